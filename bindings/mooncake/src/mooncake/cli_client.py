"""The console script ``mooncake_client``: a process that owns memory of the store and serves local clients.

It runs ``snowskin mooncake-client``, which accepts the flags of that script.
"""

from typing import NoReturn

from mooncake import _binary


def main() -> NoReturn:
    """Replaces this process by the program."""
    _binary.replace_by("mooncake-client")


if __name__ == "__main__":
    main()
