"""vllm-omni's connector between the stages of a pipeline.

The calls, in this order, of vllm_omni/distributed/omni_connectors/connectors/mooncake_connector.py:60-110:
``setup`` with seven positional arguments, ``ReplicateConfig().with_soft_pin = True`` (a name that the
interface it was written for had), ``put(key, bytes, pin)``, ``get(key)`` tried up to 20 times, ``close()``.

With ``VLLM_OMNI_SRC`` naming a checkout, the file itself runs.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any

import cluster
import pytest

pytestmark = pytest.mark.cluster


def test_a_stage_hands_its_result_to_the_next(master: cluster.Master) -> None:
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    first, second = MooncakeDistributedStore(), MooncakeDistributedStore()
    for store in (first, second):
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", 8 << 20, 4 << 20, "tcp", "", master.address)
        assert code == 0
    pin = ReplicateConfig()
    pin.with_soft_pin = True
    assert pin.soft_pin_action.name == "ENABLE"
    key, value = "request-1/thinker_to_talker", pickle.dumps({"hidden": list(range(1000))})

    late = threading.Timer(0.1, lambda: first.put(key, value, pin))
    late.start()
    assert cluster.eventually(lambda: second.get(key), "the value arrives") == value
    late.join()
    for store in (first, second):
        assert store.close() == 0


SOURCE = os.environ.get("VLLM_OMNI_SRC")
CONNECTOR = "vllm_omni/distributed/omni_connectors/connectors/mooncake_connector.py"


def load(path: Path) -> Any:
    """The connector's module, with stand-ins for the two modules of its package that it imports."""

    class Base:
        def serialize_obj(self, value: Any) -> bytes:
            return pickle.dumps(value)

        def deserialize_obj(self, value: bytes) -> Any:
            return pickle.loads(value)

    package = "stand_in_omni"
    modules = {
        package: types.ModuleType(package),
        f"{package}.connectors": types.ModuleType(f"{package}.connectors"),
        f"{package}.connectors.base": types.ModuleType(f"{package}.connectors.base"),
        f"{package}.utils": types.ModuleType(f"{package}.utils"),
        f"{package}.utils.logging": types.ModuleType(f"{package}.utils.logging"),
    }
    for module in modules.values():
        module.__path__ = []  # type: ignore[attr-defined]
    modules[f"{package}.connectors.base"].OmniConnectorBase = Base  # type: ignore[attr-defined]
    modules[f"{package}.utils.logging"].get_connector_logger = logging.getLogger  # type: ignore[attr-defined]
    sys.modules.update(modules)
    name = f"{package}.connectors.mooncake_connector"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(SOURCE is None, reason="VLLM_OMNI_SRC does not name a checkout of vllm-omni")
def test_the_file_of_the_connector_itself(master: cluster.Master) -> None:
    assert SOURCE is not None
    connector = load(Path(SOURCE) / CONNECTOR).MooncakeConnector(
        {"metadata_server": "P2PHANDSHAKE", "master": master.address, "segment": 8 << 20, "localbuf": 4 << 20}
    )
    try:
        value = {"tokens": list(range(100)), "text": "x" * 10_000}
        is_stored, size, _ = connector.put("thinker", "talker", "request-2", value)
        assert is_stored
        assert connector.get("thinker", "talker", "request-2") == (value, size)
        assert connector.health()["status"] == "healthy"
    finally:
        connector.close()
