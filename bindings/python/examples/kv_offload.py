"""An offloading KV cache for a toy transformer, in NumPy.

A prompt is divided into blocks of tokens. The keys and values of a block depend on all tokens before it, so a
block is named by the hash of its whole prefix. Before the model computes a prompt, it reads the longest
prefix whose blocks are in the store; afterwards it stores what it has computed. Another process, or the same
one after a restart, continues from there.

    python kv_offload.py [MASTER]

Without MASTER it starts a store of its own.
"""

from __future__ import annotations

import hashlib
import sys
import time

import numpy as np
import snowskin
from snowskin.testing import Cluster

LAYERS, HEADS, WIDTH, BLOCK = 4, 4, 32, 16
HIDDEN = HEADS * WIDTH
SHAPE = (LAYERS, 2, BLOCK, HEADS, WIDTH)  # one block: keys and values of all layers


class Model:
    """A transformer with random weights: attention and a projection per layer."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        scale = HIDDEN**-0.5
        self.embedding = rng.standard_normal((1000, HIDDEN), dtype="f4")
        self.weights = rng.standard_normal((LAYERS, 4, HIDDEN, HIDDEN), dtype="f4") * scale
        self.computed_tokens = 0

    def forward(self, tokens: list[int], past: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The last hidden state, and the keys and values of ``tokens``, whose predecessors have ``past``."""
        self.computed_tokens += len(tokens)
        hidden = self.embedding[tokens]
        fresh = np.empty((LAYERS, 2, len(tokens), HEADS, WIDTH), dtype="f4")
        for layer in range(LAYERS):
            q, k, v = ((hidden @ self.weights[layer, part]).reshape(-1, HEADS, WIDTH) for part in range(3))
            fresh[layer] = k, v
            keys = np.concatenate([past[layer, 0], k])
            values = np.concatenate([past[layer, 1], v])
            scores = np.einsum("qhw,khw->hqk", q, keys) / WIDTH**0.5
            seen = np.arange(len(keys)) <= (len(past[layer, 0]) + np.arange(len(tokens)))[:, None]
            scores = np.where(seen, scores, -np.inf)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed = np.einsum("hqk,khw->qhw", scores, values).reshape(-1, HIDDEN)
            hidden = hidden + mixed @ self.weights[layer, 3]
        return hidden[-1], fresh


def names_of(tokens: list[int]) -> list[str]:
    """The names of the prompt's full blocks: each is the hash of all tokens up to its end."""
    digest = hashlib.sha256()
    names = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        digest.update(np.array(tokens[start : start + BLOCK], dtype="u4").tobytes())
        names.append("kv/" + digest.hexdigest()[:32])
    return names


def prefill(model: Model, store: snowskin.Store, tokens: list[int]) -> tuple[np.ndarray, int]:
    """Computes a prompt, using and filling the cache. Returns the last hidden state and the tokens reused."""
    # The last token is computed in any case: its hidden state is the result.
    names = names_of(tokens[:-1])
    with store.get_prefix(names) as leases:
        reused = len(leases) * BLOCK
        past = np.empty((LAYERS, 2, reused, HEADS, WIDTH), dtype="f4")
        for number, lease in enumerate(leases):
            past[:, :, number * BLOCK : (number + 1) * BLOCK] = lease.numpy("f4", SHAPE)
    hidden, fresh = model.forward(tokens[reused:], past)
    blocks = {}
    for number in range(reused // BLOCK, len(names)):
        at = number * BLOCK - reused
        blocks[names[number]] = np.ascontiguousarray(fresh[:, :, at : at + BLOCK])
    # Blocks of one prompt are useless without those before them: evicted together.
    store.put_many(blocks, pin="soft").raise_errors()
    return hidden, reused


def run(master: str) -> None:
    rng = np.random.default_rng(7)
    system = rng.integers(0, 1000, 256).tolist()  # what all prompts begin with
    questions = [rng.integers(0, 1000, 40).tolist() for _ in range(4)]
    with snowskin.Store.connect(master) as store:
        reference = Model()
        for number, question in enumerate(questions):
            model = Model()
            began = time.perf_counter()
            hidden, reused = prefill(model, store, system + question)
            took = time.perf_counter() - began
            expected, _ = reference.forward(
                system + question, np.empty((LAYERS, 2, 0, HEADS, WIDTH), dtype="f4")
            )
            error = np.abs(hidden - expected).max()
            tokens = len(system) + len(question)
            print(f"prompt {number}: {reused} of {tokens} tokens reused, {took * 1e3:.1f} ms")
            if error > 1e-3:
                raise AssertionError(f"the result differs from that without a cache by {error}")
        stats = store.stats()
        print(f"{stats['hits']} blocks read ({stats['read_bytes'] >> 10} KiB), {stats['puts']} stored")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1])
    else:
        with Cluster(memory="64MiB") as cluster:
            run(cluster.master)
