"""Memory of the allocator is mapped whole by peers, and given back when nothing uses it any more."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_double import installed
from cuda_memory import Gpu, gpu

from mooncake_driver_nvlink import _core
from mooncake_driver_nvlink.allocator import FREE, MALLOC, library_path, torch_allocator
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import DriverUnavailable
from mooncake_transfer.memory import MemoryRange
from mooncake_transfer.testing import PeerProcess, digest, pattern

NBYTES = 5 << 20
UNIT = 2 << 20  # of the double's memory
POINTER = ctypes.c_void_p


@pytest.fixture(scope="module")
def library() -> Iterator[Path]:
    with installed() as library:
        yield library


@pytest.fixture
def device(library: Path) -> Gpu:
    return gpu(str(library.parent))


class Functions:
    """The two functions, as a framework calls them."""

    def __init__(self, library: Path) -> None:
        shared = ctypes.CDLL(library_path(str(library)))
        self._malloc, self._free = shared[MALLOC], shared[FREE]
        self._malloc.restype = POINTER
        self._malloc.argtypes = (ctypes.c_size_t, ctypes.c_int, POINTER)
        self._free.argtypes = (POINTER, ctypes.c_size_t, ctypes.c_int, POINTER)

    def malloc(self, nbytes: int, device: int = 0) -> int | None:
        found: int | None = self._malloc(nbytes, device, None)
        return found

    def free(self, address: int, nbytes: int, device: int = 0) -> None:
        self._free(address, nbytes, device, None)


@pytest.fixture
def functions(library: Path) -> Functions:
    return Functions(library)


def test_a_peer_maps_what_it_gave_and_writes_past_no_staging(
    library: Path, device: Gpu, functions: Functions
) -> None:
    config = TransferConfig(drivers=("nvlink",), driver_options={"nvlink": {"library": str(library)}})
    address = functions.malloc(NBYTES)
    assert address is not None
    device.view(address, NBYTES, None)[:] = pattern(3, NBYTES)
    with TransferEngine(config) as owner, PeerProcess(config) as peer:
        theirs = peer.allocate(NBYTES, 4, "cuda_memory:malloc")
        local = owner.register(MemoryRange(address, NBYTES, device=0))
        remote = owner.import_region(theirs.descriptor)
        owner.write(local, remote, [[0, 0, NBYTES]]).wait(20)
        assert peer.digest(theirs.number) == digest(pattern(3, NBYTES))
    functions.free(address, NBYTES)
    assert device.violation() == ""


def test_what_is_freed_can_be_had_again_and_nothing_is_left(device: Gpu, functions: Functions) -> None:
    before = device.count("mappings")
    for nbytes in (1, UNIT, UNIT + 1, NBYTES):
        address = functions.malloc(nbytes, device=1)
        assert address is not None
        functions.free(address, nbytes, device=1)
        functions.free(address, nbytes, device=1)  # it is not ours any more
    assert device.count("mappings") == before
    assert device.violation() == ""


def test_memory_that_is_not_there_is_a_null_pointer_with_a_reason(functions: Functions) -> None:
    assert functions.malloc(0) is None
    assert functions.malloc(NBYTES, device=77) is None
    assert "cuDeviceGet" in _core.allocation_failure()


def test_torch_takes_the_functions_where_it_has_cuda(library: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None:
        with pytest.raises(DriverUnavailable, match="built without CUDA"):
            torch_allocator(str(library))
    else:
        assert isinstance(torch_allocator(str(library)), torch.cuda.memory.CUDAPluggableAllocator)


def test_without_the_library_the_reason_is_told(tmp_path: Path) -> None:
    code = (
        f"from mooncake_driver_nvlink.allocator import library_path; library_path({str(tmp_path / 'none')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert DriverUnavailable.__name__ in done.stderr
    assert "GPU memory cannot be allocated here" in done.stderr
