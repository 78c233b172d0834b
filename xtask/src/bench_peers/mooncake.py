"""One process of Mooncake for `cargo xtask bench-peers`: for each JSON line on stdin, writes a JSON line to stdout.

    mooncake.py engine-target PORT            memory that is read and written
    mooncake.py engine PORT PEER ADDRESS      moves bytes from and to it
    mooncake.py node PORT MASTER BYTES        lends memory to the store
    mooncake.py client PORT MASTER            puts and gets

Every process answers {"do": "cpu"}, "serve" and "rest" with the CPU seconds that it has used; a target that has to poll
does so from "serve" to "rest".
"""

import ctypes
import json
import mmap
import random
import resource
import sys
import time

WINDOW = 256 << 20
# Registered memory must outlive the functions that allocate it.
KEPT = []


def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def memory(size):
    buffer = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    ctypes.memset(address, 1, size)
    KEPT.append(buffer)
    return buffer, address


def measure(seconds, call, calls_max=None):
    """Calls until the time is over; returns (calls, seconds, p50 in microseconds, own CPU seconds)."""
    nanos = []
    used = cpu()
    began = time.perf_counter_ns()
    end = began + int(seconds * 1e9)
    now = began
    while now < end and (calls_max is None or len(nanos) < calls_max):
        call(len(nanos))
        after = time.perf_counter_ns()
        nanos.append(after - now)
        now = after
    elapsed = (now - began) / 1e9
    nanos.sort()
    return len(nanos), elapsed, nanos[len(nanos) // 2] / 1e3, cpu() - used


def check(codes):
    for code in codes if isinstance(codes, list) else [codes]:
        if code < 0:
            raise RuntimeError(f"Mooncake gave error {code}")


def answer(calls, items_each, bytes_each, elapsed, p50_us, cpu_s):
    items = calls * items_each
    return {"items": items, "bytes": items * bytes_each, "seconds": elapsed, "p50_us": p50_us, "cpu_s": cpu_s}


def engine(port):
    from mooncake.engine import TransferEngine

    this = TransferEngine()
    check(-abs(this.initialize(f"127.0.0.1:{port}", "P2PHANDSHAKE", "tcp", "")))
    keep = memory(WINDOW)
    check(-abs(this.register_memory(keep[1], WINDOW)))
    return this, keep


def engine_target(port):
    this, keep = engine(port)
    return {"peer": f"127.0.0.1:{this.get_rpc_port()}", "address": keep[1]}, lambda command: (this, keep) and None


def engine_initiator(port, peer, remote):
    this, keep = engine(port)
    remote = int(remote)

    def run(command):
        block, batch = command["block"], command["batch"]
        move = this.batch_transfer_sync_read if command["op"] == "read" else this.batch_transfer_sync_write
        offsets = [i % (WINDOW // block) * block for i in range(batch)]
        args = ([keep[1] + at for at in offsets], [remote + at for at in offsets], [block] * batch)

        def call(_):
            check(-abs(move(peer, *args)))

        call(0)
        calls, elapsed, p50_us, cpu_s = measure(command["seconds"], call)
        return answer(calls, batch, block, elapsed, p50_us, cpu_s)

    return {}, run


def store(port, master, segment, local):
    from mooncake.store import MooncakeDistributedStore

    this = MooncakeDistributedStore()
    check(-abs(this.setup(f"127.0.0.1:{port}", "P2PHANDSHAKE", segment, local, "tcp", "", master)))
    return this


def node(port, master, size):
    this = store(port, master, int(size), 64 << 20)
    return {}, lambda command: this and None


def client(port, master):
    this = store(port, master, 0, 768 << 20)
    keep = memory(512 << 20)
    address = keep[1]
    check(this.register_buffer(address, 512 << 20))
    serial = iter(range(1 << 62))

    def fresh(count, value, call_batch=64):
        """Stores `count` objects and returns their keys."""
        keys = [f"bench/{next(serial):026x}" for _ in range(count)]
        call_batch = max(1, min(call_batch, (512 << 20) // value))
        for at in range(0, count, call_batch):
            group = keys[at : at + call_batch]
            check(this.batch_put_from(group, [address + i * value for i in range(len(group))], [value] * len(group)))
        return keys

    def run(command):
        op, value, batch, plain = command["op"], command["value"], command["batch"], command["plain"]
        seconds = command["seconds"]
        rng = random.Random(1)
        places = [address + i * value for i in range(batch)]
        sizes = [value] * batch
        limit = None
        keys = []
        if op in ("get", "batch-get", "exists"):
            keys = fresh(command["objects"], value)
            # Keys are taken in order, which is random enough and costs no time between the calls.
            rng.shuffle(keys)
            picks = [keys[i % len(keys) :][:batch] for i in range(0, len(keys), batch)]
            picks = [(pick + keys)[:batch] for pick in picks]
        else:
            limit = max(1, command["objects"] // batch)
            keys = [f"bench/{next(serial):026x}" for _ in range(limit * batch)]
            picks = [keys[i * batch : (i + 1) * batch] for i in range(limit)]
        data = bytes(value)

        if op == "get" and plain:
            def call(i):
                if len(this.get(picks[i % len(picks)][0])) != value:
                    raise RuntimeError("Mooncake missed")
        elif op == "get":
            def call(i):
                check(this.get_into(picks[i % len(picks)][0], address, value))
        elif op == "batch-get" and plain:
            def call(i):
                got = this.get_batch(picks[i % len(picks)])
                if any(len(one) != value for one in got):
                    raise RuntimeError("Mooncake missed")
        elif op == "batch-get":
            def call(i):
                check(this.batch_get_into(picks[i % len(picks)], places, sizes))
        elif op == "put" and plain:
            def call(i):
                check(-abs(this.put(picks[i][0], data)))
        elif op == "put":
            def call(i):
                check(-abs(this.put_from(picks[i][0], address, value)))
        elif op == "batch-put" and plain:
            def call(i):
                check(-abs(this.put_batch(picks[i], [data] * batch)))
        elif op == "batch-put":
            def call(i):
                check([-abs(code) for code in this.batch_put_from(picks[i], places, sizes)])
        elif op == "exists":
            def call(i):
                if batch == 1:
                    found = [this.is_exist(picks[i % len(picks)][0])]
                else:
                    found = this.batch_is_exist(picks[i % len(picks)])
                if min(found) != 1:
                    raise RuntimeError("Mooncake missed")
        else:
            raise RuntimeError(f"no operation {op}")
        calls, elapsed, p50_us, cpu_s = measure(seconds, call, limit)
        if not command.get("keep"):
            # Waits until the leases of the objects that were read have expired.
            time.sleep(command["lease_s"])
            for key in keys if limit is None else keys[: calls * batch]:
                this.remove(key)
        return answer(calls, batch, value, elapsed, p50_us, cpu_s)

    return {}, run


def main():
    roles = {"engine-target": engine_target, "engine": engine_initiator, "node": node, "client": client}
    ready, run = roles[sys.argv[1]](*sys.argv[2:])
    # Output of the libraries goes to stderr; stdout is for answers.
    print("READY " + json.dumps(ready), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        result = run(command) if command["do"] == "run" else {"cpu_s": cpu()}
        print("ANSWER " + json.dumps(result), flush=True)


main()
