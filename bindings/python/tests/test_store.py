"""The blocking store: what it stores, what it returns, what it refuses."""

from __future__ import annotations

import array
import ctypes
import mmap
import pickle
import threading

import numpy as np
import pytest
import snowskin
from snowskin import InvalidArgument, Store
from snowskin.testing import Cluster


def test_what_is_put_is_what_is_got(store: Store, name: str) -> None:
    value = bytes(range(256)) * 100
    assert store.put(name, value).stored
    lease = store.get(name)
    assert lease is not None
    assert bytes(lease) == value == lease.tobytes()
    assert (len(lease), lease.nbytes, lease.key) == (len(value), len(value), name)


def test_a_miss_is_none_and_a_second_put_changes_nothing(store: Store, name: str) -> None:
    assert store.get(name) is None
    assert not store.exists(name)
    first, second = store.put(name, b"first"), store.put(name, b"second")
    assert (first.stored, bool(first), second.stored, bool(second)) == (True, True, False, False)
    assert first != second and first == store.put(name + "x", b"x")
    lease = store.get(name)
    assert lease is not None and bytes(lease) == b"first"
    assert store.exists(name)


def test_an_object_that_is_overwritten_has_the_new_bytes(store: Store, name: str) -> None:
    store.put(name, b"old")
    assert store.put(name, b"newer", overwrite=True).stored
    lease = store.get(name)
    assert lease is not None and bytes(lease) == b"newer"


def test_an_object_is_found_while_it_is_overwritten(store: Store, master: str, name: str) -> None:
    """The old bytes until the new ones are stored, all of one value, of lengths that change."""

    def value(version: int) -> bytes:
        return bytes([version]) * (1000 + version * 3000)

    keys = [f"{name}/{number}" for number in range(4)]
    assert all(store.put_many({key: value(0) for key in keys}))
    seen: dict[str, set[int]] = {key: set() for key in keys}
    wrong: list[object] = []
    began, ended = threading.Event(), threading.Event()

    def read() -> None:
        with Store.connect(master) as reader:
            while not ended.is_set():
                with reader.get_many(keys) as leases:
                    for key, lease in zip(keys, leases, strict=True):
                        found = None if lease is None else bytes(lease)
                        if found is None or found != value(found[0]):
                            wrong.append((key, found and (found[:1], len(found))))
                        else:
                            seen[key].add(found[0])
                began.set()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert began.wait(30)
        for version in [*range(1, 100)] * 3:
            assert all(store.put_many({key: value(version) for key in keys}, overwrite=True))
    finally:
        ended.set()
        thread.join()
    assert not wrong
    # The reader saw values change, so it read while they were written.
    assert all(len(versions) > 2 for versions in seen.values())


def test_an_object_stays_when_there_is_no_room_for_a_new_one(store: Store, name: str) -> None:
    assert store.put(name, b"old").stored
    with pytest.raises(snowskin.NoSpace):
        store.put(name, bytes(600 << 20), overwrite=True)
    lease = store.get(name)
    assert lease is not None and bytes(lease) == b"old"


@pytest.mark.parametrize(
    "value",
    [
        b"bytes",
        bytearray(b"bytearray"),
        memoryview(b"memoryview")[2:6],
        array.array("d", [1.0, 2.0]),
        np.arange(12, dtype="f4").reshape(3, 4),
        np.array(7, dtype="i8"),
        np.arange(5, dtype="f8")[:0:-1][:1],
        (ctypes.c_uint16 * 3)(1, 2, 3),
        [b"several", bytearray(b"parts"), b"", np.ones(2)],
        (b"tuple",),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_buffer_is_stored_with_all_its_bytes(store: Store, name: str, value: object) -> None:
    parts = value if isinstance(value, (list, tuple)) else [value]
    expected = b"".join(memoryview(part).tobytes() for part in parts)  # type: ignore[arg-type]
    assert store.put(name, value).stored  # type: ignore[arg-type]
    lease = store.get(name)
    assert lease is not None and bytes(lease) == expected
    buffer = bytearray(len(expected) + 3)
    assert store.get_into(name, buffer) == len(expected)
    assert buffer == expected + bytes(3)


def test_a_file_that_is_mapped_is_stored(store: Store, name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "file"
    path.write_bytes(b"mapped" * 1000)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        assert store.put(name, mapped).stored
    lease = store.get(name)
    assert lease is not None and bytes(lease) == b"mapped" * 1000


@pytest.mark.parametrize("length", [1, 63, 64, 65, 4096, 65_536, 65_537, 1 << 20, (5 << 20) + 3])
def test_lengths_around_every_boundary(store: Store, name: str, length: int) -> None:
    value = np.random.default_rng(length).integers(0, 256, length, dtype="u1")
    assert store.put(name, value).stored
    with store.get(name) as lease:  # type: ignore[union-attr]
        np.testing.assert_array_equal(lease.numpy(), value)
    into = np.zeros(length, dtype="u1")
    assert store.get_into(name, into) == length
    np.testing.assert_array_equal(into, value)
    info = store.stat(name)
    assert info is not None and (info.key, info.nbytes) == (name, length)
    assert store.remove(name, force=True)


def test_parts_of_objects(store: Store, name: str) -> None:
    value = np.arange(300_000, dtype="u1")
    store.put(name, value)

    def part(offset: int, length: int | None = None) -> bytes:
        lease = store.get(name, offset=offset, length=length)
        assert lease is not None
        return bytes(lease)

    assert part(0, 1) == value[:1].tobytes()
    assert part(65_530, 20) == value[65_530:65_550].tobytes()
    assert part(299_999) == value[299_999:].tobytes()
    assert part(100_000) == value[100_000:].tobytes()
    buffer = bytearray(10)
    assert store.get_into(name, buffer, offset=70_000, length=10) == 10
    assert buffer == value[70_000:70_010].tobytes()
    with pytest.raises(InvalidArgument):
        store.get(name, offset=299_999, length=2)
    with pytest.raises(InvalidArgument):
        store.get(name, offset=300_000)
    with pytest.raises(InvalidArgument):
        store.get(name, length=0)


def test_a_batch_has_a_result_per_item_and_a_miss_is_none(store: Store, name: str) -> None:
    keys = [f"{name}/{number}" for number in range(1300)]
    seen: list[tuple[int, int]] = []
    stored = store.put_many(
        {key: key.encode() for key in keys[:-1]}, progress=lambda done, total: seen.append((done, total))
    )
    assert list(stored) == [True] * 1299 and stored.errors == {}
    assert seen[-1] == (1299, 1299) and len(seen) == 3 and seen == sorted(seen)
    again = store.put_many([(keys[0], b"other"), (keys[-1], b"new")])
    assert list(again) == [False, True]
    seen.clear()
    with store.get_many([*keys, "nothing"], progress=lambda *at: seen.append(at)) as leases:
        assert [lease and bytes(lease) for lease in leases[:1299]] == [key.encode() for key in keys[:-1]]
        assert leases[1299] is not None and leases[1300] is None
        assert len(leases) == 1301 and leases.errors == {}
        leases.raise_errors()
        kept = leases[0]
    assert kept is not None and kept.released
    assert seen[-1] == (1301, 1301)
    assert store.exists_many([keys[0], "nothing"]) == [True, False]
    buffers = {key: bytearray(64) for key in keys[:3]}
    lengths = store.get_many_into(buffers)
    assert list(lengths) == [len(key) for key in keys[:3]]
    assert buffers[keys[1]][: len(keys[1])] == keys[1].encode()
    assert list(store.remove_many([*keys[:2], "nothing"], force=True)) == [True, True, False]
    assert store.remove_matching(f"^{name}/", force=True) == 1298


def test_a_batch_of_many_different_lengths_has_no_misses(master: str) -> None:
    """No length is known before, and none is like the one before it."""
    values = {f"lengths/{number}": bytes([number]) * (100_000 + 1_000 * number) for number in range(200)}
    with snowskin.Store.connect(master) as writer, snowskin.Store.connect(master) as reader:
        assert all(writer.put_many(values))
        for _ in range(2):
            with reader.get_many(list(values)) as leases:
                found = [None if lease is None else bytes(lease) for lease in leases]
            assert found == list(values.values())
        assert writer.remove_matching("^lengths/", force=True) == 200


def test_an_item_that_fails_does_not_affect_the_others(store: Store, name: str) -> None:
    store.put_many({f"{name}/a": b"12345", f"{name}/b": b"123"})
    into = [(f"{name}/a", bytearray(3)), (f"{name}/b", bytearray(3)), (f"{name}/c", bytearray(3))]
    results = store.get_many_into(into)
    assert list(results) == [None, 3, None]
    assert list(results.errors) == [0]
    error = results.errors[0]
    assert (error.code, error.key, type(error)) == ("buffer_too_small", f"{name}/a", InvalidArgument)
    with pytest.raises(snowskin.BatchError, match="1 of 3 items failed") as raised:
        results.raise_errors()
    assert raised.value.errors == results.errors and raised.value.code == "buffer_too_small"
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.code, list(again.errors)) == (str(raised.value), "buffer_too_small", [0])


def test_gets_into_the_same_buffer_are_carried_out_one_after_the_other(store: Store, name: str) -> None:
    values = {f"{name}/{number}": bytes([number]) * 100_000 for number in range(5)}
    store.put_many(values)
    buffer = bytearray(100_010)
    whole, part = memoryview(buffer)[:100_000], memoryview(buffer)[10:]
    results = store.get_many_into([(key, whole if number % 2 else part) for number, key in enumerate(values)])
    assert list(results) == [100_000] * 5
    assert results.errors == {}


def test_the_longest_prefix_ends_at_the_first_key_that_is_not_there(store: Store, name: str) -> None:
    keys = [f"{name}/{number}" for number in range(6)]
    store.put_many({key: key.encode() for key in keys if not key.endswith("4")})
    with store.get_prefix(keys) as leases:
        assert [bytes(lease) for lease in leases] == [key.encode() for key in keys[:4]]
    assert len(store.get_prefix(["nothing", *keys])) == 0
    assert len(store.get_prefix([])) == 0


def test_what_is_prefetched_is_in_memory_or_is_not(store: Store, name: str) -> None:
    assert store.put(name, b"x", disk="never").stored
    assert store.put_many({f"{name}/now": b"y"}, disk="now").errors == {}
    assert store.prefetch([name, "nothing", f"{name}/now"], deadline=0.2) == [True, False, True]
    assert store.prefetch([]) == []
    with pytest.raises(ValueError, match='disk is "auto"'):
        store.put(name, b"x", disk="tape")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without pin"):
        store.put(name, b"x", disk="now", pin="hard")
    with pytest.raises(ValueError, match="deadline"):
        store.prefetch([name], deadline=-1)


def test_objects_of_very_different_lengths_in_one_batch(store: Store, name: str) -> None:
    lengths = [1, 2_000_000, 70_000, 10, 900_000, 3_000_000, 64]
    values = {f"{name}/{length}": np.full(length, length % 251, dtype="u1") for length in lengths}
    assert all(store.put_many(values))
    for _ in range(2):
        with store.get_many(list(values)) as leases:
            for lease, value in zip(leases, values.values(), strict=True):
                assert lease is not None
                np.testing.assert_array_equal(lease.numpy(), value)
    store.remove_many(list(values), force=True)


def test_listing_and_scanning(store: Store, name: str) -> None:
    values = {f"{name}/{number:04}": bytes(number + 1) for number in range(2500)}
    store.put_many(values)
    found = {info.key: info.nbytes for info in store.list(f"{name}/")}
    assert found == {key: len(value) for key, value in values.items()}
    infos = list(store.scan(f"^{name}/001[0-3]$"))
    assert sorted(info.key for info in infos) == [f"{name}/{number:04}" for number in range(10, 14)]
    assert all(info.complete and info.replicas == 1 for info in infos)
    assert list(store.list(f"{name}/none")) == []
    with pytest.raises(InvalidArgument) as raised:
        list(store.scan("("))
    assert raised.value.code == "invalid_pattern"
    store.remove_matching(f"^{name}/", force=True)


@pytest.mark.parametrize("key", ["ключ", b"\xff\x00raw", "with space/and:signs", "k" * 200])
def test_keys_come_back_as_they_were_given(store: Store, name: str, key: str | bytes) -> None:
    prefix = name if isinstance(key, str) else name.encode()
    whole = prefix + key  # type: ignore[operator]
    store.put(whole, b"x")
    lease = store.get(whole)
    assert lease is not None
    [info] = store.list(prefix)
    assert info.key == lease.key
    again = store.get(info.key)
    assert again is not None and bytes(again) == b"x"
    if isinstance(key, str):
        assert info.key == whole


def test_removal_respects_readers_unless_it_is_forced(store: Store, name: str) -> None:
    store.put(name, b"x")
    assert store.get(name) is not None
    assert store.remove(name, force=True) is True
    assert store.remove(name) is False
    assert store.get(name) is None


def test_wrong_arguments_are_refused_with_what_is_right(store: Store, name: str) -> None:
    strided = np.arange(10)[::2]
    refused: list[tuple[object, str]] = [
        (lambda: store.put(name, b""), "at least one byte"),
        (lambda: store.put(name, [b"", b""]), "at least one byte"),
        (lambda: store.put("", b"x"), "a key has 1 to"),
        (lambda: store.put("k" * 100_000, b"x"), "a key has 1 to"),
        (lambda: store.put(name, strided), "not C-contiguous.*ascontiguousarray"),
        (lambda: store.put(name, np.asfortranarray(np.ones((3, 3)))), "not C-contiguous"),
        (lambda: store.put(name, b"x", pin="firm"), 'pin is None, "soft" or "hard"'),  # type: ignore[arg-type]
        (lambda: store.put(name, b"x", replicas=0), "replicas is 1 to 255"),
        (lambda: store.put(name, b"x", replicas=1000), "replicas is 1 to 255"),
        (lambda: store.put(name, b"x", ttl=0), "ttl is a number of seconds"),
        (lambda: store.put(name, b"x", ttl=float("nan")), "ttl is a number of seconds"),
        (lambda: store.put(name, b"x", group=-1), "group is a str, or an int"),
        (lambda: store.put(name, b"x", timeout=-1), "timeout is None or a number of seconds"),
        (lambda: store.put(name, [b"x"] * 2000), "at most 1024 parts"),
        (lambda: store.get_into(name, b"read-only"), "bytes is read-only"),
        (lambda: store.get_into(name, memoryview(b"read-only")), "read-only"),
    ]
    for call, message in refused:
        with pytest.raises(InvalidArgument, match=message) as raised:
            call()  # type: ignore[operator]
        assert isinstance(raised.value, ValueError) and raised.value.code == "invalid_argument"
    wrong_types: list[tuple[object, str]] = [
        (lambda: store.put(name, "text"), "bytes, not str: encode it"),  # type: ignore[arg-type]
        (lambda: store.put(name, 7), "neither the buffer protocol nor __dlpack__"),  # type: ignore[arg-type]
        (lambda: store.put(7, b"x"), "a key is str or bytes, not int"),  # type: ignore[arg-type]
        (lambda: store.get(None), "a key is str or bytes, not NoneType"),  # type: ignore[arg-type]
        (lambda: store.get_many("abc"), "a list of keys, not one key"),
        (lambda: store.get_many(7), "not iterable"),  # type: ignore[arg-type]
        (lambda: store.put_many([("a",)]), "expected tuple of length 2"),  # type: ignore[list-item]
        (lambda: store.get(name, ofset=1), "ofset"),  # type: ignore[call-arg]
    ]
    for call, message in wrong_types:
        with pytest.raises((TypeError, ValueError), match=message):
            call()  # type: ignore[operator]
    assert store.get(name) is None


def test_settings_are_refused_before_anything_is_opened() -> None:
    refused: list[tuple[dict[str, object], str]] = [
        ({"master": "nowhere"}, "is not an address"),
        ({"memory": "four GiB"}, "memory is a number of bytes"),
        ({"memory": 0}, "at least 1"),
        ({"rails": "tcp,carrier-pigeon"}, "rails: .*carrier-pigeon"),
        ({"rails": "none"}, "at least one fabric"),
        ({"listen": "localhost"}, "listen is IP:PORT"),
        ({"listen": "0.0.0.0:0"}, "advertise_host must be set"),
        ({"tenant": ""}, "tenant has 1 to 64 bytes"),
        ({"pool": 1000}, "pool is at least 2MiB"),
        ({"call_timeout": 0}, "call_timeout is a number of seconds"),
        ({"local": "auto", "memory": "1MiB"}, "memory and local exclude each other"),
    ]
    for options, message in refused:
        with pytest.raises(InvalidArgument, match=message):
            snowskin.Config(**options)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=message):
            snowskin.Store.connect(**options)  # type: ignore[arg-type]
    for options in [{"memory": 1.5}, {"rails": 3}, {"secret": 7}, {"unknown": 1}]:
        with pytest.raises(TypeError):
            snowskin.Store.connect(**options)  # type: ignore[arg-type]


def test_secrets_are_neither_shown_nor_lost() -> None:
    config = snowskin.Config(
        "h:1", secret="tenant-s3cret", cluster_secret=b"cluster-s3cret", admin_secret="s3cret"
    )
    assert "s3cret" not in repr(config) and "***" in repr(config)
    again = pickle.loads(pickle.dumps(config))
    assert again == config and again.secret == "tenant-s3cret" and hash(again) == hash(config)
    with pytest.raises(TypeError) as raised:
        snowskin.Config(secret=["s3cret"])  # type: ignore[arg-type]
    assert "s3cret" not in str(raised.value)


def test_a_master_that_does_not_answer_is_named(store: Store) -> None:
    with pytest.raises(snowskin.PeerUnreachable, match=r"no master at 127\.0\.0\.1:1") as raised:
        snowskin.Store.connect("127.0.0.1:1", connect_timeout=0.3)
    assert raised.value.code == "master_unreachable" and raised.value.retryable


def test_a_secret_that_is_wrong_is_refused() -> None:
    arguments = ("--cluster-secret", "right")
    with Cluster(memory="16MiB", master_arguments=arguments, node_arguments=arguments) as cluster:
        with snowskin.Store.connect(cluster.master, cluster_secret="right") as good:
            assert good.put("k", b"v").stored
        with pytest.raises(snowskin.PermissionDenied) as raised:
            snowskin.Store.connect(cluster.master, cluster_secret="wr0ng")
        assert "wr0ng" not in str(raised.value) and isinstance(raised.value, PermissionError)


def test_a_store_that_is_closed_says_so(master: str) -> None:
    with snowskin.Store.connect(master) as store:
        store.put("closed", b"x")
        lease = store.get("closed")
        assert "open" in repr(store) and not store.closed
    assert store.closed and "closed" in repr(store)
    for call in (lambda: store.get("closed"), lambda: store.put("k", b"v"), lambda: list(store.list())):
        with pytest.raises(snowskin.Closed) as raised:
            call()
        assert raised.value.code == "closed"
    assert store.close() is True
    # Leases outlive their store.
    assert lease is not None and bytes(lease) == b"x"


def test_memory_that_a_store_lends_is_part_of_the_store(master: str, name: str) -> None:
    with Cluster(nodes=0) as empty:
        with snowskin.Store.connect(empty.master) as poor:
            with pytest.raises(snowskin.NoSpace) as raised:
                poor.put(name, b"x")
            assert (raised.value.code, raised.value.key, raised.value.retryable) == ("no_segment", name, True)
            assert poor.endpoint is None
            with snowskin.Store.connect(empty.master, memory="8MiB", node_name="mine") as rich:
                assert rich.endpoint is not None
                assert poor.put(name, b"x").stored
                with pytest.raises(snowskin.NoSpace) as raised:
                    poor.put("large", bytes(9 << 20))
                assert raised.value.code == "object_too_large" and not raised.value.retryable
            with pytest.raises(snowskin.SnowskinError):
                poor.put("later", b"x")
            assert poor.get(name) is None


def test_leases_that_are_held_use_up_the_pool_and_released_ones_do_not(master: str, name: str) -> None:
    with snowskin.Store.connect(master, pool="4MiB") as store:
        store.put(name, bytes(1 << 20))
        held = [store.get(name) for _ in range(4)]
        with pytest.raises(snowskin.NoSpace) as raised:
            store.get(name)
        assert raised.value.code == "pool_full" and raised.value.retryable and raised.value.key == name
        assert "release leases" in str(raised.value)
        stats = store.stats()
        assert stats["pool_used_bytes"] == 4 << 20 == stats["pool_bytes_max"]
        assert held[0] is not None
        held[0].release()
        assert store.get(name) is not None
        held.clear()
        for _ in range(50):
            with store.get(name) as lease:  # type: ignore[union-attr]
                assert len(lease) == 1 << 20
        assert store.stats()["pool_used_bytes"] == 0


def test_a_store_and_an_engine_are_not_pickled(store: Store) -> None:
    with pytest.raises(TypeError, match="Config"):
        pickle.dumps(store)
    with snowskin.Engine() as engine, pytest.raises(TypeError, match="start one"):
        pickle.dumps(engine)


def test_what_progress_raises_ends_the_operation(store: Store, name: str) -> None:
    class Enough(Exception):
        pass

    def progress(done: int, total: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        store.put_many({f"{name}/{number}": b"x" for number in range(2000)}, progress=progress)
    assert store.put(f"{name}/after", b"x").stored
    store.remove_matching(f"^{name}/", force=True)
