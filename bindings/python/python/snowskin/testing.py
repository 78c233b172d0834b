"""Clusters of processes, for tests, examples and notebooks.

>>> with snowskin.testing.Cluster(memory="16MiB") as cluster:
...     with snowskin.Store.connect(cluster.master) as s:
...         s.put("key", b"value").stored
True

The processes are those of the program ``snowskin``, on this machine, on ports that the system chooses. They
end with the ``with`` block, or when this interpreter exits.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
import weakref
from typing import Any

from . import _binary

__all__ = ["Cluster", "Process"]

#: Longest time that a process may take to start, seconds.
START_S = 30.0
#: Longest time that a process may take to end before it is killed, seconds.
STOP_S = 10.0


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with SIGTERM; if that takes too long, with SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


class Process:
    """A server process of the program ``snowskin``.

    ``ready`` is the line of JSON that it prints when it serves.
    """

    def __init__(self, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SNOWSKIN_")}
        self._process = subprocess.Popen(
            [_binary.path(), *arguments, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # Its log is the test's, where that is shown.
            stderr=None if "SNOWSKIN_TEST_LOG" in os.environ else subprocess.DEVNULL,
            env=environment,
        )
        self._finalizer = weakref.finalize(self, _stop, self._process)
        line = self._first_line()
        if not line:
            self._finalizer()
            command = " ".join(["snowskin", *arguments])
            raise RuntimeError(f"{command} did not start: set SNOWSKIN_TEST_LOG to see its messages")
        self.ready: dict[str, Any] = json.loads(line)

    def _first_line(self) -> bytes:
        output = self._process.stdout
        assert output is not None
        until = time.monotonic() + START_S
        while (left := until - time.monotonic()) > 0:
            if select.select([output], [], [], left)[0]:
                return output.readline()
        return b""

    @property
    def pid(self) -> int:
        """The process number."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Sends a signal, such as ``signal.SIGSTOP``."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the process with SIGKILL."""
        self._process.kill()
        self._finalizer()

    def stop(self) -> None:
        """Ends the process with SIGTERM; if that takes too long, kills it."""
        self._finalizer()


class Cluster:
    """A master and nodes.

    ``memory`` is what each node lends. ``master_arguments`` and ``node_arguments`` are further arguments of
    the program.
    """

    def __init__(
        self,
        *,
        nodes: int = 1,
        memory: int | str = "64MiB",
        master_arguments: tuple[str, ...] = (),
        node_arguments: tuple[str, ...] = (),
    ) -> None:
        self.processes: list[Process] = []
        try:
            listen = ("--listen", "127.0.0.1:0", "--http", "none")
            self.master_process = self._start("master", *listen, *master_arguments)
            #: Address of the master.
            self.master: str = self.master_process.ready["rpc"]
            to = ("--master", self.master)
            self.nodes = [
                self._start("node", "--memory", str(memory), "--name", f"node-{number}", *to, *node_arguments)
                for number in range(nodes)
            ]
        except BaseException:
            self.close()
            raise

    def _start(self, *arguments: str) -> Process:
        process = Process(*arguments)
        self.processes.append(process)
        return process

    def close(self) -> None:
        """Ends all processes, the nodes first."""
        for process in reversed(self.processes):
            process.stop()
        self.processes.clear()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<snowskin.testing.Cluster {self.master} of {len(self.nodes)} nodes>"
