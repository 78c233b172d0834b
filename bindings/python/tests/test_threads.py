"""Eight threads on one store: no result is mixed up, and nothing is left behind. For builds without a GIL,
too."""

from __future__ import annotations

import contextlib
import gc
import random
import threading

import numpy as np
import snowskin


def test_threads_share_a_store(master: str, name: str) -> None:
    failures: list[BaseException] = []
    with snowskin.Store.connect(master, pool="256MiB") as store:
        shared = [f"{name}/shared/{number}" for number in range(20)]
        for number, key in enumerate(shared):
            store.put(key, np.full(1000 * (number + 1), number, dtype="u1"))

        def work(thread: int) -> None:
            rng = random.Random(thread)
            held: list[tuple[snowskin.Lease, int]] = []
            try:
                for step in range(300):
                    choice = rng.randrange(7)
                    number = rng.randrange(20)
                    own = f"{name}/{thread}/{step}"
                    if choice == 0:
                        assert store.put(own, bytes([thread]) * rng.randrange(1, 100_000)).stored
                    elif choice == 1:
                        lease = store.get(shared[number])
                        assert lease is not None
                        held.append((lease, number))
                    elif choice == 2:
                        into = bytearray(20_000)
                        assert store.get_into(shared[number], into) == 1000 * (number + 1)
                        assert into[0] == number and into[1000 * (number + 1) - 1] == number
                    elif choice == 3:
                        with store.get_many(shared) as leases:
                            for at, one in enumerate(leases):
                                assert one is not None and one.numpy()[-1] == at
                    elif choice == 4 and held:
                        lease, expected = held.pop(rng.randrange(len(held)))
                        array = lease.numpy()
                        lease.release()
                        assert (array == expected).all()
                    elif choice == 5:
                        assert store.exists(shared[number]) and not store.exists(own)
                    else:
                        assert store.get(own) is None
                for lease, expected in held:
                    assert (lease.numpy() == expected).all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
        gc.collect()
        assert store.stats()["pool_used_bytes"] == 0
        store.remove_matching(f"^{name}/", force=True)


def test_a_lease_is_released_by_many_threads_at_once(store: snowskin.Store, name: str) -> None:
    store.put(name, bytes(1000))
    for _ in range(100):
        lease = store.get(name)
        assert lease is not None
        barrier = threading.Barrier(4)

        def work(lease: snowskin.Lease = lease, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            with contextlib.suppress(BufferError):
                memoryview(lease)[:10].tobytes()
            lease.release()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert lease.released


def test_a_store_is_closed_while_threads_use_it(master: str, name: str) -> None:
    for _ in range(5):
        store = snowskin.Store.connect(master)
        store.put(name, bytes(1000))
        started = threading.Barrier(5)

        def work(store: snowskin.Store = store, started: threading.Barrier = started) -> None:
            started.wait()
            while True:
                try:
                    store.get(name)
                except snowskin.Closed:
                    return

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        assert store.close(timeout=30)
        for thread in threads:
            thread.join()
