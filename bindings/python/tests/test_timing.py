"""What depends on real time: the GIL while native code waits, Ctrl-C, the event loop's latency, exit, import.

Limits are those of the requirements. Where a machine is busy, an interpreter is kept from running although no
code here holds the GIL, so a run that exceeds a limit is repeated, and the best of some runs counts.

``pytest -rP`` shows what was measured.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import snowskin
import snowskin.aio
from snowskin.testing import Cluster

#: Attempts of which one has to be within the limit.
ATTEMPTS = 5


def best_of(measure: Callable[[], float], limit_s: float) -> float:
    """Repeats a measurement until it is within the limit; returns the best."""
    best = float("inf")
    for _ in range(ATTEMPTS):
        best = min(best, measure())
        if best <= limit_s:
            break
    print(f"measured: {best * 1000:.1f} ms; limit: {limit_s * 1000:.0f} ms")
    return best


class Heartbeat:
    """A thread that needs the GIL every millisecond, and the longest time for which it did not get it."""

    def __enter__(self) -> Heartbeat:
        self.longest_s = 0.0
        self._stop = False
        self._thread = threading.Thread(target=self._beat)
        self._thread.start()
        return self

    def _beat(self) -> None:
        last = time.perf_counter()
        while not self._stop:
            time.sleep(0.001)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last)
            last = now

    def __exit__(self, *exception: object) -> None:
        self._stop = True
        self._thread.join()


def test_no_call_keeps_the_gil(master: str) -> None:
    """Waits for: setup with 512 MiB, registration, puts, gets, close; no gap above 50 ms."""

    def measure() -> float:
        with Heartbeat() as heart:
            with snowskin.Store.connect(master, memory="512MiB") as store:
                values = {f"heart/{number}": bytes(1 << 20) for number in range(64)}
                store.put_many(values, overwrite=True)
                with store.get_many(list(values)) as leases:
                    assert len(leases) == 64
                store.put("heart/large", bytes(64 << 20), overwrite=True)
                assert store.get("heart/large") is not None
                list(store.list("heart/"))
                store.remove_matching("^heart/", force=True)
            with snowskin.Engine() as here, snowskin.Engine() as there:
                target = there.alloc("256MiB", remote="readwrite")
                memory = np.zeros(256 << 20, dtype="u1")
                with here.register(memory) as region:
                    region.write_to(here.open(there.name), target.addr).wait()
        return heart.longest_s

    assert best_of(measure, 0.05) <= 0.05


def test_no_call_keeps_the_gil_when_nothing_answers() -> None:
    """Waits for: a master that does not exist, and one that is stopped; no gap above 50 ms."""

    def measure() -> float:
        with Cluster(memory="16MiB") as cluster, Heartbeat() as heart:
            with pytest.raises(snowskin.PeerUnreachable):
                snowskin.Store.connect("127.0.0.1:1", connect_timeout=0.3)
            with snowskin.Store.connect(cluster.master, call_timeout=0.3) as store:
                cluster.master_process.signal(signal.SIGSTOP)
                with pytest.raises(snowskin.SnowskinError):
                    store.put("k", b"v")
                with pytest.raises(snowskin.Timeout):
                    store.exists("k", timeout=0.05)
                cluster.master_process.signal(signal.SIGCONT)
        return heart.longest_s

    assert best_of(measure, 0.05) <= 0.05


INTERRUPTED = """
    import os, signal, sys, threading, time
    import snowskin
    from snowskin.testing import Cluster

    # Python leaves the signal ignored where its parent ignores it, as a shell does for what it runs in the
    # background.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    with Cluster(memory="64MiB") as cluster:
        store = snowskin.Store.connect(cluster.master, rails="tcp", call_timeout=30, transfer_timeout=30)
        store.put("key", bytes(4 << 20))
        peer_process = cluster.nodes[0] if sys.argv[1] == "node" else cluster.master_process
        peer_process.signal(signal.SIGSTOP)
        buffer = bytearray(4 << 20)
        sent = []

        def interrupt():
            time.sleep(0.3)
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            store.get_into("key", buffer) if sys.argv[2] == "get" else store.put("other", buffer)
        except KeyboardInterrupt:
            print((time.perf_counter() - sent[0]) * 1000)
        # The operation is under way and keeps its buffer.
        try:
            buffer.append(0)
            print("free")
        except BufferError:
            print("lent")
        peer_process.signal(signal.SIGCONT)
        while True:
            try:
                buffer.append(0)
                break
            except BufferError:
                time.sleep(0.001)
        print(store.get("key") is not None or store.get("key") is not None)
"""


@pytest.mark.parametrize("stopped", ["master", "node"])
@pytest.mark.parametrize("operation", ["get", "put"])
def test_an_interrupt_ends_a_wait_within_100_ms(stopped: str, operation: str) -> None:
    """Waits for: 0.3 s in an operation that cannot end, then the interrupt."""

    def measure() -> float:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(INTERRUPTED), stopped, operation],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        took_ms, state, found = done.stdout.split()
        assert (state, found) == ("lent", "True")
        return float(took_ms) / 1000

    assert best_of(measure, 0.1) <= 0.1


def test_an_interrupt_ends_connecting() -> None:
    """Waits for: 0.3 s of connecting to a master that accepts and does not answer, then the interrupt."""
    script = """
        import os, signal, socket, threading, time
        import snowskin

        signal.signal(signal.SIGINT, signal.default_int_handler)
        listener = socket.create_server(("127.0.0.1", 0))
        address = "127.0.0.1:%d" % listener.getsockname()[1]
        sent = []

        def interrupt():
            time.sleep(0.3)
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            snowskin.Store.connect(address, connect_timeout=30)
        except KeyboardInterrupt:
            print((time.perf_counter() - sent[0]) * 1000)
    """

    def measure() -> float:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return float(done.stdout) / 1000

    assert best_of(measure, 0.1) <= 0.1


def test_a_thousand_gets_do_not_keep_the_loop(master: str) -> None:
    """Waits for: 1,000 concurrent gets; the loop's latency stays below 10 ms."""

    async def attempt(store: snowskin.aio.Store) -> float:
        longest = 0.0
        running = True

        async def beat() -> None:
            nonlocal longest
            last = time.perf_counter()
            while running:
                await asyncio.sleep(0)
                now = time.perf_counter()
                longest = max(longest, now - last)
                last = now

        async def get(number: int) -> None:
            lease = await store.get(f"loop/{number}")
            assert lease is not None and len(lease) == 4096

        heart = asyncio.create_task(beat())
        await asyncio.sleep(0)
        async with asyncio.TaskGroup() as group:
            # As requests arrive: many at a time, not all in one turn of the loop.
            for number in range(1000):
                group.create_task(get(number))
                if number % 100 == 99:
                    await asyncio.sleep(0)
        running = False
        await heart
        return longest

    async def main() -> float:
        async with snowskin.aio.Store.connect(master) as store:
            await store.put_many({f"loop/{number}": bytes(4096) for number in range(1000)})
            best = float("inf")
            for _ in range(ATTEMPTS):
                best = min(best, await attempt(store))
            await store.remove_matching("^loop/", force=True)
            print(f"measured: {best * 1000:.1f} ms; limit: 10 ms")
            return best

    assert asyncio.run(main()) <= 0.01


@pytest.mark.parametrize("what", ["store", "memory", "aio", "engine"])
def test_an_exit_with_a_dead_master_takes_less_than_2_s(what: str) -> None:
    """Waits for: the exit of an interpreter whose master, or peer, is stopped."""
    script = """
        import asyncio, signal, sys, threading, time
        import snowskin, snowskin.aio
        from snowskin.testing import Cluster

        cluster = Cluster(memory="16MiB")
        if sys.argv[1] == "engine":
            here, there = snowskin.Engine(rails="tcp"), snowskin.Engine(rails="tcp")
            target = there.alloc("64MiB", remote="readwrite")
            region = here.register(bytearray(64 << 20))
            batch = region.write_to(here.open(there.name), target.addr)
        elif sys.argv[1] == "aio":
            store = asyncio.run(snowskin.aio.Store.connect(cluster.master)._open())
        else:
            store = snowskin.Store.connect(cluster.master, memory="4MiB" if sys.argv[1] == "memory" else None)
            threading.Thread(target=lambda: store.put("k", bytes(1000)), daemon=True).start()
        # Killed without a word at exit, after everything else.
        import weakref
        for process in cluster.processes:
            process._finalizer.atexit = False
            process.signal(signal.SIGSTOP)
        if sys.argv[1] in ("store", "memory"):
            threading.Thread(target=lambda: store.put("l", bytes(1000)), daemon=True).start()
            time.sleep(0.05)
        print(*[process.pid for process in cluster.processes], flush=True)
    """

    def measure() -> float:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), what], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        servers = [int(pid) for pid in process.stdout.readline().split()]
        began = time.perf_counter()
        try:
            assert process.wait(30) == 0
        finally:
            for server in servers:
                os.kill(server, signal.SIGKILL)
            process.stdout.close()
        return time.perf_counter() - began

    assert best_of(measure, 2.0) <= 2.0


def test_importing_takes_less_than_100_ms() -> None:
    """Waits for: an interpreter that imports the package, compared with one that does not."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}

    def run(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
        return time.perf_counter() - began

    run("import snowskin")
    assert best_of(lambda: run("import snowskin") - run("pass"), 0.1) <= 0.1


def test_a_timeout_is_kept(master: str) -> None:
    """Waits for: 0.1 s for a master that is stopped."""
    with Cluster(memory="16MiB") as cluster:
        with snowskin.Store.connect(cluster.master, call_timeout=2) as store:
            cluster.master_process.signal(signal.SIGSTOP)
            began = time.perf_counter()
            with pytest.raises(snowskin.Timeout) as raised:
                store.put("k", b"v", timeout=0.1)
            took = time.perf_counter() - began
            assert 0.1 <= took < 1.0 and raised.value.retryable and isinstance(raised.value, TimeoutError)
            cluster.master_process.signal(signal.SIGCONT)
            # The put that was given up may have been carried out; the store works on.
            store.put("k", b"v")
            assert store.exists("k")
