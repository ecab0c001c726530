"""What is special to GPU memory: streams, tensors, peers without a direct path, nothing left behind."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_double import installed
from cuda_memory import Gpu, Stream, fabric, malloc, mapped, mapped_whole
from gpu_fixtures import config

from mooncake_transfer import TransferEngine
from mooncake_transfer.errors import DriverUnavailable, RegionRefused, TransferError
from mooncake_transfer.memory import MemoryRange
from mooncake_transfer.testing import PeerProcess, digest, pattern
from mooncake_transfer.testing.namespaces import NetworkPair, NetworkUnavailable

NBYTES = 5 << 20
ALL = [[0, 0, NBYTES]]
DEADLINE_S = 20.0


def test_a_transfer_follows_a_stream(engine: TransferEngine, device: Gpu) -> None:
    source, place = malloc(NBYTES), malloc(NBYTES)
    remote = engine.import_region(engine.register(source.source).descriptor())
    local = engine.register(place.source)
    engine.read(local, remote, [[0, 0, 1]]).wait(DEADLINE_S)  # the peer has granted it
    stream, may_go = Stream(device), threading.Event()
    after: list[str] = []

    def produce() -> None:
        assert may_go.wait(DEADLINE_S)
        source.set(pattern(1, NBYTES))

    stream.then(produce)
    transfer = engine.read(local, remote, ALL, stream=stream.handle.value)
    stream.then(lambda: after.append(digest(place.get())))
    assert not transfer.done()
    assert after == []
    may_go.set()
    transfer.wait(DEADLINE_S)
    device.call("cuStreamSynchronize", stream.handle)
    assert after == [digest(pattern(1, NBYTES))]
    stream.close()


def test_what_is_no_stream_is_refused_with_the_reason(engine: TransferEngine) -> None:
    source, place = malloc(NBYTES), malloc(NBYTES)
    remote = engine.import_region(engine.register(source.source).descriptor())
    local = engine.register(place.source)
    engine.read(local, remote, [[0, 0, 1]]).wait(DEADLINE_S)
    with pytest.raises(TransferError, match="cuStreamGetCtx of the stream that was given"):
        engine.read(local, remote, ALL, stream=12345).wait(DEADLINE_S)


class Tensor:
    """A tensor of GPU memory as DLPack hands it over."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self._shape = (ctypes.c_int64 * 1)(nbytes)
        # DLManagedTensor: data, device (CUDA, 0), ndim and dtype (unsigned, 8 bits, 1 lane), shape, strides,
        # offset, context, deleter
        self._tensor = (ctypes.c_uint64 * 8)(
            address, 2, 1 | (1 | 8 << 8 | 1 << 16) << 32, ctypes.addressof(self._shape), 0, 0, 0, 0
        )

    def __dlpack__(self, **options: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self._tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_tensors_of_a_gpu_come_by_dlpack_and_by_cuda_array_interface(engine: TransferEngine) -> None:
    memory, other = malloc(NBYTES), malloc(NBYTES)
    memory.set(pattern(1, NBYTES))
    tensor = Tensor(memory.source.address, NBYTES, memory)
    array = SimpleNamespace(
        __cuda_array_interface__={
            "shape": (NBYTES,),
            "typestr": "|u1",
            "data": (other.source.address, False),
            "version": 3,
        },
        device=0,
        memory=other,
    )
    source, place = engine.register(tensor), engine.register(array)
    engine.read(place, engine.import_region(source.descriptor()), ALL).wait(DEADLINE_S)
    assert digest(other.get()) == digest(pattern(1, NBYTES))


@pytest.mark.parametrize("beyond", ["never allocated", "freed", "another device"])
def test_memory_that_is_not_the_gpus_is_refused(engine: TransferEngine, beyond: str) -> None:
    memory = malloc(NBYTES)
    address, ordinal = memory.source.address, 1 if beyond == "another device" else 0
    if beyond != "another device":
        memory.close()
    if beyond == "never allocated":
        address = 1 << 46
    reason = "is on CUDA device 0, not 1" if ordinal else "CUDA knows no GPU memory at 0x"
    with pytest.raises(DriverUnavailable, match=reason):
        engine.register(MemoryRange(address, NBYTES, device=ordinal))


def test_neighbouring_blocks_are_one_copy_and_scattered_ones_one_batch(
    engine: TransferEngine, device: Gpu
) -> None:
    source, place = malloc(NBYTES), malloc(NBYTES)
    remote = engine.import_region(engine.register(source.source).descriptor())
    local = engine.register(place.source)
    engine.read(local, remote, [[0, 0, 1]]).wait(DEADLINE_S)
    copies, batches = device.count("copies"), device.count("batches")
    engine.read(local, remote, [[at * 4096, at * 4096, 4096] for at in range(100)]).wait(DEADLINE_S)
    assert device.count("copies") - copies == 1
    engine.read(local, remote, [[at * 4096, at * 8192, 4096] for at in range(100)]).wait(DEADLINE_S)
    assert device.count("copies") - copies == 101
    assert 1 <= device.count("batches") - batches <= 4  # one for each submit()


def test_main_memory_and_gpu_memory_move_to_each_other(engine: TransferEngine) -> None:
    memory = malloc(NBYTES)
    on_gpu, on_host = engine.register(memory.source), engine.allocate(NBYTES)
    view = np.frombuffer(on_host.view(), np.uint8)
    view[:] = pattern(1, NBYTES)
    engine.write(on_host, engine.import_region(on_gpu.descriptor()), ALL).wait(DEADLINE_S)
    assert digest(memory.get()) == digest(pattern(1, NBYTES))
    view[:] = 0
    engine.write(on_gpu, engine.import_region(on_host.descriptor()), ALL).wait(DEADLINE_S)
    assert digest(view) == digest(pattern(1, NBYTES))


@pytest.mark.parametrize("kind", ["malloc", "mapped"])
def test_many_regions_of_one_allocation_are_reached(
    engine: TransferEngine, library: Path, device: Gpu, kind: str
) -> None:
    """A caching allocator's: CUDA opens an IPC handle once in a process, whatever is in it."""
    place = malloc(NBYTES)
    local = engine.register(place.source)
    with PeerProcess(config(library)) as peer:
        owned = [peer.allocate(NBYTES, seed, f"cuda_memory:{kind}") for seed in (1, 2)]
        granted = peer.grant(owned[0].number, "rw")  # another key of the same memory
        for seed, descriptor in ((1, owned[0].descriptor), (2, owned[1].descriptor), (1, granted)):
            engine.read(local, engine.import_region(descriptor), ALL).wait(DEADLINE_S)
            assert digest(place.get()) == digest(pattern(seed, NBYTES))
        assert device.count("imports") == (2 if kind == "malloc" else 0)
        peer.revoke(owned[0].number, granted, DEADLINE_S)
        engine.read(local, engine.import_region(owned[0].descriptor), ALL).wait(DEADLINE_S)
        for region in owned:
            peer.close_region(region.number, DEADLINE_S)
        assert device.count("imports") == 0


def test_a_reading_key_of_mapped_memory_does_not_let_the_gpu_write(
    engine: TransferEngine, library: Path
) -> None:
    place = mapped_whole(NBYTES)
    local = engine.register(place.source)
    with PeerProcess(config(library)) as peer:
        owned = peer.allocate(NBYTES, 1, "cuda_memory:mapped")
        remote = engine.import_region(peer.grant(owned.number, "r"))
        engine.read(local, remote, ALL).wait(DEADLINE_S)
        assert digest(place.get()) == digest(pattern(1, NBYTES))
        with pytest.raises(RegionRefused, match="only reading"):
            engine.write(local, remote, ALL).wait(DEADLINE_S)


@pytest.mark.parametrize("library", [{"FIRST": 0}], indirect=True)
def test_gpus_that_the_other_process_does_not_see_are_reached(engine: TransferEngine, library: Path) -> None:
    """CUDA_VISIBLE_DEVICES gives each process GPUs of its own."""
    place = malloc(NBYTES)
    local = engine.register(place.source)
    with installed(FIRST=2) as elsewhere, PeerProcess(config(elsewhere)) as peer:
        for kind in ("malloc", "mapped"):
            owned = peer.allocate(NBYTES, 3, f"cuda_memory:{kind}")
            engine.read(local, engine.import_region(owned.descriptor), ALL).wait(DEADLINE_S)
            assert digest(place.get()) == digest(pattern(3, NBYTES))


@pytest.mark.parametrize("library", [{"FABRIC": 1}], indirect=True)
def test_fabric_handles_cross_hosts(library: Path) -> None:
    """Two network namespaces: no unix socket leads from one to the other, as between hosts."""
    try:
        network = NetworkPair()
    except NetworkUnavailable as reason:
        pytest.skip(str(reason))
    with network:
        peers = [
            PeerProcess(config(library, host=network.addresses[end]), prefix=network.inside(end))
            for end in (0, 1)
        ]
        try:
            owned = peers[1].allocate(NBYTES, 1, "cuda_memory:fabric")
            other = peers[0].allocate(NBYTES, 2, "cuda_memory:fabric")
            peers[0].write(other.number, owned.descriptor, ALL, DEADLINE_S)
            assert peers[1].digest(owned.number) == digest(pattern(2, NBYTES))
            peers[1].close_region(owned.number, DEADLINE_S)
            with pytest.raises(AssertionError, match="RegionRefused"):
                peers[0].write(other.number, owned.descriptor, ALL, DEADLINE_S)
            legacy = peers[1].allocate(NBYTES, 1, "cuda_memory:malloc")
            with pytest.raises(AssertionError, match="CU_MEM_HANDLE_TYPE_FABRIC"):
                peers[0].write(other.number, legacy.descriptor, ALL, DEADLINE_S)
        finally:
            for peer in peers:
                peer.close()


def test_kinds_of_memory_are_what_they_say(device: Gpu, library: Path) -> None:
    """The double refuses what hardware refuses; otherwise these tests would prove little."""
    address = ctypes.c_uint64()
    assert (
        device.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1)) == 201
    )  # no context is current
    with pytest.raises(AssertionError, match="CUDA error 1"):
        device.map([4096], 1)  # not a multiple of the granularity
    with pytest.raises(AssertionError, match="CUDA error 800"):
        fabric(NBYTES)  # this machine has none
    memory = mapped(NBYTES)
    assert len(memory._parts) == 2
    stream = Stream(device)
    pageable = np.zeros(4096, np.uint8)
    at = [ctypes.c_uint64(number) for number in (memory.source.address, pageable.ctypes.data)]
    with pytest.raises(AssertionError, match="CUDA error 1"):
        device.within("cuMemcpyAsync", *at, ctypes.c_size_t(4096), stream.handle)
    stream.close()
    memory.close()
