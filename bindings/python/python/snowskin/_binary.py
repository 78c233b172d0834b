"""Where the program ``snowskin`` is."""

from __future__ import annotations

import contextlib
import os
import shutil
import sysconfig

__all__ = ["path"]


def path() -> str:
    """The path of the program ``snowskin``.

    Looked for in ``SNOWSKIN_BINARY``, in the scripts directories of this interpreter (where the wheel
    installs it), and in ``PATH``.

    Raises :exc:`FileNotFoundError` with these places.
    """
    named = os.environ.get("SNOWSKIN_BINARY")
    if named:
        if os.access(named, os.X_OK):
            return named
        raise FileNotFoundError(f"SNOWSKIN_BINARY is {named!r}, which is not a program")
    looked = [sysconfig.get_path("scripts")]
    with contextlib.suppress(KeyError):
        looked.append(sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user")))
    for directory in looked:
        program = os.path.join(directory, "snowskin")
        if os.access(program, os.X_OK) and os.path.isfile(program):
            return program
    found = shutil.which("snowskin")
    if found:
        return found
    places = " nor in ".join(looked)
    raise FileNotFoundError(
        f"the program snowskin is neither in {places} nor in PATH: install the wheel `snowskin`, or set "
        "SNOWSKIN_BINARY"
    )
