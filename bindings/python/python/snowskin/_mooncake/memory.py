"""Tensors as bytes: what of a tensor is written, and tensors over bytes that were read.

torch is needed to make a tensor, not to write one: a tensor is any object whose class has ``Tensor`` in its
name and that has torch's methods.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from . import header as headers
from .header import HEADER_BYTES, Axis, Header
from .parallel import Refused

_TORCH_PREFIX = "torch."


def torch() -> Any:
    """The module torch. Raises ``ImportError`` with the remedy where it is not installed."""
    try:
        import torch as module
    except ImportError as error:
        raise ImportError(
            f"tensors of the store are tensors of torch, which cannot be imported: {error}"
        ) from error
    return module


def is_tensor(value: object) -> bool:
    return "Tensor" in type(value).__name__


@dataclass(frozen=True)
class Written:
    """One tensor that is to be stored: its header and its elements, at addresses until this is dropped."""

    header: Any
    body: Any
    body_bytes: int

    @staticmethod
    def of(
        tensor: Any, *, global_shape: Sequence[int] | None = None, axes: Sequence[Axis] | None = None
    ) -> Written:
        """The tensor, contiguous and in the memory of the host; a copy is made where it is not."""
        if not is_tensor(tensor):
            raise Refused(f"{type(tensor).__name__} is no tensor of torch")
        body = tensor.contiguous()
        if getattr(body, "is_cuda", False) or getattr(getattr(body, "device", None), "type", "cpu") != "cpu":
            body = body.cpu()
        encoded = headers.encode(dtype_name(body), shape_of(body), global_shape=global_shape, axes=axes)
        size = int(body.numel()) * int(body.element_size())
        return Written((ctypes.c_ubyte * HEADER_BYTES).from_buffer_copy(encoded), body, size)

    @property
    def address(self) -> int:
        """Where the elements are."""
        return int(self.body.data_ptr())

    def addresses(self) -> list[int]:
        header = ctypes.addressof(self.header)
        return [header, self.address] if self.body_bytes else [header]

    def sizes(self) -> list[int]:
        return [HEADER_BYTES, self.body_bytes] if self.body_bytes else [HEADER_BYTES]


def dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix(_TORCH_PREFIX)


def shape_of(tensor: Any) -> tuple[int, ...]:
    return tuple(int(length) for length in tensor.shape)


def dtype_in_torch(name: str) -> Any:
    dtype = getattr(torch(), name, None)
    if dtype is None:
        raise Refused(f"torch {torch().__version__} has no dtype {name}")
    return dtype


def empty(dtype: str, shape: Sequence[int]) -> Any:
    """A new tensor whose elements are not set."""
    return torch().empty(tuple(shape), dtype=dtype_in_torch(dtype))


def tensor_over(memory: Any, header: Header) -> Any:
    """The tensor in ``memory``, which has the header at its beginning and lives as long as the tensor."""
    dtype = dtype_in_torch(header.dtype.name)
    if header.data_bytes == 0:
        return torch().empty(header.shape, dtype=dtype)
    elements = prod(header.shape)
    return (
        torch()
        .frombuffer(memory, dtype=dtype, count=elements, offset=header.data_offset)
        .reshape(header.shape)
    )


def at(address: int, size: int) -> Any:
    """The ``size`` bytes at ``address``, as a buffer. The caller keeps them mapped."""
    if address == 0 or size < 0:
        raise Refused(f"{size} bytes at address {address:#x}")
    return (ctypes.c_ubyte * size).from_address(address)


def object_at(address: int, size: int) -> tuple[Any, Header]:
    """The tensor object of ``size`` bytes at ``address``: its bytes and its header, checked."""
    if size < HEADER_BYTES:
        raise Refused(f"{size} bytes are no tensor object: a header has {HEADER_BYTES}")
    memory = at(address, size)
    return memory, headers.decode(memory, size)
