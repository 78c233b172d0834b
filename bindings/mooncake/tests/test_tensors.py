"""The tensor methods, over a store and a torch that stand in for the real ones; over the real torch, too."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins import Config, Store, Tensor, arange, torch_module

from snowskin._mooncake import header as headers
from snowskin._mooncake import tensors
from snowskin._mooncake.header import DTYPES, HEADER_BYTES

INVALID = -600
NAMES = [dtype.name for dtype in DTYPES]


@dataclass
class Torch:
    """The module, and how to make and to compare its tensors."""

    module: Any
    is_real: bool

    def arange(self, *shape: int, dtype: str = "float32", first: int = 0) -> Any:
        if not self.is_real:
            return arange(self.module, shape, dtype, first)
        count = 1
        for length in shape:
            count *= length
        made = self.module.arange(first, first + count).to(getattr(self.module, dtype))
        return made.reshape(shape)

    def same(self, one: Any, other: Any) -> bool:
        if isinstance(one, Tensor):
            return one.equals(other)
        return other is not None and one.dtype == other.dtype and bool(self.module.equal(one, other))

    def part(self, tensor: Any, dim: int, rank: int, count: int) -> Any:
        length = tensor.shape[dim] // count
        return tensor.narrow(dim, rank * length, length).contiguous()


@pytest.fixture(params=["stand-in", pytest.param("torch", marks=pytest.mark.torch)])
def torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "torch", torch_module(NAMES))
        # Where it is installed, it would look into the stand-in.
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    import torch as module

    yield Torch(module, request.param == "torch")


@pytest.fixture
def store() -> Store:
    return Store()


def axis(kind: str, rank: int, size: int, split_dim: int | None = None, **more: int) -> Any:
    fields = {
        "kind": kind,
        "rank": rank,
        "size": size,
        "split_dim": split_dim,
        "expert_id": None,
        "stage_id": None,
    }
    return SimpleNamespace(**(fields | more))


def layout(*axes: Any) -> Any:
    return SimpleNamespace(axes=list(axes))


def tp(rank: int, size: int, split_dim: int) -> Any:
    return layout(axis("tp", rank, size, split_dim))


def target(mode: str, parallelism: Any = None) -> Any:
    return SimpleNamespace(mode=mode, parallelism=parallelism)


def writer(rank: int, size: int, split_dim: int) -> Any:
    return SimpleNamespace(rank=rank, size=size, split_dim=split_dim)


class Room:
    """Memory of the caller, for reads into an address."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.size = size
        self.memory = (ctypes.c_ubyte * size)()
        self.address = ctypes.addressof(self.memory)

    def load(self, stored: bytes) -> int:
        ctypes.memmove(self.address, stored, len(stored))
        return len(stored)


# -- whole tensors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_makes_the_round_trip(torch: Torch, store: Store, name: str) -> None:
    if not hasattr(torch.module, name):
        pytest.skip(f"this torch has no {name}")
    tensor = torch.arange(3, 5, dtype=name)
    assert tensors.put_tensor(store, "k", tensor) == 0
    assert torch.same(tensor, tensors.get_tensor(store, "k"))
    stored = headers.decode(store.objects["k"], len(store.objects["k"]))
    assert (stored.dtype.name, stored.shape, stored.is_shard) == (name, (3, 5), False)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (2, 1, 2, 1, 2, 1, 2, 1)])
def test_every_shape_makes_the_round_trip(torch: Torch, store: Store, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(*shape)
    assert tensors.put_tensor(store, "k", tensor) == 0
    read = tensors.get_tensor(store, "k")
    assert tuple(read.shape) == shape and torch.same(tensor, read)


def test_what_is_no_tensor_is_refused(torch: Torch, store: Store) -> None:
    for value in (b"bytes", None, [1.0], object()):
        assert tensors.put_tensor(store, "k", value) == INVALID
    too_many = torch.arange(*[1] * 9)
    assert tensors.put_tensor(store, "k", too_many) == INVALID
    assert tensors.batch_put_tensor(store, ["a", "b"], [None, torch.arange(2)]) == [INVALID, 0]
    assert list(store.objects) == ["b"]


def test_a_tensor_that_is_not_contiguous_is_stored_as_it_reads(torch: Torch, store: Store) -> None:
    tensor = torch.arange(4, 6)
    column = tensor.narrow(1, 2, 1)
    assert tensors.put_tensor(store, "k", column) == 0
    assert torch.same(torch.part(tensor, 1, 2, 6), tensors.get_tensor(store, "k"))


def test_a_put_keeps_the_first_and_an_upsert_replaces_it(torch: Torch, store: Store) -> None:
    first, second = torch.arange(4), torch.arange(4, first=9)
    assert tensors.put_tensor(store, "k", first) == 0
    assert tensors.put_tensor(store, "k", second) == 0
    assert torch.same(first, tensors.get_tensor(store, "k"))
    assert tensors.upsert_tensor(store, "k", second) == 0
    assert torch.same(second, tensors.get_tensor(store, "k"))


def test_a_batch_has_an_answer_for_each_key(torch: Torch, store: Store) -> None:
    values = [torch.arange(4, first=item) for item in range(3)]
    assert tensors.batch_put_tensor(store, ["a", "b", "c"], values) == [0, 0, 0]
    assert store.requests == 1
    read = tensors.batch_get_tensor(store, ["c", "missing", "a"])
    assert torch.same(values[2], read[0]) and read[1] is None and torch.same(values[0], read[2])
    assert tensors.batch_put_tensor(store, ["a", "b"], values) == [INVALID, INVALID]


def test_a_store_that_is_not_set_up_answers_each_key(torch: Torch, store: Store) -> None:
    store.is_ready = False
    tensor = torch.arange(4)
    assert tensors.put_tensor(store, "k", tensor) == INVALID
    assert tensors.batch_pub_tensor(store, ["a", "b"], [tensor] * 2, None) == [INVALID] * 2
    assert tensors.get_tensor(store, "k") is None
    assert tensors.batch_get_tensor_with_parallelism(store, ["a", "b"], None) == [None, None]
    assert tensors.save_tensor_to_safetensor(store, "k", None) == INVALID


@pytest.mark.parametrize("damage", [0, 4, 8, 12, 24, 32, 104, 168])
def test_an_object_with_a_damaged_header_is_no_tensor(torch: Torch, store: Store, damage: int) -> None:
    assert tensors.put_tensor(store, "k", torch.arange(4, 4)) == 0
    whole = bytearray(store.objects["k"])
    whole[damage] ^= 0x5A
    store.objects["k"] = bytes(whole)
    assert tensors.get_tensor(store, "k") is None
    room = Room()
    assert tensors.get_tensor_into(store, "k", room.address, room.size) is None


@pytest.mark.parametrize(
    "length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 63, HEADER_BYTES + 65]
)
def test_an_object_of_another_length_is_no_tensor(torch: Torch, store: Store, length: int) -> None:
    assert tensors.put_tensor(store, "k", torch.arange(4, 4)) == 0
    store.objects["k"] = (store.objects["k"] + b"more")[:length]
    assert tensors.get_tensor(store, "k") is None


def test_a_torch_without_the_dtype_reads_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rich = torch_module(NAMES)
    monkeypatch.setitem(sys.modules, "torch", rich)
    assert tensors.put_tensor(store, "k", arange(rich, (4,), "float8_e5m2")) == 0
    monkeypatch.setitem(sys.modules, "torch", torch_module(["float32"]))
    assert tensors.get_tensor(store, "k") is None


def test_without_torch_tensors_are_written_and_a_read_names_what_is_missing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert tensors.put_tensor(store, "k", arange(torch_module(NAMES), (4,))) == 0
    with pytest.raises(ImportError, match="tensors of torch"):
        tensors.get_tensor(store, "k")


# -- addresses -----------------------------------------------------------------------------------------------


def test_a_read_into_memory_is_a_view_of_it(torch: Torch, store: Store) -> None:
    tensor, room = torch.arange(4, 4), Room()
    assert tensors.put_tensor(store, "k", tensor) == 0
    read = tensors.get_tensor_into(store, "k", room.address, room.size)
    assert torch.same(tensor, read)
    assert read.data_ptr() == room.address + HEADER_BYTES
    assert tensors.get_tensor_into(store, "k", room.address, 100) is None
    assert tensors.get_tensor_into(store, "missing", room.address, room.size) is None
    assert tensors.get_tensor_into(store, "k", 0, room.size) is None


def test_a_batch_of_reads_into_memory(torch: Torch, store: Store) -> None:
    tensor, room = torch.arange(4), Room()
    assert tensors.put_tensor(store, "k", tensor) == 0
    places = [room.address, room.address + 1024]
    read = tensors.batch_get_tensor_into(store, ["k", "missing"], places, [1024, 1024])
    assert torch.same(tensor, read[0]) and read[1] is None
    # Lists that do not fit together are answered with codes, unlike all other reads.
    assert tensors.batch_get_tensor_into(store, ["k"], places, [1024]) == [INVALID]
    assert tensors.batch_get_tensor_into(store, ["k"], [0], [1024]) == [INVALID]


def test_a_tensor_object_in_memory_is_stored_as_it_is(torch: Torch, store: Store) -> None:
    tensor, room = torch.arange(4, 4), Room()
    assert tensors.put_tensor(store, "seed", tensor) == 0
    size = room.load(store.objects["seed"])
    assert tensors.put_tensor_from(store, "k", room.address, size) == 0
    assert store.objects["k"] == store.objects["seed"]
    assert tensors.batch_put_tensor_from(store, ["a", "b"], [room.address] * 2, [size] * 2) == [0, 0]
    assert tensors.batch_put_tensor_from(store, [], [], []) == []
    for bad in (0, HEADER_BYTES - 1, size - 1, size + 1):
        assert tensors.put_tensor_from(store, "bad", room.address, bad) == INVALID
        assert tensors.upsert_tensor_from(store, "bad", room.address, bad) == INVALID
    assert tensors.put_tensor_from(store, "bad", 0, size) == INVALID
    assert (
        tensors.batch_put_tensor_from(store, ["bad", "bad2"], [room.address, 0], [size] * 2) == [INVALID] * 2
    )
    assert "bad" not in store.objects


# -- shards of tensor parallelism ----------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "count"), [(0, 2), (0, 4), (1, 3), (2, 5), (1, 1)])
def test_all_shards_of_a_tensor(torch: Torch, store: Store, dim: int, count: int) -> None:
    tensor = torch.arange(4, 3, 5)
    assert tensors.put_tensor_with_tp(store, "k", tensor, 0, count, dim) == 0
    room = Room()
    for rank in range(count):
        expected = torch.part(tensor, dim, rank, count)
        assert torch.same(expected, tensors.get_tensor_with_tp(store, "k", rank, count, dim))
        into = tensors.get_tensor_with_tp_into(store, "k", room.address, room.size, rank, count, dim)
        assert torch.same(expected, into)
        if count > 1:
            stored = headers.decode(store.objects[f"k_tp_{rank}"])
            assert stored.is_shard and stored.global_shape == (4, 3, 5)
            shown = stored.axis("tp")
            assert shown is not None
            assert (shown.rank, shown.count, shown.split_dim, shown.extent) == (
                rank,
                count,
                dim,
                expected.shape[dim],
            )


def test_shards_that_are_not_equal_are_refused(torch: Torch, store: Store) -> None:
    tensor = torch.arange(7, 2)
    assert tensors.put_tensor_with_tp(store, "k", tensor, 0, 2, 0) == INVALID
    assert tensors.put_tensor_with_tp(store, "k", tensor, 0, 2, 2) == INVALID
    assert tensors.put_tensor_with_tp(store, "k", tensor, 0, 2, -1) == INVALID
    assert tensors.batch_put_tensor_with_tp(store, ["k", "l"], [tensor, torch.arange(4)], 0, 2, 0) == [
        INVALID,
        0,
    ]
    assert sorted(store.objects) == ["l_tp_0", "l_tp_1"]


def test_the_code_of_one_shard_is_the_code_of_its_tensor(torch: Torch, store: Store) -> None:
    store.fails["b_tp_1"] = -200
    values = [torch.arange(4)] * 3
    assert tensors.batch_put_tensor_with_tp(store, ["a", "b", "c"], values, 0, 2, 0) == [0, -200, 0]
    assert tensors.put_tensor_with_tp(store, "b", values[0], 0, 2, 0) == -200


def test_groups_follow_their_tensors_to_the_shards(torch: Torch, store: Store) -> None:
    config = Config()
    config.group_ids = ["g", "h"]
    values = [torch.arange(4), torch.arange(4)]
    assert tensors.batch_pub_tensor_with_tp(store, ["a", "b"], values, config, 0, 2, 0) == [0, 0]
    assert store.groups == [["g", "g", "h", "h"]]
    assert tensors.batch_pub_tensor(store, ["a"], values[:1], config) == [INVALID]
    config.preferred_segments = ["one", "two"]
    assert tensors.pub_tensor(store, "c", values[0], config) == INVALID


def test_shards_of_a_tensor_object_in_memory(torch: Torch, store: Store) -> None:
    tensor, room = torch.arange(4, 6), Room()
    assert tensors.put_tensor(store, "seed", tensor) == 0
    size = room.load(store.objects["seed"])
    assert tensors.put_tensor_with_tp_from(store, "k", room.address, size, 1, 2, 1) == 0
    keys, places = ["a", "b"], [room.address] * 2
    assert tensors.batch_put_tensor_with_tp_from(store, keys, places, [size, 7], 3, 2, 0) == [0, INVALID]
    for rank in range(2):
        assert torch.same(torch.part(tensor, 1, rank, 2), tensors.get_tensor_with_tp(store, "k", rank, 2, 0))
        read = tensors.batch_get_tensor_with_tp(store, ["a", "b"], rank, 2)
        assert torch.same(torch.part(tensor, 0, rank, 2), read[0]) and read[1] is None


# -- layouts -------------------------------------------------------------------------------------------------

LAYOUTS = {
    "tp": lambda rank, size, dim: tp(rank, size, dim),
    "dp tp": lambda rank, size, dim: layout(axis("dp", 1, 2), axis("tp", rank, size, dim)),
    "pp tp": lambda rank, size, dim: layout(axis("pp", 0, 2, stage_id=7), axis("tp", rank, size, dim)),
    "tp ep": lambda rank, size, dim: layout(axis("TP", rank, size, dim), axis("ep", 1, 2, expert_id=3)),
}


def put_layout(torch: Torch, store: Store, key: str, tensor: Any, name: str, size: int, dim: int) -> None:
    for rank in range(size):
        # With a tp axis alone each rank has its shard; with others, it has the whole and stores a part.
        value = torch.part(tensor, dim, rank, size) if name == "tp" else tensor
        how = LAYOUTS[name](rank, size, dim)
        assert tensors.put_tensor_with_parallelism(store, key, value, how, None, None) == 0


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize(("dim", "written", "read"), [(0, 4, 4), (0, 4, 2), (1, 2, 6), (2, 1, 4), (1, 3, 1)])
def test_any_number_of_ranks_reads_what_any_number_wrote(
    torch: Torch, store: Store, name: str, dim: int, written: int, read: int
) -> None:
    tensor, room = torch.arange(4, 6, 8), Room()
    put_layout(torch, store, "k", tensor, name, written, dim)
    for rank in range(read):
        how = LAYOUTS[name](rank, read, dim)
        whole = tensors.get_tensor_with_parallelism(store, "k", target("full", how))
        assert torch.same(tensor, whole)
        expected = torch.part(tensor, dim, rank, read)
        assert torch.same(expected, tensors.get_tensor_with_parallelism(store, "k", target("shard", how)))
        for mode, wanted in (("FULL", tensor), ("Shard", expected)):
            place = target(mode, how)
            into = tensors.get_tensor_with_parallelism_into(store, "k", room.address, room.size, place)
            assert torch.same(wanted, into)
            # The memory has a tensor object that can be stored again.
            size = HEADER_BYTES + into.numel() * into.element_size()
            assert tensors.put_tensor_from(store, f"again {mode} {rank}", room.address, size) == 0
            assert torch.same(wanted, tensors.get_tensor(store, f"again {mode} {rank}"))


def test_a_read_of_a_shard_that_is_there_is_two_requests(torch: Torch, store: Store) -> None:
    tensor = torch.arange(4, 6)
    put_layout(torch, store, "k", tensor, "dp tp", 2, 0)
    store.requests = 0
    how = LAYOUTS["dp tp"](1, 2, 0)
    assert tensors.get_tensor_with_parallelism(store, "k", target("shard", how)) is not None
    assert store.requests == 2


def test_the_order_of_axes_does_not_matter(torch: Torch, store: Store) -> None:
    tensor = torch.arange(4, 6)
    put_layout(torch, store, "k", tensor, "dp tp", 2, 0)
    turned = layout(axis("tp", 0, 2, 0), axis("dp", 1, 2))
    assert torch.same(tensor, tensors.get_tensor_with_parallelism(store, "k", target("full", turned)))


def test_a_shard_that_is_missing_is_no_tensor(torch: Torch, store: Store) -> None:
    tensor = torch.arange(4, 6)
    put_layout(torch, store, "k", tensor, "tp", 2, 0)
    del store.objects["k_tp_1"]
    assert tensors.get_tensor_with_parallelism(store, "k", target("full", tp(0, 2, 0))) is None
    assert tensors.get_tensor_with_parallelism(store, "k", target("shard", tp(1, 2, 0))) is None
    shard = tensors.get_tensor_with_parallelism(store, "k", target("shard", tp(0, 2, 0)))
    assert torch.same(torch.part(tensor, 0, 0, 2), shard)


def test_shards_of_different_tensors_are_not_put_together(torch: Torch, store: Store) -> None:
    put_layout(torch, store, "k", torch.arange(4, 6), "tp", 2, 0)
    put_layout(torch, store, "l", torch.arange(4, 8), "tp", 2, 0)
    store.objects["k_tp_1"] = store.objects["l_tp_1"]
    assert tensors.get_tensor_with_parallelism(store, "k", target("full", tp(0, 2, 0))) is None


def test_parts_of_writers_make_the_whole(torch: Torch, store: Store) -> None:
    tensor, room = torch.arange(6, 8), Room()
    for rank in range(4):
        assert tensors.put_tensor_with_parallelism(store, "k", tensor, None, None, writer(rank, 4, 1)) == 0
    assert torch.same(tensor, tensors.get_tensor_with_parallelism(store, "k", target("full")))
    into = tensors.get_tensor_with_parallelism_into(store, "k", room.address, room.size, target("full"))
    assert torch.same(tensor, into)
    for rank in range(4):
        shard = tensors.get_tensor_with_parallelism(store, "k", target("shard", tp(rank, 4, 1)))
        assert torch.same(torch.part(tensor, 1, rank, 4), shard)
    # A tensor that no writer divided is read as it is.
    assert tensors.put_tensor(store, "plain", tensor) == 0
    assert torch.same(tensor, tensors.get_tensor_with_parallelism(store, "plain", target("full")))


def test_layouts_from_a_tensor_object_in_memory(torch: Torch, store: Store) -> None:
    tensor, room = torch.arange(4, 6), Room()
    assert tensors.put_tensor(store, "seed", tensor) == 0
    size = room.load(store.objects["seed"])
    for key, how, part in (
        ("a", tp(0, 2, 1), None),
        ("b", LAYOUTS["dp tp"](0, 2, 0), None),
        ("c", None, writer(0, 1, 0)),
    ):
        code = tensors.put_tensor_with_parallelism_from(store, key, room.address, size, how, None, part)
        assert code == 0, key
        wanted = target("full", how)
        assert torch.same(tensor, tensors.get_tensor_with_parallelism(store, key, wanted)), key
    places = [room.address] * 2
    codes = tensors.batch_upsert_tensor_with_parallelism_from(
        store, ["d", "e"], places, [size] * 2, [tp(0, 2, 0), tp(0, 5, 0)], None, None
    )
    assert codes == [0, INVALID]


@pytest.mark.parametrize(
    "bad",
    [
        layout(),
        layout(axis("dp", 0, 2, 0)),
        layout(axis("tp", 0, 2)),
        layout(axis("ep", 0, 2)),
        layout(axis("pp", 0, 2)),
        layout(axis("xp", 0, 2)),
        layout(axis("tp", 2, 2, 0)),
        layout(axis("tp", -1, 2, 0)),
        layout(axis("tp", 0, 0, 0)),
        layout(axis("tp", 0, 2**40, 0)),
        layout(axis("tp", 0, 2, 9)),
        layout(axis("tp", 0, "2", 0)),
        layout(axis("dp", 0, 2), axis("dp", 1, 2)),
        layout(*[axis("dp", 0, 2)] * 5),
        SimpleNamespace(),
        "tp",
    ],
)
def test_a_bad_layout_is_refused_everywhere(torch: Torch, store: Store, bad: Any) -> None:
    tensor = torch.arange(4, 6)
    assert tensors.put_tensor_with_parallelism(store, "k", tensor, bad, None, None) == INVALID
    assert tensors.upsert_tensor_with_parallelism(store, "k", tensor, bad, None, None) == INVALID
    assert tensors.batch_put_tensor_with_parallelism(store, ["k"], [tensor], [bad], None, None) == [INVALID]
    assert tensors.get_tensor_with_parallelism(store, "k", target("shard", bad)) is None
    assert tensors.batch_get_tensor_with_parallelism(store, ["k"], [target("full", bad)]) == [None]
    assert store.objects == {}


def test_requests_that_contradict_themselves(torch: Torch, store: Store) -> None:
    tensor = torch.arange(4, 6)
    both = (tp(0, 2, 0), None, writer(0, 2, 0))
    assert tensors.put_tensor_with_parallelism(store, "k", tensor, *both) == INVALID
    lists = ([tp(0, 2, 0)], None, [writer(0, 2, 0)])
    assert tensors.batch_put_tensor_with_parallelism(store, ["k"], [tensor], *lists) == [INVALID]
    assert tensors.batch_put_tensor_with_parallelism(store, ["k"], [tensor], "no list", None, None) == [
        INVALID
    ]
    for bad in (writer(2, 2, 0), writer(0, 0, 0), writer(0, 2, -1), writer(0, 2, 7), object()):
        assert tensors.put_tensor_with_parallelism(store, "k", tensor, None, None, bad) == INVALID
    assert tensors.get_tensor_with_parallelism(store, "k", target("shard")) is None
    assert tensors.get_tensor_with_parallelism(store, "k", target("some")) is None
    assert tensors.get_tensor_with_parallelism(store, "k", target("as_stored", tp(0, 2, 0))) is None
    assert tensors.batch_get_tensor_with_parallelism(store, ["k", "l"], [None]) == [None, None]
    assert store.objects == {}


def test_a_read_that_needs_more_room_than_there_is(torch: Torch, store: Store) -> None:
    put_layout(torch, store, "k", torch.arange(4, 6), "tp", 2, 0)
    room = Room(HEADER_BYTES + 4 * 6 * 4)
    wanted = target("full", tp(0, 2, 0))
    assert tensors.get_tensor_with_parallelism_into(store, "k", room.address, room.size - 1, wanted) is None
    assert bytes(room.memory) == bytes(room.size)
    assert tensors.get_tensor_with_parallelism_into(store, "k", room.address, room.size, wanted) is not None


# -- bytes and files -----------------------------------------------------------------------------------------


def test_a_tensor_as_bytes(torch: Torch) -> None:
    tensor = torch.arange(2, 3, dtype="int64")
    header, address, size, owner = tensors.serialize_tensor(tensor)
    assert len(header) == HEADER_BYTES and size == 48 and owner is not None
    payload = header + ctypes.string_at(address, size)
    assert torch.same(tensor, tensors.deserialize_tensor(payload))
    for bad in (b"", payload[:-1], payload + b"x", b"\0" * 400):
        with pytest.raises(ValueError, match="invalid serialized"):
            tensors.deserialize_tensor(bad)
    with pytest.raises(ValueError, match="unsupported tensor"):
        tensors.serialize_tensor([1, 2])


def test_a_file_that_is_not_there(torch: Torch, store: Store) -> None:
    assert tensors.save_tensor_to_safetensor(store, "missing", None) == -1100
    assert tensors.load_tensor_from_safetensor(store, "k", "/does/not/exist") is None


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="safetensors is not installed")
def test_a_tensor_in_a_file(store: Store, tmp_path: Any) -> None:
    import torch as module

    path = str(tmp_path / "file")
    tensor = module.arange(6).reshape(2, 3)
    assert tensors.put_tensor(store, "k", tensor) == 0
    assert tensors.save_tensor_to_safetensor(store, "k", path) == 0
    loaded = tensors.load_tensor_from_safetensor(store, "other", path)
    assert module.equal(tensor, loaded) and module.equal(tensor, tensors.get_tensor(store, "other"))


# -- CUDA ----------------------------------------------------------------------------------------------------


def test_reads_into_a_device_are_refused_here(torch: Torch, store: Store) -> None:
    assert tensors.get_tensor_into_cuda(store, "k", torch.arange(2)) == INVALID
    assert tensors.batch_get_tensor_into_cuda(store, ["a", "b"], [None, None]) == [INVALID] * 2
