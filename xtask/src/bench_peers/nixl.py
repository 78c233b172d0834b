"""One process of NIXL over UCX for `cargo xtask bench-peers`; the same lines as mooncake.py.

    nixl.py target METADATA            memory that is read and written; described in the file METADATA
    nixl.py initiator METADATA ADDRESS moves bytes from and to it
"""

import ctypes
import json
import mmap
import resource
import select
import sys
import time

from nixl._api import nixl_agent, nixl_agent_config

WINDOW = 256 << 20


def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main():
    role, metadata = sys.argv[1], sys.argv[2]
    agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
    keep = mmap.mmap(-1, WINDOW)
    address = ctypes.addressof(ctypes.c_char.from_buffer(keep))
    ctypes.memset(address, 1, WINDOW)
    registered = agent.register_memory([(address, WINDOW, 0, "")], "DRAM")

    if role == "target":
        with open(metadata, "wb") as file:
            file.write(agent.get_agent_metadata())
        print("READY " + json.dumps({"address": address}), flush=True)
        serving = False
        while True:
            # With UCX over TCP the target must poll, as a serving process does. It is stopped while others
            # are measured.
            if serving:
                for _ in range(64):
                    agent.get_new_notifs()
            if select.select([sys.stdin], [], [], 0 if serving else None)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                serving = {"serve": True, "rest": False}.get(json.loads(line)["do"], serving)
                print("ANSWER " + json.dumps({"cpu_s": cpu()}), flush=True)

    remote = int(sys.argv[3])
    with open(metadata, "rb") as file:
        peer = agent.add_remote_agent(file.read())
    print("READY {}", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "cpu":
            print("ANSWER " + json.dumps({"cpu_s": cpu()}), flush=True)
            continue
        block, batch = command["block"], command["batch"]
        offsets = [i % (WINDOW // block) * block for i in range(batch)]
        local = agent.get_xfer_descs([(address + at, block, 0) for at in offsets], "DRAM")
        there = agent.get_xfer_descs([(remote + at, block, 0) for at in offsets], "DRAM")
        handle = agent.initialize_xfer(command["op"].upper(), local, there, peer)

        def once():
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"NIXL says {state}")

        once()
        nanos = []
        used = cpu()
        began = now = time.perf_counter_ns()
        while now < began + command["seconds"] * 1e9:
            once()
            after = time.perf_counter_ns()
            nanos.append(after - now)
            now = after
        used = cpu() - used
        agent.release_xfer_handle(handle)
        nanos.sort()
        items = len(nanos) * batch
        print(
            "ANSWER "
            + json.dumps(
                {
                    "items": items,
                    "bytes": items * block,
                    "seconds": (now - began) / 1e9,
                    "p50_us": nanos[len(nanos) // 2] / 1e3,
                    "cpu_s": used,
                }
            ),
            flush=True,
        )
    agent.deregister_memory(registered)


main()
