"""How a tensor is divided among ranks, and the keys under which its shards are stored.

A *layout* is a tuple of :class:`AxisSpec`. Of its axes, only ``tp`` divides the tensor; ``dp``, ``ep`` and
``pp`` make names of replicas, experts and stages. Sharding is uniform: the divided dimension is a multiple of
the number of shards. Keys, for a tensor with the key ``k``:

==================================== =========================================================================
``k``                                a tensor that is not divided
``k_tp_RANK``                        the shard of a layout with a ``tp`` axis alone
``k__dp_0of2__tp_1of4_sd0``          the shard of other layouts, axes in the order dp, tp, ep, pp; ``_eidN``,
                                     ``_sidN`` behind an axis names its expert or stage
``k__parallelism_manifest``          how the layout divided the tensor
``k__writer_RANKofCOUNT_sdDIM``      the shard of a writer that has a part of the tensor and no layout
``k__writer_manifest``               how writers divided it
==================================== =========================================================================

The names and rules are those of Mooncake at 3b5a5941 (mooncake-integration/store/store_py_internal.h:173-186,
820-1260). Everything that a caller passes is checked here; :class:`Refused` says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from .header import AXES_MAX, KINDS, Axis, Header

# The order of axes in keys and in comparisons.
_ORDER = ("dp", "tp", "ep", "pp")
_MODES = ("as_stored", "shard", "full")
_RANKS_MAX = 1 << 16


class Refused(ValueError):
    """An argument that cannot be carried out; the method answers with the code for invalid arguments."""


@dataclass(frozen=True)
class AxisSpec:
    """One axis of a layout, checked."""

    kind: str
    rank: int
    size: int
    split_dim: int | None = None
    expert_id: int | None = None
    stage_id: int | None = None

    def suffix(self) -> str:
        """The part of a key that names this axis."""
        parts = [f"{self.kind}_{self.rank}of{self.size}"]
        for mark, value in (("sd", self.split_dim), ("eid", self.expert_id), ("sid", self.stage_id)):
            if value is not None:
                parts.append(f"{mark}{value}")
        return "_".join(parts)

    def stored(self, index: int, shape: tuple[int, ...]) -> Axis:
        """The axis as it is written into the header of a shard with this shape."""
        extra = self.expert_id if self.kind == "ep" else self.stage_id if self.kind == "pp" else None
        return Axis(
            KINDS.index(self.kind),
            index,
            self.rank,
            self.size,
            -1 if self.split_dim is None else self.split_dim,
            extra or 0,
            0 if self.split_dim is None else shape[self.split_dim],
        )


Layout = tuple[AxisSpec, ...]


@dataclass(frozen=True)
class WriterPartition:
    """The part of a tensor that one writer has: ``rank`` of ``size`` along ``split_dim``."""

    rank: int
    size: int
    split_dim: int

    def key(self, base: str) -> str:
        return f"{base}__writer_{self.rank}of{self.size}_sd{self.split_dim}"

    def layout(self) -> Layout:
        return (AxisSpec("tp", self.rank, self.size, self.split_dim),)


@dataclass(frozen=True)
class Target:
    """What a read wants: the tensor as it is stored, a shard of a layout, or the whole."""

    mode: str = "as_stored"
    layout: Layout | None = None


# -- arguments -----------------------------------------------------------------------------------------------


def _int(owner: object, name: str) -> int:
    value = getattr(owner, name, None)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(f"{name} of {type(owner).__name__} is {value!r}; it has to be a number")
    return value


def _optional_int(owner: object, name: str) -> int | None:
    return None if getattr(owner, name, None) is None else _int(owner, name)


def layout_of(parallelism: Any) -> Layout:
    """The axes of a ``TensorParallelism``, or of any object that has the same attributes, checked."""
    axes = getattr(parallelism, "axes", None)
    if not isinstance(axes, Iterable):
        raise Refused(f"{type(parallelism).__name__} has no axes: use TensorParallelism")
    layout = tuple(_axis_of(axis) for axis in axes)
    if not 0 < len(layout) <= AXES_MAX:
        raise Refused(f"a layout has 1 to {AXES_MAX} axes, not {len(layout)}")
    kinds = [axis.kind for axis in layout]
    if len(set(kinds)) != len(kinds):
        raise Refused(f"an axis of each kind, not {kinds}")
    return layout


def _axis_of(axis: Any) -> AxisSpec:
    kind = str(getattr(axis, "kind", "")).lower()
    if kind not in _ORDER:
        raise Refused(f"the kind of an axis is one of {', '.join(_ORDER)}, not {kind!r}")
    spec = AxisSpec(
        kind,
        _int(axis, "rank"),
        _int(axis, "size"),
        _optional_int(axis, "split_dim"),
        _optional_int(axis, "expert_id"),
        _optional_int(axis, "stage_id"),
    )
    _check_ranks(spec.rank, spec.size)
    if (kind == "tp") != (spec.split_dim is not None):
        raise Refused("a tp axis needs split_dim" if kind == "tp" else f"a {kind} axis has no split_dim")
    if kind == "ep" and spec.expert_id is None:
        raise Refused("an ep axis needs expert_id")
    if kind == "pp" and spec.stage_id is None:
        raise Refused("a pp axis needs stage_id")
    return spec


def _check_ranks(rank: int, size: int) -> None:
    if not 0 < size <= _RANKS_MAX or not 0 <= rank < size:
        raise Refused(f"rank {rank} of {size}: ranks count from 0, and there are at most {_RANKS_MAX}")


def writer_partition_of(partition: Any) -> WriterPartition:
    """The attributes of a writer partition, checked."""
    checked = WriterPartition(_int(partition, "rank"), _int(partition, "size"), _int(partition, "split_dim"))
    _check_ranks(checked.rank, checked.size)
    if checked.split_dim < 0:
        raise Refused(f"split_dim is {checked.split_dim}; dimensions count from 0")
    return checked


def target_of(target: Any) -> Target:
    """The attributes of a ``ReadTarget``, checked; ``None`` means the tensor as it is stored."""
    if target is None:
        return Target()
    mode = str(getattr(target, "mode", "")).lower()
    if mode not in _MODES:
        raise Refused(f"the mode of a read is one of {', '.join(_MODES)}, not {mode!r}")
    parallelism = getattr(target, "parallelism", None)
    return Target(mode, None if parallelism is None else layout_of(parallelism))


# -- layouts -------------------------------------------------------------------------------------------------


def canonical(layout: Layout) -> Layout:
    """The axes in the order in which keys name them."""
    return tuple(sorted(layout, key=lambda axis: _ORDER.index(axis.kind)))


def tp_axis(layout: Layout) -> AxisSpec | None:
    return next((axis for axis in layout if axis.kind == "tp"), None)


def is_tp_alone(layout: Layout) -> bool:
    return len(layout) == 1 and layout[0].kind == "tp"


def with_tp(layout: Layout, rank: int, size: int) -> Layout:
    """The layout with another rank and another number of shards."""
    return tuple(replace(axis, rank=rank, size=size) if axis.kind == "tp" else axis for axis in layout)


def shard_key(base: str, layout: Layout) -> str:
    """The key of the shard that ``layout`` describes."""
    if is_tp_alone(layout):
        return tp_key(base, layout[0].rank)
    return "__".join([base, *(axis.suffix() for axis in canonical(layout))])


def tp_key(base: str, rank: int) -> str:
    return f"{base}_tp_{rank}"


def manifest_key(base: str) -> str:
    return f"{base}__parallelism_manifest"


def writer_manifest_key(base: str) -> str:
    return f"{base}__writer_manifest"


def stored_axes(layout: Layout, shape: tuple[int, ...]) -> list[Axis]:
    """The axes for the header of a shard with this shape."""
    for axis in layout:
        if axis.split_dim is not None and not 0 <= axis.split_dim < len(shape):
            raise Refused(f"split_dim {axis.split_dim} of a tensor with {len(shape)} dimensions")
    return [axis.stored(index, shape) for index, axis in enumerate(layout)]


def layout_in(header: Header) -> Layout | None:
    """The layout that the header of a shard describes; ``None`` for a tensor that is not a shard."""
    if not header.is_shard or any(KINDS[axis.kind] not in _ORDER for axis in header.axes):
        return None
    found = []
    for axis in header.axes:
        kind = KINDS[axis.kind]
        found.append(
            AxisSpec(
                kind,
                axis.rank,
                axis.count,
                None if axis.split_dim < 0 else axis.split_dim,
                axis.extra if kind == "ep" else None,
                axis.extra if kind == "pp" else None,
            )
        )
    return canonical(tuple(found))


def is_same(layout: Layout, header: Header) -> bool:
    """Whether ``header`` is that of the shard which ``layout`` describes."""
    return layout_in(header) == canonical(layout)


# -- ranges --------------------------------------------------------------------------------------------------


def part_of(length: int, rank: int, count: int) -> tuple[int, int]:
    """The start and the length of a part of a dimension. Raises :class:`Refused` unless parts are equal."""
    if count <= 0 or length % count:
        raise Refused(f"a dimension of {length} cannot be divided into {count} equal parts")
    return rank * (length // count), length // count


def check_split(shape: tuple[int, ...], split_dim: int | None, count: int) -> int:
    """``split_dim``, if a tensor of this shape can be divided along it."""
    if split_dim is None or not 0 <= split_dim < len(shape):
        raise Refused(f"split_dim {split_dim} of a tensor with {len(shape)} dimensions")
    part_of(shape[split_dim], 0, count)
    return split_dim
