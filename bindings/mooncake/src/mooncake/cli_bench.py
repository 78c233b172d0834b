"""The console script ``transfer_engine_bench``: measures transfers between two processes.

It runs ``snowskin mooncake-transfer-engine-bench``, which accepts the flags of that script.
"""

from typing import NoReturn

from mooncake import _binary


def main() -> NoReturn:
    """Replaces this process by the program."""
    _binary.replace_by("mooncake-transfer-engine-bench")


if __name__ == "__main__":
    main()
