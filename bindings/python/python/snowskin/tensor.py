"""Tensors in a store, with type and shape.

An object holds a header of 304 bytes, which is that of Mooncake's tensors, and the elements in C order.

>>> _ = snowskin.tensor.put(store, "weights", np.arange(6, dtype="f4").reshape(2, 3))
>>> snowskin.tensor.get(store, "weights")
array([[0., 1., 2.],
       [3., 4., 5.]], dtype=float32)

Tensors of NumPy and torch are stored without a copy here, and read as views of a lease: the memory is given
back when the last view is gone. ``torch`` is imported only where it is asked for. All functions also take a
:class:`snowskin.aio.Store`, and are then to be awaited.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

from . import aio
from ._errors import InvalidArgument
from ._mooncake import header as _header
from ._native import Lease, PutResult, Store
from ._results import Results

if TYPE_CHECKING:
    from ._types import Buffer, Key

__all__ = ["get", "get_many", "pack", "put", "unpack"]

#: The names that NumPy uses where they differ from those in the header.
_NUMPY_NAMES = {"bool": "bool_"}
#: Types that NumPy has only with the package ``ml_dtypes``.
_EXTENSIONS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def pack(tensor: Any) -> list[Buffer]:
    """The header and the elements of a tensor, as two buffers: a value for ``put`` and ``put_many``.

    >>> [len(memoryview(part).cast("B")) for part in snowskin.tensor.pack(np.zeros((2, 2)))]
    [304, 32]

    ``tensor`` is an array of NumPy, a tensor of torch in host memory, or another object with ``__dlpack__``.

    Raises :exc:`InvalidArgument` for a type without a number in the header, for elements that are not
    contiguous in C order, and for tensors on a device.
    """
    name, shape, elements = _parts(tensor)
    try:
        head = _header.encode(name, shape)
    except _header.BadHeader as error:
        raise InvalidArgument(str(error), code="invalid_argument") from error
    return [head, elements]


def unpack(lease: Lease, library: Literal["numpy", "torch"] = "numpy") -> Any:
    """The tensor in a lease, as a view that keeps the lease's memory.

    Raises :exc:`InvalidArgument` with the code ``not_a_tensor`` when the object has no header, and
    ``unknown_dtype`` when the library lacks the type.
    """
    try:
        head = _header.decode(memoryview(lease)[: _header.HEADER_BYTES], len(lease))
    except _header.BadHeader as error:
        raise InvalidArgument(str(error), code="not_a_tensor", key=lease.key) from error
    name, shape, offset = head.dtype.name, head.shape, head.data_offset
    if library == "torch":
        import torch

        dtype = getattr(torch, name, None)
        if dtype is None:
            raise _unknown(lease, name, "this release of torch lacks it")
        if head.data_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        # As bytes, because DLPack's converters know fewer types than torch.
        return torch.from_dlpack(lease.tensor("uint8", [head.data_bytes], offset)).view(dtype).reshape(shape)
    if library != "numpy":
        raise InvalidArgument(f"library is 'numpy' or 'torch', not {library!r}", code="invalid_argument")
    dtype = _numpy_dtype(lease, name)
    if head.data_bytes == 0:
        import numpy

        return numpy.empty(shape, dtype=dtype)
    return lease.numpy(dtype, shape, offset)


@overload
def put(store: Store, key: Key, tensor: Any, **options: Any) -> PutResult: ...
@overload
def put(store: aio.Store, key: Key, tensor: Any, **options: Any) -> Awaitable[PutResult]: ...
def put(store: Store | aio.Store, key: Key, tensor: Any, **options: Any) -> Any:
    """Stores a tensor. ``options`` are those of :meth:`Store.put`. See :func:`pack` for what can be
    stored."""
    return store.put(key, pack(tensor), **options)


@overload
def get(store: Store, key: Key, *, library: Literal["numpy", "torch"] = "numpy") -> Any: ...
@overload
def get(store: aio.Store, key: Key, *, library: Literal["numpy", "torch"] = "numpy") -> Awaitable[Any]: ...
def get(store: Store | aio.Store, key: Key, *, library: Literal["numpy", "torch"] = "numpy") -> Any:
    """Reads a tensor. ``None`` is a miss. See :func:`unpack` for what is returned."""
    if isinstance(store, aio.Store):
        return _get_async(store, key, library)
    lease = store.get(key)
    return None if lease is None else unpack(lease, library)


@overload
def get_many(
    store: Store, keys: Iterable[Key], *, library: Literal["numpy", "torch"] = "numpy"
) -> Results[Any]: ...
@overload
def get_many(
    store: aio.Store, keys: Iterable[Key], *, library: Literal["numpy", "torch"] = "numpy"
) -> Awaitable[Results[Any]]: ...
def get_many(
    store: Store | aio.Store, keys: Iterable[Key], *, library: Literal["numpy", "torch"] = "numpy"
) -> Any:
    """Reads many tensors: one per key, and ``None`` for each miss. An object without a header is an error of
    its item. (Stores many: ``store.put_many({key: pack(tensor), …})``.)"""
    if isinstance(store, aio.Store):
        return _get_many_async(store, keys, library)
    return _unpacked(store.get_many(keys), library)


async def _get_async(store: aio.Store, key: Key, library: Literal["numpy", "torch"]) -> Any:
    lease = await store.get(key)
    return None if lease is None else unpack(lease, library)


async def _get_many_async(
    store: aio.Store, keys: Iterable[Key], library: Literal["numpy", "torch"]
) -> Results[Any]:
    return _unpacked(await store.get_many(keys), library)


def _unpacked(leases: Results[Lease | None], library: Literal["numpy", "torch"]) -> Results[Any]:
    values: list[Any] = []
    errors = dict(leases.errors)
    for index, lease in enumerate(leases):
        try:
            values.append(None if lease is None else unpack(lease, library))
        except InvalidArgument as error:
            errors[index] = error
            values.append(None)
    return Results(values, errors)


def _parts(tensor: Any) -> tuple[str, tuple[int, ...], Any]:
    """Name of the type, shape, and the elements as a buffer of bytes."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if tensor.device.type != "cpu":
            raise InvalidArgument(
                f"the tensor is on {tensor.device}: copy it to host memory first, with .cpu()",
                code="invalid_argument",
            )
        if not tensor.is_contiguous():
            raise _strided()
        flat = tensor.detach().reshape(-1)
        # As bytes, because DLPack's converters know fewer types than torch.
        elements = flat.view(torch.uint8) if flat.numel() else b""
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), elements
    import numpy

    array = tensor if isinstance(tensor, numpy.ndarray) else numpy.from_dlpack(tensor)
    if array.dtype.byteorder == ">":
        raise InvalidArgument(
            "the elements are big-endian: store them in native order", code="invalid_argument"
        )
    if not array.flags.c_contiguous:
        raise _strided()
    # As bytes, because the buffer protocol lacks the types of ml_dtypes.
    elements = array.reshape(-1).view("u1") if array.size else b""
    return array.dtype.name, array.shape, elements


def _numpy_dtype(lease: Lease, name: str) -> Any:
    import numpy

    if name not in _EXTENSIONS:
        return numpy.dtype(_NUMPY_NAMES.get(name, name))
    try:
        import ml_dtypes
    except ImportError:
        raise _unknown(
            lease, name, "NumPy has it with the package ml_dtypes; or use library='torch'"
        ) from None
    return numpy.dtype(getattr(ml_dtypes, name))


def _unknown(lease: Lease, name: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"the elements are {name}: {why}", code="unknown_dtype", key=lease.key)


def _strided() -> InvalidArgument:
    return InvalidArgument(
        "the tensor is not contiguous in C order: copy it, with .contiguous() or numpy.ascontiguousarray",
        code="invalid_argument",
    )
