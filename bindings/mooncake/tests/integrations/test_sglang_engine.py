"""SGLang's transfer engine for prefill and decode.

The calls, in this order, of python/sglang/srt/distributed/device_communicators/mooncake_transfer_engine.py:
``initialize(hostname, "P2PHANDSHAKE", os.environ.get("MOONCAKE_PROTOCOL", "rdma"), device or "")`` (with
``MC_FORCE_TCP`` the device is empty), ``hasattr(engine, "batch_register_memory")`` as a check of the version,
``register_memory``, ``batch_register_memory``, ``transfer_sync_write``, ``batch_transfer_sync_write``,
``send_probe(session_id)``, ``get_engine()``, ``batch_unregister_memory``, ``unregister_memory``; in forks,
``batch_transfer_async_write`` and ``transfer_submit_write`` with their states.
"""

from __future__ import annotations

import os

import cluster
import pytest
from cluster import Memory
from peers import Peer

pytestmark = pytest.mark.cluster

SIZE = 256 * 1024


def test_the_calls_of_a_disaggregated_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from mooncake.engine import TransferEngine

    monkeypatch.setenv("MC_FORCE_TCP", "1")
    device = "" if os.environ["MC_FORCE_TCP"] == "1" else "mlx5_0"
    with Peer(SIZE, SIZE) as decode:
        engine = TransferEngine()
        protocol = os.environ.get("MOONCAKE_PROTOCOL", "rdma")
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, device or "") == 0
        assert hasattr(engine, "batch_register_memory")
        session_id = f"127.0.0.1:{engine.get_rpc_port()}"

        aux, kv = Memory(SIZE), Memory(SIZE)
        assert engine.register_memory(aux.address, aux.size) == 0
        assert engine.batch_register_memory([kv.address], [kv.size]) == 0
        aux.fill(1)
        kv.fill(2)
        assert engine.send_probe(decode.session) == 0
        assert engine.transfer_sync_write(decode.session, aux.address, decode.addresses[0], SIZE) == 0
        half = SIZE // 2
        src, dst = [kv.address, kv.address + half], [decode.addresses[1] + half, decode.addresses[1]]
        assert engine.batch_transfer_sync_write(decode.session, src, dst, [half, half]) == 0
        assert decode.read(0, 0, SIZE) == aux.read(0, SIZE)
        assert decode.read(1, 0, SIZE) == kv.read(half, half) + kv.read(0, half)

        # Both ends know each other: the decode server probes its prefill server, too.
        assert decode.call("send_probe", session_id) == 0
        assert engine.send_probe("127.0.0.1:1") != 0
        assert engine.get_engine() is not None
        assert engine.batch_unregister_memory([kv.address]) == 0
        assert engine.unregister_memory(aux.address) == 0


def test_transfers_that_are_polled() -> None:
    from mooncake.engine import TransferEngine

    with Peer(SIZE) as decode:
        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        memory = Memory(SIZE)
        memory.fill(4)
        assert engine.register_memory(memory.address, memory.size) == 0
        batch = engine.transfer_submit_write(decode.session, memory.address, decode.addresses[0], SIZE)
        assert batch != 0
        state = cluster.eventually(lambda: engine.transfer_check_status(batch), "the transfer ends")
        assert state == 1
        assert decode.read(0, 0, SIZE) == memory.read(0, SIZE)
        # Freed with its end: the number means nothing any more, and asking does no harm.
        assert engine.transfer_check_status(batch) == -1

        lists = [memory.address], [decode.addresses[0]], [SIZE]
        batches = [engine.batch_transfer_async_write(decode.session, *lists) for _ in range(4)]
        assert all(batches)
        assert engine.get_batch_transfer_status(batches) == 0
        assert engine.batch_transfer_async_write("127.0.0.1:1", *lists) == 0
