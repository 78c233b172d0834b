"""The metadata server over real sockets: the requests of engines, and requests that no one should send."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import cluster
import pytest

from mooncake.http_metadata_server import KVBootstrapServer, KVPoll, Limits

LIMITS = Limits(
    head_bytes_max=2048, body_bytes_max=4096, keys_max=4, stored_bytes_max=8192, connections_max=8
)


@contextlib.contextmanager
def serving(limits: Limits = LIMITS) -> Iterator[KVBootstrapServer]:
    server = KVBootstrapServer(port=0, host="127.0.0.1", limits=limits)
    server.run()
    assert server.poll() is KVPoll.Success
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server() -> Iterator[KVBootstrapServer]:
    with serving() as running:
        yield running


def url(server: KVBootstrapServer, key: str) -> str:
    return f"http://127.0.0.1:{server.port}/metadata?key={quote(key, safe='')}"


def raw(server: KVBootstrapServer, sent: bytes, half_close: bool = True) -> bytes:
    """Everything that the server answers to ``sent`` until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(sent)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = bytearray()
        while part := connection.recv(65536):
            answer += part
        return bytes(answer)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]


def test_the_life_of_an_engine(server: KVBootstrapServer) -> None:
    rpc, ram = url(server, "mooncake/rpc_meta/10.0.0.1:12345"), url(server, "mooncake/ram/10.0.0.1:12345")
    place = json.dumps({"ip_or_host_name": "10.0.0.1", "rpc_port": 12345}).encode()
    assert cluster.http("PUT", rpc, place)[0] == 200
    assert cluster.http("GET", ram)[0] == 404
    for buffers in (b'{"buffers": []}', b'{"buffers": [1]}'):
        assert cluster.http("PUT", ram, buffers)[0] == 200
        assert cluster.http("GET", ram) == (200, buffers)
    assert cluster.http("GET", rpc) == (200, place)
    for key in (rpc, ram):
        assert cluster.http("DELETE", key)[0] == 200
        assert cluster.http("DELETE", key)[0] == 404


def test_two_processes_cannot_have_one_name(server: KVBootstrapServer) -> None:
    key = url(server, "mooncake/rpc_meta/a:1")
    assert cluster.http("PUT", key, b"first")[0] == 200
    status, why = cluster.http("PUT", key, b"second")
    assert status == 400 and b"another process has this name" in why
    assert cluster.http("GET", key) == (200, b"first")


def test_bytes_that_are_no_text_are_kept(server: KVBootstrapServer) -> None:
    value = bytes(range(256))
    assert cluster.http("PUT", url(server, "k"), value)[0] == 200
    assert cluster.http("GET", url(server, "k")) == (200, value)


def test_one_connection_carries_many_requests(server: KVBootstrapServer) -> None:
    put = b"PUT /metadata?key=k HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nv1"
    get = b"GET /metadata?key=k HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = raw(server, put + get * 3)
    assert statuses(answer) == [200] * 4 and answer.endswith(b"\r\n\r\nv1")


def test_a_body_in_chunks_and_one_that_is_announced(server: KVBootstrapServer) -> None:
    chunked = (
        b"PUT /metadata?key=k HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: t\r\n\r\n"
    )
    assert statuses(raw(server, chunked)) == [200]
    assert server.store["k"] == b"abcde"
    announced = b"PUT /metadata?key=k HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nz"
    assert statuses(raw(server, announced)) == [100, 200]
    assert server.store["k"] == b"z"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\r\n\r\n\r\n\r\n", 400),
        (b"GET /metadata?key=k\r\n\r\n", 400),
        (b"GET /metadata?key=k HTTP/9\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET http://[/metadata HTTP/1.1\r\n\r\n", 400),
        (b"GET /metadata?key=%ff HTTP/1.1\r\n\r\n", 400),
        (b"GET /metadata?" + b"&".join([b"a=b"] * 100) + b" HTTP/1.1\r\n\r\n", 400),
        (b"PATCH /metadata?key=k HTTP/1.1\r\n\r\n", 405),
        (b"GET /metadata?key=k HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET /metadata?key=k HTTP/1.1\r\nbad : x\r\n\r\n", 400),
        (b"PUT /metadata?key=k HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"PUT /metadata?key=k HTTP/1.1\r\nContent-Length: 1_0\r\n\r\n", 400),
        (b"PUT /metadata?key=k HTTP/1.1\r\nContent-Length: 4097\r\n\r\n", 413),
        (b"PUT /metadata?key=k HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"PUT /metadata?key=k HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"PUT /metadata?key=k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"PUT /metadata?key=k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd", 400),
        (b"PUT /metadata?key=k HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n", 413),
        (b"GET /metadata?key=" + b"k" * 4096 + b" HTTP/1.1\r\n\r\n", 431),
    ],
)
def test_a_bad_request_is_refused_and_the_server_lives(
    server: KVBootstrapServer, sent: bytes, status: int
) -> None:
    assert statuses(raw(server, sent)) == [status]
    assert server.store == {}
    assert cluster.http("GET", url(server, "k"))[0] == 404


@pytest.mark.parametrize("cut", [1, 10, 40, 55])
def test_a_request_that_ends_early_changes_nothing(server: KVBootstrapServer, cut: int) -> None:
    whole = b"PUT /metadata?key=k HTTP/1.1\r\nContent-Length: 10\r\n\r\n0123456789"
    assert raw(server, whole[:cut]) == b""
    assert server.store == {}


def test_stored_keys_and_bytes_are_limited(server: KVBootstrapServer) -> None:
    for key in "abcd":
        assert cluster.http("PUT", url(server, key), b"x")[0] == 200
    assert cluster.http("PUT", url(server, "e"), b"x")[0] == 507
    assert cluster.http("PUT", url(server, "a"), b"y" * 4096)[0] == 200
    assert cluster.http("PUT", url(server, "b"), b"y" * 4096)[0] == 507
    # What was deleted does not count any more.
    assert cluster.http("DELETE", url(server, "a"))[0] == 200
    assert cluster.http("PUT", url(server, "b"), b"y" * 4096)[0] == 200


def test_connections_are_limited(server: KVBootstrapServer) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(LIMITS.connections_max):
            held.enter_context(socket.create_connection(("127.0.0.1", server.port), 10)).sendall(b"G")
        eventually_full = lambda: statuses(raw(server, b"", half_close=False)) == [503]
        cluster.eventually(eventually_full, "the server refuses one more connection")
    cluster.eventually(lambda: answers(server), "connections that ended make room")


def answers(server: KVBootstrapServer) -> bool:
    with contextlib.suppress(OSError):
        return cluster.http("GET", url(server, "k"))[0] == 404
    return False


def test_a_client_that_is_slow_ends_and_others_are_served() -> None:
    with serving(Limits(request_s_max=0.2, idle_s_max=0.2)) as server:
        with socket.create_connection(("127.0.0.1", server.port), 10) as slow:
            slow.sendall(b"GET /metadata")
            assert cluster.http("GET", url(server, "k"))[0] == 404
            assert statuses(slow.recv(65536)) == [408]
        with socket.create_connection(("127.0.0.1", server.port), 10) as silent:
            assert silent.recv(1) == b""


def test_requests_of_many_threads(server: KVBootstrapServer) -> None:
    failures: list[object] = []

    def work(number: int) -> None:
        for turn in range(20):
            value = f"{number}/{turn}".encode()
            got = (
                cluster.http("PUT", url(server, f"key{number}"), value)[0],
                cluster.http("GET", url(server, f"key{number}")),
            )
            if got != (200, (200, value)):
                failures.append(got)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


def test_a_port_that_is_taken_is_a_failed_server() -> None:
    with serving() as first:
        second = KVBootstrapServer(port=first.port, host="127.0.0.1")
        second.run()
        assert second.poll() is KVPoll.Failed
        second.close()
        assert first.poll() is KVPoll.Success
    assert first.poll() is KVPoll.Failed


def test_the_command_ends_by_a_signal_with_status_0() -> None:
    port = cluster.free_port()
    source = str(Path(__file__).parents[1] / "src")
    words = [
        sys.executable,
        "-m",
        "mooncake.http_metadata_server",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    with cluster.Process(words, {"PYTHONPATH": path}) as running:
        cluster.eventually(lambda: running.must_run() or cluster.accepts(port), "the command listens")
        taken = cluster.Process(words, {"PYTHONPATH": path})
        with taken:
            assert taken.child.wait(20) == 1
            assert "cannot listen" in taken.log()
        running.child.send_signal(signal.SIGTERM)
        assert running.child.wait(20) == 0
