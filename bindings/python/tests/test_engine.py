"""Engines: registered memory, one-sided transfers, batches."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest
import snowskin
from helpers import eventually
from snowskin import Engine, InvalidArgument


@pytest.fixture(params=["shm", "tcp", "local"])
def pair(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    with Engine(rails=request.param) as here, Engine(rails=[request.param]) as there:
        yield here, there


def test_bytes_move_between_registered_memory(pair: tuple[Engine, Engine]) -> None:
    here, there = pair
    source = np.arange(100_000, dtype="u1")
    with there.alloc("1MiB", remote="readwrite") as target, here.open(there.name) as peer:
        assert peer.name == there.name and not peer.closed
        [region] = peer.regions
        assert (region.addr, region.nbytes) == (target.addr, 1 << 20) and region.readable and region.writable
        with here.register(source) as local:
            assert (local.nbytes, len(local)) == (100_000, 100_000) and local.obj is source
            report = local.write_to(peer, target.addr + 10).wait()
            assert report.nbytes == 100_000 and report.failed == 0 and not report.fence_needed
            view = np.frombuffer(target, dtype="u1")
            np.testing.assert_array_equal(view[10:100_010], source)
            assert view[9] == 0 and view[100_010] == 0
            back = bytearray(50)
            with here.register(back) as destination:
                assert (
                    destination.read_from(peer, target.addr + 20, 30, offset=5, timeout=5).wait(10).nbytes
                    == 30
                )
            assert back == bytes(5) + source[10:40].tobytes() + bytes(15)
    del view


def test_a_batch_is_awaited_and_has_one_end(pair: tuple[Engine, Engine]) -> None:
    here, there = pair

    async def main() -> None:
        target = there.alloc(1 << 20, remote="readwrite")
        peer = here.open(there.name)
        blocks = [here.register(np.full(4096, number, dtype="u1")) for number in range(64)]
        batch = here.batch()
        assert batch.status == "new" and not batch.done
        for number, block in enumerate(blocks):
            assert batch.write(block, peer, target.addr + number * 4096) is batch
        report = await batch
        assert (report.nbytes, batch.status, batch.done) == (64 * 4096, "completed", True)
        # It can be awaited and waited for again.
        assert await batch == report == batch.wait()
        view = np.frombuffer(target, dtype="u1")
        for number in range(64):
            assert (view[number * 4096 : (number + 1) * 4096] == number).all()
        both = await asyncio.gather(
            *[blocks[0].write_to(peer, target.addr + number) for number in range(100)]
        )
        assert sum(report.nbytes for report in both) == 100 * 4096
        with pytest.raises(InvalidArgument, match="was submitted"):
            batch.write(blocks[0], peer, target.addr)
        fence = await peer.fence(timeout=5)
        assert fence.failed == 0

    asyncio.run(main())


def test_notifications_arrive_in_order_and_once(pair: tuple[Engine, Engine]) -> None:
    here, there = pair
    peer = here.open(there.name)
    assert peer.probe() == "alive"
    for number in range(5):
        peer.notify("kind", b"message %d" % number)
    received = there.notifications()
    assert [(one.name, one.message) for one in received] == [("kind", b"message %d" % n) for n in range(5)]
    assert there.notifications() == [] == here.notifications()
    with pytest.raises(snowskin.PermissionDenied) as raised:
        peer.notify("large", bytes(1 << 20))
    assert raised.value.code == "refused"


def test_registered_memory_cannot_go_away(pair: tuple[Engine, Engine]) -> None:
    here, _ = pair
    memory = bytearray(1000)
    region = here.register(memory)
    with pytest.raises(BufferError):
        memory.append(0)
    assert bytes(memoryview(region)[:10]) == bytes(10)
    region.close()
    assert region.closed and "closed" in repr(region)

    def is_free() -> bool:
        try:
            memory.append(0)
        except BufferError:
            return False
        return True

    eventually("the registration has ended", is_free)
    # So does a region that is forgotten.
    here.register(memory)
    gc.collect()
    eventually("the registration has ended", is_free)
    # And one whose engine is closed.
    region = here.register(memory)
    assert here.close()
    eventually("the registration has ended", is_free)
    assert region.closed


def test_views_of_memory_of_the_engine_outlive_it() -> None:
    with Engine(rails="local") as engine:
        region = engine.alloc(4096)
        view = memoryview(region)
        view[:5] = b"bytes"
    assert region.closed and engine.closed and "closed" in repr(engine)
    del region
    gc.collect()
    assert bytes(view[:6]) == b"bytes\0"
    with pytest.raises(snowskin.Closed):
        engine.alloc(10)


def test_rights_are_enforced(pair: tuple[Engine, Engine]) -> None:
    here, there = pair
    peer_of = {remote: there.alloc(4096, remote=remote) for remote in ("read", "write")}  # type: ignore[arg-type]
    private = there.alloc(4096)
    peer = here.open(there.name)
    assert sorted(region.addr for region in peer.regions) == sorted(
        region.addr for region in peer_of.values()
    )
    local = here.register(bytearray(64))
    assert local.read_from(peer, peer_of["read"].addr).wait().nbytes == 64
    assert local.write_to(peer, peer_of["write"].addr).wait().nbytes == 64
    for batch, message in [
        (lambda: local.write_to(peer, peer_of["read"].addr).wait(), "does not export"),
        (lambda: local.read_from(peer, peer_of["write"].addr).wait(), "does not export"),
        (lambda: local.read_from(peer, private.addr).wait(), "does not lie in one exported region"),
        (lambda: local.read_from(peer, peer_of["read"].addr + 4095).wait(), "does not lie in one exported"),
    ]:
        with pytest.raises(snowskin.SnowskinError, match=message):
            batch()
    constant = here.register(b"constant")
    assert constant.write_to(peer, peer_of["write"].addr).wait().nbytes == 8
    with pytest.raises(InvalidArgument, match="read-only"):
        constant.read_from(peer, peer_of["read"].addr)
    with pytest.raises(InvalidArgument, match="read-only"):
        there.register(b"constant", remote="write")


def test_wrong_arguments_are_refused_with_what_is_right() -> None:
    with Engine(rails="local") as engine, Engine(rails="local") as other:
        region = engine.register(bytearray(100))
        target = other.alloc(4096, remote="readwrite")
        peer, foreign = engine.open(other.name), other.open(engine.name)
        refused: list[tuple[object, str]] = [
            (lambda: region.read_from(peer, target.addr, 101), "101 bytes at offset 0 do not lie inside"),
            (lambda: region.read_from(peer, target.addr, offset=100), "at least one byte"),
            (lambda: region.read_from(peer, target.addr, offset=101), "do not lie inside"),
            (lambda: region.read_from(peer, target.addr, 1, offset=2**64 - 1), "do not lie inside"),
            (lambda: region.read_from(foreign, target.addr), "opened with another engine"),
            (lambda: engine.batch().wait(), "has no request"),
            (lambda: engine.batch().submit(), "has no request"),
            (lambda: engine.register(bytearray(10), remote="all"), 'remote is None, "read"'),  # type: ignore[arg-type]
            (lambda: engine.register(np.ones((4, 4))[:, ::2]), "not C-contiguous"),
            (lambda: engine.alloc("a lot"), "nbytes is a number of bytes"),
            (lambda: engine.open("not a name"), "is not host:port"),
            (lambda: engine.register(b""), "at least one byte"),
            (lambda: Engine(rails="pigeon"), "rails: "),
            (lambda: Engine(listen="here"), "listen is IP:PORT"),
            (lambda: Engine(metadata="gopher://x"), "metadata: "),
            (lambda: Engine(name="x"), "metadata.source"),
            (lambda: region.read_from(peer, target.addr, timeout=-1), "timeout is None or"),
        ]
        for call, message in refused:
            with pytest.raises(InvalidArgument, match=message):
                call()  # type: ignore[operator]
        for call in (lambda: engine.register("text"), lambda: engine.register(7), lambda: engine.alloc(1.5)):  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                call()
        overlapping = memoryview(region.obj)
        with pytest.raises(InvalidArgument) as raised:
            engine.register(overlapping)
        assert raised.value.code == "overlap"
        peer.close()
        assert peer.closed and "closed" in repr(peer)
        with pytest.raises(snowskin.Closed):
            region.read_from(peer, target.addr)
        region.close()
        with pytest.raises(snowskin.Closed):
            region.read_from(peer, target.addr)


def test_a_peer_that_does_not_answer_is_named() -> None:
    with Engine(rails="tcp") as engine:
        with pytest.raises(snowskin.PeerUnreachable, match=r"127\.0\.0\.1:1") as raised:
            engine.open("127.0.0.1:1")
        assert raised.value.code == "peer_unreachable" and raised.value.retryable
        with Engine(rails="tcp") as other:
            target = other.alloc(4096, remote="readwrite")
            peer = engine.open(other.name)
            address = target.addr
        assert peer.probe(0.5) == "unreachable"
        local = engine.register(bytearray(4096))
        with pytest.raises(snowskin.SnowskinError) as raised:
            local.read_from(peer, address, timeout=1).wait(20)
        assert isinstance(raised.value, (snowskin.PeerUnreachable, snowskin.Timeout))


def test_a_cluster_secret_is_needed_on_both_sides() -> None:
    with (
        Engine(rails="shm", cluster_secret="right") as owner,
        Engine(rails="shm", cluster_secret=b"right") as good,
        Engine(rails="shm", cluster_secret="wrong") as bad,
        Engine(rails="shm") as none,
    ):
        assert good.open(owner.name).probe() == "alive"
        for engine in (bad, none):
            with pytest.raises(snowskin.SnowskinError) as raised:
                engine.open(owner.name)
            assert "right" not in str(raised.value)


def test_batches_that_are_dropped_and_engines_that_are_closed_leave_nothing_behind() -> None:
    with Engine(rails="tcp") as here, Engine(rails="tcp") as there:
        target = there.alloc("64MiB", remote="readwrite")
        peer = here.open(there.name)
        memory = bytearray(64 << 20)
        for _ in range(10):
            region = here.register(memory)
            batch = region.write_to(peer, target.addr)
            del batch, region
            gc.collect()

            def is_free() -> bool:
                try:
                    memory.append(0)
                    memory.pop()
                except BufferError:
                    return False
                return True

            eventually("the transfer and the registration have ended", is_free)
        region = here.register(memory)
        batch = region.write_to(peer, target.addr)
        assert here.close()
        with pytest.raises(snowskin.SnowskinError):
            batch.wait()
        assert batch.done


def test_a_batch_is_cancelled() -> None:
    with Engine(rails="tcp") as here, Engine(rails="tcp") as there:
        target = there.alloc("256MiB", remote="readwrite")
        peer = here.open(there.name)
        region = here.register(bytearray(256 << 20))
        batch = region.write_to(peer, target.addr)
        batch.cancel()
        # Cancelled, unless its end came first.
        try:
            batch.wait()
            assert batch.status == "completed"
        except snowskin.SnowskinError as error:
            assert error.code in ("cancelled", "fence_needed")
        batch.cancel()
        assert peer.fence().wait(10).failed == 0


def test_engines_are_used_by_many_threads() -> None:
    with Engine(rails="shm") as here, Engine(rails="shm") as there:
        target = there.alloc(1 << 20, remote="readwrite")
        peer = here.open(there.name)
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                base = target.addr + number * 65536
                with here.register(np.full(4096, number, dtype="u1")) as mine:
                    for _ in range(100):
                        mine.write_to(peer, base).wait()
                        with here.register(bytearray(4096)) as back:
                            back.read_from(peer, base).wait()
                            assert bytes(memoryview(back)) == bytes([number]) * 4096
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert here.stats()["rails"][0]["errors"] == 0
