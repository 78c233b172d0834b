"""The store for asyncio."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading

import numpy as np
import pytest
import snowskin
import snowskin.aio
from snowskin.aio import Store
from snowskin.testing import Cluster


def test_what_the_blocking_store_does(master: str, name: str) -> None:
    async def main() -> None:
        async with Store.connect(master) as store:
            assert "open" in repr(store)
            assert (await store.put(name, b"value")).stored
            assert not (await store.put(name, b"other")).stored
            lease = await store.get(name)
            assert lease is not None and bytes(lease) == b"value"
            part = await store.get(name, offset=1, length=3)
            assert part is not None and bytes(part) == b"alu"
            assert await store.get(name + "x") is None
            buffer = np.zeros(8, dtype="u1")
            assert await store.get_into(name, buffer) == 5
            assert buffer[:5].tobytes() == b"value"
            assert await store.exists(name) and await store.exists_many([name, "x"]) == [True, False]
            assert await store.prefetch([name, "x"], deadline=0.2) == [True, False]
            info = await store.stat(name)
            assert info is not None and info.nbytes == 5 and await store.stat(name + "x") is None
            assert (await store.put(name, b"new", overwrite=True)).stored
            assert await store.remove(name, force=True) and not await store.remove(name)
            seen: list[tuple[int, int]] = []
            keys = [f"{name}/{number}" for number in range(1200)]
            stored = await store.put_many(
                {key: key.encode() for key in keys}, progress=lambda *at: seen.append(at)
            )
            assert list(stored) == [True] * 1200 and seen[-1] == (1200, 1200) and len(seen) == 3
            leases = await store.get_many([*keys, "x"], progress=lambda *at: seen.append(at))
            assert [lease and bytes(lease) for lease in leases] == [*(key.encode() for key in keys), None]
            prefix = await store.get_prefix([*keys[:3], "x", keys[4]])
            assert [bytes(lease) for lease in prefix] == [key.encode() for key in keys[:3]]
            into = await store.get_many_into([(keys[0], bytearray(100)), (keys[1], bytearray(1))])
            assert list(into) == [len(keys[0]), None] and into.errors[1].code == "buffer_too_small"
            assert {info.key async for info in store.list(f"{name}/")} == set(keys)
            assert [info.key async for info in store.scan(f"^{name}/7$")] == [f"{name}/7"]
            assert list(await store.remove_many(keys[:2], force=True)) == [True, True]
            assert await store.remove_matching(f"^{name}/", force=True) == 1198
            assert (await store.stats())["hits"] > 1200
        assert store.closed and "closed" in repr(store)
        with pytest.raises(snowskin.Closed):
            await store.get(name)

    asyncio.run(main())


def test_errors_are_raised_where_they_are_awaited(master: str, name: str) -> None:
    async def main() -> None:
        async with Store.connect(master) as store:
            with pytest.raises(snowskin.InvalidArgument):
                await store.put(name, b"")
            with pytest.raises(TypeError, match="not str"):
                await store.put(name, "text")  # type: ignore[arg-type]
            await store.put(name, b"12345")
            with pytest.raises(snowskin.InvalidArgument) as raised:
                await store.get_into(name, bytearray(2))
            assert (raised.value.code, raised.value.key) == ("buffer_too_small", name)
            with pytest.raises(TypeError):
                await store.get_many("abc")

    asyncio.run(main())
    with pytest.raises(snowskin.InvalidArgument):
        Store.connect("nowhere")

    async def unreachable() -> None:
        with pytest.raises(snowskin.PeerUnreachable):
            await Store.connect("127.0.0.1:1", connect_timeout=0.2)

    asyncio.run(unreachable())


def test_many_operations_at_a_time(master: str, name: str) -> None:
    async def main() -> None:
        async with Store.connect(master) as store:
            await asyncio.gather(
                *[store.put(f"{name}/{number}", bytes([number % 256]) * 4096) for number in range(1000)]
            )
            leases = await asyncio.gather(*[store.get(f"{name}/{number}") for number in range(1000)])
            for number, lease in enumerate(leases):
                assert lease is not None and bytes(lease) == bytes([number % 256]) * 4096
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(store.exists(f"{name}/{number}")) for number in range(1100)]
            assert [task.result() for task in tasks] == [True] * 1000 + [False] * 100
            await store.remove_matching(f"^{name}/", force=True)

    asyncio.run(main())


def is_lent(buffer: bytearray) -> bool:
    """Whether native code holds the buffer, which then cannot change its length."""
    try:
        buffer.append(0)
        buffer.pop()
    except BufferError:
        return True
    return False


def test_a_cancelled_operation_keeps_its_buffer_until_its_end() -> None:
    async def main(cluster: Cluster) -> None:
        async with Store.connect(cluster.master, rails="tcp") as store:
            value = np.random.default_rng(1).integers(0, 256, 4 << 20, dtype="u1")
            assert await store.put("key", value)
            # From here on no byte moves.
            cluster.nodes[0].signal(signal.SIGSTOP)
            into, source, queued = bytearray(4 << 20), bytearray(4 << 20), bytearray(4 << 20)
            get = asyncio.create_task(store.get_into("key", into))
            put = asyncio.create_task(store.put("other", source))
            await asyncio.sleep(0)
            never = asyncio.create_task(store.get_into("key", queued))
            await asyncio.sleep(0)
            assert is_lent(into) and is_lent(source) and is_lent(queued)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(store.get("key"), 0.01)
            for task in (get, put, never):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            # They are under way, and keep their buffers.
            assert is_lent(into) or is_lent(source)
            cluster.nodes[0].signal(signal.SIGCONT)
            while is_lent(into) or is_lent(source) or is_lent(queued):
                await asyncio.sleep(0.001)
            while (lease := await store.get("key")) is None:
                await asyncio.sleep(0.001)
            np.testing.assert_array_equal(lease.numpy(), value)
            # Memory that was allocated for gets that were cancelled has come back.
            del lease
            gc.collect()
            while (await store.stats())["pool_used_bytes"] > 0:
                await asyncio.sleep(0.001)

    with Cluster(memory="64MiB") as cluster:
        asyncio.run(main(cluster))


def test_a_store_is_used_by_several_loops(master: str, name: str) -> None:
    store = asyncio.run(_open(master))

    async def use(number: int) -> None:
        await store.put(f"{name}/{number}", b"x" * number)
        lease = await store.get(f"{name}/{number}")
        assert lease is not None and len(lease) == number

    asyncio.run(use(1))
    threads = [
        threading.Thread(target=lambda number=number: asyncio.run(use(number))) for number in range(2, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asyncio.run(store.exists_many([f"{name}/{number}" for number in range(9)])) == [
        False,
        *[True] * 7,
        False,
    ]
    assert asyncio.run(store.close())


async def _open(master: str) -> Store:
    return await Store.connect(master)


def test_an_operation_whose_loop_is_closed_harms_no_other(master: str, name: str) -> None:
    store = asyncio.run(_open(master))

    async def leave() -> None:
        # Begun and never awaited: the loop is closed with the operation in flight.
        store._native.put(f"{name}/left", b"x" * 100_000, None, 1, None, None, False, "auto")

    for _ in range(20):
        asyncio.run(leave())
    gc.collect()

    async def after() -> bool:
        return (await store.put(f"{name}/after", b"x")).stored

    assert asyncio.run(after())
    assert asyncio.run(store.close())


def test_without_a_loop_and_with_a_loop_that_cannot_watch_descriptors(master: str) -> None:
    store = asyncio.run(_open(master))
    with pytest.raises(RuntimeError, match="no running event loop"):
        store._native.exists_many(["a"])

    class Loop(asyncio.SelectorEventLoop):
        def add_reader(self, *arguments: object) -> None:  # type: ignore[override]
            raise NotImplementedError

    loop = Loop()
    try:
        with pytest.raises((RuntimeError, NotImplementedError)):
            loop.run_until_complete(store.exists("a"))
    finally:
        asyncio.SelectorEventLoop.close(loop)
    asyncio.run(store.close())


def test_connecting_is_cancelled() -> None:
    # It accepts connections, in its backlog, and never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        async def main() -> None:
            connecting = Store.connect(address, connect_timeout=1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(connecting._open(), 0.01)

        asyncio.run(main())
