"""``async_store`` with the native class: awaitables without threads, their order, cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import cluster
import pytest

pytestmark = pytest.mark.cluster

AT_ONCE = 1000


@pytest.fixture
def store(master: cluster.Master) -> Iterator[Any]:
    from mooncake.async_store import MooncakeDistributedStoreAsync

    opened = MooncakeDistributedStoreAsync()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", master.address)
    assert asyncio.run(opened.async_setup(*arguments)) == 0
    yield opened
    assert asyncio.run(opened.async_close()) == 0


def test_the_answers_are_those_of_the_methods(store: Any) -> None:
    async def calls() -> None:
        assert await store.async_put("a", b"first") == 0
        assert await store.async_put("a", b"second") == 0
        assert await store.async_get("a") == b"first"
        assert await store.async_get("missing") == b""
        assert await store.async_is_exist("a") == 1
        assert await store.async_is_exist("missing") == 0
        assert await store.async_put("e", b"") == -600
        assert await store.async_put("", b"x") == -600
        assert await store.async_batch_is_exist(["a", "missing"]) == [1, 0]
        assert await store.async_remove("a", True) == 0
        assert await store.async_get("a") == b""

    asyncio.run(calls())


def test_a_thousand_gets_at_once_use_no_threads(store: Any) -> None:
    for number in range(50):
        assert store.put(f"many/{number}", bytes([number]) * 4096) == 0

    async def calls() -> int:
        before = threading.active_count()
        keys = [f"many/{number % 50}" for number in range(AT_ONCE)]
        values = await asyncio.gather(*(store.async_get(key) for key in keys))
        assert [value[0] for value in values] == [number % 50 for number in range(AT_ONCE)]
        return threading.active_count() - before

    assert asyncio.run(calls()) <= 1


def test_a_put_has_the_bytes_of_its_call(store: Any) -> None:
    async def calls() -> None:
        value = bytearray(b"a" * 10_000)
        put = asyncio.ensure_future(store.async_put("copied", value))
        await asyncio.sleep(0)
        value[:] = b"b" * 10_000
        assert await put == 0
        assert await store.async_get("copied") == b"a" * 10_000

    asyncio.run(calls())


def test_wrong_arguments_are_type_errors(store: Any) -> None:
    async def calls() -> None:
        with pytest.raises(TypeError):
            await store.async_get(1)
        with pytest.raises(TypeError):
            await store.async_put("a", "text")
        with pytest.raises(TypeError):
            await store.async_put("a")

    asyncio.run(calls())


def test_a_store_that_is_not_set_up_answers() -> None:
    from mooncake.async_store import MooncakeDistributedStoreAsync

    async def calls() -> None:
        store = MooncakeDistributedStoreAsync()
        assert await store.async_get("a") == b""
        assert await store.async_put("a", b"x") == -600
        assert await store.async_is_exist("a") == -600
        assert await store.async_health_check() == 1

    asyncio.run(calls())
