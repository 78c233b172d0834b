"""vLLM's MooncakeConnector: prefill writes KV blocks into the memory of decode.

The calls, in this order, of vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py:
``initialize(hostname, "P2PHANDSHAKE", protocol, device_name)``, ``get_rpc_port()``,
``batch_register_memory(kv_data_ptrs, kv_data_lens) == 0``, and from several threads
``batch_transfer_sync_write(remote_session, src_ptrs, dst_ptrs, lengths)``.
"""

from __future__ import annotations

import threading

import pytest
from cluster import Memory
from peers import Peer

pytestmark = pytest.mark.cluster

LAYERS = 4
BLOCKS = 64
BLOCK = 16 * 1024
THREADS = 4


def test_four_threads_hand_their_blocks_over() -> None:
    from mooncake.engine import TransferEngine

    with Peer(*[BLOCKS * BLOCK] * LAYERS) as decode:
        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        session = f"127.0.0.1:{engine.get_rpc_port()}"
        assert session != decode.session
        layers = [Memory(BLOCKS * BLOCK) for _ in range(LAYERS)]
        kv_data_ptrs, kv_data_lens = [m.address for m in layers], [m.size for m in layers]
        assert engine.batch_register_memory(kv_data_ptrs, kv_data_lens) == 0
        for seed, memory in enumerate(layers):
            memory.fill(seed)

        failures: list[int] = []

        def send(worker: int) -> None:
            # A request has its blocks in different places at both ends.
            blocks = range(worker, BLOCKS, THREADS)
            src, dst, lengths = [], [], []
            for layer, base in enumerate(kv_data_ptrs):
                for block in blocks:
                    src.append(base + block * BLOCK)
                    dst.append(decode.addresses[layer] + (BLOCKS - 1 - block) * BLOCK)
                    lengths.append(BLOCK)
            code = engine.batch_transfer_sync_write(decode.session, src, dst, lengths)
            if code != 0:
                failures.append(code)

        threads = [threading.Thread(target=send, args=(worker,)) for worker in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []

        for layer, memory in enumerate(layers):
            arrived = decode.read(layer, 0, BLOCKS * BLOCK)
            for block in range(BLOCKS):
                place = (BLOCKS - 1 - block) * BLOCK
                assert arrived[place : place + BLOCK] == memory.read(block * BLOCK, BLOCK), (layer, block)


def test_a_decode_that_is_gone_is_a_failure_and_another_is_served() -> None:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = Memory(BLOCK)
    assert engine.batch_register_memory([memory.address], [memory.size]) == 0
    with Peer(BLOCK) as gone:
        gone.kill()
        code = engine.batch_transfer_sync_write(gone.session, [memory.address], [gone.addresses[0]], [BLOCK])
        assert code == -1
    with Peer(BLOCK) as decode:
        memory.fill(7)
        lists = [memory.address], [decode.addresses[0]], [BLOCK]
        assert engine.batch_transfer_sync_write(decode.session, *lists) == 0
        assert decode.read(0, 0, BLOCK) == memory.read(0, BLOCK)
