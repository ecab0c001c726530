"""Two processes on real GPUs: compares bytes and measures. ``python on_gpu.py`` prints a line of JSON.

It needs nothing but NVIDIA's driver. Run by test_on_gpu.py and by ``hatch run bench nvlink``.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.memory import MemoryRange
from mooncake_transfer.testing.pattern import pattern

Bytes = npt.NDArray[np.uint8]
SIZES = (1 << 20, 16 << 20, 256 << 20)
ROUNDS = 20
DEADLINE_S = 60.0
CONFIG = TransferConfig(drivers=("nvlink",))
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE


class Gpu:
    """The first GPU: its primary context, current on this thread, a stream of its own, and pinned memory."""

    def __init__(self, nbytes: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, 0)
        self.name = name.value.decode()
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxPushCurrent_v2", context)
        self.call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        self.stream = stream.value or 0
        self._pinned: Bytes = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        where = ctypes.c_void_p(self._pinned.ctypes.data)
        self.call("cuMemHostRegister_v2", where, ctypes.c_size_t(nbytes), PORTABLE)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of CUDA; it must succeed."""
        code = getattr(self._cuda, name)(*arguments)
        assert code == 0, f"{name}: CUDA error {code}"

    def allocate(self, nbytes: int) -> MemoryRange:
        """Memory on the GPU, until this process ends."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return MemoryRange(address.value, nbytes, device=0)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Have the stream copy, between any two kinds of memory."""
        self.call(
            "cuMemcpyAsync",
            ctypes.c_uint64(to),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(self.stream),
        )

    def wait(self) -> None:
        """Until the stream has done what it was given."""
        self.call("cuStreamSynchronize", ctypes.c_void_p(self.stream))

    def fill(self, memory: MemoryRange, seed: int) -> None:
        """Have the stream fill it with bytes that tell where they came from, once it has done all before."""
        self.wait()
        self._pinned[:] = pattern(seed, memory.nbytes)
        self.copy(memory.address, self._pinned.ctypes.data, memory.nbytes)

    def holds(self, memory: MemoryRange, seed: int) -> bool:
        """Whether it holds those bytes, after all that the stream was given before."""
        self.copy(self._pinned.ctypes.data, memory.address, memory.nbytes)
        self.wait()
        return bool(np.array_equal(self._pinned, pattern(seed, memory.nbytes)))


def own(nbytes: int) -> None:
    """The other process: owns memory, and says whether it holds what it should when it is asked."""
    gpu = Gpu(nbytes)
    memory = gpu.allocate(nbytes)
    gpu.fill(memory, 1)
    gpu.wait()
    with TransferEngine(CONFIG) as engine:
        sys.stdout.write(engine.register(memory).descriptor().hex() + "\n")
        sys.stdout.flush()
        for line in sys.stdin:
            sys.stdout.write(f"{int(gpu.holds(memory, int(line)))}\n")
            sys.stdout.flush()


def best_s(act: Callable[[], None]) -> float:
    """Seconds that the best of some rounds takes."""
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        act()
        found.append(time.perf_counter() - began)
    return min(found)


def measure(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Read and write another process's memory. Raises AssertionError when a byte is wrong."""
    nbytes = max(sizes)
    owner = subprocess.Popen(
        [sys.executable, __file__, "own", str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    gpu = Gpu(nbytes)
    result: dict[str, Any] = {"gpu": gpu.name, "sizes": {}}
    try:
        with TransferEngine(CONFIG) as engine:
            place, other = gpu.allocate(nbytes), gpu.allocate(nbytes)
            local = engine.register(place)
            remote = engine.import_region(bytes.fromhex(owner.stdout.readline()))
            engine.read(local, remote, [[0, 0, nbytes]]).wait(DEADLINE_S)
            assert gpu.holds(place, 1), "what was read is not what the owner holds"
            gpu.fill(place, 2)
            # In the order of the stream: written when the copy before is done, without a wait for it.
            engine.write(local, remote, [[0, 0, nbytes]], stream=gpu.stream).wait(DEADLINE_S)
            owner.stdin.write("2\n")
            owner.stdin.flush()
            assert owner.stdout.readline().strip() == "1", "the owner does not hold what was written"
            for size in sizes:

                def copy(size: int = size) -> None:
                    gpu.copy(other.address, place.address, size)
                    gpu.wait()

                def read(size: int = size) -> None:
                    engine.read(local, remote, [[0, 0, size]]).wait(DEADLINE_S)

                limit, ours = best_s(copy), best_s(read)
                result["sizes"][size] = {"read_gb_s": size / ours / 1e9, "copy_gb_s": size / limit / 1e9}
    finally:
        owner.stdin.close()
        owner.wait(DEADLINE_S)
        owner.stdout.close()
    return result


if __name__ == "__main__":
    if sys.argv[1:2] == ["own"]:
        own(int(sys.argv[2]))
    else:
        asked = tuple(int(size) for size in sys.argv[1:]) or SIZES
        sys.stdout.write(json.dumps(measure(asked)) + "\n")
