"""Memory of a GPU that does not exist: the fake driver of te-gpu, through ctypes. A CPU that touches the
memory faults."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_CUDA = 2


def library() -> Path:
    """The fake driver; the test is skipped where it was not built."""
    named = os.environ.get("SNOWSKIN_FAKE_CUDA")
    target = os.environ.get("CARGO_TARGET_DIR", Path(__file__).resolve().parents[3] / "target")
    found = Path(named) if named else Path(target) / "debug" / "examples" / "libcuda.so"
    if not found.exists():
        pytest.skip(f"{found} was not built: run `cargo build -p te-gpu --examples`, or set SNOWSKIN_FAKE_CUDA")
    return found


class Memory:
    """Memory of the fake device."""

    def __init__(self, nbytes: int) -> None:
        self.driver = ctypes.CDLL(str(library()))
        self.driver.fake_allocate.restype = ctypes.c_uint64
        self.driver.fake_allocate.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
        for name in ("fake_peek", "fake_poke"):
            getattr(self.driver, name).argtypes = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
        self.driver.fake_free.argtypes = [ctypes.c_uint64]
        self.nbytes = nbytes
        self.addr: int = self.driver.fake_allocate(0, nbytes, 0)
        assert self.addr

    def write(self, offset: int, data: bytes) -> None:
        assert self.driver.fake_poke(self.addr + offset, data, len(data)) == 0

    def read(self, offset: int, nbytes: int) -> bytes:
        out = ctypes.create_string_buffer(nbytes)
        assert self.driver.fake_peek(self.addr + offset, out, nbytes) == 0
        return out.raw

    def free(self) -> None:
        assert self.driver.fake_free(self.addr) == 0


class CudaArray:
    """An array with `__cuda_array_interface__`."""

    def __init__(self, addr: int, shape: Sequence[int], **entries: Any) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(shape),
            "typestr": "|u1",
            "data": (addr, False),
            "version": 3,
            **entries,
        }


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class Tensor:
    """A tensor with `__dlpack__`, of bytes."""

    def __init__(
        self, addr: int, shape: Sequence[int], *, strides: Sequence[int] | None = None, kind: int = _CUDA
    ) -> None:
        self.kind = kind
        self.streams: list[Any] = []
        self.deleted = 0
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self._managed = _Managed()
        tensor = self._managed.tensor
        tensor.data, tensor.device, tensor.ndim = addr, _Device(kind, 0), len(shape)
        tensor.dtype, tensor.shape = _Type(1, 8, 1), self._shape
        if self._strides is not None:
            tensor.strides = self._strides
        self._managed.deleter = _Deleter(self._delete)

    def _delete(self, _managed: int) -> None:
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.kind, 0)

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.streams.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._managed), b"dltensor", None)
