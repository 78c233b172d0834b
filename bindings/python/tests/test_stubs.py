"""Types: the stubs agree with the module, and everything passes mypy's strict mode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent


def mypy(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, cwd=PROJECT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stubs_agree_with_the_module(tmp_path: Path) -> None:
    allowed = tmp_path / "allowlist"
    # Written in C: Python sees these as methods of every type with a buffer only from 3.12 on.
    allowed.write_text("snowskin\\._native\\.(Lease|Region)\\.__(release_)?buffer__\n")
    mypy(
        "mypy.stubtest", "snowskin",
        "--mypy-config-file", str(PROJECT / "pyproject.toml"),
        "--allowlist", str(allowed), "--ignore-unused-allowlist",
    )  # fmt: skip


def test_the_package_and_the_examples_are_strictly_typed() -> None:
    mypy("mypy", "--no-error-summary", "--package", "snowskin")
    mypy("mypy", "--no-error-summary", *(str(path) for path in sorted((PROJECT / "examples").glob("*.py"))))


def test_wrong_calls_are_found_by_the_types(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import snowskin\n"
        "def f(store: snowskin.Store) -> None:\n"
        "    lease = store.get('k')\n"
        "    lease.numpy()\n"
        "    store.put('k', 'text')\n"
        "    store.put('k', b'x', pin='firm')\n"
        "    count: str = store.get_into('k', bytearray(1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    for line in (4, 5, 6, 7):
        assert f"program.py:{line}: error" in done.stdout, done.stdout
