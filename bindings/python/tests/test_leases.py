"""Leases: views without a copy, whose memory stays as long as a view exists."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import snowskin
from snowskin import InvalidArgument, Store


@pytest.fixture
def floats(store: Store, name: str) -> snowskin.Lease:
    store.put(name, np.arange(12, dtype="f4"))
    lease = store.get(name)
    assert lease is not None
    return lease


def test_views_show_the_bytes_without_a_copy(floats: snowskin.Lease) -> None:
    array = floats.numpy("f4", (3, 4))
    np.testing.assert_array_equal(array, np.arange(12, dtype="f4").reshape(3, 4))
    view = memoryview(floats)
    assert (view.nbytes, view.readonly, view.contiguous, view.itemsize) == (48, False, True, 1)
    # One memory: what one view writes, the others show.
    array[0, 0] = 7.5
    assert view[:4].cast("f")[0] == 7.5
    assert floats.memoryview == view
    assert np.frombuffer(floats, dtype="f4")[0] == 7.5
    assert floats.numpy("f4", 2, offset=4).tolist() == [1.0, 2.0]
    assert floats.numpy("f4", (), offset=8).item() == 2.0
    assert floats.numpy().dtype == np.uint8 and floats.numpy("f4").shape == (12,)
    assert array.ctypes.data % 64 == 0


def test_dlpack_in_both_versions(floats: snowskin.Lease) -> None:
    array = np.from_dlpack(floats)
    assert (array.dtype, array.shape) == (np.uint8, (48,))
    array[0] = 9
    assert memoryview(floats)[0] == 9
    assert floats.__dlpack_device__() == (1, 0)
    old, new = floats.__dlpack__(), floats.__dlpack__(max_version=(1, 1))
    assert '"dltensor"' in repr(old) and '"dltensor_versioned"' in repr(new)
    typed = floats.tensor("float32", (3, 4))
    assert (typed.dtype, typed.shape, typed.lease) == ("float32", (3, 4), floats)
    matrix = np.from_dlpack(typed)
    assert (matrix.dtype, matrix.shape) == (np.float32, (3, 4))
    matrix[2, 3] = -1
    assert floats.numpy("f4")[11] == -1
    copy = np.from_dlpack(floats, copy=True)
    copy[:] = 0
    assert floats.numpy("f4")[11] == -1
    half = floats.tensor("bfloat16", offset=2)
    assert half.shape == (23,)


def test_dlpack_refuses_what_host_memory_cannot_do(floats: snowskin.Lease) -> None:
    for options in [{"stream": 1}, {"dl_device": (2, 0)}]:
        with pytest.raises(BufferError):
            floats.__dlpack__(**options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="unknown dtype"):
        floats.tensor("float7")
    with pytest.raises(InvalidArgument, match="does not fit the 48 bytes"):
        floats.tensor("float32", (13,))
    with pytest.raises(InvalidArgument, match="does not fit"):
        floats.tensor("float32", (2**62, 2**62))
    with pytest.raises(InvalidArgument, match="does not fit"):
        floats.tensor("float32", (-1,))
    with pytest.raises(ValueError):
        floats.numpy("f4", (5, 5))
    with pytest.raises(ValueError):
        floats.numpy("f4", (1,), offset=100)


def test_a_tensor_is_put_through_dlpack(store: Store, name: str) -> None:
    class Tensor:
        """An array that has DLPack alone."""

        def __init__(self, array: np.ndarray, device: int = 1, knows_versions: bool = True) -> None:
            self.array, self.device, self.knows_versions = array, device, knows_versions

        def __dlpack_device__(self) -> tuple[int, int]:
            return (self.device, 0)

        def __dlpack__(self, **options: object) -> object:
            if options and not self.knows_versions:
                raise TypeError("unexpected keyword argument 'max_version'")
            return self.array.__dlpack__(**options)

    array = np.arange(10, dtype="i4").reshape(2, 5)
    for number, knows_versions in enumerate([True, False]):
        assert store.put(f"{name}/{number}", Tensor(array, knows_versions=knows_versions)).stored
        lease = store.get(f"{name}/{number}")
        assert lease is not None and bytes(lease) == array.tobytes()
    into = np.zeros(10, dtype="i4")
    assert store.get_into(f"{name}/0", Tensor(into)) == 40
    np.testing.assert_array_equal(into, array.reshape(-1))
    references = weakref.ref(into)
    del into
    gc.collect()
    assert references() is None, "the tensor was released"
    for refused, message in [
        (Tensor(array[:, ::2]), "strides"),
        (Tensor(array, device=4), "on a device"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            store.put(f"{name}/refused", refused)
    read_only = np.arange(4)
    read_only.setflags(write=False)
    with pytest.raises((InvalidArgument, BufferError)):
        store.get_into(f"{name}/0", Tensor(read_only))

    class Broken(Tensor):
        def __dlpack__(self, **options: object) -> object:
            return "no capsule"

    with pytest.raises((TypeError, InvalidArgument)):
        store.put(f"{name}/refused", Broken(array))
    used = array.__dlpack__()
    np.from_dlpack(
        type("Used", (), {"__dlpack__": lambda self, **_: used, "__dlpack_device__": lambda self: (1, 0)})()
    )

    class Used(Tensor):
        def __dlpack__(self, **options: object) -> object:
            return used

    with pytest.raises(InvalidArgument, match="not an unused DLPack tensor"):
        store.put(f"{name}/refused", Used(array))


def test_a_lease_that_is_released_lends_no_more_but_its_views_stay(store: Store, name: str) -> None:
    store.put(name, b"0123456789")
    with store.get(name) as lease:  # type: ignore[union-attr]
        view = memoryview(lease)
        array = lease.numpy()
        tensor = np.from_dlpack(lease)
    assert lease.released and "released" in repr(lease) and len(lease) == 10
    for call in (
        lambda: memoryview(lease),
        lease.tobytes,
        lease.numpy,
        lease.__dlpack__,
        lambda: bytes(lease),
    ):
        with pytest.raises(BufferError, match="released"):
            call()
    lease.release()
    # The memory is not given to another object while a view exists.
    others = [store.get(name) for _ in range(100)]
    for other in others:
        assert other is not None
        other.numpy()[:] = 0
    assert bytes(view) == array.tobytes() == tensor.tobytes() == b"0123456789"


def test_memory_comes_back_when_the_last_view_is_gone(master: str, name: str) -> None:
    with snowskin.Store.connect(master, pool="2MiB") as store:
        store.put(name, bytes(1 << 20))

        def used() -> int:
            return store.stats()["pool_used_bytes"]

        lease = store.get(name)
        assert lease is not None and used() == 1 << 20
        views = [memoryview(lease), lease.numpy(), np.from_dlpack(lease), lease.__dlpack__()]
        lease.release()
        while views:
            assert used() == 1 << 20
            views.pop()
        del lease
        gc.collect()
        assert used() == 0


def test_leases_are_not_shared_between_readers(store: Store, name: str) -> None:
    store.put(name, b"original")
    first, second = store.get(name), store.get(name)
    assert first is not None and second is not None
    first.numpy()[:] = 0
    assert bytes(second) == b"original"
    third = store.get(name)
    assert third is not None and bytes(third) == b"original"


def test_memory_is_given_back_on_whichever_thread_a_view_ends(store: Store, name: str) -> None:
    import threading

    store.put(name, bytes(100_000))
    before = store.stats()["pool_used_bytes"]
    leases = [store.get(name) for _ in range(20)]
    thread = threading.Thread(target=leases.clear)
    thread.start()
    thread.join()
    assert store.stats()["pool_used_bytes"] == before
