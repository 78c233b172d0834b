"""The life of a process: import, logging, fork, exit."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import sys

import pytest
import snowskin
from helpers import assert_runs, eventually, run_python


def test_importing_brings_neither_numpy_nor_asyncio() -> None:
    assert_runs("""
        import sys
        import snowskin
        assert "numpy" not in sys.modules and "asyncio" not in sys.modules and "torch" not in sys.modules
        assert snowskin.aio.Store and snowskin.tensor.put
        try:
            snowskin.nothing
        except AttributeError as error:
            assert "nothing" in str(error)
        else:
            raise AssertionError
    """)


def test_errors_survive_pickling() -> None:
    error = snowskin.NoSpace("no room", code="no_space", key="k", retryable=True)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code, again.key, again.retryable) == (
        snowskin.NoSpace, "'k': no room", "no_space", "k", True,
    )  # fmt: skip
    assert issubclass(snowskin.InvalidArgument, ValueError) and issubclass(snowskin.Timeout, TimeoutError)


def test_native_messages_reach_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="snowskin"):
        with snowskin.Engine(rails="local") as engine:
            _region = engine.alloc(4096, remote="read")
            engine.open(engine.name)
        eventually(
            "a message arrives", lambda: any("attaching" in record.message for record in caplog.records)
        )
    record = next(record for record in caplog.records if "attaching" in record.message)
    assert record.name.startswith("snowskin.te_engine.") and record.levelno == logging.DEBUG
    assert record.pathname.endswith(".rs") and record.lineno > 0 and record.threadName
    # The level is read when something is opened.
    logging.getLogger("snowskin").setLevel(logging.ERROR)
    try:
        snowskin.update_log_level()
    finally:
        logging.getLogger("snowskin").setLevel(logging.NOTSET)


def test_a_handler_that_uses_the_store_or_raises_harms_nothing(master: str) -> None:
    assert_runs(
        """
        import logging, sys
        import snowskin

        logging.raiseExceptions = False

        class Handler(logging.Handler):
            def emit(self, record):
                with snowskin.Engine(rails="local"):
                    pass
                raise RuntimeError("a handler that raises")

        sys.unraisablehook = lambda *_: None
        logging.getLogger("snowskin").addHandler(Handler())
        logging.getLogger("snowskin").setLevel(logging.DEBUG)
        with snowskin.Store.connect(sys.argv[1]) as store:
            for number in range(50):
                store.put(f"log/{number}", b"x", overwrite=True)
                try:
                    store.get_into(f"log/{number}", bytearray(0))
                except snowskin.SnowskinError:
                    pass
        """,
        master,
    )


def _in_child(result, work) -> None:  # type: ignore[no-untyped-def]
    try:
        result.send(work())
    except BaseException as error:
        result.send(error)


def in_fork(work):  # type: ignore[no-untyped-def]
    """Runs something in a forked child, and returns its result."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_in_child, args=(there, work))
    child.start()
    assert here.poll(20), "the child is stuck"
    result = here.recv()
    child.join(20)
    assert child.exitcode == 0, "the child ended badly"
    if isinstance(result, BaseException):
        raise result
    return result


def test_a_forked_child_cannot_use_what_its_parent_opened(store: snowskin.Store, name: str) -> None:
    store.put(name, b"of the parent")
    lease = store.get(name)
    assert lease is not None
    engine = snowskin.Engine(rails="shm")
    region = engine.register(bytearray(4096))
    peer = engine.open(engine.name)
    batch = engine.batch()
    view = memoryview(lease)

    def child() -> list[str]:
        codes = []
        for call in (
            lambda: store.get(name),
            lambda: store.put("k", b"v"),
            lambda: list(store.list()),
            lambda: engine.alloc(10),
            lambda: engine.open("127.0.0.1:1"),
            lambda: region.read_from(peer, 0),
            lambda: peer.probe(),
        ):
            try:
                call()
            except snowskin.Closed as error:
                codes.append(error.code)
        assert store.closed and engine.closed and store.close() and engine.close()
        # The lease's memory is private: the bytes of the moment of the fork.
        assert bytes(view) == b"of the parent"
        batch.cancel()
        region.close()
        return codes

    assert in_fork(child) == ["forked"] * 7
    assert bytes(view) == b"of the parent" and store.get(name) is not None
    assert engine.close()


def test_a_forked_child_opens_its_own(master: str, name: str, store: snowskin.Store) -> None:
    store.put(name, b"x")

    def child() -> bytes:
        with snowskin.Store.connect(master) as own, snowskin.Engine(rails="shm") as engine:
            assert engine.name
            lease = own.get(name)
            assert lease is not None
            own.put(name + "/child", b"y")
            return bytes(lease)

    assert in_fork(child) == b"x"
    assert store.exists(name + "/child")


def test_forks_while_threads_use_the_store(master: str, name: str) -> None:
    import threading

    with snowskin.Store.connect(master) as store:
        store.put(name, bytes(10_000))
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                lease = store.get(name)
                assert lease is not None

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                assert in_fork(lambda: store.closed) is True
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_a_process_ends_cleanly_whatever_is_open(master: str) -> None:
    """With operations in flight, leases that are held, and threads that use the store."""
    output = assert_runs(
        """
        import sys, threading, asyncio
        import snowskin, snowskin.aio

        store = snowskin.Store.connect(sys.argv[1], memory="4MiB")
        engine = snowskin.Engine(rails="tcp")
        region = engine.register(bytearray(1 << 20), remote="readwrite")
        store.put("exit", bytes(100_000))
        lease = store.get("exit")
        keep = [lease, memoryview(lease), lease.__dlpack__()]

        def work():
            while True:
                store.get("exit")

        for _ in range(3):
            threading.Thread(target=work, daemon=True).start()

        async def main():
            async_store = await snowskin.aio.Store.connect(sys.argv[1])
            keep.append(async_store)
            for number in range(100):
                async_store._native.put(f"exit/{number}", b"x", None, 1, None, None, False, "auto")

        asyncio.run(main())
        print("end")
        """,
        master,
    )
    assert output == "end\n"


def test_an_exit_by_an_exception_keeps_its_exit_code(master: str) -> None:
    done = run_python(
        "import sys, snowskin\nstore = snowskin.Store.connect(sys.argv[1])\nsys.exit(7)", master
    )
    assert (done.returncode, done.stderr) == (7, "")
    done = run_python(
        "import sys, snowskin\nstore = snowskin.Store.connect(sys.argv[1])\nraise OSError('x')", master
    )
    assert done.returncode == 1 and "OSError: x" in done.stderr


def test_the_store_in_a_process_pool(master: str, name: str) -> None:
    from concurrent.futures import ProcessPoolExecutor

    config = snowskin.Config(master)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        keys = list(pool.map(_put_one, [config] * 4, [f"{name}/{number}" for number in range(4)]))
    with config.connect() as store:
        assert store.exists_many(keys) == [True] * 4


def _put_one(config: snowskin.Config, key: str) -> str:
    with config.connect() as store:
        store.put(key, b"x")
    return key


def test_the_program_is_found(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    from snowskin import _binary

    assert os.access(_binary.path(), os.X_OK)
    program = tmp_path / "snowskin"
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv("SNOWSKIN_BINARY", str(program))
    with pytest.raises(FileNotFoundError, match="SNOWSKIN_BINARY"):
        _binary.path()
    program.chmod(0o755)
    assert _binary.path() == str(program)
    monkeypatch.delenv("SNOWSKIN_BINARY")
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _binary.path() == str(program)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="install the wheel"):
        _binary.path()


def test_the_version_is_that_of_the_program() -> None:
    import subprocess

    from snowskin import _binary

    output = subprocess.run([_binary.path(), "--version"], capture_output=True, text=True, check=True).stdout
    assert snowskin.__version__ in output
    assert sys.version_info >= (3, 11)
