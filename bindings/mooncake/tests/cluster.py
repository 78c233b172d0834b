"""Processes and stores for the tests: a master, memory, free ports. Everything ends with its context."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from mooncake import _binary

START_S = 20.0
LEASE_MS = 500


def free_port() -> int:
    """A port that no process listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def eventually(condition: Callable[[], Any], what: str, within_s: float = START_S) -> Any:
    """The first true value of ``condition``, which is asked again and again."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {within_s} s: {what}")


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def http(method: str, url: str, body: bytes | None = None) -> tuple[int, bytes]:
    """The status and the body of one request."""
    request = urllib.request.Request(url, data=body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class Process:
    """A child process whose output is kept for the message of a failure."""

    def __init__(self, words: list[str], env: dict[str, str] | None = None) -> None:
        self.words = words
        self._log = tempfile.TemporaryFile("w+b")
        self.child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        )

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def must_run(self) -> None:
        if self.child.poll() is not None:
            raise AssertionError(f"{self.words} ended with {self.child.returncode}:\n{self.log()}")

    def kill(self) -> None:
        """Ends it as a crash does."""
        self.child.kill()
        self.child.wait(START_S)

    def stop(self) -> None:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(5.0)
        self.kill()
        self._log.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Master(Process):
    """A master with the flags of ``mooncake_master``; objects are leased for ``LEASE_MS``."""

    def __init__(self, *flags: str) -> None:
        self.port, self.metrics_port, self.http_port = free_port(), free_port(), free_port()
        super().__init__(
            [
                _binary.path(),
                "mooncake-master",
                f"--port={self.port}",
                f"--metrics_port={self.metrics_port}",
                f"--default_kv_lease_ttl={LEASE_MS}",
                *flags,
            ]
        )
        self.address = f"127.0.0.1:{self.port}"

        def is_ready() -> bool:
            self.must_run()
            return accepts(self.port) and accepts(self.metrics_port)

        eventually(is_ready, f"the master listens on {self.address}")


@contextlib.contextmanager
def store(
    master: Master, *, segment: int = 64 << 20, local_buffer: int = 16 << 20, **more: Any
) -> Iterator[Any]:
    """A store that lends ``segment`` bytes to ``master`` and closes at the end."""
    from mooncake.store import MooncakeDistributedStore

    opened = MooncakeDistributedStore()
    code = opened.setup("127.0.0.1", "P2PHANDSHAKE", segment, local_buffer, "tcp", "", master.address, **more)
    assert code == 0, f"setup: {code}"
    try:
        yield opened
    finally:
        opened.close()


class Memory:
    """Bytes with an address, as a pool of KV blocks in GPU memory would be."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes = (ctypes.c_ubyte * size)()
        self.address = ctypes.addressof(self._bytes)

    def read(self, offset: int, size: int) -> bytes:
        assert offset + size <= self.size
        return ctypes.string_at(self.address + offset, size)

    def write(self, offset: int, data: bytes) -> None:
        assert offset + len(data) <= self.size
        ctypes.memmove(self.address + offset, data, len(data))

    def fill(self, seed: int) -> None:
        """Writes bytes that differ at every position and for every seed."""
        self.write(0, pattern(seed, self.size))


def pattern(seed: int, size: int) -> bytes:
    """``size`` bytes that another seed, or another position, does not have."""
    words = bytearray()
    value = (seed * 0x9E3779B97F4A7C15 + 1) & (2**64 - 1)
    for _ in range((min(size, 1 << 16) + 7) // 8):
        value = (value * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
        words += value.to_bytes(8, "little")
    return bytes(words * (size // max(len(words), 1) + 1))[:size]


def python(code: str, *arguments: str, env: dict[str, str] | None = None) -> Process:
    """A Python process that runs ``code`` with this interpreter."""
    return Process([sys.executable, "-c", code, *arguments], env)
