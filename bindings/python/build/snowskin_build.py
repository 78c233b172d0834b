"""The build backend of the wheel: builds the program ``snowskin``, then calls maturin (PEP 517).

The wheel contains the program (``snowskin.data/scripts/snowskin``), which maturin does not build beside an
extension module. ``SNOWSKIN_PROGRAM`` names a program that has been built already, for example for another
target.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import maturin
from maturin import get_requires_for_build_editable, get_requires_for_build_wheel

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_wheel",
]

HERE = Path(__file__).resolve().parent.parent


def build_wheel(directory, config_settings=None, metadata_directory=None):
    place_program()
    with_cwd = os.getcwd()
    os.chdir(HERE)
    try:
        return maturin.build_wheel(directory, config_settings, metadata_directory)
    finally:
        os.chdir(with_cwd)


def build_editable(directory, config_settings=None, metadata_directory=None):
    place_program()
    with_cwd = os.getcwd()
    os.chdir(HERE)
    try:
        return maturin.build_editable(directory, config_settings, metadata_directory)
    finally:
        os.chdir(with_cwd)


def build_sdist(directory, config_settings=None):
    raise RuntimeError("there is no source distribution: install from a checkout, or from a wheel")


def place_program():
    """Builds the program, and puts a copy without debug information where maturin looks for it."""
    named = os.environ.get("SNOWSKIN_PROGRAM")
    program = Path(named) if named else built()
    scripts = HERE / "snowskin.data" / "scripts"
    scripts.mkdir(parents=True, exist_ok=True)
    target = scripts / "snowskin"
    # A copy beside it first: a program that runs cannot be written.
    fresh = scripts / ".snowskin.new"
    shutil.copy2(program, fresh)
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-all", str(fresh)], check=True)
    os.replace(fresh, target)


def built():
    command = ["cargo", "build", "--release", "--locked", "--package", "cli", "--message-format", "json"]
    done = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, check=True, text=True)
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message.get("executable"):
            return Path(message["executable"])
    raise RuntimeError("cargo built no program")
