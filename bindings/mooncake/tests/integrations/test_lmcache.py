"""LMCache's connector of the store.

The calls, in this order, of lmcache/v1/storage_backend/connector/mooncakestore_connector.py: ``setup`` with
seven positional arguments, whose result is not looked at; ``ReplicateConfig().replica_num = 1`` and
``preferred_segment = get_hostname()``; ``register_buffer(data_ptr, numel)``; ``is_exist``; ``put_from`` or
``put_parts(key, metadata, data)``; ``await asyncio.to_thread(store.batch_get_into, ...)``, where a result of
0 or less is a miss; ``batch_get_buffer`` and ``memoryview(buffer)``; ``unregister_buffer``; ``close``.
"""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path

import cluster
import pytest
from cluster import Memory

pytestmark = pytest.mark.cluster

CHUNK = 32 * 1024
METADATA = struct.Struct("<7i")


def test_the_calls_of_a_remote_connector(master: cluster.Master, tmp_path: Path) -> None:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    path = tmp_path / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": 16 << 20,
                "local_buffer_size": 8 << 20,
                "master_server_address": master.address,
                "transfer_timeout": 1,
                "prefer_local_alloc": True,
            }
        )
    )
    config = json.loads(path.read_text())
    store = MooncakeDistributedStore()
    store.setup(
        config["local_hostname"],
        config["metadata_server"],
        config["global_segment_size"],
        config["local_buffer_size"],
        config.get("protocol", "tcp"),
        config.get("device_name", ""),
        config["master_server_address"],
    )
    replicas = ReplicateConfig()
    replicas.replica_num = 1
    replicas.preferred_segment = store.get_hostname()
    pinned = Memory(8 * CHUNK)
    assert store.register_buffer(pinned.address, pinned.size) == 0

    assert not store.is_exist("chunk@0")
    pinned.fill(1)
    assert store.put_from("chunk@0", pinned.address, CHUNK, replicas) == 0
    metadata = METADATA.pack(2, 4, 256, 0, 0, 0, CHUNK)
    data = memoryview(pinned.read(CHUNK, CHUNK))
    assert store.put_parts("chunk@1", metadata, data, config=replicas) == 0
    assert store.is_exist("chunk@0") and store.is_exist("chunk@1")

    async def load() -> None:
        keys = ["chunk@0", "chunk@missing"]
        places = [pinned.address + 4 * CHUNK, pinned.address + 5 * CHUNK]
        sizes = await asyncio.to_thread(store.batch_get_into, keys, places, [CHUNK, CHUNK])
        assert sizes[0] == CHUNK and sizes[1] <= 0
        buffers = await asyncio.to_thread(store.batch_get_buffer, ["chunk@1", "chunk@missing"])
        assert buffers[1] is None
        view = memoryview(buffers[0])
        assert METADATA.unpack(view[: METADATA.size].cast("B"))[-1] == CHUNK
        assert view[METADATA.size :].cast("B") == data

    asyncio.run(load())
    assert pinned.read(4 * CHUNK, CHUNK) == pinned.read(0, CHUNK)
    assert store.unregister_buffer(pinned.address) == 0
    store.close()
