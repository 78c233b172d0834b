"""A checkpoint goes from one trainer to many workers.

The trainer stores each tensor of a new checkpoint under its version, and then a manifest: a worker that sees
the manifest finds all tensors. The workers read them at the same time, from as many replicas as there are,
and the trainer removes the version before.

    python checkpoint_broadcast.py [WORKERS]
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import snowskin
import snowskin.aio
from snowskin import tensor
from snowskin.testing import Cluster

LAYERS, HIDDEN = 6, 512


def checkpoint(version: int) -> dict[str, np.ndarray]:
    """The weights of a version."""
    rng = np.random.default_rng(version)
    return {
        f"layer.{layer}.{name}": rng.standard_normal((HIDDEN, HIDDEN), dtype="f4")
        for layer in range(LAYERS)
        for name in ("q", "k", "v", "o")
    }


def publish(store: snowskin.Store, version: int) -> None:
    """Stores a version, its manifest last."""
    weights = checkpoint(version)
    prefix = f"model/{version}/"
    packed = {prefix + name: tensor.pack(weight) for name, weight in weights.items()}
    total = sum(weight.nbytes for weight in weights.values())
    began = time.perf_counter()

    def progress(done: int, count: int) -> None:
        print(f"version {version}: {done} of {count} tensors stored")

    # Pinned: a checkpoint of which a tensor was evicted is useless.
    store.put_many(packed, pin="hard", replicas=2, progress=progress).raise_errors()
    manifest = {"version": version, "tensors": sorted(weights)}
    store.put(f"model/{version}/manifest", json.dumps(manifest).encode(), pin="hard")
    took = time.perf_counter() - began
    print(f"version {version}: {total >> 20} MiB stored in {took * 1e3:.0f} ms")


def retract(store: snowskin.Store, version: int) -> int:
    """Removes a version, its manifest first."""
    store.remove(f"model/{version}/manifest", force=True)
    return 1 + store.remove_matching(f"^model/{version}/", force=True)


async def load(master: str, version: int) -> dict[str, np.ndarray]:
    """Waits for a version, and reads it: views of leases, without a copy."""
    async with snowskin.aio.Store.connect(master) as store:
        while (lease := await store.get(f"model/{version}/manifest")) is None:
            await asyncio.sleep(0.01)
        names = json.loads(bytes(lease))["tensors"]
        tensors = await tensor.get_many(store, [f"model/{version}/{name}" for name in names])
        tensors.raise_errors()
        return dict(zip(names, tensors, strict=True))


def work(master: str, worker: int, version: int) -> str:
    """One worker: loads a version and checks it."""
    began = time.perf_counter()
    weights = asyncio.run(load(master, version))
    took = time.perf_counter() - began
    expected = checkpoint(version)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, expected[name])
    return f"worker {worker}: version {version} loaded in {took * 1e3:.0f} ms"


def main(workers: int) -> None:
    with Cluster(nodes=2, memory="128MiB") as cluster, snowskin.Store.connect(cluster.master) as store:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for version in (1, 2):
                waiting = [pool.submit(work, cluster.master, worker, version) for worker in range(workers)]
                publish(store, version)
                for worker in waiting:
                    print(worker.result())
                if version > 1:
                    print(f"version {version - 1}: {retract(store, version - 1)} objects removed")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
