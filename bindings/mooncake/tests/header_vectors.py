"""Writes data/headers.json: the headers and manifests that Mooncake itself stores, to compare ours with.

Run it with an interpreter that has Mooncake's own wheel and numpy, beside a running ``mooncake_master``::

    python header_vectors.py 127.0.0.1:50051

It needs no torch: `stand_ins.Tensor` has the methods that Mooncake calls. Each vector is what was written
(dtype, shape of the whole tensor, axes) and the bytes that came back.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from stand_ins import arange, torch_module

NAMES = (
    "float32 float64 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool float16 bfloat16 float8_e4m3fn"
    " float8_e5m2"
).split()
WHOLE = [(3, 5), (), (0,), (2, 0, 3), (1,) * 8]
"""The shapes of whole tensors; the dtypes go through the first."""

LAYOUTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "tp": ([{"kind": "tp", "rank": 1, "size": 2, "split_dim": 1}], "k_tp_1"),
    "dp tp": (
        [{"kind": "dp", "rank": 1, "size": 2}, {"kind": "tp", "rank": 0, "size": 3, "split_dim": 1}],
        "k__dp_1of2__tp_0of3_sd1",
    ),
    "ep tp": (
        [
            {"kind": "ep", "rank": 3, "size": 4, "expert_id": 9},
            {"kind": "tp", "rank": 1, "size": 2, "split_dim": 0},
        ],
        "k__tp_1of2_sd0__ep_3of4_eid9",
    ),
    "tp pp": (
        [
            {"kind": "tp", "rank": 0, "size": 2, "split_dim": 0},
            {"kind": "pp", "rank": 1, "size": 3, "stage_id": 5},
        ],
        "k__tp_0of2_sd0__pp_1of3_sid5",
    ),
}
"""The axes of shards, and the key under which the shard is stored."""

HEADER_BYTES = 304
MANIFEST_BYTES = 96


def layout_of(store_module: Any, axes: list[dict[str, Any]]) -> Any:
    layout = store_module.TensorParallelism()
    made = []
    for fields in axes:
        axis = store_module.ParallelAxis()
        for name, value in fields.items():
            setattr(axis, name, value)
        made.append(axis)
    layout.axes = made
    return layout


def collect(store_module: Any, store: Any, torch: Any) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = []

    def keep(dtype: str, shape: tuple[int, ...], key: str, size: int, **more: Any) -> None:
        stored = bytes(store.get(key))
        if not stored:
            raise SystemExit(f"{key} is not there: {dtype} {shape} {more}")
        vectors.append(
            {"dtype": dtype, "shape": list(shape), "key": key, "bytes": stored[:size].hex(), **more}
        )

    def put(tensor: Any, **more: Any) -> None:
        store.remove_all(force=True)
        code = (
            store.put_tensor_with_parallelism("k", tensor, **more) if more else store.put_tensor("k", tensor)
        )
        if code != 0:
            raise SystemExit(f"put of {tensor.dtype} {tensor.shape} {more}: {code}")

    for dtype in NAMES:
        for shape in WHOLE if dtype == "uint8" else WHOLE[:1]:
            put(arange(torch, shape, dtype))
            keep(dtype, shape, "k", HEADER_BYTES, kind="whole")
        put(arange(torch, (4, 6), dtype), parallelism=layout_of(store_module, LAYOUTS["tp"][0]))
        keep(dtype, (4, 6), "k_tp_1", HEADER_BYTES, kind="shard", axes=LAYOUTS["tp"][0])
    for axes, key in LAYOUTS.values():
        put(arange(torch, (6, 12)), parallelism=layout_of(store_module, axes))
        keep("float32", (6, 12), key, HEADER_BYTES, kind="shard", axes=axes)
        if store.is_exist("k__parallelism_manifest") == 1:
            keep("float32", (6, 12), "k__parallelism_manifest", MANIFEST_BYTES, kind="manifest", axes=axes)
    return vectors


def main() -> None:
    torch = torch_module(NAMES)
    sys.modules["torch"] = torch
    import mooncake.store as store_module

    store = store_module.MooncakeDistributedStore()
    master = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", master)
    if code != 0:
        raise SystemExit(f"setup with the master {master}: {code}")
    vectors = collect(store_module, store, torch)
    path = Path(__file__).parent / "data" / "headers.json"
    path.write_text("[\n" + ",\n".join(" " + json.dumps(vector) for vector in vectors) + "\n]\n", "utf-8")
    print(f"{len(vectors)} vectors in {path}")
    store.close()


if __name__ == "__main__":
    main()
