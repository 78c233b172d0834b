"""The metadata server: descriptors of segments under ``http://HOST:PORT/metadata?key=KEY``.

======== ============================ ==========================================================
Method   Answer                       Errors
======== ============================ ==========================================================
GET      200 and the bytes            400 no key, 404 unknown key
PUT      200                          400 no key, or the key exists and contains ``rpc_meta``
DELETE   200                          400 no key, 404 unknown key
other    405
======== ============================ ==========================================================

A key that contains ``rpc_meta`` names the control port of one process. The second process that claims the
same name is refused, because descriptors of the two would replace each other.

The server needs the standard library only. It has no authentication: whoever reaches the port can change what
peers connect to, so bind it to a network of the cluster. Everything that a client can make grow has a limit
(see :class:`Limits`); a request beyond one gets an HTTP status that says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import threading
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import Protocol
from urllib.parse import parse_qsl, urlsplit

logger = logging.getLogger(__name__)

_STOP_S = 2.0
_START_S = 10.0


@dataclass(frozen=True)
class Limits:
    """What clients can make the server hold or wait for. Sizes are bytes, times are seconds."""

    head_bytes_max: int = 16 * 1024
    body_bytes_max: int = 16 * 1024**2
    keys_max: int = 1024**2
    stored_bytes_max: int = 1024**3
    connections_max: int = 4096
    request_s_max: float = 30.0
    idle_s_max: float = 120.0


class KVPoll(Enum):
    """The state of a server."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class MetadataRequest(Protocol):
    """What the handler needs of a request."""

    method: str

    @property
    def query(self) -> dict[str, str]: ...

    async def read(self) -> bytes: ...


@dataclass(frozen=True)
class Response:
    """The answer to one request."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"


@dataclass
class _Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = b""

    async def read(self) -> bytes:
        return self.body


class _Refused(Exception):
    """A request that is answered with an error, after which the connection is closed."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.response = _error(status, why)


def _error(status: HTTPStatus, why: str) -> Response:
    return Response(status, json.dumps({"error": why}).encode())


@dataclass
class KVBootstrapServer:
    """A metadata server on a thread of its own.

    ``port`` 0 lets the kernel choose; after :meth:`run` the attribute ``port`` has the number. ``store``
    holds the bytes of each key.
    """

    port: int
    host: str = "0.0.0.0"
    limits: Limits = field(default_factory=Limits)
    store: dict[str, bytes] = field(default_factory=dict, init=False)
    thread: threading.Thread | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._decided = threading.Event()
        self._is_listening = False
        self._stored_bytes = 0
        self._connections: set[asyncio.Task[None]] = set()

    # -- the thread ------------------------------------------------------------------------------------------

    def run(self) -> threading.Thread:
        """Starts the thread, and returns when it listens, or has failed to; :meth:`poll` tells which.

        The reason of a failure is in the log.
        """
        self.thread = threading.Thread(target=self._run_server, name="metadata-server", daemon=True)
        self.thread.start()
        self._decided.wait(_START_S)
        return self.thread

    def poll(self) -> KVPoll:
        """``Success`` while the server listens, else ``Failed``."""
        is_alive = self.thread is not None and self.thread.is_alive()
        return KVPoll.Success if is_alive and self._is_listening else KVPoll.Failed

    def close(self) -> None:
        """Ends the server; connections are closed. Waits for the thread for at most 2 s."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:
                pass  # The loop has ended by itself.
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_STOP_S)

    def _run_server(self) -> None:
        try:
            asyncio.run(self._listen())
        except OSError as error:
            logger.error("The metadata server cannot listen on %s:%d: %s", self.host, self.port, error)
        finally:
            self._is_listening = False
            self._decided.set()

    async def _listen(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        limit = self.limits.head_bytes_max
        server = await asyncio.start_server(self._connected, self.host, self.port, limit=limit, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        self._is_listening = True
        self._decided.set()
        logger.info("The metadata server listens on %s:%d", self.host, self.port)
        try:
            await self._stop.wait()
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    # -- one connection --------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= self.limits.connections_max:
            _write(writer, _error(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections"), keeps=False)
            writer.close()
            return
        self._connections.add(task)
        try:
            while await self._one_request(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # The client is gone, or the server ends: there is no one to answer.
        finally:
            self._connections.discard(task)
            writer.close()

    async def _one_request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serves one request, and returns whether the connection may carry another."""
        try:
            first = await asyncio.wait_for(reader.readexactly(1), self.limits.idle_s_max)
        except TimeoutError:
            return False
        try:
            async with asyncio.timeout(self.limits.request_s_max):
                request = await self._read_request(first, reader, writer)
                response = await self._route(request)
        except _Refused as refused:
            await _send(writer, refused.response, keeps=False)
            return False
        except TimeoutError:
            late = _error(HTTPStatus.REQUEST_TIMEOUT, f"no complete request in {self.limits.request_s_max} s")
            await _send(writer, late, keeps=False)
            return False
        keeps = request.headers.get("connection", "").lower() != "close"
        # A client that does not read its answer holds the connection until the idle time has passed.
        try:
            await asyncio.wait_for(_send(writer, response, keeps), self.limits.idle_s_max)
        except TimeoutError:
            return False
        return keeps

    async def _read_request(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Request:
        try:
            head = first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise _Refused(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the head of the request exceeds {self.limits.head_bytes_max} bytes",
            ) from None
        request = _parse_head(head)
        if request.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()
        coding = request.headers.get("transfer-encoding", "").lower()
        if coding == "chunked":
            request.body = await self._read_chunks(reader)
        elif coding:
            raise _Refused(HTTPStatus.NOT_IMPLEMENTED, f"the transfer coding {coding!r} is not known")
        else:
            length = self._body_len(request.headers.get("content-length", "0"), 10)
            request.body = await reader.readexactly(length)
        return request

    async def _read_chunks(self, reader: asyncio.StreamReader) -> bytes:
        body = bytearray()
        while True:
            line = await self._read_line(reader)
            length = self._body_len(line.split(";")[0].strip(), 16)
            if length == 0:
                break
            if len(body) + length > self.limits.body_bytes_max:
                raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large())
            body += await reader.readexactly(length)
            if await reader.readexactly(2) != b"\r\n":
                raise _Refused(HTTPStatus.BAD_REQUEST, "a chunk does not end with CR LF")
        while await self._read_line(reader):
            pass  # Trailers mean nothing here.
        return bytes(body)

    async def _read_line(self, reader: asyncio.StreamReader) -> str:
        try:
            return (await reader.readuntil(b"\r\n")).decode("latin-1").strip()
        except asyncio.LimitOverrunError:
            raise _Refused(HTTPStatus.BAD_REQUEST, "a line of the body is too long") from None

    def _body_len(self, text: str, base: int) -> int:
        # `int` also accepts signs, spaces and underscores, which no length has.
        if not text.isascii() or not text.isalnum() or len(text) > 20:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"{text!r} is no length")
        try:
            length = int(text, base)
        except ValueError:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"{text!r} is no length") from None
        if length > self.limits.body_bytes_max:
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, self._too_large())
        return length

    def _too_large(self) -> str:
        return f"the body exceeds {self.limits.body_bytes_max} bytes"

    # -- the resource ----------------------------------------------------------------------------------------

    async def _route(self, request: _Request) -> Response:
        if request.path != "/metadata":
            return _error(HTTPStatus.NOT_FOUND, f"there is no {request.path}: use /metadata?key=KEY")
        return await self._handle_metadata(request)

    async def _handle_metadata(self, request: MetadataRequest) -> Response:
        key = request.query.get("key", "").strip()
        if not key:
            return _error(HTTPStatus.BAD_REQUEST, "no key: use /metadata?key=KEY")
        if request.method == "GET":
            return self._get(key)
        if request.method == "PUT":
            return self._put(key, await request.read())
        if request.method == "DELETE":
            return self._delete(key)
        return _error(HTTPStatus.METHOD_NOT_ALLOWED, f"no {request.method}: use GET, PUT or DELETE")

    def _get(self, key: str) -> Response:
        value = self.store.get(key)
        return _unknown(key) if value is None else Response(HTTPStatus.OK, value)

    def _put(self, key: str, value: bytes) -> Response:
        old = self.store.get(key)
        if old is not None and "rpc_meta" in key:
            return _error(
                HTTPStatus.BAD_REQUEST,
                f"{key} exists: another process has this name; choose another, or DELETE the key if it ended",
            )
        if old is None and len(self.store) >= self.limits.keys_max:
            return _error(HTTPStatus.INSUFFICIENT_STORAGE, f"there are {self.limits.keys_max} keys already")
        stored_bytes = self._stored_bytes + len(value) - len(old or b"")
        if stored_bytes > self.limits.stored_bytes_max:
            return _error(
                HTTPStatus.INSUFFICIENT_STORAGE, f"all values exceed {self.limits.stored_bytes_max} bytes"
            )
        self._stored_bytes = stored_bytes
        self.store[key] = value
        return Response(HTTPStatus.OK, b'{"status": "stored"}')

    def _delete(self, key: str) -> Response:
        value = self.store.pop(key, None)
        if value is None:
            return _unknown(key)
        self._stored_bytes -= len(value)
        return Response(HTTPStatus.OK, b'{"status": "deleted"}')


def _unknown(key: str) -> Response:
    return _error(HTTPStatus.NOT_FOUND, f"there is no {key}")


def _parse_head(head: bytes) -> _Request:
    lines = head[:-4].decode("latin-1").lstrip("\r\n").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _Refused(HTTPStatus.BAD_REQUEST, "the first line is not METHOD TARGET HTTP/1.1")
    method, target, version = words
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise _Refused(HTTPStatus.BAD_REQUEST, f"{line[:80]!r} is no header")
        headers[name.lower()] = value.strip()
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    try:
        url = urlsplit(target)
        query = dict(parse_qsl(url.query, keep_blank_values=True, errors="strict", max_num_fields=64))
    except ValueError as error:
        raise _Refused(HTTPStatus.BAD_REQUEST, f"the target cannot be understood: {error}") from None
    return _Request(method, url.path, query, headers)


def _write(writer: asyncio.StreamWriter, response: Response, keeps: bool) -> None:
    status = HTTPStatus(response.status)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        f"Connection: {'keep-alive' if keeps else 'close'}\r\n\r\n"
    )
    writer.write(head.encode("latin-1") + response.body)


async def _send(writer: asyncio.StreamWriter, response: Response, keeps: bool) -> None:
    _write(writer, response, keeps)
    await writer.drain()


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="mooncake_http_metadata_server", description="Serves descriptors of segments over HTTP."
    )
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default 8080)")
    parser.add_argument("--host", default="0.0.0.0", help="address to bind (default 0.0.0.0)")
    parser.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Runs a server until SIGINT or SIGTERM. The status is 1 when it cannot listen."""
    arguments = _arguments(words)
    logging.basicConfig(
        level=arguments.log_level, format="%(asctime)s - %(name)s - %(levelname)s - %(message)s"
    )
    server = KVBootstrapServer(port=arguments.port, host=arguments.host)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    server.run()
    try:
        while server.poll() is KVPoll.Success and not ended.wait(1.0):
            pass
        return 0 if ended.is_set() else 1
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main())
