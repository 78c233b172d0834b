"""What the tests of this directory share: processes end with the test, and what is missing is said."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
if importlib.util.find_spec("mooncake") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
if importlib.util.find_spec("snowskin") is None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "python"))

import cluster


def _missing() -> str | None:
    try:
        import snowskin._native
    except ImportError as error:
        return f"the native module is not built: {error}"
    try:
        cluster._binary.path()
    except FileNotFoundError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _missing()
    for item in items:
        if missing and item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.skip(reason=missing))
        if item.get_closest_marker("torch") and importlib.util.find_spec("torch") is None:
            item.add_marker(pytest.mark.skip(reason="torch is not installed"))


@pytest.fixture(scope="module")
def master() -> Iterator[cluster.Master]:
    with cluster.Master() as running:
        yield running  # type: ignore[misc]
