"""What tests share."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

#: Longest time that anything here may take.
PATIENCE_S = 30.0


def eventually(what: str, condition: Callable[[], bool]) -> None:
    """Waits until the condition holds."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(f"not within {PATIENCE_S} s: {what}")
        time.sleep(0.005)


def run_python(script: str, *arguments: str, timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Runs a script in a fresh interpreter, and returns its output."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def assert_runs(script: str, *arguments: str, timeout: float = PATIENCE_S) -> str:
    """As ``run_python``, for a script that must succeed. Returns its standard output."""
    done = run_python(script, *arguments, timeout=timeout)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
