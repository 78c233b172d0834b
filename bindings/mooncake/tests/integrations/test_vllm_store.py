"""vLLM's MooncakeStoreConnector: KV blocks in the store.

The calls, in this order, of vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/worker.py: ``setup``
with seven positional arguments, ``ReplicateConfig().preferred_segment``, ``register_buffer(ptr, len)``,
``batch_is_exist(keys)`` compared with 1, ``batch_put_from_multi_buffers(keys, addrs, sizes, config)`` where
-200 means that the caller waits, ``batch_get_into_multi_buffers(keys, addrs, sizes)`` with an answer for each
key, ``batch_get_replica_desc``, ``remove_all(force=True)``, ``close()``.
"""

from __future__ import annotations

import cluster
import pytest
from cluster import Memory

pytestmark = pytest.mark.cluster

LAYERS = 3
BLOCK = 8 * 1024
BLOCKS = 8
NO_ROOM = -200


def places(memory: Memory, block: int) -> tuple[list[int], list[int]]:
    """The parts of a block: one in each layer."""
    layer = BLOCKS * BLOCK
    return [memory.address + at * layer + block * BLOCK for at in range(LAYERS)], [BLOCK] * LAYERS


def test_blocks_are_stored_and_loaded(master: cluster.Master) -> None:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 4 << 20, "tcp", "", master.address)
    assert code == 0
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    kv, loaded = Memory(LAYERS * BLOCKS * BLOCK), Memory(LAYERS * BLOCKS * BLOCK)
    for memory in (kv, loaded):
        assert store.register_buffer(memory.address, memory.size) == 0
    kv.fill(3)

    keys = [f"model@tp0@{block:08x}" for block in range(BLOCKS)]
    assert [code == 1 for code in store.batch_is_exist(keys)] == [False] * BLOCKS
    pairs = [places(kv, block) for block in range(BLOCKS)]
    codes = store.batch_put_from_multi_buffers(keys, [p[0] for p in pairs], [p[1] for p in pairs], config)
    assert codes == [0] * BLOCKS
    assert [code == 1 for code in store.batch_is_exist(keys)] == [True] * BLOCKS

    wanted = [*keys, "model@tp0@missing"]
    pairs = [places(loaded, block) for block in range(BLOCKS)] + [places(loaded, 0)]
    got = store.batch_get_into_multi_buffers(wanted, [p[0] for p in pairs], [p[1] for p in pairs])
    for key, size in zip(wanted, got, strict=True):
        assert size == (LAYERS * BLOCK if key != wanted[-1] else -704), key
    assert loaded.read(0, loaded.size) == kv.read(0, kv.size)

    found = store.batch_get_replica_desc(wanted)
    assert sorted(found) == sorted(keys)
    for replicas in found.values():
        assert [replica.is_memory_replica() for replica in replicas] == [True]
        place = replicas[0].get_memory_descriptor().buffer_descriptor
        assert (place.size, place.transport_endpoint) == (LAYERS * BLOCK, store.get_hostname())
    assert store.remove_all(force=True) == BLOCKS
    assert store.batch_is_exist(keys) == [0] * BLOCKS
    assert store.close() == 0


def test_a_full_store_is_back_pressure_and_not_an_error(master: cluster.Master) -> None:
    with cluster.store(master, segment=4 << 20) as store:
        memory = Memory(1 << 20)
        assert store.register_buffer(memory.address, memory.size) == 0
        keys = [f"full/{block}" for block in range(8)]
        codes = store.batch_put_from_multi_buffers(keys, [[memory.address]] * 8, [[memory.size]] * 8)
        assert set(codes) == {0, NO_ROOM}
        present = store.batch_is_exist(keys)
        assert [code == 0 for code in codes] == [there == 1 for there in present]


def test_a_worker_without_memory_of_its_own_uses_that_of_others(master: cluster.Master) -> None:
    """``mode: standalone-store``: the worker lends nothing, another process owns the memory."""
    with cluster.store(master, segment=16 << 20), cluster.store(master, segment=0) as worker:
        memory = Memory(BLOCK)
        memory.fill(9)
        assert worker.register_buffer(memory.address, memory.size) == 0
        assert worker.batch_put_from_multi_buffers(["k"], [[memory.address]], [[BLOCK]]) == [0]
        memory.write(0, bytes(BLOCK))
        assert worker.batch_get_into_multi_buffers(["k"], [[memory.address]], [[BLOCK]]) == [BLOCK]
        assert memory.read(0, BLOCK) == cluster.pattern(9, BLOCK)
