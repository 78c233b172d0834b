"""The store for asyncio: each method ``NAME`` has an awaitable ``async_NAME`` with the same arguments.

Reads, writes, checks for existence and removals run on the native client's own thread, and the event loop is
woken when they end: no thread waits for them, so any number can be under way. Methods without such a native
form (``setup``, ``close``, tensors, tasks, ...) run on a pool of threads that belongs to the store.

An awaitable that is cancelled raises ``CancelledError`` when its transfer is over, not before: after that
nothing touches the memory whose addresses the caller passed. The wait is bounded by the deadline of the
operation.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mooncake.store import MooncakeDistributedStore

_PREFIX = "async_"
# Native methods that start an operation and return an asyncio future have the method's name behind this.
_NATIVE_PREFIX = "_async_"
_THREADS_MAX = 16

_T = TypeVar("_T")


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """A store whose methods can be awaited.

    All methods of ``MooncakeDistributedStore`` are there, too, and block as usual.
    """

    _threads: ThreadPoolExecutor | None = None

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if not name.startswith(_PREFIX):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        method_name = name[len(_PREFIX) :]
        # Not `getattr(self, ...)`: "async_async_put" names no method, and must not become one.
        if not callable(getattr(type(self), method_name, None)):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: it has no method {method_name!r}"
            )
        awaitable = self._awaitable(method_name)
        # The next access finds it in the instance and does not come here.
        self.__dict__[name] = awaitable
        return awaitable

    def _awaitable(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self, name)
        is_overridden = getattr(type(self), name) is not getattr(MooncakeDistributedStore, name, None)
        native = None if is_overridden else getattr(MooncakeDistributedStore, _NATIVE_PREFIX + name, None)

        @functools.wraps(method)
        async def on_the_client(*args: Any, **kwargs: Any) -> Any:
            return await _until_over(native(self, *args, **kwargs))

        @functools.wraps(method)
        async def on_a_thread(*args: Any, **kwargs: Any) -> Any:
            call = functools.partial(method, *args, **kwargs)
            return await _until_over(asyncio.get_running_loop().run_in_executor(self._pool(), call))

        return on_a_thread if native is None else on_the_client

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="mooncake-store")
        return self._threads


async def _until_over(operation: asyncio.Future[_T]) -> _T:
    """The result of ``operation``, which is not abandoned when this task is cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while not operation.done():
        try:
            await asyncio.wait([operation])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return operation.result()
    if not operation.cancelled():
        operation.exception()  # Seen: the caller is told of the cancellation alone.
    raise cancelled
