"""Memory of GPUs, with the fake driver of te-gpu. No GPU is behind it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
import snowskin
import snowskin.aio
from fake_gpu import CudaArray, Memory, Tensor, library
from snowskin import InvalidArgument, Store

LENGTHS = [1, 4096, 100_000, (1 << 20) + 1]


@pytest.fixture(scope="module")
def gpu_store(master: str) -> Iterator[Store]:
    with Store.connect(master, gpu_library=library()) as store:
        yield store


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_tensors_of_a_device_are_put_and_read_into(gpu_store: Store, name: str, nbytes: int) -> None:
    memory = Memory(4 << 20)
    value = os.urandom(nbytes)
    memory.write(3, value)
    source = Tensor(memory.addr + 3, (nbytes,))
    assert gpu_store.put(name, source).stored
    assert bytes(gpu_store.get(name)) == value
    # Its memory has to be ready: the producer is told not to synchronise.
    assert set(source.streams) == {-1}
    assert source.deleted == 1
    sink = Tensor(memory.addr + (2 << 20), (nbytes + 5,))
    assert gpu_store.get_into(name, sink) == nbytes
    assert memory.read(2 << 20, nbytes + 5) == value + bytes(5)
    assert sink.deleted == 1


def test_arrays_with_the_cuda_array_interface(gpu_store: Store, name: str) -> None:
    memory = Memory(1 << 20)
    value = os.urandom(3 * 1000 * 4)
    memory.write(0, value)
    assert gpu_store.put(name, CudaArray(memory.addr, (3, 1000), typestr="<f4")).stored
    strides = (1000, 1)
    into = CudaArray(memory.addr + 50_000, (12, 1000), strides=strides, stream=1)
    assert gpu_store.get_into(name, into) == len(value)
    assert memory.read(50_000, len(value)) == value
    assert gpu_store.get_into(name, CudaArray(memory.addr + 100_001, (10,)), offset=7, length=10) == 10
    assert memory.read(100_001, 10) == value[7:17]


def test_parts_of_a_value_are_on_the_device_and_on_the_host(gpu_store: Store, name: str) -> None:
    memory = Memory(1 << 20)
    value = os.urandom(300_000)
    memory.write(0, value)
    parts = [b"head", Tensor(memory.addr, (300_000,)), b"", bytearray(b"tail")]
    assert gpu_store.put(name, parts).stored
    assert bytes(gpu_store.get(name)) == b"head" + value + b"tail"


def test_many_and_asyncio(gpu_store: Store, master: str, name: str) -> None:
    memory = Memory(8 << 20)
    values = {f"{name}/{number}": os.urandom(50_001) for number in range(20)}
    items = {}
    for number, (key, value) in enumerate(values.items()):
        memory.write(number * 50_001, value)
        items[key] = Tensor(memory.addr + number * 50_001, (50_001,))
    # One of them is in host memory.
    items[f"{name}/host"] = values[f"{name}/host"] = os.urandom(50_001)
    assert all(gpu_store.put_many(items))

    async def read() -> None:
        config = snowskin.Config(master, gpu_library=library())
        async with config.connect_async() as store:
            sinks = {
                key: Tensor(memory.addr + (2 << 20) + number * 60_000, (50_001,))
                for number, key in enumerate(values)
            }
            for key, sink in sinks.items():
                assert await store.get_into(key, sink) == 50_001

    asyncio.run(read())
    for number, value in enumerate(values.values()):
        assert memory.read((2 << 20) + number * 60_000, 50_001) == value


def test_what_cannot_be_used_is_refused(gpu_store: Store, store: Store, master: str, name: str) -> None:
    memory = Memory(1 << 20)
    gpu_store.put(name, b"0123456789")
    for bad, why in [
        (Tensor(memory.addr, (10, 10), strides=(1, 10)), "C order"),
        (Tensor(memory.addr, (10,), kind=7), "DLPack device 7"),
        (CudaArray(memory.addr, (10, 10), strides=(1, 10)), "C order"),
        (CudaArray(memory.addr, (10,), mask=CudaArray(memory.addr, (10,))), "masked"),
        (CudaArray(memory.addr, (10,), version=1), "version 1"),
        (CudaArray(0, (10,)), "no memory"),
        # Beyond its allocation, and not memory of a device at all.
        (CudaArray(memory.addr, (2 << 20,)), "one allocation"),
        (CudaArray(4096, (10,)), "one allocation"),
    ]:
        for refused in (lambda bad=bad: gpu_store.put(name + "x", bad), lambda bad=bad: gpu_store.get_into(name, bad)):
            with pytest.raises(InvalidArgument, match=why):
                refused()
    with pytest.raises(InvalidArgument, match="read-only"):
        gpu_store.get_into(name, CudaArray(memory.addr, (10,), data=(memory.addr, True)))
    # A store whose process has no driver for it.
    with pytest.raises(InvalidArgument, match="cuda:0 cannot be used"):
        store.put(name + "y", Tensor(memory.addr, (10,)))
    # Memory that was freed.
    memory.free()
    with pytest.raises(InvalidArgument, match="one allocation"):
        gpu_store.put(name + "z", Tensor(memory.addr, (10,)))
    assert bytes(gpu_store.get(name)) == b"0123456789"


def test_an_engine_registers_memory_of_a_device(name: str) -> None:
    memory = Memory(1 << 20)
    value = os.urandom(100_000)
    memory.write(0, value)
    with snowskin.Engine(rails="tcp", gpu_library=library()) as ours, snowskin.Engine(rails="tcp") as theirs:
        there = theirs.register(bytearray(100_000), remote="readwrite")
        here = ours.register(Tensor(memory.addr, (100_000,)))
        peer = ours.open(theirs.name)
        here.write_to(peer, there.addr).wait()
        assert bytes(there) == value
        memory.write(0, bytes(100_000))
        here.read_from(peer, there.addr).wait()
        assert memory.read(0, 100_000) == value
        with pytest.raises(TypeError):
            memoryview(here)


def test_torch_tensors_of_a_device(gpu_store: Store, name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this host has no CUDA device")
    value = torch.arange(100_000, device="cuda")
    torch.cuda.synchronize()
    with Store.connect(gpu_store.master) as store:
        assert store.put(name, value).stored
        found = torch.zeros_like(value)
        torch.cuda.synchronize()
        assert store.get_into(name, found) == value.nbytes
        assert torch.equal(found, value)
