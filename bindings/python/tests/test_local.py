"""A store through the node on this machine, without an engine of its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import snowskin
from snowskin.testing import Cluster


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    path = tmp_path_factory.mktemp("local") / "socket"
    with Cluster(memory="64MiB", node_arguments=("--local", str(path))) as cluster:
        yield cluster, path


def test_what_a_store_with_an_engine_does(local: tuple[Cluster, Path], name: str) -> None:
    cluster, path = local
    with snowskin.Store.connect(cluster.master, local=path) as store:
        assert f"unix:{path}" in repr(store)
        assert store.put(name, b"value").stored and not store.put(name, b"other").stored
        lease = store.get(name)
        assert lease is not None and bytes(lease) == b"value"
        assert store.get(name + "x") is None
        large = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype="u1")
        store.put(name + "/large", large)
        for _ in range(3):
            with store.get(name + "/large") as lease:  # type: ignore[union-attr]
                np.testing.assert_array_equal(lease.numpy(), large)
        part = store.get(name + "/large", offset=100_000, length=10)
        assert part is not None and bytes(part) == large[100_000:100_010].tobytes()
        into = bytearray(3 << 20)
        assert store.get_into(name + "/large", into) == 3 << 20 and into == large.tobytes()
        keys = [f"{name}/{number}" for number in range(100)]
        assert all(store.put_many({key: key.encode() for key in keys}))
        with store.get_many([*keys, "x"]) as leases:
            assert [lease and bytes(lease) for lease in leases] == [*(key.encode() for key in keys), None]
        assert len(store.get_prefix([*keys[:5], "x"])) == 5
        assert store.exists_many([name, "x"]) == [True, False]
        assert {info.key for info in store.list(f"{name}/9")} == {
            key for key in keys if key.startswith(f"{name}/9")
        }
        assert store.stat(name) is not None
        assert store.remove(name, force=True)
        assert "hits" not in store.stats()


def test_without_a_master_only_the_node_is_asked(local: tuple[Cluster, Path], name: str) -> None:
    _, path = local
    with snowskin.Store.connect(local=str(path)) as store:
        store.put(name, bytes(200_000))
        lease = store.get(name)
        assert lease is not None and len(lease) == 200_000
        for call in (lambda: list(store.list()), lambda: store.stat(name)):
            with pytest.raises(
                snowskin.InvalidArgument, match="give connect\\(\\) the address of the master"
            ):
                call()


def test_leases_that_are_held_use_up_the_arena(local: tuple[Cluster, Path], name: str) -> None:
    _, path = local
    with snowskin.Store.connect(local=path, pool="4MiB") as store:
        store.put(name, bytes(1 << 20))
        held = []
        with pytest.raises(snowskin.SnowskinError):
            for _ in range(10):
                held.append(store.get(name))
        assert 2 <= len(held) <= 4
        held.clear()
        gc.collect()
        assert store.get(name) is not None


def test_a_node_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(snowskin.PeerUnreachable, match="no node at"):
        snowskin.Store.connect(local=tmp_path / "none")
