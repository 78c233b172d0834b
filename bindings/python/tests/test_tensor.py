"""Tensors with type and shape."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import snowskin
import snowskin.aio
from snowskin import InvalidArgument, Store, tensor

TYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 1, 5), (0,), (3, 0, 2), (1, 2, 1, 2, 1, 2, 1, 2)])
def test_arrays_come_back_with_type_and_shape(
    store: Store, name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    assert tensor.put(store, name, array).stored
    found = tensor.get(store, name)
    assert (found.dtype, found.shape) == (array.dtype, shape)
    np.testing.assert_array_equal(found, array)
    assert not tensor.put(store, name, array).stored
    assert tensor.get(store, name + "x") is None


def test_a_tensor_is_a_view_of_a_lease(store: Store, name: str) -> None:
    array = np.arange(1000, dtype="f8")
    tensor.put(store, name, array)
    lease = store.get(name)
    assert lease is not None and len(lease) == 304 + 8000
    view = tensor.unpack(lease)
    view[0] = 42.0
    assert lease.numpy("f8", (1,), offset=304)[0] == 42.0
    lease.release()
    assert view[0] == 42.0 and (view[1:] == array[1:]).all()


def test_the_header_is_that_of_the_other_store() -> None:
    """python.md 4.2: fields by their offsets."""
    head = bytes(memoryview(tensor.pack(np.zeros((2, 3), dtype="f2"))[0]))  # type: ignore[arg-type]
    assert len(head) == 304 and head[:8] == bytes.fromhex("4e4f4f4d 0100 3001")
    assert np.frombuffer(head, "<i4", 4, 8).tolist() == [11, 2, 0, 0]
    assert np.frombuffer(head, "<u8", 2, 24).tolist() == [304, 12]
    assert np.frombuffer(head, "<i8", 8, 40).tolist() == [2, 3, -1, -1, -1, -1, -1, -1]
    assert np.frombuffer(head, "<i8", 8, 104).tolist() == [2, 3, -1, -1, -1, -1, -1, -1]


def test_many_tensors(store: Store, name: str) -> None:
    arrays = {f"{name}/{number}": np.full((number + 1, 2), number, dtype="i4") for number in range(10)}
    assert all(store.put_many({key: tensor.pack(array) for key, array in arrays.items()}))
    store.put(f"{name}/bytes", b"not a tensor")
    found = tensor.get_many(store, [*arrays, f"{name}/missing", f"{name}/bytes"])
    for one, array in zip(found, arrays.values(), strict=False):
        np.testing.assert_array_equal(one, array)
    assert found[10] is None and found[11] is None and list(found.errors) == [11]
    assert found.errors[11].code == "not_a_tensor"


def test_with_asyncio(master: str, name: str) -> None:
    async def main() -> None:
        async with snowskin.aio.Store.connect(master) as store:
            array = np.arange(6, dtype="f4").reshape(2, 3)
            assert (await tensor.put(store, name, array, pin="soft")).stored
            np.testing.assert_array_equal(await tensor.get(store, name), array)
            assert await tensor.get(store, name + "x") is None
            found = await tensor.get_many(store, [name, name + "x"])
            np.testing.assert_array_equal(found[0], array)
            assert found[1] is None

    asyncio.run(main())


def test_wrong_tensors_are_refused(store: Store, name: str) -> None:
    wrong: list[tuple[Any, str]] = [
        (np.ones((3, 3))[:, ::2], "not contiguous in C order"),
        (np.array(["text"]), "no stored tensor can have the dtype"),
        (np.ones(3, dtype="c8"), "no stored tensor can have the dtype 'complex64'"),
        (np.ones(3, dtype=">f4"), "big-endian"),
        (np.ones((1,) * 9), "8"),
    ]
    for value, message in wrong:
        with pytest.raises(InvalidArgument, match=message):
            tensor.put(store, name, value)
    with pytest.raises((TypeError, AttributeError)):
        tensor.put(store, name, "text")
    store.put(name, bytes(400))
    with pytest.raises(InvalidArgument) as raised:
        tensor.get(store, name)
    assert raised.value.code == "not_a_tensor" and raised.value.key == name
    tensor.put(store, name + "t", np.ones(3))
    with pytest.raises(InvalidArgument, match="library is"):
        tensor.get(store, name + "t", library="jax")  # type: ignore[call-overload]


def test_types_that_numpy_lacks(store: Store, name: str) -> None:
    from snowskin._mooncake import header

    store.put(name, [header.encode("bfloat16", (2, 2)), bytes(8)])
    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(InvalidArgument, match="ml_dtypes") as raised:
            tensor.get(store, name)
        assert raised.value.code == "unknown_dtype"
    else:
        assert tensor.get(store, name).dtype == ml_dtypes.bfloat16


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "uint8"])
def test_torch(store: Store, name: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    value = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    assert tensor.put(store, name, value).stored
    found = tensor.get(store, name, library="torch")
    assert found.dtype == value.dtype and found.shape == value.shape and torch.equal(found, value)
    zero = torch.empty(0, 3, dtype=value.dtype)
    tensor.put(store, name + "0", zero)
    assert tensor.get(store, name + "0", library="torch").shape == (0, 3)
    with pytest.raises(InvalidArgument, match="contiguous"):
        tensor.put(store, name + "t", value.t())
    weight = torch.ones(3, requires_grad=True)
    assert tensor.put(store, name + "g", weight).stored
    lease = store.get(name)
    assert lease is not None and len(torch.from_dlpack(lease)) == len(lease)
