"""What the tests of tensors need in place of torch and of a store: both in memory, both small.

The stand-in for torch has numpy arrays inside and only the methods that the package calls. Elements of types
that numpy does not have are kept as integers of the same size.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

_NUMPY = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


class Dtype:
    def __init__(self, name: str) -> None:
        self.name = name
        self.numpy = np.dtype(_NUMPY.get(name, name))

    def __str__(self) -> str:
        return f"torch.{self.name}"


class Tensor:
    """A tensor; the methods are those of torch."""

    is_cuda = False

    def __init__(self, array: Any, dtype: Dtype) -> None:
        assert array.dtype == dtype.numpy
        self.array, self.dtype = array, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array).reshape(self.array.shape), self.dtype)

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        assert 0 <= start <= start + length <= self.array.shape[dim]
        return Tensor(self.array[(slice(None),) * dim + (slice(start, start + length),)], self.dtype)

    def reshape(self, shape: Sequence[int]) -> Tensor:
        return Tensor(self.array.reshape(tuple(shape)), self.dtype)

    def copy_(self, other: Tensor) -> None:
        self.array[...] = other.array

    def equals(self, other: Any) -> bool:
        return (
            isinstance(other, Tensor)
            and other.shape == self.shape
            and other.dtype.name == self.dtype.name
            and bool(np.array_equal(self.array, other.array))
        )


def torch_module(dtypes: Sequence[str]) -> types.ModuleType:
    """A module ``torch`` with these dtypes."""
    module = types.ModuleType("torch")
    module.__version__ = "of the tests"  # type: ignore[attr-defined]
    for name in dtypes:
        setattr(module, name, Dtype(name))

    def empty(shape: Sequence[int], dtype: Dtype) -> Tensor:
        return Tensor(np.empty(tuple(shape), dtype.numpy), dtype)

    def frombuffer(memory: Any, dtype: Dtype, count: int, offset: int) -> Tensor:
        return Tensor(np.frombuffer(memory, dtype.numpy, count, offset), dtype)

    module.empty, module.frombuffer = empty, frombuffer  # type: ignore[attr-defined]
    return module


def arange(module: Any, shape: Sequence[int], dtype: str = "float32", first: int = 0) -> Tensor:
    """A tensor whose elements all differ, as far as its dtype has so many values."""
    chosen = getattr(module, dtype)
    count = int(np.prod(shape, dtype=np.int64))
    array = np.arange(first, first + count).astype(chosen.numpy)
    return Tensor(array.reshape(tuple(shape)), chosen)


class Config:
    """The attributes of ``ReplicateConfig`` that the tensor methods use."""

    def __init__(self) -> None:
        self.replica_num = 1
        self.preferred_segments: list[str] = []
        self.group_ids: list[str] | None = None

    def _copy(self) -> Config:
        copied = Config()
        copied.__dict__.update(self.__dict__)
        return copied


class Store:
    """Objects in a dict, with the methods that the tensor functions call and the native store's codes."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_ready = True
        self.fails: dict[str, int] = {}
        self.groups: list[list[str] | None] = []
        self.requests = 0

    def _is_ready(self) -> bool:
        return self.is_ready

    def _write_parts(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], config: Any, upsert: bool
    ) -> list[int]:
        self.requests += 1
        self.groups.append(None if config is None else config.group_ids)
        codes = []
        for key, starts, lengths in zip(keys, addresses, sizes, strict=True):
            parts = [ctypes.string_at(*part) for part in zip(starts, lengths, strict=True)]
            if key in self.fails:
                codes.append(self.fails[key])
                continue
            if upsert or key not in self.objects:
                self.objects[key] = b"".join(parts)
            codes.append(0)
        return codes

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self.objects.get(key, b"")

    def get_buffer(self, key: str) -> bytearray | None:
        return bytearray(self.get(key)) or None

    def batch_get_buffer(self, keys: list[str]) -> list[bytearray | None]:
        return [self.get_buffer(key) for key in keys]

    def get_into(self, key: str, address: int, size: int) -> int:
        return self.batch_get_into([key], [address], [size])[0]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.requests += 1
        lengths = []
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            found = self.objects.get(key)
            if found is None or len(found) > size:
                lengths.append(-704 if found is None else -600)
                continue
            ctypes.memmove(address, found, len(found))
            lengths.append(len(found))
        return lengths

    def get_into_ranges(
        self,
        addresses: list[int],
        keys: list[list[str]],
        places: list[list[list[int]]],
        offsets: list[list[list[int]]],
        sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        self.requests += 1
        answers = []
        for item, address in enumerate(addresses):
            ((key,), ((place,),), ((offset,),), ((size,),)) = (
                keys[item],
                places[item],
                offsets[item],
                sizes[item],
            )
            found = self.objects.get(key)
            if found is None or offset + size > len(found):
                answers.append([[-704 if found is None else -600]])
                continue
            ctypes.memmove(address + place, found[offset : offset + size], size)
            answers.append([[size]])
        return answers
