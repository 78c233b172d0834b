"""What the table of answers (returns.py) does not show of a store: lengths, lifetimes, threads, processes."""

from __future__ import annotations

import ast
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import cluster
import numpy as np
import pytest
from cluster import Memory, pattern

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def store(master: cluster.Master) -> Iterator[Any]:
    with cluster.store(master) as opened:
        yield opened


def test_a_value_is_all_of_its_bytes(store: Any) -> None:
    values = np.arange(4, dtype="f4")
    assert store.put("floats", values) == 0
    assert store.get("floats") == values.tobytes()
    assert store.put("floats of two dimensions", values.reshape(2, 2)) == 0
    assert store.get("floats of two dimensions") == values.tobytes()


def test_a_value_with_gaps_is_refused_with_the_remedy(store: Any) -> None:
    with pytest.raises(ValueError, match="ascontiguousarray"):
        store.put("gaps", np.arange(10, dtype="u1")[::2])
    assert store.is_exist("gaps") == 0


def test_parts_are_bytes_of_one_dimension(store: Any) -> None:
    for part in (np.arange(4, dtype="f4"), np.zeros((2, 2), "u1")):
        with pytest.raises(RuntimeError, match="1-D"):
            store.put_parts("parts", b"a", part)
    with pytest.raises(TypeError):
        store.put_parts("parts", "text")
    assert store.is_exist("parts") == 0


def test_a_value_of_every_length(store: Any) -> None:
    for length in (1, 2, 4095, 4096, 4097, 65536, (1 << 20) + 3, 15 << 20):
        value = pattern(length, length)
        assert store.put(f"length {length}", value) == 0
        assert store.get_size(f"length {length}") == length
        assert store.get(f"length {length}") == value
        assert store.remove(f"length {length}", force=True) == 0


def test_a_buffer_outlives_its_object_and_its_store(master: cluster.Master) -> None:
    with cluster.store(master) as opened:
        assert opened.put("outlived", b"0123456789") == 0
        handle = opened.get_buffer("outlived")
        view = memoryview(handle)
        assert opened.remove("outlived", force=True) == 0
    del handle
    gc.collect()
    assert bytes(view) == b"0123456789"
    view[0] = ord("x")
    assert view.tobytes()[:1] == b"x"


def test_a_store_can_be_set_up_again(master: cluster.Master) -> None:
    from mooncake.store import MooncakeDistributedStore

    opened = MooncakeDistributedStore()
    for turn in range(3):
        arguments = ("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 4 << 20, "tcp", "", master.address)
        assert opened.setup(*arguments) == 0
        assert opened.put(f"turn {turn}", b"x") == 0
        assert opened.close() == 0
        assert opened.put("closed", b"x") == -600
        assert opened.health_check() == 1


def test_threads_write_and_read_their_own(store: Any) -> None:
    wrong: list[str] = []

    def turn(number: int) -> None:
        for round_ in range(50):
            key, value = f"thread {number}/{round_}", pattern(number * 1000 + round_, 20_000)
            if store.put(key, value) != 0 or store.get(key) != value or store.remove(key, True) != 0:
                wrong.append(key)

    threads = [threading.Thread(target=turn, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_store_that_is_closed_by_another_thread_answers(master: cluster.Master) -> None:
    with cluster.store(master) as opened:
        assert opened.put("k", bytes(1 << 20)) == 0
        answers: set[Any] = set()
        begun = threading.Event()

        def read() -> None:
            while True:
                answers.add(len(opened.get("k")))
                begun.set()
                if 0 in answers:
                    return

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun.wait()
        assert opened.close() == 0
        for thread in threads:
            thread.join(30.0)
        assert answers == {0, 1 << 20}


def test_a_child_of_fork_cannot_use_the_store_of_its_parent(store: Any) -> None:
    assert store.put("parent", b"1") == 0
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answers = (store.put("child", b"1"), store.get("parent"), store.health_check() != 0, store.close())
        os.write(write, repr(answers).encode())
        os._exit(0)
    os.waitpid(child, 0)
    code, value, is_unhealthy, closed = ast.literal_eval(os.read(read, 1000).decode())
    os.close(read)
    os.close(write)
    assert code < 0 and value == b"" and is_unhealthy and closed == 0
    assert store.get("parent") == b"1"


def test_objects_of_another_process(master: cluster.Master, store: Any) -> None:
    code = """
import signal, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 4 << 20, "tcp", "", sys.argv[1]) == 0
assert store.put("of another", b"value" * 1000) == 0
print("stored", flush=True)
signal.pause()
"""
    with cluster.python(code, master.address) as other:
        cluster.eventually(lambda: (other.must_run(), "stored" in other.log())[1], "the other has stored")
        assert store.get("of another") == b"value" * 1000
        memory = Memory(8192)
        assert store.get_into("of another", memory.address, 8192) == 5000
        assert memory.read(0, 5000) == b"value" * 1000


def test_what_a_process_lends_is_gone_soon_after_it_closes(master: cluster.Master, store: Any) -> None:
    from mooncake.store import ReplicateConfig

    with cluster.store(master) as lender:
        config = ReplicateConfig()
        config.preferred_segment = lender.get_hostname()
        assert lender.put("lent", b"x" * 5000, config) == 0
        assert store.is_exist("lent") == 1
    cluster.eventually(lambda: store.is_exist("lent") == 0, "the object goes with its memory", 1.0)


def test_hostile_sizes_and_addresses_are_answered(store: Any) -> None:
    top = (1 << 64) - 1
    memory = Memory(64)
    assert store.register_buffer(memory.address, 0) == -600
    assert store.register_buffer(memory.address, top) == -600
    assert store.register_buffer(0, 64) == -600
    assert store.put_from("hostile", memory.address, top) < 0
    assert store.put_from("hostile", 0, 64) < 0
    assert store.batch_put_from_multi_buffers(["hostile"], [[memory.address] * 2], [[top, top]])[0] < 0
    assert store.is_exist("hostile") == 0
    with pytest.raises(TypeError):
        store.put_from("hostile", -1, 1)
    with pytest.raises(TypeError):
        store.put_from("hostile", memory.address, 1 << 64)
