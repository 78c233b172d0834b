"""The store for asyncio.

>>> import asyncio
>>> async def main():
...     async with snowskin.aio.Store.connect(master) as s:
...         await s.put("async/0", b"block")
...         leases = await asyncio.gather(*[s.get("async/0") for _ in range(100)])
...         return bytes(leases[99])
>>> asyncio.run(main())
b'block'

Operations run on the store's own thread, without an executor, and their completions wake the event loop once
per burst. A coroutine that is cancelled (``asyncio.timeout``, ``wait_for``) stops waiting: an operation that
has begun goes on and keeps its buffers until its end, one that has not does not begin.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from . import _native
from ._config import Config
from ._results import Results

if TYPE_CHECKING:
    from ._native import Lease, ObjectInfo, PutResult
    from ._types import Buffer, Key, Value

__all__ = ["Connecting", "Store"]

T = TypeVar("T")

#: Items of one job of a bulk operation: its progress, and what other operations wait for.
_CHUNK = 512
#: Jobs of a bulk operation that are under way together.
_JOBS = 2
#: How long closing waits, seconds.
_CLOSE_S = 2.0


async def _finished(future: asyncio.Future[T]) -> T:
    """Waits for an operation. One that has not begun when the wait is cancelled does not begin."""
    try:
        return await future
    except asyncio.CancelledError:
        _native.abandon(future)
        raise


class Connecting:
    """A store that is being opened: ``await`` it, or use it with ``async with``, which also closes the
    store."""

    __slots__ = ("_config", "_store")

    def __init__(self, config: Config) -> None:
        self._config = config
        self._store: Store | None = None

    async def _open(self) -> Store:
        native = await _finished(_native.AsyncStore.connect(self._config))
        return Store(native)

    def __await__(self) -> Generator[Any, Any, Store]:
        return self._open().__await__()

    async def __aenter__(self) -> Store:
        self._store = await self._open()
        return self._store

    async def __aexit__(self, *exception: object) -> None:
        if self._store is not None:
            await self._store.close()


class Store:
    """A store of objects, for one or several event loops. See :class:`snowskin.Store`, whose methods and
    arguments these are; timeouts are those of asyncio."""

    __slots__ = ("__weakref__", "_native")

    def __init__(self, native: _native.AsyncStore) -> None:
        self._native = native

    @staticmethod
    def connect(
        master: str | None = None,
        *,
        memory: int | str | None = None,
        rails: str | Sequence[str] = "auto",
        local: str | os.PathLike[str] | None = None,
        tenant: str = "default",
        secret: str | bytes | None = None,
        cluster_secret: str | bytes | None = None,
        admin_secret: str | bytes | None = None,
        listen: str = "127.0.0.1:0",
        advertise: str | None = None,
        node_name: str | None = None,
        pool: int | str = "1GiB",
        connect_timeout: float = 2.0,
        call_timeout: float = 5.0,
        transfer_timeout: float = 10.0,
        gpu_library: str | os.PathLike[str] | None = None,
    ) -> Connecting:
        """Opens a store: ``async with Store.connect(...) as store``, or ``store = await Store.connect(...)``.
        The arguments are those of :class:`snowskin.Config`. ``ValueError`` comes at once, before anything is
        opened."""
        return Connecting(
            Config(
                master,
                memory=memory,
                rails=rails,
                local=local,
                tenant=tenant,
                secret=secret,
                cluster_secret=cluster_secret,
                admin_secret=admin_secret,
                listen=listen,
                advertise=advertise,
                node_name=node_name,
                pool=pool,
                connect_timeout=connect_timeout,
                call_timeout=call_timeout,
                transfer_timeout=transfer_timeout,
                gpu_library=gpu_library,
            )
        )

    async def put(
        self,
        key: Key,
        value: Value,
        *,
        pin: str | None = None,
        replicas: int = 1,
        group: str | int | None = None,
        ttl: float | None = None,
        overwrite: bool = False,
        disk: str = "auto",
    ) -> PutResult:
        """Stores an object: a buffer, or a list or tuple of buffers, which stay exported until the operation
        is over."""
        return await _finished(self._native.put(key, value, pin, replicas, group, ttl, overwrite, disk))

    async def put_many(
        self,
        items: Mapping[str, Value] | Iterable[tuple[Key, Value]],
        *,
        pin: str | None = None,
        replicas: int = 1,
        group: str | int | None = None,
        ttl: float | None = None,
        overwrite: bool = False,
        disk: str = "auto",
        progress: Callable[[int, int], object] | None = None,
    ) -> Results[bool]:
        """Stores many objects. One ``bool`` per item; ``progress(done, total)`` is called as items end."""

        def send(chunk: list[Any]) -> asyncio.Future[tuple[list[bool], dict[int, Any]]]:
            return self._native.put_chunk(chunk, pin, replicas, group, ttl, overwrite, disk)

        return await _in_chunks(_pairs(items), send, progress)

    async def get(self, key: Key, *, offset: int = 0, length: int | None = None) -> Lease | None:
        """Reads an object, or a part of it, into memory of the store. ``None`` is a miss."""
        return await _finished(self._native.get(key, offset, length))

    async def get_into(
        self, key: Key, buffer: Buffer, *, offset: int = 0, length: int | None = None
    ) -> int | None:
        """Reads an object, or a part of it, into a buffer, which stays exported until the operation is
        over."""
        return await _finished(self._native.get_into(key, buffer, offset, length))

    async def get_many(
        self, keys: Iterable[Key], *, progress: Callable[[int, int], object] | None = None
    ) -> Results[Lease | None]:
        """Reads many objects: one lease per key, and ``None`` for each miss."""
        return await _in_chunks(_keys(keys), self._native.get_chunk, progress)

    async def get_many_into(
        self,
        items: Mapping[str, Buffer] | Iterable[tuple[Key, Buffer]],
        *,
        progress: Callable[[int, int], object] | None = None,
    ) -> Results[int | None]:
        """Reads many objects into buffers: the number of bytes per item, and ``None`` for each miss."""
        return await _in_chunks(_pairs(items), self._native.get_into_chunk, progress)

    async def get_prefix(self, keys: Iterable[Key]) -> Results[Lease]:
        """Reads the longest prefix of ``keys`` that is in the store."""
        return await _finished(self._native.get_prefix(_keys(keys)))

    async def prefetch(self, keys: Iterable[Key], *, deadline: float = 1.0) -> list[bool]:
        """Copies objects that are on disks alone into memory, and waits until they are there, for at most
        ``deadline`` seconds. One ``bool`` per key: whether it is in memory now, where it is leased for a
        while."""
        asked = _keys(keys)
        there = [False] * len(asked)
        left = list(range(len(asked)))
        loop = asyncio.get_running_loop()
        end, pause = loop.time() + deadline, 0.001
        while True:
            found = await _finished(self._native.prefetch([asked[at] for at in left]))
            for at, answer in zip(left, found, strict=True):
                there[at] = answer is True
            left = [at for at, answer in zip(left, found, strict=True) if answer is False]
            time = end - loop.time()
            if not left or not time > 0:  # also if the deadline is no number
                return there
            await asyncio.sleep(min(pause, time))
            pause = min(2 * pause, 0.02)

    async def exists(self, key: Key) -> bool:
        """Whether a get would find the object."""
        return (await _finished(self._native.exists_many([key])))[0]

    async def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """Whether gets would find the objects, in one request."""
        return await _finished(self._native.exists_many(_keys(keys)))

    async def remove(self, key: Key, *, force: bool = False) -> bool:
        """Removes an object. The result is false if there was none."""
        values, errors = await _finished(self._native.remove_many([key], force))
        if errors:
            raise errors[0]
        return values[0]

    async def remove_many(self, keys: Iterable[Key], *, force: bool = False) -> Results[bool]:
        """Removes many objects. One ``bool`` per key."""
        values, errors = await _finished(self._native.remove_many(_keys(keys), force))
        return Results(values, errors)

    async def remove_matching(self, pattern: str, *, force: bool = False) -> int:
        """Removes every object whose key matches a regular expression, and returns their number."""
        return await _finished(self._native.remove_matching(pattern, force))

    async def stat(self, key: Key) -> ObjectInfo | None:
        """Length and checksum of an object; ``None`` if there is none."""
        return await _finished(self._native.stat(key))

    async def list(self, prefix: Key = "") -> AsyncIterator[ObjectInfo]:
        """Iterates over the objects whose keys begin with ``prefix``: ``async for info in
        store.list("a/")``."""
        async for info in self._pages(prefix, None):
            yield info

    async def scan(self, pattern: str) -> AsyncIterator[ObjectInfo]:
        """Iterates over the objects whose keys match a regular expression."""
        async for info in self._pages("", pattern):
            yield info

    async def _pages(self, prefix: Key, pattern: str | None) -> AsyncIterator[ObjectInfo]:
        cursor = 0
        while True:
            infos, cursor = await _finished(self._native.page(prefix, pattern, cursor))
            for info in infos:
                yield info
            if cursor == 0:
                return

    async def stats(self) -> dict[str, int]:
        """Counters of this store: hits, misses, bytes, and the memory of its leases."""
        return await _finished(self._native.stats())

    @property
    def endpoint(self) -> str | None:
        """Address at which the memory that this store lends is reached; ``None`` if it lends none."""
        return self._native.endpoint

    @property
    def closed(self) -> bool:
        """Whether the store was closed."""
        return self._native.closed

    async def close(self, timeout: float = _CLOSE_S) -> bool:
        """Closes the store: operations that have been asked for are carried out, further ones are refused,
        memory that it lends is withdrawn. Returns whether that was over within ``timeout`` seconds; otherwise
        the rest happens in the background."""
        done, _ = await asyncio.wait([self._native.close()], timeout=timeout)
        return bool(done)

    def __repr__(self) -> str:
        return f"<snowskin.aio.Store {self._native.place} {'closed' if self.closed else 'open'}>"


def _keys(keys: Iterable[Key]) -> list[Key]:
    if isinstance(keys, (str, bytes)):
        raise TypeError("keys is a list of keys, not one key")
    return list(keys)


def _pairs(items: Any) -> list[Any]:
    return list(items.items()) if hasattr(items, "items") else list(items)


async def _in_chunks(
    items: list[Any],
    send: Callable[[list[Any]], asyncio.Future[tuple[list[T], dict[int, Any]]]],
    progress: Callable[[int, int], object] | None,
) -> Results[T]:
    """Carries out a bulk operation in jobs, of which some are under way together."""
    values: list[T] = []
    errors: dict[int, Any] = {}
    under_way: list[asyncio.Future[tuple[list[T], dict[int, Any]]]] = []
    next_item = 0
    try:
        while next_item < len(items) or under_way:
            while next_item < len(items) and len(under_way) < _JOBS:
                under_way.append(send(items[next_item : next_item + _CHUNK]))
                next_item += _CHUNK
            part, failed = await under_way[0]
            del under_way[0]
            errors.update((len(values) + index, error) for index, error in failed.items())
            values.extend(part)
            if progress is not None:
                progress(len(values), len(items))
    except BaseException:
        for future in under_way:
            future.cancel()
            _native.abandon(future)
        raise
    return Results(values, errors)
