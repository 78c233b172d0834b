"""The package itself: who may own it, how scripts find the program, what is imported when."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake import _binary, _refuse

SOURCE = Path(__file__).parents[1] / "src"


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("mooncake_transfer_engine-0.3.13.post1.dist-info", "mooncake-transfer-engine"),
        ("mooncake_transfer_engine_non_cuda-0.3.13.dist-info", "mooncake-transfer-engine-non-cuda"),
        ("mooncake_transfer_engine_cuda13-0.4.dist-info", "mooncake-transfer-engine-cuda13"),
        ("Mooncake.Transfer.Engine-1.0.egg-info", "mooncake-transfer-engine"),
    ],
)
def test_the_other_distribution_is_recognised(tmp_path: Path, directory: str, name: str) -> None:
    (tmp_path / directory).mkdir()
    assert _refuse.installed_beside(["/does/not/exist", str(tmp_path)]) == (name, str(tmp_path))


def test_our_own_distribution_and_others_are_not_in_the_way(tmp_path: Path) -> None:
    for name in ("snowskin_mooncake-0.1.0.dist-info", "mooncake-1.0.dist-info", "mooncake_transfer_engine"):
        (tmp_path / name).mkdir()
    assert _refuse.installed_beside([str(tmp_path)]) is None


def test_the_import_is_refused_beside_the_other_distribution(tmp_path: Path) -> None:
    (tmp_path / "mooncake_transfer_engine-0.3.13.post1.dist-info").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", "import mooncake"],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: snowskin-mooncake and mooncake-transfer-engine")
    assert "pip uninstall mooncake-transfer-engine" in last


def test_a_second_directory_adds_modules(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "added.py").write_text("WHO = 'the overlay'\n")
    shown = subprocess.run(
        [sys.executable, "-c", "import mooncake.added; print(mooncake.added.WHO)"],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert shown.stdout == "the overlay\n", shown.stderr


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import mooncake

    with pytest.raises(AttributeError, match="'nonsense'"):
        mooncake.nonsense


def program(tmp_path: Path) -> Path:
    path = tmp_path / "snowskin"
    path.write_text('#!/bin/sh\necho "$$ $*"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("cli", "mooncake-master"),
        ("cli_client", "mooncake-client"),
        ("cli_bench", "mooncake-transfer-engine-bench"),
    ],
)
def test_a_script_becomes_the_program_and_keeps_its_process_id(
    tmp_path: Path, module: str, command: str
) -> None:
    started = subprocess.Popen(
        [sys.executable, "-m", f"mooncake.{module}", "--port=61351", "-a b"],
        env={**os.environ, "SNOWSKIN_BINARY": str(program(tmp_path)), "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        text=True,
    )
    shown, _ = started.communicate(timeout=30)
    assert shown == f"{started.pid} {command} --port=61351 -a b\n"


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "mooncake.cli"],
        env={**os.environ, "SNOWSKIN_BINARY": str(tmp_path / "absent"), "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 127
    assert "SNOWSKIN_BINARY is" in ended.stderr and "absent" in ended.stderr


def test_the_program_is_found_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SNOWSKIN_BINARY", raising=False)
    monkeypatch.setattr(_binary, "_candidates", lambda: iter(["/does/not/exist/snowskin"]))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="/does/not/exist/snowskin"):
        _binary.path()
    installed = program(tmp_path)
    assert _binary.path() == str(installed)
