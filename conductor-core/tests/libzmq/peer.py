"""A socket of libzmq: `peer.py KIND bind|connect ADDRESS`. Prints the port, then what it received, a line each.

It ends when its standard input does.
"""

import sys
import threading
import time

import zmq

kind, how, address = sys.argv[1:]
context = zmq.Context()
socket = context.socket(getattr(zmq, kind))
socket.linger = 0
socket.setsockopt(zmq.HEARTBEAT_IVL, 100)
socket.setsockopt(zmq.HEARTBEAT_TTL, 1000)
socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000)
if kind == "SUB":
    socket.subscribe(b"kv")
if how == "bind":
    port = socket.bind_to_random_port(address)
    print(port, flush=True)
else:
    socket.connect(address)
    print(0, flush=True)


def show(parts):
    print(" ".join(part.hex() or "-" for part in parts), flush=True)


def replay(parts):
    """Answers as vLLM's publisher does: three messages and the end, after the envelope of the question."""
    envelope, start = parts[:-1], int.from_bytes(parts[-1], "big")
    show(parts[1:])
    for seq in range(start, start + 3):
        socket.send_multipart([*envelope, b"kv", seq.to_bytes(8, "big"), bytes([seq]) * 300])
    socket.send_multipart([*envelope, b"kv", b"\xff" * 8, b""])


def run():
    if kind == "PUB":
        for seq in range(1 << 30):
            socket.send_multipart([b"other", b"", b""])
            socket.send_multipart([b"kv@1", seq.to_bytes(8, "big"), bytes([seq % 256]) * (seq % 3 * 70_000)])
            time.sleep(0.005)
    if kind in ("DEALER", "REQ"):
        socket.send_multipart([b""] * (kind == "DEALER") + [(5).to_bytes(8, "big")])
    while True:
        parts = socket.recv_multipart()
        if kind == "ROUTER":
            replay(parts)
        else:
            show(parts)
        if kind == "REQ":
            return


threading.Thread(target=run, daemon=True).start()
sys.stdin.read()
