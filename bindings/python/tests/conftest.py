"""Fixtures: a cluster of real processes, and stores that are connected to it."""

from __future__ import annotations

import faulthandler
import uuid
from collections.abc import Iterator

import pytest
import snowskin
from snowskin.testing import Cluster

#: A test that takes longer than this is stuck: show where, and end.
STUCK_S = 120


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    # Leases of the master end soon, so that tests of removal need not wait.
    with Cluster(nodes=2, memory="256MiB", master_arguments=("--lease-ms", "500")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def master(cluster: Cluster) -> str:
    return cluster.master


@pytest.fixture(scope="session")
def store(master: str) -> Iterator[snowskin.Store]:
    with snowskin.Store.connect(master) as store:
        yield store


@pytest.fixture
def name() -> str:
    """A prefix for keys that no other test uses."""
    return uuid.uuid4().hex
