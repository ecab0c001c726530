"""Memory the user brings: what is taken as it lies, and what is refused."""

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_transfer.errors import ConfigError
from mooncake_transfer.memory import HOST, MemoryKind, MemoryRange, node_of, nodes_with_memory, wrap

GPU_ADDRESS = 0x7F0000000000


class Managed(ctypes.Structure):
    """A managed tensor of DLPack 0.x, laid out here by hand from the specification."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Versioned(ctypes.Structure):
    """The same of DLPack 1.x."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        *Managed._fields_[:10],
    )


class Producer:
    """An array of 2 x 3 float32 somewhere, as DLPack shows it."""

    def __init__(self, device: tuple[int, int], *, versioned: bool = False, **fields: Any):
        self._shape = (ctypes.c_int64 * 2)(2, 3)
        self._strides = (ctypes.c_int64 * 2)(*fields.pop("strides", (3, 1)))
        kind = Versioned if versioned else Managed
        self._name = b"dltensor_versioned" if versioned else b"dltensor"
        self.tensor = kind(data=GPU_ADDRESS, device_type=device[0], device_id=device[1], ndim=2)
        self.tensor.type_code, self.tensor.bits, self.tensor.lanes = 2, 32, 1
        self.tensor.shape, self.tensor.strides = self._shape, self._strides
        for name, value in ({"major": 1, "minor": 0} | fields if versioned else fields).items():
            setattr(self.tensor, name, value)

    def __dlpack__(self) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), self._name, None)


class OnlyDlpack:
    """A numpy array whose buffer protocol is out of sight."""

    def __init__(self, array: Any):
        self.array = array

    def __dlpack__(self, **options: Any) -> object:
        return self.array.__dlpack__(**options)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["u1", "f2", "c16"])
def test_an_array_is_taken_where_it_lies(dtype: str, order: Any) -> None:
    array = np.zeros((3, 5), dtype=dtype, order=order)
    if order == "F":
        with pytest.raises(ConfigError, match="not contiguous"):
            wrap(array)
        return
    memory = wrap(array)
    assert (memory.address, memory.nbytes) == (array.ctypes.data, array.nbytes)
    assert (memory.kind, memory.device, memory.fd, memory.writable) == (MemoryKind.DRAM, HOST, -1, True)


def test_the_bytes_outlive_the_name_of_their_owner() -> None:
    memory = wrap(bytearray(b"kept alive"))
    assert ctypes.string_at(memory.address, memory.nbytes) == b"kept alive"


def test_cpu_memory_comes_through_dlpack_and_stays_alive() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    address, content = array.ctypes.data, array.tobytes()
    memory = wrap(OnlyDlpack(array))
    del array
    assert (memory.address, memory.nbytes, memory.kind) == (address, 24, MemoryKind.DRAM)
    assert ctypes.string_at(memory.address, memory.nbytes) == content


def test_a_capsule_that_nobody_took_over_frees_its_memory() -> None:
    array = np.zeros(1000)
    references = _references(array)
    memory = wrap(OnlyDlpack(array))
    assert _references(array) > references
    del memory
    assert _references(array) == references


def _references(thing: object) -> int:
    return ctypes.c_ssize_t.from_address(id(thing)).value


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize(
    ("device", "kind", "ordinal"),
    [
        ((2, 3), MemoryKind.CUDA, 3),
        ((13, 1), MemoryKind.CUDA, 1),
        ((3, 0), MemoryKind.DRAM, HOST),
        ((1, 0), MemoryKind.DRAM, HOST),
    ],
)
def test_dlpack_says_which_device_holds_the_memory(
    device: tuple[int, int], kind: MemoryKind, ordinal: int, versioned: bool
) -> None:
    memory = wrap(Producer(device, versioned=versioned, byte_offset=64))
    assert (memory.kind, memory.device) == (kind, ordinal)
    assert (memory.address, memory.nbytes) == (GPU_ADDRESS + 64, 24)


@pytest.mark.parametrize(
    ("producer", "problem"),
    [
        (Producer((10, 0)), "device type 10"),
        (Producer((2, 0), strides=(6, 2)), "not contiguous"),
        (Producer((2, 0), versioned=True, flags=1), "read-only"),
        (Producer((2, 0), versioned=True, major=2), "version 2"),
        (Producer((2, 0), bits=0), "empty"),
        (OnlyDlpack(np.broadcast_to(np.zeros(3), (2, 3))), "read-only|refuses|not contiguous"),
        (SimpleNamespace(__dlpack__=lambda: "no capsule"), "no unused DLPack capsule"),
    ],
)
def test_a_capsule_that_cannot_be_used_is_refused(producer: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        wrap(producer)


def cuda_array(**fields: Any) -> SimpleNamespace:
    interface = {"version": 3, "shape": (4, 8), "typestr": "<f2", "data": (GPU_ADDRESS, False)} | fields
    return SimpleNamespace(__cuda_array_interface__=interface, device=SimpleNamespace(id=2))


def test_a_gpu_array_is_described_by_its_interface() -> None:
    memory = wrap(cuda_array())
    assert (memory.kind, memory.device, memory.address, memory.nbytes) == (
        MemoryKind.CUDA,
        2,
        GPU_ADDRESS,
        64,
    )
    assert wrap(cuda_array(strides=(16, 2))).nbytes == 64


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"data": (GPU_ADDRESS, True)}, "read-only"),
        ({"shape": (0, 8)}, "empty"),
        ({"strides": (32, 2)}, "not contiguous"),
        ({"typestr": "nonsense"}, "malformed"),
        ({"data": None}, "malformed"),
        ({"strides": (2,)}, "malformed"),
    ],
)
def test_a_gpu_array_that_cannot_be_used_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        wrap(cuda_array(**fields))


class Tensor:
    """What a tensor library shows of a tensor."""

    nbytes = 128

    def __init__(self, device: str, contiguous: bool = True):
        self.device = device
        self.is_contiguous = lambda: contiguous

    def data_ptr(self) -> int:
        return GPU_ADDRESS


def test_a_tensor_says_which_gpu_holds_it() -> None:
    memory = wrap(Tensor("cuda:5"))
    assert (memory.kind, memory.device, memory.address) == (MemoryKind.CUDA, 5, GPU_ADDRESS)


@pytest.mark.parametrize("tensor", [Tensor("meta"), Tensor("cuda:0", contiguous=False), Tensor("xpu:1")])
def test_a_tensor_elsewhere_or_with_gaps_is_refused(tensor: Tensor) -> None:
    with pytest.raises(ConfigError, match="cannot register a tensor"):
        wrap(tensor)


def test_a_mapped_range_is_taken_by_its_address() -> None:
    with mmap.mmap(-1, 3 * mmap.PAGESIZE) as mapping:
        view = np.frombuffer(mapping, dtype=np.uint8)
        memory = wrap(MemoryRange(view.ctypes.data, view.nbytes, owner=view))
        assert (memory.address, memory.nbytes, memory.owner is view) == (view.ctypes.data, view.nbytes, True)
        del memory, view


def test_a_range_that_ends_behind_its_mapping_is_refused() -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    page = mmap.PAGESIZE
    address = libc.mmap(None, ctypes.c_size_t(4 * page), 3, 0x22, -1, ctypes.c_long(0))
    libc.munmap(ctypes.c_void_p(address + 2 * page), ctypes.c_size_t(page))
    libc.mprotect(ctypes.c_void_p(address + 3 * page), ctypes.c_size_t(page), mmap.PROT_READ)
    try:
        assert wrap(MemoryRange(address, 2 * page)).nbytes == 2 * page
        with pytest.raises(ConfigError, match=f"{address + 2 * page:#x} is not mapped"):
            wrap(MemoryRange(address, 2 * page + 1))
        with pytest.raises(ConfigError, match=r"not writable \(r--p\)"):
            wrap(MemoryRange(address + 3 * page, 8))
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(4 * page))


@pytest.mark.parametrize("given", [(0, 8), (4096, 0), (-1, 8), ((1 << 64) - 4, 8), (8, 8)])
def test_a_range_that_is_none_is_refused(given: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"no range of memory|not mapped"):
        wrap(MemoryRange(*given))


def test_a_gpu_range_is_believed() -> None:
    memory = wrap(MemoryRange(GPU_ADDRESS, 1 << 30, device=1))
    assert (memory.kind, memory.device, memory.nbytes) == (MemoryKind.CUDA, 1, 1 << 30)


def test_memory_that_was_touched_lies_on_a_node_with_memory() -> None:
    array = np.ones(1 << 20, dtype=np.uint8)
    assert wrap(array).numa_node in {-1, *nodes_with_memory()}
    assert node_of(array.ctypes.data, 1) in nodes_with_memory()


def test_a_torch_tensor_is_taken_where_it_lies() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    memory = wrap(tensor)
    assert (memory.address, memory.nbytes, memory.kind) == (tensor.data_ptr(), 48, MemoryKind.DRAM)
    assert wrap(OnlyDlpack(tensor)).address == tensor.data_ptr()
    with pytest.raises(ConfigError, match="contiguous"):
        wrap(tensor.t())
