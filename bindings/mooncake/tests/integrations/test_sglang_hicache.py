"""SGLang's HiCache over the store.

The calls, in this order, of python/sglang/srt/mem_cache/storage/mooncake_store/mooncake_store.py:
``hasattr(ReplicateConfig, "group_ids")`` on the class; ``MooncakeHostMemAllocator().alloc(size)`` and an
array at the address; ``GET /get_all_segments`` of the master, which must answer with a text; ``setup`` with
seven positional arguments, the transfer engine as the eighth, and keywords, of which those are dropped whose
names are in the text of a ``TypeError``; a warm-up of ``put``, ``is_exist`` and ``get``; ``register_buffer``;
``batch_is_exist``; ``batch_put_from`` with ``group_ids``, ``batch_get_into``; ``setup_dummy`` where the
memory is owned by another process.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

import cluster
import pytest
from cluster import Memory

pytestmark = pytest.mark.cluster

PAGE = 64 * 1024
PAGES = 4


def set_up(store: Any, address: str, engine: Any = None, **keywords: Any) -> list[str]:
    """The loop around ``setup``: returns the keywords that were dropped."""
    dropped: list[str] = []
    while True:
        try:
            code = store.setup(
                "127.0.0.1", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", address, engine, **keywords
            )
            break
        except TypeError as error:
            unsupported = [name for name in keywords if name in str(error)]
            if not unsupported:
                raise
            for name in unsupported:
                keywords.pop(name)
            dropped += unsupported
    assert code == 0
    return dropped


def warm_up(store: Any) -> None:
    key, value = f"sglang_mooncake_store_warmup_key{uuid.uuid4().hex}", bytes(4 * 1024)
    cluster.eventually(lambda: store.put(key, value) == 0, "the warm-up is stored")
    assert store.is_exist(key) == 1
    assert store.get(key) == value


def test_the_pages_of_a_cache(master: cluster.Master) -> None:
    from mooncake.store import MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig

    assert hasattr(ReplicateConfig, "group_ids")
    allocator = MooncakeHostMemAllocator()
    pool = allocator.alloc(PAGES * PAGE)
    pages = (ctypes.c_byte * (PAGES * PAGE)).from_address(pool)
    ctypes.memmove(pages, cluster.pattern(5, PAGES * PAGE), PAGES * PAGE)

    status, text = cluster.http("GET", f"http://127.0.0.1:{master.metrics_port}/get_all_segments")
    assert status == 200
    store = MooncakeDistributedStore()
    assert set_up(store, master.address, enable_ssd_offload=False, tenant_id="default") == []
    status, text = cluster.http("GET", f"http://127.0.0.1:{master.metrics_port}/get_all_segments")
    assert status == 200 and store.get_hostname() in text.decode()
    warm_up(store)

    assert store.register_buffer(pool, PAGES * PAGE) == 0
    keys = [f"tag_page{page}_0_k" for page in range(PAGES)]
    addresses, sizes = [pool + page * PAGE for page in range(PAGES)], [PAGE] * PAGES
    assert store.batch_is_exist(keys) == [0] * PAGES
    config = ReplicateConfig()
    config.group_ids = [f"sglang-hicache:page{page // 2}" for page in range(PAGES)]
    assert store.batch_put_from(keys, addresses, sizes, config) == [0] * PAGES
    ctypes.memset(pages, 0, PAGES * PAGE)
    assert store.batch_get_into(keys, addresses, sizes) == sizes
    assert bytes(pages) == cluster.pattern(5, PAGES * PAGE)
    assert store.unregister_buffer(pool) == 0
    assert store.close() == 0
    del pages
    assert allocator.free(pool) == 0
    assert allocator.free(pool) == -1


def test_a_keyword_that_does_not_exist_is_dropped_by_the_text_of_the_error(master: cluster.Master) -> None:
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert set_up(store, master.address, keyword_of_tomorrow=1) == ["keyword_of_tomorrow"]
    warm_up(store)
    assert store.close() == 0


def test_the_text_of_the_error_lists_what_is_accepted(master: cluster.Master) -> None:
    from mooncake.store import MooncakeDistributedStore

    with pytest.raises(TypeError) as caught:
        MooncakeDistributedStore().setup("127.0.0.1", bogus=1)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "setup(): incompatible function arguments. The following argument types are supported:"
    )
    for keyword in (
        "local_hostname",
        "engine",
        "enable_ssd_offload",
        "tenant_id",
        "client_http_port",
        "config",
    ):
        assert keyword in str(caught.value)
    assert "bogus" in str(caught.value)


def test_an_engine_that_is_initialized_is_reused(master: cluster.Master) -> None:
    from mooncake.engine import TransferEngine
    from mooncake.store import MooncakeDistributedStore

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    store = MooncakeDistributedStore()
    assert set_up(store, master.address, engine.get_engine()) == []
    warm_up(store)
    assert store.close() == 0
    # The engine outlives the store that used it.
    memory = Memory(PAGE)
    assert engine.register_memory(memory.address, memory.size) == 0


def test_a_scheduler_without_memory_of_its_own(master: cluster.Master) -> None:
    """``standalone_storage``: another process on the host (``mooncake_client``) owns the memory."""
    from mooncake.store import MooncakeDistributedStore, MooncakeHostMemAllocator

    port = cluster.free_port()
    words = [
        cluster._binary.path(),
        "mooncake-client",
        f"--master_server_address={master.address}",
        f"--port={port}",
        "--host=127.0.0.1",
        "--global_segment_size=32 MB",
        "--metadata_server=P2PHANDSHAKE",
    ]
    with cluster.Process(words) as owner:
        cluster.eventually(lambda: owner.must_run() or cluster.accepts(port), "the owner listens")
        allocator = MooncakeHostMemAllocator()
        pool = allocator.alloc(PAGES * PAGE)
        store = MooncakeDistributedStore()
        assert store.setup_dummy(PAGES * PAGE, 16 << 20, f"127.0.0.1:{port}") == 0
        warm_up(store)
        assert store.register_buffer(pool, PAGES * PAGE) == 0
        ctypes.memmove(pool, cluster.pattern(6, PAGES * PAGE), PAGES * PAGE)
        assert store.batch_put_from(["p0"], [pool], [PAGE]) == [0]
        ctypes.memset(pool, 0, PAGE)
        assert store.batch_get_into(["p0"], [pool], [PAGE]) == [PAGE]
        assert ctypes.string_at(pool, PAGE) == cluster.pattern(6, PAGES * PAGE)[:PAGE]
        assert store.close() == 0
        assert allocator.free(pool) == 0
