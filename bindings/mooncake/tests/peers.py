"""A second process with a transfer engine: what the other end of a connector is."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cluster import Memory, pattern

_ANSWER_S = 60.0


def _serve(connection: Connection, sizes: list[int]) -> None:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    memories = [Memory(size) for size in sizes]
    if code == 0 and memories:
        code = engine.batch_register_memory([m.address for m in memories], sizes)
    connection.send((code, f"127.0.0.1:{engine.get_rpc_port()}", [m.address for m in memories]))
    while True:
        request = connection.recv()
        match request:
            case ("read", number, offset, size):
                connection.send(memories[number].read(offset, size))
            case ("fill", number, seed):
                memories[number].fill(seed)
                connection.send(None)
            case ("call", name, arguments):
                connection.send(getattr(engine, name)(*arguments))
            case ("notifies",):
                connection.send([(n.name, n.msg) for n in engine.get_notifies()])
            case _:
                return


class Peer:
    """A process with an engine that has registered memories of these sizes."""

    def __init__(self, *sizes: int, target: Callable[..., None] = _serve) -> None:
        # A new interpreter, as another program would be: nothing of this process is in it.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, list(sizes)), daemon=True)
        self.process.start()
        theirs.close()
        code, self.session, self.addresses = self._answer()
        assert code == 0, f"the peer's engine: {code}"

    def _answer(self) -> Any:
        assert self._connection.poll(_ANSWER_S), "the peer does not answer"
        return self._connection.recv()

    def ask(self, *request: Any) -> Any:
        self._connection.send(request)
        return self._answer()

    def call(self, name: str, *arguments: Any) -> Any:
        return self.ask("call", name, arguments)

    def read(self, number: int, offset: int, size: int) -> bytes:
        return bytes(self.ask("read", number, offset, size))

    def fill(self, number: int, seed: int) -> None:
        self.ask("fill", number, seed)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(_ANSWER_S)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._connection.send(("end",))
        except OSError:
            pass
        self.process.join(5.0)
        self.kill()
        self._connection.close()


__all__ = ["Peer", "pattern"]
