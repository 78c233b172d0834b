"""Prefill and decode in two processes: the KV blocks go straight from memory to memory.

The decode process allocates the memory for a request's blocks and tells the prefill process their address.
The prefill process writes each block when it has computed it, waits for the writes, and then notifies the
decode process. Nothing is copied in between, and the decode process does nothing until the notification
arrives.

    python handover.py
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import multiprocessing.connection
import sys
import time
from typing import Any

import numpy as np
import snowskin

BLOCKS, SHAPE = 32, (2, 16, 8, 64)  # blocks of a request; keys and values, tokens, heads, width
BLOCK_BYTES = 2 * int(np.prod(SHAPE))


def compute(block: int) -> np.ndarray:
    """Stands for the model: the keys and values of a block."""
    return np.random.default_rng(block).standard_normal(SHAPE).astype("f2")


def prefill(requests: multiprocessing.connection.Connection) -> None:
    """The prefill process: computes requests and writes their blocks where they are wanted."""

    async def serve(engine: snowskin.Engine, order: dict[str, Any]) -> None:
        # Two buffers: one is written while the other is computed.
        buffers = [engine.register(np.empty(SHAPE, dtype="f2")) for _ in range(2)]
        flights: list[snowskin.Batch | None] = [None, None]
        with engine.open(order["engine"]) as peer:
            for block in range(order["blocks"]):
                side = block % 2
                flight = flights[side]
                if flight is not None:
                    await flight
                buffers[side].obj[...] = compute(block)
                flights[side] = buffers[side].write_to(peer, order["addr"] + block * BLOCK_BYTES, timeout=10)
            for flight in flights:
                if flight is not None:
                    await flight
            # The writes have arrived: the decode process may look.
            peer.notify("ready", json.dumps({"request": order["request"]}).encode())
        for buffer in buffers:
            buffer.close()

    with snowskin.Engine() as engine:
        while (order := requests.recv()) is not None:
            asyncio.run(serve(engine, order))


def decode(requests: multiprocessing.connection.Connection) -> None:
    """The decode process: asks for a request's blocks, and uses them."""
    with snowskin.Engine() as engine, engine.alloc(BLOCKS * BLOCK_BYTES, remote="write") as memory:
        cache = memory.numpy("f2", (BLOCKS, *SHAPE))
        for request in range(3):
            cache[...] = 0
            began = time.perf_counter()
            order = {"engine": engine.name, "addr": memory.addr, "blocks": BLOCKS, "request": request}
            requests.send(order)
            while not (notifications := engine.notifications()):
                time.sleep(0.001)
            took = time.perf_counter() - began
            assert json.loads(notifications[0].message) == {"request": request}
            for block in range(BLOCKS):
                np.testing.assert_array_equal(cache[block], compute(block))
            size = f"{BLOCKS} blocks of {BLOCK_BYTES >> 10} KiB"
            print(f"request {request}: {size} handed over in {took * 1e3:.0f} ms")
        requests.send(None)
        del cache


def main() -> int:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=prefill, args=(there,))
    process.start()
    try:
        decode(here)
    finally:
        process.join(timeout=30)
        if process.is_alive():
            process.kill()
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(main())
