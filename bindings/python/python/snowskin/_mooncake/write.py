"""How tensors are written: what of each goes where, and the code of each item of a batch.

``store`` is the native store. Its method ``_write_parts(keys, addresses, sizes, config, upsert)`` writes
objects that are put together of parts in memory, and returns a code for each. Arguments that cannot be
carried out raise :class:`~snowskin._mooncake.parallel.Refused`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import header as headers
from . import memory, parallel
from .header import BadHeader, Manifest
from .memory import Written
from .parallel import Layout, Refused, WriterPartition

logger = logging.getLogger("mooncake.store")

INVALID_PARAMS = -600


def check_config(config: Any) -> Any:
    preferred = [] if config is None else config.preferred_segments
    if preferred and len(preferred) != config.replica_num:
        raise Refused(f"{len(preferred)} preferred_segments for {config.replica_num} replicas: one for each")
    return config


def check_lens(keys: Sequence[str], **lists: Sequence[Any]) -> None:
    for name, values in lists.items():
        if len(values) != len(keys):
            raise Refused(f"{len(keys)} keys and {len(values)} {name}: one for each")


def for_items(config: Any, items: Sequence[int]) -> Any:
    """``config`` with the group of each of these items of a batch."""
    if config is None or config.group_ids is None:
        return config
    groups = config.group_ids
    if items and max(items) >= len(groups):
        raise Refused(f"{len(groups)} group_ids: one for each key")
    chosen = config._copy()
    chosen.group_ids = [groups[item] for item in items]
    return chosen


def write_items(
    store: Any, items: Sequence[tuple[int, str, Written]], results: list[int], config: Any, upsert: bool
) -> list[int]:
    """Writes the tensors, and enters the code of each into the place of its item in ``results``.

    Several tensors of one item are its shards: the first code that is not 0 is that of the item.
    """
    if not items:
        return results
    codes = store._write_parts(
        [key for _, key, _ in items],
        [written.addresses() for _, _, written in items],
        [written.sizes() for _, _, written in items],
        for_items(config, [item for item, _, _ in items]),
        upsert,
    )
    for item in {item for item, _, _ in items}:
        results[item] = 0
    for (item, _, _), code in zip(items, codes, strict=True):
        results[item] = results[item] or code
    return results


def write_one(store: Any, key: str, written: Written, config: Any, upsert: bool) -> int:
    return write_items(store, [(0, key, written)], [INVALID_PARAMS], config, upsert)[0]


def write_many(
    store: Any, keys: Sequence[str], tensors: Sequence[Any], config: Any, upsert: bool
) -> list[int]:
    check_lens(keys, tensors=tensors)
    check_groups(keys, config)
    return write_each(store, keys, tensors, lambda key, tensor: [(key, Written.of(tensor))], config, upsert)


def write_each(
    store: Any,
    keys: Sequence[str],
    values: Sequence[Any],
    shards: Callable[[str, Any], list[tuple[str, Written]]],
    config: Any,
    upsert: bool,
) -> list[int]:
    """Writes what ``shards`` makes of each value; a value that is refused does not stop the others."""
    results = [INVALID_PARAMS] * len(keys)
    items = []
    for item, (key, value) in enumerate(zip(keys, values, strict=True)):
        try:
            items += [(item, shard_key, written) for shard_key, written in shards(key, value)]
        except (Refused, BadHeader) as error:
            logger.error("%s: %s", key, error)
    return write_items(store, items, results, config, upsert)


def check_groups(keys: Sequence[str], config: Any) -> None:
    if config is not None and config.group_ids is not None and len(config.group_ids) != len(keys):
        raise Refused(f"{len(config.group_ids)} group_ids for {len(keys)} keys: one for each")


def tp_shards(key: str, tensor: Any, tp_size: int, split_dim: int) -> list[tuple[str, Written]]:
    """All shards of a whole tensor, with the keys of a layout that has a tp axis alone."""
    layout = (parallel.AxisSpec("tp", 0, tp_size, split_dim),)
    return all_shards(key, tensor, layout)


def all_shards(key: str, tensor: Any, layout: Layout) -> list[tuple[str, Written]]:
    axis = parallel.tp_axis(layout)
    assert axis is not None
    found = []
    for rank in range(axis.size):
        ranked = parallel.with_tp(layout, rank, axis.size)
        found.append((parallel.shard_key(key, ranked), shard_of(tensor, ranked)))
    return found


def shard_of(tensor: Any, layout: Layout) -> Written:
    """The shard of a whole tensor that ``layout`` describes."""
    if not memory.is_tensor(tensor):
        raise Refused(f"{type(tensor).__name__} is no tensor of torch")
    axis, shape = parallel.tp_axis(layout), memory.shape_of(tensor)
    assert axis is not None
    dim = parallel.check_split(shape, axis.split_dim, axis.size)
    start, extent = parallel.part_of(shape[dim], axis.rank, axis.size)
    part = tensor.narrow(dim, start, extent)
    return Written.of(part, global_shape=shape, axes=parallel.stored_axes(layout, memory.shape_of(part)))


def own_shard(tensor: Any, layout: Layout) -> tuple[Written, tuple[int, ...]]:
    """A tensor that is the shard of a layout with a tp axis alone, and the shape of the whole."""
    axis, shape = layout[0], memory.shape_of(tensor)
    if axis.split_dim is None or axis.split_dim >= len(shape):
        raise Refused(f"split_dim {axis.split_dim} of a tensor with {len(shape)} dimensions")
    whole = (*shape[: axis.split_dim], shape[axis.split_dim] * axis.size, *shape[axis.split_dim + 1 :])
    return Written.of(tensor, global_shape=whole, axes=parallel.stored_axes(layout, shape)), whole


def write_manifest(
    store: Any, key: str, dtype: str, shape: tuple[int, ...], axis: Any, config: Any, upsert: bool
) -> int:
    stored = Manifest(headers.dtype_of(dtype), shape, axis.split_dim, axis.size).encode()
    buffer = (ctypes.c_ubyte * len(stored)).from_buffer_copy(stored)
    codes = store._write_parts([key], [[ctypes.addressof(buffer)]], [[len(stored)]], config, upsert)
    return int(codes[0])


def put_whole(store: Any, key: str, tensor: Any, config: Any, upsert: bool) -> int:
    return write_one(store, key, Written.of(tensor), check_config(config), upsert)


def put_tp(store: Any, key: str, tensor: Any, config: Any, tp_size: int, split_dim: int) -> int:
    if tp_size <= 1:
        return put_whole(store, key, tensor, config, False)
    shards = tp_shards(key, tensor, tp_size, split_dim)
    items = [(0, shard_key, written) for shard_key, written in shards]
    return write_items(store, items, [INVALID_PARAMS], check_config(config), False)[0]


def batch_tp(
    store: Any, keys: Sequence[str], tensors: Sequence[Any], config: Any, tp_size: int, split_dim: int
) -> list[int]:
    check_lens(keys, tensors=tensors)
    check_groups(keys, check_config(config))
    if tp_size <= 1:
        return write_many(store, keys, tensors, config, False)
    shards = functools.partial(tp_shards, tp_size=tp_size, split_dim=split_dim)
    return write_each(store, keys, tensors, shards, config, False)


@dataclass(frozen=True)
class Divided:
    """How a tensor is to be written: as it is, as a shard of a layout, or as the part of a writer."""

    layout: Layout | None = None
    writer: WriterPartition | None = None

    @staticmethod
    def of(parallelism: Any, writer_partition: Any) -> Divided:
        if parallelism is not None and writer_partition is not None:
            raise Refused("a writer_partition or a parallelism, not both")
        if writer_partition is not None:
            return Divided(writer=parallel.writer_partition_of(writer_partition))
        return Divided(layout=None if parallelism is None else parallel.layout_of(parallelism))


def put_divided(store: Any, key: str, tensor: Any, how: Divided, config: Any, upsert: bool) -> int:
    check_config(config)
    if how.writer is not None:
        return put_writer_part(store, key, tensor, how.writer, config, upsert)
    if how.layout is None:
        return put_whole(store, key, tensor, config, upsert)
    if not memory.is_tensor(tensor):
        raise Refused(f"{type(tensor).__name__} is no tensor of torch")
    axis, shard_key = parallel.tp_axis(how.layout), parallel.shard_key(key, how.layout)
    if axis is None:
        axes = parallel.stored_axes(how.layout, memory.shape_of(tensor))
        return write_one(store, shard_key, Written.of(tensor, axes=axes), config, upsert)
    if parallel.is_tp_alone(how.layout):
        written, whole = own_shard(tensor, how.layout)
    else:
        written, whole = shard_of(tensor, how.layout), memory.shape_of(tensor)
    code = write_one(store, shard_key, written, config, upsert)
    if code != 0:
        return code
    dtype = memory.dtype_name(tensor)
    return write_manifest(store, parallel.manifest_key(key), dtype, whole, axis, config, upsert)


def put_writer_part(
    store: Any, key: str, tensor: Any, writer: WriterPartition, config: Any, upsert: bool
) -> int:
    written = shard_of(tensor, writer.layout())
    code = write_one(store, writer.key(key), written, config, upsert)
    if code != 0:
        return code
    dtype, shape = memory.dtype_name(tensor), memory.shape_of(tensor)
    return write_manifest(store, parallel.writer_manifest_key(key), dtype, shape, writer, config, upsert)


def put_divided_from(
    store: Any, key: str, address: int, size: int, how: Divided, config: Any, upsert: bool
) -> int:
    """As :func:`put_divided`, of a tensor object in memory; with a tp axis, all shards of it."""
    check_config(config)
    found, header = memory.object_at(address, size)
    if how == Divided():
        return int(store._write_parts([key], [[address]], [[size]], config, upsert)[0])
    tensor = memory.tensor_over(found, header)
    if how.writer is not None:
        return put_writer_part(store, key, tensor, how.writer, config, upsert)
    assert how.layout is not None
    if parallel.tp_axis(how.layout) is not None:
        items = [(0, shard_key, written) for shard_key, written in all_shards(key, tensor, how.layout)]
        return write_items(store, items, [INVALID_PARAMS], config, upsert)[0]
    written = Written.of(
        tensor, global_shape=header.global_shape, axes=parallel.stored_axes(how.layout, header.shape)
    )
    return write_one(store, parallel.shard_key(key, how.layout), written, config, upsert)


def batch_divided(
    keys: Sequence[str], parallelisms: Any, writer_partitions: Any, config: Any, write: Callable[..., int]
) -> list[int]:
    """Calls ``write(item, how, config)`` for each key; a refused item does not stop the others."""
    check_groups(keys, config)
    wishes = parallelisms if writer_partitions is None else writer_partitions
    if not isinstance(wishes, list) or len(wishes) != len(keys):
        raise Refused("parallelisms and writer_partitions are lists with an entry for each key")
    results = []
    for item, wish in enumerate(wishes):
        try:
            how = Divided.of(wish, None) if writer_partitions is None else Divided.of(None, wish)
            results.append(write(item, how, for_items(config, [item])))
        except (Refused, BadHeader) as error:
            logger.error("%s: %s", keys[item], error)
            results.append(INVALID_PARAMS)
    return results


def batch_from(
    store: Any, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], config: Any, upsert: bool
) -> list[int]:
    check_lens(keys, buffer_ptrs=addresses, sizes=sizes)
    check_groups(keys, check_config(config))
    for address, size in zip(addresses, sizes, strict=True):
        memory.object_at(address, size)
    parts = [[address] for address in addresses], [[size] for size in sizes]
    return list(store._write_parts(keys, *parts, config, upsert)) if keys else []
