"""Loads an index of KV blocks the way engines and routers do, and prints what it took, as JSON.

Run by `cargo xtask bench-peers --only conductor` for each participant: it publishes blocks over ZeroMQ in vLLM's
format, waits until the service knows them all, and asks with the token ids of a long prompt.

    python conductor.py dynamo|snowskin PORT PID EVENTS_PORT BLOCKS BLOCKS_PER_MESSAGE QUERIES
"""

import http.client
import json
import os
import random
import sys
import time

import msgspec
import zmq

BLOCK_TOKENS = 16
# The conversations of the published trace have 12 k tokens on average; the longest common prefix measured is deeper.
CHAIN_BLOCKS = 860
QUERY_BLOCKS = 752
PUBLISHERS = 4
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
DEADLINE_S = 120.0


def cpu_s(pid):
    """CPU time of a process and the children that it waited for, seconds."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def rss_bytes(pid):
    with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Service:
    """The HTTP side of a participant, over one connection that is kept."""

    def __init__(self, kind, port):
        self.kind = kind
        self.query_path = "/query" if kind == "dynamo" else "/query?shape=instances"
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def post(self, path, body):
        self.connection.request("POST", path, body, {"content-type": "application/json"})
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise SystemExit(f"{self.kind}: {path}: HTTP {answer.status}: {text[:300]!r}")
        return text

    def register(self, instance, port):
        body = {
            "instance_id": instance if self.kind == "dynamo" else str(instance),
            "endpoint": f"tcp://127.0.0.1:{port}",
            "model_name" if self.kind == "dynamo" else "modelname": "model",
            "type": "vLLM",
            "block_size": BLOCK_TOKENS,
            "dp_rank": 0,
        }
        self.post("/register", json.dumps(body))

    def query_body(self, tokens):
        name = "model_name" if self.kind == "dynamo" else "model"
        return json.dumps({"token_ids": tokens, name: "model", "block_size": BLOCK_TOKENS})

    def matched(self, tokens, instance):
        """Tokens of a prompt that an instance has."""
        answer = json.loads(self.post(self.query_path, self.query_body(tokens)))
        found = answer["instances"].get(str(instance))
        return 0 if found is None else found["longest_matched"]


def chain(rng, seed):
    """The hashes and tokens of one prompt, in messages."""
    tokens = [rng.randrange(128_000) for _ in range(CHAIN_BLOCKS * BLOCK_TOKENS)]
    hashes = [(seed << 20 | block) * 0x9E3779B97F4A7C15 & (2**64 - 1) for block in range(CHAIN_BLOCKS)]
    return tokens, hashes


def messages(tokens, hashes, blocks_per_message):
    encode = msgspec.msgpack.encode
    for first in range(0, CHAIN_BLOCKS, blocks_per_message):
        last = min(first + blocks_per_message, CHAIN_BLOCKS)
        event = {
            "type": "BlockStored",
            "block_hashes": hashes[first:last],
            "parent_block_hash": hashes[first - 1] if first else None,
            "token_ids": tokens[first * BLOCK_TOKENS : last * BLOCK_TOKENS],
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        yield encode([time.time(), [event], 0])


class Publisher:
    def __init__(self, context, port):
        self.socket = context.socket(zmq.PUB)
        self.socket.sndhwm = 0
        self.socket.bind(f"tcp://127.0.0.1:{port}")
        self.seq = 0

    def send(self, payload):
        self.socket.send_multipart([b"", self.seq.to_bytes(8, "big"), payload])
        self.seq += 1


def wait_for(what, found):
    until = time.monotonic() + DEADLINE_S
    while not found():
        if time.monotonic() > until:
            raise SystemExit(f"{what}: not there after {DEADLINE_S} s")
        time.sleep(0.001)


def percentile(sorted_values, share):
    return sorted_values[min(int(len(sorted_values) * share), len(sorted_values) - 1)]


def timed(service, path, body, count):
    """Latencies of requests over one connection, microseconds, sorted."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        if body is None:
            service.connection.request("GET", path)
            service.connection.getresponse().read()
        else:
            service.post(path, body)
        times.append((time.perf_counter() - began) * 1e6)
    times.sort()
    return times


def main():
    kind = sys.argv[1]
    port, pid, events_port, blocks, per_message, queries = map(int, sys.argv[2:])
    rng = random.Random(1)
    service = Service(kind, port)
    context = zmq.Context()
    publishers = [Publisher(context, events_port + index) for index in range(PUBLISHERS)]
    for index in range(PUBLISHERS):
        service.register(index + 1, events_port + index)

    # The first chain of each publisher is only there to see that its subscription is live.
    for index, publisher in enumerate(publishers):
        tokens, hashes = chain(rng, index + 1)
        payloads = list(messages(tokens[: BLOCK_TOKENS * CHAIN_BLOCKS], hashes, CHAIN_BLOCKS))

        def there(tokens=tokens, index=index, publisher=publisher, payloads=payloads):
            if service.matched(tokens, index + 1) == CHAIN_BLOCKS * BLOCK_TOKENS:
                return True
            # A subscription that came later has missed it; numbers go on.
            publisher.send(payloads[0])
            time.sleep(0.05)
            return False

        wait_for("the first blocks", there)

    chains = -(-blocks // CHAIN_BLOCKS)
    work, lasts, sent_bytes = [], {}, 0
    for number in range(chains):
        index = number % PUBLISHERS
        tokens, hashes = chain(rng, PUBLISHERS + number + 1)
        payloads = list(messages(tokens, hashes, per_message))
        sent_bytes += sum(map(len, payloads))
        work.append((publishers[index], payloads))
        lasts[index] = tokens
    cpu_before, began = cpu_s(pid), time.perf_counter()
    for publisher, payloads in work:
        for payload in payloads:
            publisher.send(payload)
    published = time.perf_counter() - began
    for index, tokens in lasts.items():
        wait_for("the last blocks", lambda: service.matched(tokens, index + 1) == CHAIN_BLOCKS * BLOCK_TOKENS)
    visible, cpu = time.perf_counter() - began, cpu_s(pid) - cpu_before

    body = service.query_body(lasts[0][: QUERY_BLOCKS * BLOCK_TOKENS])
    timed(service, service.query_path, body, queries // 10 + 1)
    times = timed(service, service.query_path, body, queries)
    floor = timed(service, "/health", None, queries)
    count = chains * CHAIN_BLOCKS
    print(
        json.dumps(
            {
                "blocks": count,
                "blocks_per_message": per_message,
                "payload_bytes": sent_bytes,
                "publish_s": published,
                "visible_s": visible,
                "blocks_per_s": count / visible,
                "cpu_s": cpu,
                "blocks_per_cpu_s": count / max(cpu, 1e-9),
                "rss_bytes": rss_bytes(pid),
                "query_p50_us": percentile(times, 0.5),
                "query_p99_us": percentile(times, 0.99),
                "health_p50_us": percentile(floor, 0.5),
            }
        )
    )


if __name__ == "__main__":
    main()
