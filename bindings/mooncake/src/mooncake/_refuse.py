"""Refuses to run beside a distribution that owns the same files.

``snowskin-mooncake`` and ``mooncake-transfer-engine`` (with or without a suffix such as ``-cuda13`` or
``-non-cuda``) both install the top-level package ``mooncake``. pip does not notice: the files of the one that
was installed last win, one by one, and the result is a mixture of both. There is no metadata by which a wheel
could rule that out, so this check is at import.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable

# Directories of metadata of the other distribution; wheels write `_`, other installers `-` or `.`.
_OTHER = re.compile(r"^(mooncake[-_.]transfer[-_.]engine.*?)-[^-]*\.(?:dist-info|egg-info)$", re.IGNORECASE)


def installed_beside(path: Iterable[str]) -> tuple[str, str] | None:
    """The name of the other distribution and the directory that has it, or ``None``.

    ``path`` is a search path such as ``sys.path``. One directory listing per entry; entries that cannot be
    listed (archives, directories that are gone) have no distribution that would be in the way.
    """
    for entry in dict.fromkeys(path):
        try:
            names = os.listdir(entry or os.curdir)
        except OSError:
            continue
        for name in names:
            found = _OTHER.match(name)
            if found:
                return re.sub(r"[-_.]+", "-", found[1]).lower(), entry or os.curdir
    return None


def refuse_beside_other() -> None:
    """Raises ``ImportError`` when the other distribution is installed in an environment of ``sys.path``."""
    found = installed_beside(sys.path)
    if found:
        name, where = found
        raise ImportError(
            f"snowskin-mooncake and {name} (in {where}) both install the package `mooncake`: "
            f"run `pip uninstall {name}` and then `pip install --force-reinstall --no-deps snowskin-mooncake`"
        )
