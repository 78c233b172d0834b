"""The 304 bytes in front of a stored tensor, and the 96 bytes of a shard manifest. Little endian.

====== ============ ======================================================================================
Offset Type         Field of a header
====== ============ ======================================================================================
0      u32          magic 0x4D4F4F4E
4      u16, u16     version 1, header size 304
8      i32          dtype, see :data:`DTYPES`
12     i32          number of dimensions, 0 to 8
16     u32, u32     layout 0 whole, 1 shard; reserved
24     u64, u64     offset and length of the data in the object, bytes
40     i64[8]       shape of the whole tensor, -1 for dimensions that it does not have
104    i64[8]       shape of the tensor that is stored here
168    u32, u32     number of axes, 0 to 4; reserved
176    4 x 32 bytes i32 kind, i32 index, i32 rank, i32 count, i32 split dimension or -1, i32 expert or stage,
                    i64 length of the split dimension here
====== ============ ======================================================================================

A manifest is {u32 magic 0x574D414E, u16 version 1, u16 size 96, i32 dtype, i32 dimensions, i32 split
dimension, i32 shards, i32 reserved, 4 bytes of padding, i64[8] shape of the whole tensor}.

The formats are those of Mooncake at 3b5a5941 (mooncake-integration/integration_utils.h:25-43, 171-226,
308-399 and store/store_py_internal.h:41-55, 170-245). Nothing here needs numpy or torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from math import prod
from typing import NamedTuple

HEADER_BYTES = 304
MANIFEST_BYTES = 96
DIMS_MAX = 8
AXES_MAX = 4

_MAGIC = 0x4D4F4F4E
_MANIFEST_MAGIC = 0x574D414E
_VERSION = 1
_WHOLE, _SHARD = 0, 1
_ABSENT = -1
_LEN_MAX = 2**63 - 1

_FIXED = struct.Struct("<IHHiiIIQQ")
_SHAPE = struct.Struct("<8q")
_AXES = struct.Struct("<II")
_AXIS = struct.Struct("<iiiiiiq")
_MANIFEST = struct.Struct("<IHHiiiii4x")

KINDS = ("dp", "tp", "ep", "pp", "reserved")


class Dtype(NamedTuple):
    """A type of elements: its number in the header, its name in torch, and its size in bytes."""

    code: int
    name: str
    itemsize: int


DTYPES = tuple(
    Dtype(code, name, itemsize)
    for code, (name, itemsize) in enumerate(
        [
            ("float32", 4),
            ("float64", 8),
            ("int8", 1),
            ("uint8", 1),
            ("int16", 2),
            ("uint16", 2),
            ("int32", 4),
            ("uint32", 4),
            ("int64", 8),
            ("uint64", 8),
            ("bool", 1),
            ("float16", 2),
            ("bfloat16", 2),
            ("float8_e4m3fn", 1),
            ("float8_e5m2", 1),
        ]
    )
)
_BY_NAME = {dtype.name: dtype for dtype in DTYPES}


class BadHeader(ValueError):
    """Bytes that are no header or no manifest, or values that none can have."""


def dtype_of(name: str) -> Dtype:
    """The type with this name in torch and numpy, such as ``float32`` or ``bfloat16``."""
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise BadHeader(f"no stored tensor can have the dtype {name!r}; there are {', '.join(_BY_NAME)}")
    return dtype


@dataclass(frozen=True)
class Axis:
    """One way in which a tensor is divided. ``split_dim`` is -1 where no dimension is divided by it.

    ``extra`` is the expert of an ``ep`` axis and the stage of a ``pp`` axis; ``extent`` is the length of the
    divided dimension in this shard.
    """

    kind: int
    index: int
    rank: int
    count: int
    split_dim: int = -1
    extra: int = 0
    extent: int = 0


@dataclass(frozen=True)
class Header:
    """What a header says. ``shape`` is that of the stored tensor, ``global_shape`` that of the whole one."""

    dtype: Dtype
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    is_shard: bool = False
    axes: tuple[Axis, ...] = ()
    data_offset: int = HEADER_BYTES
    data_bytes: int = field(default=0)

    @property
    def object_bytes(self) -> int:
        """The size of the object that has this header."""
        return self.data_offset + self.data_bytes

    def axis(self, kind: str) -> Axis | None:
        """The axis of this kind (``dp``, ``tp``, ``ep``, ``pp``), if there is one."""
        return next((axis for axis in self.axes if KINDS[axis.kind] == kind), None)


def encode(
    dtype: str,
    shape: Sequence[int],
    *,
    global_shape: Sequence[int] | None = None,
    axes: Iterable[Axis] | None = None,
) -> bytes:
    """The header of a tensor of ``shape``; with ``axes``, of a shard of a tensor of ``global_shape``.

    Raises :class:`BadHeader` for a dtype without a number, more than 8 dimensions or 4 axes, and lengths that
    are negative or exceed 63 bits together.
    """
    known = dtype_of(dtype)
    chosen = () if axes is None else tuple(axes)
    header = Header(
        known,
        tuple(shape),
        tuple(shape if global_shape is None else global_shape),
        axes is not None,
        chosen,
        data_bytes=_data_bytes(known, shape),
    )
    _check(header)
    return b"".join(
        [
            _FIXED.pack(
                _MAGIC,
                _VERSION,
                HEADER_BYTES,
                known.code,
                len(header.shape),
                _SHARD if header.is_shard else _WHOLE,
                0,
                HEADER_BYTES,
                header.data_bytes,
            ),
            _pack_shape(header.global_shape),
            _pack_shape(header.shape),
            _AXES.pack(len(chosen), 0),
            *(_AXIS.pack(*astuple(axis)) for axis in chosen),
            bytes(_AXIS.size * (AXES_MAX - len(chosen))),
        ]
    )


def decode(prefix: bytes | bytearray | memoryview, object_bytes: int | None = None) -> Header:
    """The header at the beginning of ``prefix``.

    With ``object_bytes``, the size of the whole object, a header that describes another size is refused.

    Raises :class:`BadHeader`, which names the field that is wrong.
    """
    view = memoryview(prefix).cast("B")
    if len(view) < HEADER_BYTES:
        raise BadHeader(f"{len(view)} bytes are no tensor: a header has {HEADER_BYTES}")
    magic, version, size, code, ndim, layout, _, data_offset, data_bytes = _FIXED.unpack_from(view)
    if (magic, version, size) != (_MAGIC, _VERSION, HEADER_BYTES):
        raise BadHeader(f"no tensor header: magic {magic:#x}, version {version}, size {size}")
    if not 0 <= code < len(DTYPES):
        raise BadHeader(f"dtype {code} is not known")
    if not 0 <= ndim <= DIMS_MAX or layout > _SHARD:
        raise BadHeader(f"{ndim} dimensions (at most {DIMS_MAX}) in layout {layout} (0 or 1)")
    axis_count, _ = _AXES.unpack_from(view, 168)
    if axis_count > AXES_MAX:
        raise BadHeader(f"{axis_count} axes; there can be {AXES_MAX}")
    axes = tuple(Axis(*_AXIS.unpack_from(view, 176 + _AXIS.size * index)) for index in range(axis_count))
    header = Header(
        DTYPES[code],
        _unpack_shape(view, 104, ndim),
        _unpack_shape(view, 40, ndim),
        layout == _SHARD,
        axes,
        data_offset,
        data_bytes,
    )
    _check(header)
    if object_bytes is not None and header.object_bytes != object_bytes:
        raise BadHeader(f"the header describes {header.object_bytes} bytes, the object has {object_bytes}")
    return header


def _check(header: Header) -> None:
    ndim = len(header.shape)
    if ndim > DIMS_MAX or len(header.global_shape) != ndim:
        raise BadHeader(
            f"shapes {header.shape} and {header.global_shape}: both need the same 0 to {DIMS_MAX} lengths"
        )
    if any(not 0 <= length <= _LEN_MAX for length in (*header.shape, *header.global_shape)):
        raise BadHeader(f"a length of {header.shape} or {header.global_shape} is negative or too large")
    if header.data_bytes != _data_bytes(header.dtype, header.shape):
        raise BadHeader(
            f"{header.data_bytes} bytes of data for the shape {header.shape} of {header.dtype.name}"
        )
    if header.data_offset < HEADER_BYTES:
        raise BadHeader(f"the data begins at {header.data_offset}, in the header")
    if len(header.axes) > AXES_MAX:
        raise BadHeader(f"{len(header.axes)} axes; there can be {AXES_MAX}")
    for axis in header.axes:
        if (
            not 0 <= axis.kind < len(KINDS)
            or not 0 <= axis.rank < axis.count
            or not -1 <= axis.split_dim < ndim
        ):
            raise BadHeader(f"{axis} cannot be an axis of a tensor with {ndim} dimensions")


def _data_bytes(dtype: Dtype, shape: Sequence[int]) -> int:
    size = prod(shape) * dtype.itemsize
    if size > _LEN_MAX - HEADER_BYTES:
        raise BadHeader(f"the shape {tuple(shape)} of {dtype.name} exceeds 63 bits of bytes")
    return size


def _pack_shape(shape: Sequence[int]) -> bytes:
    return _SHAPE.pack(*shape, *[_ABSENT] * (DIMS_MAX - len(shape)))


def _unpack_shape(view: memoryview, offset: int, ndim: int) -> tuple[int, ...]:
    lengths = _SHAPE.unpack_from(view, offset)
    if any(length != _ABSENT for length in lengths[ndim:]):
        raise BadHeader(f"a shape of {ndim} dimensions has the lengths {lengths}")
    return lengths[:ndim]


@dataclass(frozen=True)
class Manifest:
    """How a tensor was divided when it was written."""

    dtype: Dtype
    global_shape: tuple[int, ...]
    split_dim: int
    shards: int

    def encode(self) -> bytes:
        fixed = _MANIFEST.pack(
            _MANIFEST_MAGIC,
            _VERSION,
            MANIFEST_BYTES,
            self.dtype.code,
            len(self.global_shape),
            self.split_dim,
            self.shards,
            0,
        )
        return fixed + _pack_shape(self.global_shape)

    @staticmethod
    def decode(stored: bytes | bytearray | memoryview) -> Manifest:
        """The manifest in ``stored``; raises :class:`BadHeader` when there is none."""
        view = memoryview(stored).cast("B")
        if len(view) < MANIFEST_BYTES:
            raise BadHeader(f"{len(view)} bytes are no manifest: it has {MANIFEST_BYTES}")
        magic, version, size, code, ndim, split_dim, shards, _ = _MANIFEST.unpack_from(view)
        if (magic, version, size) != (_MANIFEST_MAGIC, _VERSION, MANIFEST_BYTES):
            raise BadHeader(f"no manifest: magic {magic:#x}, version {version}, size {size}")
        if not 0 <= code < len(DTYPES) or not 0 <= ndim <= DIMS_MAX:
            raise BadHeader(f"a manifest with dtype {code} and {ndim} dimensions")
        shape = _unpack_shape(view, _MANIFEST.size, ndim)
        if any(length < 0 for length in shape) or not 0 <= split_dim < ndim or shards <= 0:
            raise BadHeader(f"a manifest of {shards} shards of {shape} along {split_dim}")
        return Manifest(DTYPES[code], shape, split_dim, shards)
