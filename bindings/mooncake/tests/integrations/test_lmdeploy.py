"""lmdeploy's migration backend: one engine for each link, over the same memory.

The calls, in this order, of lmdeploy/pytorch/disagg/backend/mooncake.py:75-227: for each remote engine a
``TransferEngine()``, ``initialize(hostname, "P2PHANDSHAKE", protocol, device)``, ``get_rpc_port()``,
``register_memory(addr, length)`` of the same KV cache in all of them, and
``transfer_sync_read(remote_url, local_addr, remote_addr, length)`` for each block.
"""

from __future__ import annotations

import pytest
from cluster import Memory
from peers import Peer

pytestmark = pytest.mark.cluster

LINKS = 5
BLOCK = 4 * 1024
BLOCKS = 16


def test_five_engines_of_one_process_register_the_same_memory() -> None:
    from mooncake.engine import TransferEngine

    cache = Memory(LINKS * BLOCKS * BLOCK)
    with Peer(BLOCKS * BLOCK) as prefill:
        prefill.fill(0, 11)
        expected = prefill.read(0, 0, BLOCKS * BLOCK)
        links = []
        for _ in range(LINKS):
            engine = TransferEngine()
            assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
            assert engine.register_memory(cache.address, cache.size) == 0
            links.append(engine)
        assert len({engine.get_rpc_port() for engine in links}) == LINKS
        for number, engine in enumerate(links):
            base = number * BLOCKS * BLOCK
            for block in range(BLOCKS):
                local = cache.address + base + block * BLOCK
                remote = prefill.addresses[0] + (BLOCKS - 1 - block) * BLOCK
                assert engine.transfer_sync_read(prefill.session, local, remote, BLOCK) == 0
            for block in range(BLOCKS):
                place = (BLOCKS - 1 - block) * BLOCK
                assert cache.read(base + block * BLOCK, BLOCK) == expected[place : place + BLOCK]
        # An engine that ends leaves the registrations of the others alone.
        del engine, links[0]
        code = links[0].transfer_sync_read(prefill.session, cache.address, prefill.addresses[0], BLOCK)
        assert code == 0
