"""The transfer engine: the codes of its calls, its memory, notifications, and hostile arguments."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from typing import Any

import cluster
import pytest
from cluster import Memory
from peers import Peer

pytestmark = pytest.mark.cluster

SIZE = 64 * 1024


@pytest.fixture
def engine() -> Iterator[Any]:
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    yield made


def test_before_initialize_every_call_answers() -> None:
    from mooncake.engine import TransferEngine

    engine, memory = TransferEngine(), Memory(64)
    assert engine.get_rpc_port() == 0
    assert engine.allocate_managed_buffer(64) == 0
    assert engine.register_memory(memory.address, 64) < 0
    assert engine.unregister_memory(memory.address) < 0
    assert engine.transfer_sync_write("127.0.0.1:1", memory.address, 1, 8) == -1
    assert engine.batch_transfer_async_write("127.0.0.1:1", [memory.address], [1], [8]) == 0
    assert engine.get_batch_transfer_status([1]) == -1
    assert engine.transfer_check_status(1) == -1
    assert engine.send_probe("127.0.0.1:1") == -1
    assert engine.get_first_buffer_address("127.0.0.1:1") == 0
    assert engine.get_notifies() == []
    assert (engine.get_engine(), engine.get_engine_ptr()) == (None, 0)
    json.loads(engine.get_local_topology())


@pytest.mark.parametrize(
    "arguments",
    [
        ("127.0.0.1", "P2PHANDSHAKE", "xgmi", ""),
        ("127.0.0.1", "ftp://h:1/x", "tcp", ""),
        ("127.0.0.1", "http://127.0.0.1:1/metadata", "tcp", ""),
        ("no host", "P2PHANDSHAKE", "tcp", ""),
    ],
)
def test_an_engine_that_cannot_start_says_minus_1(arguments: tuple[str, str, str, str]) -> None:
    from mooncake.engine import TransferEngine

    assert TransferEngine().initialize(*arguments) == -1


def test_the_codes_of_registrations(engine: Any) -> None:
    memory = Memory(SIZE)
    assert engine.register_memory(memory.address, SIZE) == 0
    assert engine.register_memory(memory.address, SIZE) == -7
    assert engine.register_memory(memory.address + 8, 8) == -7
    assert engine.register_memory(memory.address, 0) == -1
    assert engine.unregister_memory(memory.address + 8) == -3
    assert engine.unregister_memory(memory.address) == 0
    assert engine.unregister_memory(memory.address) == -3
    assert engine.batch_register_memory([1, 2], [8]) < 0


def test_managed_memory_is_the_first_of_a_peer(engine: Any) -> None:
    address = engine.allocate_managed_buffer(SIZE)
    assert address != 0
    assert engine.write_bytes_to_buffer(address, b"abcd", 4) == 0
    assert engine.write_bytes_to_buffer(address + 4, "efgh", 4) == 0
    assert engine.read_bytes_from_buffer(address, 8) == b"abcdefgh"
    assert engine.write_bytes_to_buffer(address, b"ab", 4) == -1
    with pytest.raises(TypeError):
        engine.write_bytes_to_buffer(address, memoryview(b"ab"), 2)
    with Peer() as peer:
        first = peer.call("get_first_buffer_address", f"127.0.0.1:{engine.get_rpc_port()}")
        assert 0 < first <= address
        assert peer.call("get_first_buffer_address", peer.session) == 0
    assert engine.free_managed_buffer(address, SIZE) == 0
    assert engine.free_managed_buffer(address, SIZE) < 0


def test_transfers_outside_registered_memory_fail(engine: Any) -> None:
    memory, other = Memory(SIZE), Memory(SIZE)
    assert engine.register_memory(memory.address, SIZE) == 0
    with Peer(SIZE) as peer:
        remote = peer.addresses[0]
        for local, address, length in (
            (memory.address, remote + SIZE, 8),
            (memory.address, remote - 8, 16),
            (memory.address, 0, 8),
            (memory.address, remote, 2**63),
            (memory.address, 2**64 - 4, 8),
        ):
            assert engine.transfer_sync_write(peer.session, local, address, length) == -1
        # Memory of this process need not be registered, as there over TCP.
        assert engine.transfer_sync_write(peer.session, other.address, remote, 8) == 0
        # Lists of different lengths are a failure, not an exception.
        assert engine.batch_transfer_sync_write(peer.session, [memory.address], [remote], []) == -1
        assert engine.batch_transfer_async_read(peer.session, [memory.address], [], [8]) == 0
        assert engine.transfer_sync_write(peer.session, memory.address, remote, SIZE) == 0
    del other


def test_a_notification_comes_after_its_bytes(engine: Any) -> None:
    from mooncake.engine import TransferNotify, TransferOpcode

    notify = TransferNotify("kind", "body")
    assert (notify.name, notify.msg, TransferNotify().name) == ("kind", "body", "")
    memory = Memory(SIZE)
    memory.fill(1)
    assert engine.register_memory(memory.address, SIZE) == 0
    with Peer(SIZE) as peer:
        write = (peer.session, memory.address, peer.addresses[0], SIZE, TransferOpcode.Write)
        assert engine.transfer_sync(*write, notify) == 0
        assert cluster.eventually(lambda: peer.ask("notifies"), "the message") == [("kind", "body")]
        assert peer.read(0, 0, SIZE) == memory.read(0, SIZE)
        assert peer.ask("notifies") == []
        with pytest.raises(TypeError, match="opcode"):
            engine.transfer_sync(peer.session, memory.address, peer.addresses[0], SIZE, 1)


def test_no_call_holds_the_gil(engine: Any) -> None:
    """A thread that runs Python code makes progress while another waits for a peer that does not answer."""
    memory = Memory(SIZE)
    assert engine.register_memory(memory.address, SIZE) == 0
    turns = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = turns
        # A port that accepts and says nothing: the call waits until its time is over.
        import socket

        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            port = silent.getsockname()[1]
            assert engine.send_probe(f"127.0.0.1:{port}") != 0
        assert turns - before > 1000
    finally:
        ended.set()
        thread.join()


def test_an_engine_runs_as_long_as_the_store_that_it_was_given_to(
    master: cluster.Master, engine: Any
) -> None:
    from mooncake.engine import TransferEngine
    from mooncake.store import MooncakeDistributedStore

    lent, store = TransferEngine(), MooncakeDistributedStore()
    assert lent.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    name = f"127.0.0.1:{lent.get_rpc_port()}"
    setup = ("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master.address)
    assert store.setup(*setup, engine=lent.get_engine()) == 0
    del lent
    gc.collect()
    assert engine.send_probe(name) == 0
    assert store.close() == 0
    cluster.eventually(lambda: engine.send_probe(name) != 0, "the engine stops with the store")
