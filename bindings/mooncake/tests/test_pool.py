"""``BufferPool``, leases, and the other memory that the package gives out."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import cluster
import pytest

pytestmark = pytest.mark.cluster

LOCAL = 4 << 20
PAGE = 4096


@pytest.fixture
def store(master: cluster.Master) -> Iterator[Any]:
    with cluster.store(master, segment=16 << 20, local_buffer=LOCAL) as opened:
        yield opened


def pool(store: Any, **options: Any) -> Any:
    from mooncake.store import BufferPool

    return BufferPool(store, **({"min_size_class": PAGE, "alignment": PAGE} | options))


def test_a_lease_is_registered_memory_that_objects_are_moved_from_and_into(store: Any) -> None:
    buffers = pool(store)
    with buffers.acquire(5) as source, buffers.acquire(64) as target:
        source.buffer[:] = b"bytes"
        assert (source.size, len(source.buffer), source.buffer.readonly) == (5, 5, False)
        assert store.put_from("lease", source.ptr, 5) == 0
        assert store.get_into("lease", target.ptr, 64) == 5
        assert bytes(target.buffer[:5]) == b"bytes"
    buffers.close()


def test_a_lease_with_views_is_not_released(store: Any) -> None:
    buffers = pool(store)
    lease = buffers.acquire(16)
    view = lease.buffer
    with pytest.raises(RuntimeError, match="exported views"):
        lease.release()
    view[0] = 7
    part = view[4:8]
    view.release()
    del view
    with pytest.raises(RuntimeError, match="exported views"):
        lease.release()
    part.release()
    del part
    gc.collect()
    lease.release()
    lease.release()
    for use in (lambda: lease.ptr, lambda: lease.buffer):
        with pytest.raises(RuntimeError, match="lease is closed"):
            use()
    buffers.close()


def test_a_lease_that_is_dropped_comes_back(store: Any) -> None:
    buffers = pool(store, max_bytes=LOCAL, max_regions=1)
    lease = buffers.acquire(16)
    with pytest.raises(RuntimeError, match="exhausted"):
        buffers.acquire(16, block=False)
    del lease
    gc.collect()
    buffers.acquire(16, timeout=10.0).release()
    buffers.close()


def test_a_lease_that_waits_gets_what_another_thread_gives_back(store: Any) -> None:
    buffers = pool(store, max_bytes=LOCAL)
    held = buffers.acquire(LOCAL)
    with pytest.raises(RuntimeError, match="timed out"):
        buffers.acquire(LOCAL, timeout=0.01)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(buffers.acquire(LOCAL)))
    thread.start()
    held.release()
    thread.join(10.0)
    assert [lease.size for lease in got] == [LOCAL]
    got.pop().release()
    buffers.close()


def test_free_buffers_of_other_sizes_make_room(store: Any) -> None:
    buffers = pool(store, max_bytes=LOCAL)
    small = [buffers.acquire(LOCAL // 4) for _ in range(4)]
    for lease in small:
        lease.release()
    buffers.acquire(LOCAL, block=False).release()
    buffers.close()


@pytest.mark.parametrize("size", [LOCAL + 1, 1 << 40, (1 << 64) - 1])
def test_a_size_that_the_pool_can_never_have_is_refused_at_once(store: Any, size: int) -> None:
    buffers = pool(store, max_bytes=LOCAL)
    with pytest.raises(RuntimeError, match=f"{size} exceeds pool capacity {LOCAL}"):
        buffers.acquire(size)
    buffers.close()


def test_a_pool_with_leases_is_not_closed_and_a_closed_one_lends_nothing(store: Any) -> None:
    buffers = pool(store, prewarm_size=PAGE, prewarm_count=2)
    lease = buffers.acquire(PAGE)
    with pytest.raises(RuntimeError, match="active leases"):
        buffers.close()
    lease.release()
    buffers.close()
    with pytest.raises(RuntimeError, match="closed"):
        buffers.acquire(PAGE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alignment": 12}, "power of two"),
        ({"alignment": 0}, "positive"),
        ({"min_size_class": 0}, "positive"),
    ],
)
def test_options_that_no_pool_can_have(store: Any, options: dict[str, int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        pool(store, **options)
    buffers = pool(store)
    with pytest.raises(RuntimeError, match="non-negative"):
        buffers.acquire(1, timeout=-1.0)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        buffers.acquire("1")


def test_alignment_is_that_of_the_addresses(store: Any) -> None:
    buffers = pool(store, alignment=1 << 20)
    leases = [buffers.acquire(100) for _ in range(5)]
    assert [lease.ptr % (1 << 20) for lease in leases] == [0] * 5
    for lease in leases:
        lease.release()
    buffers.close()


def test_a_pool_needs_a_store_that_is_set_up() -> None:
    from mooncake.store import BufferPool, MooncakeDistributedStore

    with pytest.raises(RuntimeError, match="not initialized"):
        BufferPool(MooncakeDistributedStore())
    with pytest.raises(RuntimeError, match="MooncakeDistributedStore"):
        BufferPool("a store")


def test_many_threads_take_and_give_back(store: Any) -> None:
    buffers = pool(store, max_bytes=LOCAL)
    wrong: list[int] = []

    def turn(number: int) -> None:
        for round_ in range(200):
            with buffers.acquire(PAGE << (round_ % 4)) as lease:
                lease.buffer[:2] = bytes((number, round_ % 256))
                if bytes(lease.buffer[:2]) != bytes((number, round_ % 256)):
                    wrong.append(number)

    threads = [threading.Thread(target=turn, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert wrong == []
    buffers.close()


def test_memory_of_the_host_is_page_aligned_and_freed_once() -> None:
    from mooncake.store import MooncakeHostMemAllocator

    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(PAGE + 1)
    assert address % PAGE == 0
    ctypes.memset(address, 1, PAGE + 1)
    assert ctypes.string_at(address, 4) == b"\1\1\1\1"
    assert allocator.free(address) == 0
    for unknown in (address, address + 1, 1, 0):
        assert allocator.free(unknown) != 0
    for size in (0, 1 << 60):
        with pytest.raises(RuntimeError):
            allocator.alloc(size)


def test_functions_for_allocators_of_other_libraries() -> None:
    from mooncake.store import get_alloc_func_addr, get_free_func_addr

    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(get_alloc_func_addr())
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(get_free_func_addr())
    address = alloc(100)
    ctypes.memset(address, 2, 100)
    free(address)
    free(None)
    assert alloc(0) is None
