"""The console script ``mooncake_master``: a master of the store.

It runs ``snowskin mooncake-master``, which accepts the flags of that script.
"""

from typing import NoReturn

from mooncake import _binary


def main() -> NoReturn:
    """Replaces this process by the program."""
    _binary.replace_by("mooncake-master")


if __name__ == "__main__":
    main()
