"""Finds the program ``snowskin``, which the console scripts run."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from typing import NoReturn

_VARIABLE = "SNOWSKIN_BINARY"


def _candidates() -> Iterator[str]:
    # The wheel installs it as a script. A virtual environment, a user installation and an environment that
    # `sys.executable` belongs to have different directories of scripts.
    yield os.path.join(sysconfig.get_path("scripts"), "snowskin")
    yield os.path.join(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")), "snowskin")
    yield os.path.join(os.path.dirname(sys.executable), "snowskin")
    # Beside the script that is running: environments whose scripts are started by their path.
    yield os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "snowskin")


def path() -> str:
    """The path of the program.

    The environment variable ``SNOWSKIN_BINARY`` comes first, then the directories of scripts of this
    installation, then ``PATH``.

    Raises ``FileNotFoundError``, which names what was tried.
    """
    named = os.environ.get(_VARIABLE)
    if named:
        if os.access(named, os.X_OK) and os.path.isfile(named):
            return named
        raise FileNotFoundError(f"{_VARIABLE} is {named!r}, which is not an executable file")
    tried = list(dict.fromkeys(_candidates()))
    for candidate in tried:
        if os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    found = shutil.which("snowskin")
    if found:
        return found
    raise FileNotFoundError(
        f"the program `snowskin` is neither in {', '.join(tried)} nor in PATH: "
        f"reinstall the distribution `snowskin`, or set {_VARIABLE} to the path of the program"
    )


def replace_by(command: str) -> NoReturn:
    """Replaces this process by ``snowskin COMMAND`` with the arguments of this process.

    The process id stays the same, so that a supervisor which started the script can signal the program. Exits
    with status 127, as a shell does, when the program cannot be found or started.
    """
    try:
        program = path()
        os.execv(program, [program, command, *sys.argv[1:]])
    except OSError as error:
        print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
        raise SystemExit(127) from None
