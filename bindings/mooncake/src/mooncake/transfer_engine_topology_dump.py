"""The console script ``transfer_engine_topology_dump``: the devices of this host, as JSON.

It starts no listener and contacts no other process. The output is what ``TransferEngine.get_local_topology``
returns: for each location of memory, the devices that reach it, nearest first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="transfer_engine_topology_dump", description="Prints the devices of this host as JSON."
    )
    parser.add_argument("--device-name", default="", help="only these devices, separated by commas")
    parser.add_argument(
        "--backend", choices=["auto", "te", "tent"], default="auto", help="accepted; there is one backend"
    )
    parser.add_argument(
        "--use-custom-topo", action="store_true", help="use the file that MC_CUSTOM_TOPO_JSON names, if any"
    )
    parser.add_argument("--custom-topo-json", metavar="FILE", help="use this file in place of what is found")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Prints the topology. The status is 1 when it cannot be determined."""
    arguments = _arguments(words)
    custom = arguments.custom_topo_json
    if custom is None and arguments.use_custom_topo:
        custom = os.environ.get("MC_CUSTOM_TOPO_JSON")
    if custom:
        try:
            with open(custom, encoding="utf-8") as file:
                topology = json.load(file)
        except (OSError, ValueError) as error:
            print(f"transfer_engine_topology_dump: {custom}: {error}", file=sys.stderr)
            return 1
    else:
        from mooncake.engine import TransferEngine

        text = TransferEngine().get_local_topology(arguments.device_name or None)
        topology = json.loads(text)
    json.dump(topology, sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
