"""How tensors are read: of one object, or put together of shards.

A read of a layout takes two requests: one for the headers of all shards, one for the bytes. Where the part of
a shard is contiguous in the result, it is read to its place; otherwise the shard is read as a whole and
copied in.

``store`` is the native store. Arguments that cannot be carried out, and shards that do not fit together,
raise :class:`~snowskin._mooncake.parallel.Refused`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from . import header as headers
from . import memory, parallel
from .header import HEADER_BYTES, BadHeader, Header, Manifest
from .parallel import Layout, Refused, Target, WriterPartition

logger = logging.getLogger("mooncake.store")


@dataclass(frozen=True)
class Read:
    """``size`` bytes of an object, from ``offset`` on, to ``address``."""

    key: str
    offset: int
    size: int
    address: int


def read_all(store: Any, reads: Sequence[Read]) -> list[bool]:
    """Carries out the reads in one request, and returns which of them got all their bytes."""
    if not reads:
        return []
    got = store.get_into_ranges(
        [read.address for read in reads],
        [[read.key] for read in reads],
        [[[0]] for _ in reads],
        [[[read.offset]] for read in reads],
        [[[read.size]] for read in reads],
    )
    return [answer == [[read.size]] for answer, read in zip(got, reads, strict=True)]


def load_headers(store: Any, keys: Sequence[str]) -> list[Header | None]:
    """The header of each object; ``None`` for one that is not there or is no tensor."""
    scratch = bytearray(HEADER_BYTES * len(keys))
    base = ctypes.addressof(ctypes.c_ubyte.from_buffer(scratch)) if keys else 0
    reads = [Read(key, 0, HEADER_BYTES, base + HEADER_BYTES * item) for item, key in enumerate(keys)]
    found: list[Header | None] = []
    for item, is_there in enumerate(read_all(store, reads)):
        try:
            prefix = memoryview(scratch)[HEADER_BYTES * item : HEADER_BYTES * (item + 1)]
            found.append(headers.decode(prefix) if is_there else None)
        except BadHeader as error:
            logger.error("%s: %s", keys[item], error)
            found.append(None)
    return found


def from_handle(key: str, handle: Any) -> Any:
    """The tensor in a handle that the store gave out, which then belongs to the tensor."""
    if handle is None:
        return None
    try:
        return memory.tensor_over(
            handle, headers.decode(memoryview(handle).cast("B")[:HEADER_BYTES], len(handle))
        )
    except (Refused, BadHeader) as error:
        logger.error("%s: %s", key, error)
        return None


def tensor_in(key: str, address: int, length: int) -> Any:
    """The tensor in memory of the caller, of which ``length`` bytes were read, or a negative code."""
    if length < 0:
        logger.error("%s: the read failed with code %d", key, length)
        return None
    try:
        return memory.tensor_over(*memory.object_at(address, length))
    except (Refused, BadHeader) as error:
        logger.error("%s: %s", key, error)
        return None


def load_manifest(store: Any, key: str) -> Manifest | None:
    stored = store.get(key)
    try:
        return Manifest.decode(stored) if stored else None
    except BadHeader as error:
        logger.error("%s: %s", key, error)
        return None


@dataclass(frozen=True)
class Sources:
    """The shards of a tensor, all of them, in the order of their ranks."""

    dtype: str
    shape: tuple[int, ...]
    split_dim: int
    shards: list[tuple[str, Header]]


def load_sources(store: Any, key: str, layouts: Sequence[Layout], keys: Sequence[str], like: Any) -> Sources:
    """The shards of ``layouts`` under ``keys``, of a tensor as in ``like`` (a manifest or a header)."""
    found = []
    for layout, shard_key, header in zip(layouts, keys, load_headers(store, keys), strict=True):
        if header is None or not parallel.is_same(layout, header):
            raise Refused(f"{key}: the object {shard_key} is not the shard that the layout has there")
        if header.global_shape != like.global_shape or header.dtype != like.dtype:
            raise Refused(f"{key}: the shard {shard_key} belongs to a tensor of another shape or dtype")
        found.append((shard_key, header))
    axis = parallel.tp_axis(layouts[0])
    assert axis is not None
    split_dim = parallel.check_split(like.global_shape, axis.split_dim, axis.size)
    return Sources(like.dtype.name, like.global_shape, split_dim, found)


def full_sources(store: Any, key: str, layout: Layout) -> Sources:
    """The shards from which a tensor of ``layout`` can be made, however many ranks it was written by."""
    axis = parallel.tp_axis(layout)
    if axis is None:
        raise Refused("a tensor is put together along a tp axis, which the layout does not have")
    like: Manifest | Header | None = load_manifest(store, parallel.manifest_key(key))
    if isinstance(like, Manifest):
        count, split_dim = like.shards, like.split_dim
    else:
        first_key = parallel.shard_key(key, parallel.with_tp(layout, 0, axis.size))
        like = load_headers(store, [first_key])[0]
        stored = None if like is None else like.axis("tp")
        if like is None or stored is None:
            raise Refused(f"{key}: neither a manifest nor the shard {first_key}")
        count, split_dim = stored.count, stored.split_dim
    if axis.split_dim != split_dim:
        raise Refused(f"{key} is divided along dimension {split_dim}, not {axis.split_dim}")
    parallel.check_split(like.global_shape, split_dim, axis.size)
    layouts = [parallel.with_tp(layout, rank, count) for rank in range(count)]
    return load_sources(store, key, layouts, [parallel.shard_key(key, each) for each in layouts], like)


def writer_sources(store: Any, key: str) -> Sources | None:
    """The shards that writers stored, if there is a manifest of them."""
    manifest = load_manifest(store, parallel.writer_manifest_key(key))
    if manifest is None:
        return None
    parts = [WriterPartition(rank, manifest.shards, manifest.split_dim) for rank in range(manifest.shards)]
    return load_sources(
        store, key, [part.layout() for part in parts], [part.key(key) for part in parts], manifest
    )


def gather(store: Any, sources: Sources, start: int, out: Any) -> bool:
    """Fills ``out`` with the tensor, whose divided dimension begins at ``start`` of the whole there."""
    dim, shape = sources.split_dim, memory.shape_of(out)
    end, itemsize = start + shape[dim], int(out.element_size())
    row_bytes = prod(shape[dim + 1 :]) * itemsize
    is_contiguous = prod(shape[:dim]) == 1
    reads, copies = [], []
    for rank, (key, header) in enumerate(sources.shards):
        first, extent = parallel.part_of(sources.shape[dim], rank, len(sources.shards))
        low, high = max(first, start), min(first + extent, end)
        if high <= low or header.data_bytes == 0:
            continue
        if is_contiguous:
            offset = header.data_offset + (low - first) * row_bytes
            address = int(out.data_ptr()) + (low - start) * row_bytes
            reads.append(Read(key, offset, (high - low) * row_bytes, address))
        else:
            shard = memory.empty(sources.dtype, header.shape)
            reads.append(Read(key, header.data_offset, header.data_bytes, int(shard.data_ptr())))
            copies.append(
                (out.narrow(dim, low - start, high - low), shard.narrow(dim, low - first, high - low))
            )
    if not all(read_all(store, reads)):
        return False
    for place, part in copies:
        place.copy_(part)
    return True


@dataclass(frozen=True)
class Plan:
    """What a read of a target needs: one object as it is, or shards and the part of the whole they make."""

    key: str = ""
    sources: Sources | None = None
    layout: Layout | None = None

    def shape(self) -> tuple[int, ...]:
        assert self.sources is not None
        whole, dim = self.sources.shape, self.sources.split_dim
        return (*whole[:dim], self._range()[1], *whole[dim + 1 :])

    def start(self) -> int:
        return self._range()[0]

    def _range(self) -> tuple[int, int]:
        assert self.sources is not None
        length = self.sources.shape[self.sources.split_dim]
        axis = None if self.layout is None else parallel.tp_axis(self.layout)
        return (0, length) if axis is None else parallel.part_of(length, axis.rank, axis.size)

    def header(self) -> bytes:
        assert self.sources is not None
        shape = self.shape()
        axes = None if self.layout is None else parallel.stored_axes(self.layout, shape)
        return headers.encode(self.sources.dtype, shape, global_shape=self.sources.shape, axes=axes)


def plan_of(store: Any, key: str, target: Target) -> Plan:
    layout = target.layout
    if layout is None:
        if target.mode == "shard":
            raise Refused("a shard of which parallelism? The target has none")
        sources = writer_sources(store, key) if target.mode == "full" else None
        return Plan(key) if sources is None else Plan(sources=sources)
    if target.mode == "full":
        return Plan(sources=full_sources(store, key, layout))
    if target.mode != "shard":
        raise Refused("a parallelism goes with the modes shard and full")
    candidates = [parallel.shard_key(key, layout)]
    if parallel.is_tp_alone(layout) and layout[0].split_dim is not None:
        candidates.append(WriterPartition(layout[0].rank, layout[0].size, layout[0].split_dim).key(key))
    for candidate, header in zip(candidates, load_headers(store, candidates), strict=True):
        if header is not None and parallel.is_same(layout, header):
            return Plan(candidate)
    return Plan(sources=full_sources(store, key, layout), layout=layout)


def get_target(store: Any, key: str, target: Any) -> Any:
    plan = plan_of(store, key, parallel.target_of(target))
    if plan.sources is None:
        return from_handle(plan.key, store.get_buffer(plan.key))
    out = memory.empty(plan.sources.dtype, plan.shape())
    return out if gather(store, plan.sources, plan.start(), out) else None


def get_target_into(store: Any, key: str, address: int, size: int, target: Any) -> Any:
    plan = plan_of(store, key, parallel.target_of(target))
    if plan.sources is None:
        return tensor_in(plan.key, address, store.get_into(plan.key, address, size))
    encoded = plan.header()
    header = headers.decode(encoded)
    if header.object_bytes > size:
        raise Refused(f"{key} needs {header.object_bytes} bytes, the buffer has {size}")
    place = memory.at(address, header.object_bytes)
    tensor = memory.tensor_over(place, header)
    if not gather(store, plan.sources, plan.start(), tensor):
        return None
    # Last: a buffer with this header has the whole tensor.
    memoryview(place).cast("B")[:HEADER_BYTES] = encoded
    return tensor


def tp_keys(keys: Sequence[str], rank: int, size: int) -> list[str]:
    return list(keys) if size <= 1 else [parallel.tp_key(key, rank) for key in keys]
