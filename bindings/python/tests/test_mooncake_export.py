"""Memory that engines of Mooncake reach. The peer here is the one of the drop-in, which speaks their wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import snowskin
from snowskin import Engine, InvalidArgument, _native

BYTES = 1 << 20
VALUE = np.random.default_rng(0).integers(0, 256, BYTES, dtype="u1")


class Peer:
    """An engine of the drop-in with memory of its own."""

    def __init__(self) -> None:
        self.memory = np.zeros(BYTES, dtype="u1")
        self.engine: Any = _native.mooncake.TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert self.engine.register_memory(self.memory.ctypes.data, BYTES) == 0

    def read(self, name: str | None, addr: int, nbytes: int = BYTES) -> bool:
        self.memory[:] = 0
        return bool(self.engine.transfer_sync_read(name, self.memory.ctypes.data, addr, nbytes) == 0)

    def write(self, name: str | None, addr: int, nbytes: int = BYTES) -> bool:
        return bool(self.engine.transfer_sync_write(name, self.memory.ctypes.data, addr, nbytes) == 0)


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.engine.unregister_memory(peer.memory.ctypes.data)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(mooncake_bind="127.0.0.1", mooncake_peers="127.0.0.0/8") as engine:
        yield engine


def test_memory_is_reached_as_far_as_it_was_exported(engine: Engine, peer: Peer) -> None:
    name = engine.mooncake_name
    assert name is not None and name != engine.name
    own = engine.alloc(BYTES, remote="readwrite")
    own.numpy()[:] = VALUE
    other = VALUE[::-1].copy()
    with engine.register(other) as region:
        assert not peer.read(name, own.addr), "registered is not exported"
        own.export_mooncake()
        region.export_mooncake(read=False, write=True)
        assert peer.read(name, own.addr) and (peer.memory == VALUE).all()
        assert not peer.write(name, own.addr), "exported to be read"
        peer.memory[:] = 7
        assert peer.write(name, region.addr) and (other == 7).all()
        assert not peer.read(name, region.addr), "exported to be written"
    assert (own.numpy() == VALUE).all()


def test_an_export_ends(engine: Engine, peer: Peer) -> None:
    name = engine.mooncake_name
    region = engine.alloc(BYTES)
    region.export_mooncake(True, True)
    with pytest.raises(InvalidArgument, match="exported to Mooncake peers already"):
        region.export_mooncake()
    assert peer.write(name, region.addr)
    assert region.withdraw_mooncake() and not region.withdraw_mooncake()
    assert not peer.read(name, region.addr)
    region.export_mooncake()
    assert peer.read(name, region.addr)


def test_an_export_ends_with_its_registration_and_its_engine(engine: Engine, peer: Peer) -> None:
    name = engine.mooncake_name
    lent = bytearray(BYTES)
    region = engine.register(lent)
    region.export_mooncake()
    assert peer.read(name, region.addr)
    kept = engine.alloc(BYTES)
    kept.export_mooncake()
    assert engine.close()
    # The memory is given back, so nothing can reach it any more.
    lent.append(0)
    assert not peer.read(name, region.addr) and not peer.read(name, kept.addr)
    with pytest.raises(snowskin.Closed):
        kept.export_mooncake()
    assert not kept.withdraw_mooncake()


def test_only_the_hosts_of_the_networks_connect(peer: Peer) -> None:
    with Engine(mooncake_bind="127.0.0.1", mooncake_peers=["10.0.0.0/8", "fe80::/16"]) as engine:
        region = engine.alloc(BYTES)
        region.export_mooncake()
        assert not peer.read(engine.mooncake_name, region.addr)


def test_messages_of_mooncake_peers_arrive(engine: Engine, peer: Peer) -> None:
    name = engine.mooncake_name
    region = engine.alloc(BYTES)
    region.export_mooncake(write=True)
    native = _native.mooncake
    note = native.TransferNotify("done", "look")
    opcode = native.TransferOpcode.Write
    local = peer.memory.ctypes.data
    assert peer.engine.transfer_sync(name, local, region.addr, BYTES, opcode, note) == 0
    assert [(one.name, one.message) for one in engine.notifications()] == [("done", b"look")]


def test_what_is_refused(engine: Engine) -> None:
    with engine.register(b"read-only") as region:
        with pytest.raises(InvalidArgument, match="read-only"):
            region.export_mooncake(write=True)
        with pytest.raises(InvalidArgument, match="read=True"):
            region.export_mooncake(read=False)
        region.export_mooncake()
    with Engine() as plain:
        assert plain.mooncake_name is None
        region = plain.alloc(4096)
        with pytest.raises(InvalidArgument, match="start it with mooncake_bind and mooncake_peers"):
            region.export_mooncake()
        assert not region.withdraw_mooncake()
    for settings, text in [
        ({"mooncake_bind": "127.0.0.1"}, "given together"),
        ({"mooncake_peers": "127.0.0.0/8"}, "given together"),
        ({"mooncake_bind": "localhost", "mooncake_peers": "127.0.0.0/8"}, "'localhost'|\"localhost\""),
        ({"mooncake_bind": "127.0.0.1", "mooncake_peers": ["127.0.0.0/33"]}, "127.0.0.0/33"),
        ({"mooncake_bind": "127.0.0.1", "mooncake_peers": []}, "peers"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            Engine(**settings)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Engine(mooncake_bind="127.0.0.1", mooncake_peers=8)  # type: ignore[arg-type]
