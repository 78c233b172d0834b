"""Our headers, keys and manifests against those that Mooncake stored (data/headers.json)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from header_vectors import HEADER_BYTES, NAMES, WHOLE
from stand_ins import Store, arange, torch_module

from snowskin._mooncake import header as headers
from snowskin._mooncake import tensors

VECTORS = json.loads((Path(__file__).parent / "data" / "headers.json").read_text("utf-8"))
AXIS = {"rank": 0, "size": 1, "split_dim": None, "expert_id": None, "stage_id": None}


def name_of(vector: dict[str, Any]) -> str:
    return f"{vector['kind']} {vector['dtype']} {vector['shape']} {vector['key']}"


def test_the_vectors_have_every_dtype_and_layout() -> None:
    seen = {(v["kind"], v["dtype"]) for v in VECTORS}
    assert all(("whole", name) in seen and ("shard", name) in seen for name in NAMES)
    assert [dtype.name for dtype in headers.DTYPES] == NAMES
    assert {tuple(v["shape"]) for v in VECTORS if v["dtype"] == "uint8"} >= set(WHOLE)
    kinds = {axis["kind"] for v in VECTORS for axis in v.get("axes", [])}
    assert kinds == {"dp", "tp", "ep", "pp"}


@pytest.mark.parametrize("vector", VECTORS, ids=name_of)
def test_what_is_stored_is_what_mooncake_stores(
    vector: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = torch_module(NAMES)
    monkeypatch.setitem(sys.modules, "torch", torch)
    store = Store()
    tensor = arange(torch, vector["shape"], vector["dtype"])
    if "axes" in vector:
        layout = SimpleNamespace(axes=[SimpleNamespace(**(AXIS | axis)) for axis in vector["axes"]])
        assert tensors.put_tensor_with_parallelism(store, "k", tensor, layout, None, None) == 0
    else:
        assert tensors.put_tensor(store, "k", tensor) == 0
    theirs = bytes.fromhex(vector["bytes"])
    ours = store.objects[vector["key"]][: len(theirs)]
    assert ours.hex() == theirs.hex()


@pytest.mark.parametrize("vector", VECTORS, ids=name_of)
def test_what_mooncake_stores_is_read_and_written_alike(vector: dict[str, Any]) -> None:
    stored = bytes.fromhex(vector["bytes"])
    if vector["kind"] == "manifest":
        assert headers.Manifest.decode(stored).encode() == stored
        return
    header = headers.decode(stored)
    assert len(stored) == HEADER_BYTES and header.dtype.name == vector["dtype"]
    assert header.is_shard == (vector["kind"] == "shard")
    axes = header.axes if header.is_shard else None
    again = headers.encode(header.dtype.name, header.shape, global_shape=header.global_shape, axes=axes)
    assert again == stored
