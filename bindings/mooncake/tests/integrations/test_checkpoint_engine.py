"""checkpoint-engine's P2P store: weights from the memory of another rank.

The calls, in this order, of checkpoint_engine/p2p_store.py:13-78: ``initialize`` (tried up to 8 times, with a
new engine each time), ``get_rpc_port()``, ``batch_register_memory(addresses, capacities) == 0``,
``batch_transfer_sync_read(target, buf_ptrs, remote_ptrs, lens) == 0``, ``batch_unregister_memory(addresses)
== 0``.
"""

from __future__ import annotations

import pytest
from cluster import Memory
from peers import Peer

pytestmark = pytest.mark.cluster

TENSORS = [1, 4096, 65_537, 1 << 20]


def test_a_rank_reads_the_weights_of_another() -> None:
    from mooncake.engine import TransferEngine

    with Peer(*TENSORS) as source:
        for number in range(len(TENSORS)):
            source.fill(number, number)
        for _ in range(8):
            engine = TransferEngine()
            if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0:
                break
        else:
            pytest.fail("no engine could be initialized")
        assert engine.get_rpc_port() > 0
        weights = [Memory(size) for size in TENSORS]
        addresses = [memory.address for memory in weights]
        assert engine.batch_register_memory(addresses, TENSORS) == 0
        assert engine.batch_transfer_sync_read(source.session, addresses, source.addresses, TENSORS) == 0
        for number, memory in enumerate(weights):
            assert memory.read(0, memory.size) == source.read(number, 0, memory.size), number
        assert engine.batch_unregister_memory(addresses) == 0
        # After that the memory is the caller's alone: a second time there is nothing to end.
        assert engine.batch_unregister_memory(addresses) < 0


def test_registrations_are_all_or_none() -> None:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = Memory(4096)
    assert engine.register_memory(memory.address, memory.size) == 0
    other = Memory(4096)
    assert engine.batch_register_memory([other.address, memory.address], [4096, 4096]) < 0
    assert engine.batch_register_memory([other.address], [4096]) == 0
