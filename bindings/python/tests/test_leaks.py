"""Memory: nothing grows with the number of operations. ``pytest -rP`` shows the resident sizes."""

from __future__ import annotations

import asyncio
import gc
import os

import numpy as np
import snowskin
import snowskin.aio

#: Cycles of a put, a get and a removal.
CYCLES = int(os.environ.get("SNOWSKIN_LEAK_CYCLES", "100000"))
#: Growth that is noise: arenas of the allocator, and caches that fill.
GROWTH_MAX = 8 << 20


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_cycles_of_puts_and_gets_take_no_memory(store: snowskin.Store, name: str) -> None:
    value = bytes(256)
    into = bytearray(256)

    def cycle(number: int) -> None:
        keys = [f"{name}/{number}/{item}" for item in range(10)]
        store.put_many([(key, value) for key in keys])
        with store.get_many(keys) as leases:
            for lease in leases:
                assert lease is not None
                memoryview(lease)
                lease.numpy()
        for key in keys[:2]:
            store.get_into(key, into)
            store.put(key, value)
            store.get(key + "x")
            np.from_dlpack(store.get(key))  # type: ignore[arg-type]
        store.remove_many(keys, force=True)

    for number in range(CYCLES // 100):
        cycle(number)
    gc.collect()
    before = rss()
    for number in range(CYCLES // 10):
        cycle(number)
    gc.collect()
    grown = rss() - before
    print(f"resident: {before} bytes, and {grown} more after {CYCLES} cycles")
    assert grown < GROWTH_MAX, f"{grown} bytes after {CYCLES} cycles"
    assert store.stats()["pool_used_bytes"] == 0


def test_tasks_take_no_memory(master: str, name: str) -> None:
    async def main() -> int:
        async with snowskin.aio.Store.connect(master) as store:
            await store.put(name, bytes(256))

            async def some(count: int) -> None:
                for _ in range(count):
                    gets = [store.get(name) for _ in range(100)]
                    await asyncio.gather(*gets)
                    task = asyncio.create_task(store.get(name))
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

            await some(50)
            gc.collect()
            before = rss()
            await some(CYCLES // 400)
            gc.collect()
            grown = rss() - before
            print(f"resident: {before} bytes, and {grown} more")
            return grown

    grown = asyncio.run(main())
    assert grown < GROWTH_MAX, f"{grown} bytes"


def test_stores_and_engines_that_are_closed_take_no_memory(master: str) -> None:
    def open_and_close(count: int) -> None:
        for _ in range(count):
            with snowskin.Store.connect(master, pool="2MiB") as store:
                store.put("leak", b"x")
                assert store.get("leak") is not None
            with snowskin.Engine(rails="local") as engine:
                engine.register(bytearray(4096))
                engine.alloc(4096)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    open_and_close(20)
    gc.collect()
    before = rss(), descriptors(), threads()
    open_and_close(60)
    gc.collect()
    after = rss(), descriptors(), threads()
    print(f"resident bytes, descriptors, threads: {before}, then {after}")
    assert after[0] - before[0] < GROWTH_MAX
    assert after[1] <= before[1] + 2 and after[2] <= before[2] + 2
