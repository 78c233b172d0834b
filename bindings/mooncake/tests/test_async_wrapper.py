"""What ``async_store`` adds to the native class, shown on a class that stands in for it."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest


class Native:
    """A store with one method that has a native asynchronous form, and one that has none."""

    started: list[asyncio.Future[Any]] = []

    def get(self, key: str) -> str:
        return f"blocking {key}"

    def _async_get(self, key: str) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        Native.started.append(future)
        if key != "late":
            future.set_result(f"native {key}")
        return future

    def get_tensor(self, key: str) -> tuple[str, str]:
        return key, threading.current_thread().name

    def fail(self) -> None:
        raise RuntimeError("it failed")


@pytest.fixture
def store_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    stand_in = types.ModuleType("mooncake.store")
    stand_in.MooncakeDistributedStore = Native  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake.store", stand_in)
    monkeypatch.delitem(sys.modules, "mooncake.async_store", raising=False)
    Native.started = []
    yield importlib.import_module("mooncake.async_store").MooncakeDistributedStoreAsync
    sys.modules.pop("mooncake.async_store", None)


def test_a_method_with_a_native_form_uses_it(store_class: Any) -> None:
    store = store_class()
    assert asyncio.run(store.async_get("a")) == "native a"
    assert store.get("a") == "blocking a"
    # The second access is an attribute of the instance.
    assert store.async_get is store.__dict__["async_get"]


def test_other_methods_run_on_the_threads_of_the_store(store_class: Any) -> None:
    key, thread = asyncio.run(store_class().async_get_tensor("t"))
    assert key == "t" and thread.startswith("mooncake-store")
    with pytest.raises(RuntimeError, match="it failed"):
        asyncio.run(store_class().async_fail())


def test_a_method_that_a_subclass_overrides_is_the_one_that_runs(store_class: Any) -> None:
    class Counting(store_class):  # type: ignore[misc]
        def get(self, key: str) -> str:
            return f"overridden {key}"

    assert asyncio.run(Counting().async_get("a")) == "overridden a"


@pytest.mark.parametrize("name", ["async_nonsense", "nonsense", "async_", "async_async_get"])
def test_names_that_no_method_has(store_class: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(store_class(), name)


def test_a_cancelled_read_ends_after_its_transfer(store_class: Any) -> None:
    async def scenario() -> list[str]:
        events: list[str] = []
        task = asyncio.create_task(store_class().async_get("late"))
        await asyncio.sleep(0)
        task.add_done_callback(lambda _: events.append("the task ended"))
        for _ in range(3):  # A caller may cancel again and again.
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        events.append("the transfer ended")
        Native.started[0].set_result("late")
        with pytest.raises(asyncio.CancelledError):
            await task
        return events

    assert asyncio.run(scenario()) == ["the transfer ended", "the task ended"]


def test_a_timeout_waits_for_the_transfer_and_is_a_timeout(store_class: Any) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, lambda: Native.started[0].set_exception(OSError("the peer is gone")))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await store_class().async_get("late")
        assert Native.started[0].done()

    asyncio.run(scenario())
