"""The tensor methods of ``MooncakeDistributedStore``. The native class checks the types and calls these.

Each function has the name of its method; ``store`` is the object whose method was called. An argument that
cannot be carried out is logged, and the answer is the code for invalid arguments, or ``None`` in place of a
tensor. A read of an object that is not there, or is no tensor, is ``None``, too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import header as headers
from . import memory, read, write
from .header import HEADER_BYTES, BadHeader
from .memory import Written
from .parallel import Refused

logger = logging.getLogger("mooncake.store")

FILE_NOT_FOUND = -1100

_F = TypeVar("_F", bound=Callable[..., Any])


def _answering(on_refusal: Callable[[Any], Any]) -> Callable[[_F], _F]:
    """Answers with ``on_refusal(key or keys)`` when the store is not set up or an argument is refused."""

    def decorate(method: _F) -> _F:
        @functools.wraps(method)
        def guarded(store: Any, keys: Any, *arguments: Any) -> Any:
            if not store._is_ready():
                logger.error("%s: the store is not set up", method.__name__)
                return on_refusal(keys)
            try:
                return method(store, keys, *arguments)
            except (Refused, BadHeader) as error:
                logger.error("%s: %s", method.__name__, error)
                return on_refusal(keys)

        return guarded  # type: ignore[return-value]

    return decorate


_code = _answering(lambda _: write.INVALID_PARAMS)
_codes = _answering(lambda keys: [write.INVALID_PARAMS] * len(keys))
_tensor = _answering(lambda _: None)
_tensors = _answering(lambda keys: [None] * len(keys))


@_code
def put_tensor(store: Any, key: str, tensor: Any) -> int:
    return write.put_whole(store, key, tensor, None, False)


@_code
def pub_tensor(store: Any, key: str, tensor: Any, config: Any) -> int:
    return write.put_whole(store, key, tensor, config, False)


@_code
def upsert_tensor(store: Any, key: str, tensor: Any) -> int:
    return write.put_whole(store, key, tensor, None, True)


@_code
def upsert_pub_tensor(store: Any, key: str, tensor: Any, config: Any) -> int:
    return write.put_whole(store, key, tensor, config, True)


@_code
def put_tensor_with_tp(store: Any, key: str, tensor: Any, tp_rank: int, tp_size: int, split_dim: int) -> int:
    return write.put_tp(store, key, tensor, None, tp_size, split_dim)


@_code
def pub_tensor_with_tp(
    store: Any, key: str, tensor: Any, config: Any, tp_rank: int, tp_size: int, split_dim: int
) -> int:
    return write.put_tp(store, key, tensor, config, tp_size, split_dim)


@_codes
def batch_put_tensor(store: Any, keys: list[str], tensors: list[Any]) -> list[int]:
    return write.write_many(store, keys, tensors, None, False)


@_codes
def batch_pub_tensor(store: Any, keys: list[str], tensors: list[Any], config: Any) -> list[int]:
    return write.write_many(store, keys, tensors, write.check_config(config), False)


@_codes
def batch_upsert_tensor(store: Any, keys: list[str], tensors: list[Any]) -> list[int]:
    return write.write_many(store, keys, tensors, None, True)


@_codes
def batch_upsert_pub_tensor(store: Any, keys: list[str], tensors: list[Any], config: Any) -> list[int]:
    return write.write_many(store, keys, tensors, write.check_config(config), True)


@_codes
def batch_put_tensor_with_tp(
    store: Any, keys: list[str], tensors: list[Any], tp_rank: int, tp_size: int, split_dim: int
) -> list[int]:
    return write.batch_tp(store, keys, tensors, None, tp_size, split_dim)


@_codes
def batch_pub_tensor_with_tp(
    store: Any, keys: list[str], tensors: list[Any], config: Any, tp_rank: int, tp_size: int, split_dim: int
) -> list[int]:
    return write.batch_tp(store, keys, tensors, config, tp_size, split_dim)


@_code
def put_tensor_from(store: Any, key: str, address: int, size: int) -> int:
    return write.put_divided_from(store, key, address, size, write.Divided(), None, False)


@_code
def upsert_tensor_from(store: Any, key: str, address: int, size: int) -> int:
    return write.put_divided_from(store, key, address, size, write.Divided(), None, True)


@_codes
def batch_put_tensor_from(store: Any, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
    return write.batch_from(store, keys, addresses, sizes, None, False)


@_codes
def batch_upsert_tensor_from(
    store: Any, keys: list[str], addresses: list[int], sizes: list[int]
) -> list[int]:
    return write.batch_from(store, keys, addresses, sizes, None, True)


@_code
def put_tensor_with_tp_from(
    store: Any, key: str, address: int, size: int, tp_rank: int, tp_size: int, split_dim: int
) -> int:
    if tp_size <= 1:
        return write.put_divided_from(store, key, address, size, write.Divided(), None, False)
    tensor = memory.tensor_over(*memory.object_at(address, size))
    return write.put_tp(store, key, tensor, None, tp_size, split_dim)


@_codes
def batch_put_tensor_with_tp_from(
    store: Any,
    keys: list[str],
    addresses: list[int],
    sizes: list[int],
    tp_rank: int,
    tp_size: int,
    split_dim: int,
) -> list[int]:
    if tp_size <= 1:
        return write.batch_from(store, keys, addresses, sizes, None, False)
    write.check_lens(keys, buffer_ptrs=addresses, sizes=sizes)

    def shards(key: str, place: tuple[int, int]) -> list[tuple[str, Written]]:
        return write.tp_shards(key, memory.tensor_over(*memory.object_at(*place)), tp_size, split_dim)

    return write.write_each(store, keys, list(zip(addresses, sizes, strict=True)), shards, None, False)


def _with_parallelism(upsert: bool) -> tuple[Callable[..., Any], ...]:
    """The four methods that write by layouts, to put or to upsert."""
    verb = "upsert" if upsert else "put"

    def one(store: Any, key: str, tensor: Any, parallelism: Any, config: Any, writer_partition: Any) -> int:
        return write.put_divided(
            store, key, tensor, write.Divided.of(parallelism, writer_partition), config, upsert
        )

    def one_from(
        store: Any, key: str, address: int, size: int, parallelism: Any, config: Any, writer_partition: Any
    ) -> int:
        how = write.Divided.of(parallelism, writer_partition)
        return write.put_divided_from(store, key, address, size, how, config, upsert)

    def many(
        store: Any,
        keys: list[str],
        tensors: list[Any],
        parallelisms: Any,
        config: Any,
        writer_partitions: Any,
    ) -> list[int]:
        write.check_lens(keys, tensors=tensors)
        if parallelisms is None and writer_partitions is None:
            return write.write_many(store, keys, tensors, write.check_config(config), upsert)
        _check_both(parallelisms, writer_partitions)

        def write_item(item: int, how: write.Divided, config: Any) -> int:
            return write.put_divided(store, keys[item], tensors[item], how, config, upsert)

        return write.batch_divided(keys, parallelisms, writer_partitions, config, write_item)

    def many_from(
        store: Any,
        keys: list[str],
        addresses: list[int],
        sizes: list[int],
        parallelisms: Any,
        config: Any,
        writer_partitions: Any,
    ) -> list[int]:
        write.check_lens(keys, buffer_ptrs=addresses, sizes=sizes)
        if parallelisms is None and writer_partitions is None:
            return write.batch_from(store, keys, addresses, sizes, config, upsert)
        _check_both(parallelisms, writer_partitions)

        def write_item(item: int, how: write.Divided, config: Any) -> int:
            return write.put_divided_from(
                store, keys[item], addresses[item], sizes[item], how, config, upsert
            )

        return write.batch_divided(keys, parallelisms, writer_partitions, config, write_item)

    one.__name__, one_from.__name__ = (
        f"{verb}_tensor_with_parallelism",
        f"{verb}_tensor_with_parallelism_from",
    )
    many.__name__, many_from.__name__ = f"batch_{one.__name__}", f"batch_{one_from.__name__}"
    return _code(one), _code(one_from), _codes(many), _codes(many_from)


def _check_both(parallelisms: Any, writer_partitions: Any) -> None:
    if parallelisms is not None and writer_partitions is not None:
        raise Refused("writer_partitions or parallelisms, not both")


(
    put_tensor_with_parallelism,
    put_tensor_with_parallelism_from,
    batch_put_tensor_with_parallelism,
    batch_put_tensor_with_parallelism_from,
) = _with_parallelism(upsert=False)
(
    upsert_tensor_with_parallelism,
    upsert_tensor_with_parallelism_from,
    batch_upsert_tensor_with_parallelism,
    batch_upsert_tensor_with_parallelism_from,
) = _with_parallelism(upsert=True)


@_tensor
def get_tensor(store: Any, key: str) -> Any:
    return read.from_handle(key, store.get_buffer(key))


@_tensors
def batch_get_tensor(store: Any, keys: list[str]) -> list[Any]:
    return [
        read.from_handle(key, handle) for key, handle in zip(keys, store.batch_get_buffer(keys), strict=True)
    ]


@_tensor
def get_tensor_with_tp(store: Any, key: str, tp_rank: int, tp_size: int, split_dim: int) -> Any:
    (read_key,) = read.tp_keys([key], tp_rank, tp_size)
    return read.from_handle(read_key, store.get_buffer(read_key))


@_tensors
def batch_get_tensor_with_tp(store: Any, keys: list[str], tp_rank: int, tp_size: int) -> list[Any]:
    read_keys = read.tp_keys(keys, tp_rank, tp_size)
    handles = store.batch_get_buffer(read_keys)
    return [read.from_handle(key, handle) for key, handle in zip(read_keys, handles, strict=True)]


@_tensor
def get_tensor_into(store: Any, key: str, address: int, size: int) -> Any:
    memory.at(address, size)
    return read.tensor_in(key, address, store.get_into(key, address, size))


# Lists that do not fit together are answered with a list of codes, as by the methods that write.
@_codes
def batch_get_tensor_into(store: Any, keys: list[str], addresses: list[int], sizes: list[int]) -> list[Any]:
    write.check_lens(keys, buffer_ptrs=addresses, sizes=sizes)
    for address, size in zip(addresses, sizes, strict=True):
        memory.at(address, size)
    lengths = store.batch_get_into(keys, addresses, sizes)
    return [read.tensor_in(*item) for item in zip(keys, addresses, lengths, strict=True)]


@_tensor
def get_tensor_with_tp_into(
    store: Any, key: str, address: int, size: int, tp_rank: int, tp_size: int, split_dim: int
) -> Any:
    (read_key,) = read.tp_keys([key], tp_rank, tp_size)
    return get_tensor_into(store, read_key, address, size)


@_tensors
def batch_get_tensor_with_tp_into(
    store: Any, keys: list[str], addresses: list[int], sizes: list[int], tp_rank: int, tp_size: int
) -> Any:
    return batch_get_tensor_into(store, read.tp_keys(keys, tp_rank, tp_size), addresses, sizes)


@_tensor
def get_tensor_with_parallelism(store: Any, key: str, target: Any) -> Any:
    return read.get_target(store, key, target)


@_tensors
def batch_get_tensor_with_parallelism(store: Any, keys: list[str], targets: Any) -> list[Any]:
    if targets is None:
        return batch_get_tensor(store, keys)
    return [
        get_tensor_with_parallelism(store, *item) for item in zip(keys, _listed(keys, targets), strict=True)
    ]


@_tensor
def get_tensor_with_parallelism_into(store: Any, key: str, address: int, size: int, target: Any) -> Any:
    memory.at(address, size)
    return read.get_target_into(store, key, address, size, target)


@_tensors
def batch_get_tensor_with_parallelism_into(
    store: Any, keys: list[str], addresses: list[int], sizes: list[int], targets: Any
) -> list[Any]:
    write.check_lens(keys, buffer_ptrs=addresses, sizes=sizes)
    wanted = [None] * len(keys) if targets is None else _listed(keys, targets)
    items = zip(keys, addresses, sizes, wanted, strict=True)
    return [get_tensor_with_parallelism_into(store, *item) for item in items]


def _listed(keys: Sequence[str], targets: Any) -> list[Any]:
    if not isinstance(targets, list):
        raise Refused("targets is a list with an entry for each key")
    write.check_lens(keys, targets=targets)
    return targets


@_code
def get_tensor_into_cuda(store: Any, key: str, tensor: Any) -> int:
    raise Refused("reads into the memory of a CUDA device need a build with CUDA; use get_tensor and copy")


@_codes
def batch_get_tensor_into_cuda(store: Any, keys: list[str], tensors: list[Any]) -> list[int]:
    raise Refused(
        "reads into the memory of a CUDA device need a build with CUDA; use batch_get_tensor and copy"
    )


@_code
def save_tensor_to_safetensor(store: Any, key: str, file_name: Any) -> int:
    tensor = get_tensor(store, key)
    if tensor is None:
        return FILE_NOT_FOUND
    path = key if file_name is None else file_name
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise Refused(f"{path}: safetensors is not installed: {error}") from error
    try:
        save_file({key: tensor}, path)
    except (SafetensorError, OSError, ValueError) as error:
        raise Refused(f"{path}: {error}") from error
    return 0


@_tensor
def load_tensor_from_safetensor(store: Any, key: Any, file_name: str) -> Any:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise Refused(f"{file_name}: safetensors is not installed: {error}") from error
    try:
        loaded = load_file(file_name)
    except (SafetensorError, OSError, ValueError) as error:
        raise Refused(f"{file_name}: {error}") from error
    if not loaded:
        raise Refused(f"{file_name} has no tensors")
    chosen = key if key in loaded else next(iter(loaded))
    if key is not None and chosen != key:
        logger.warning("%s has no tensor %r; its first, %r, is used", file_name, key, chosen)
    code = put_tensor(store, file_name if key is None else key, loaded[chosen])
    return loaded[chosen] if code == 0 else None


def serialize_tensor(tensor: Any) -> tuple[bytes, int, int, Any]:
    """The header of a tensor, the address and size of its elements, and the object that keeps them alive."""
    try:
        written = Written.of(tensor)
    except (Refused, BadHeader) as error:
        raise ValueError(f"unsupported tensor for Mooncake tensor serialization: {error}") from error
    return bytes(written.header), written.address, written.body_bytes, written.body


def deserialize_tensor(payload: bytes) -> Any:
    """The tensor in the bytes of a header and its elements."""
    try:
        owned = bytearray(payload)
        return memory.tensor_over(owned, headers.decode(memoryview(owned)[:HEADER_BYTES], len(owned)))
    except (Refused, BadHeader) as error:
        raise ValueError(f"invalid serialized Mooncake tensor payload: {error}") from error
