"""The stubs say what the native classes have: names, arguments, defaults (mypy's stubtest)."""

from __future__ import annotations

import importlib.util
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

# What a stub cannot say as `inspect.signature` says it.
ALLOWED = """
# Two overloads; `inspect.signature` shows the first.
mooncake.store.MooncakeDistributedStore.setup
"""


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_the_stubs_are_those_of_the_modules(tmp_path: Path) -> None:
    # mypy finds installed packages by itself, and refuses their directory among the paths.
    installed = [Path(path).resolve() for path in site.getsitepackages()]
    paths = [
        path
        for path in sys.path
        if (Path(path, "mooncake").is_dir() or Path(path, "snowskin").is_dir())
        and Path(path).resolve() not in installed
    ]
    allowed = tmp_path / "allowed"
    allowed.write_text(ALLOWED)
    words = ["mooncake.engine", "mooncake.store", "--concise", f"--allowlist={allowed}"]
    ended = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", *words],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": ":".join(paths), "PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
