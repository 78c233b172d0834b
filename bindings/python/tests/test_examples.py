"""The examples run, and say what they are meant to say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_toy_transformer_offloads_its_cache(master: str) -> None:
    output = run("kv_offload.py", master)
    assert "prompt 0: 0 of 296" in output and "prompt 3: 256 of 296 tokens reused" in output
    assert "prompt 0: 0 of" in run("kv_offload.py")


def test_blocks_are_handed_over_between_processes() -> None:
    assert "request 2: 32 blocks of 32 KiB handed over" in run("handover.py")


def test_a_checkpoint_is_broadcast() -> None:
    output = run("checkpoint_broadcast.py", "2")
    assert "worker 1: version 2 loaded" in output and "version 1: 25 objects removed" in output


def test_every_example_is_tested() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"kv_offload.py", "handover.py", "checkpoint_broadcast.py"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_say_what_they_are(path: Path) -> None:
    assert compile(path.read_text(), str(path), "exec").co_consts[0].count("\n") > 5
