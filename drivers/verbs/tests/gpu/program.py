"""A process whose libcuda is the double: arguments are the double's path and what to do.

Engines find it by its name, since the process has loaded it, as processes that use CUDA have.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import TransferError
from mooncake_transfer.testing import pattern

NBYTES = 3 * 4096 + 17
BEFORE = 2 * 4096 + 512  # it lies in the middle of what was allocated, as tensors of torch do
DEADLINE_S = 30.0
OPTIONS = {"verbs_double": {"devices": "double0,double1"}}
CONFIG = TransferConfig(drivers=("verbs_double",), driver_options=OPTIONS)


class Array:
    """An array of GPU memory by ``__cuda_array_interface__``."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (NBYTES,),
            "typestr": "|u1",
            "version": 3,
        }


class Tensor:
    """The same memory as a tensor of torch shows it."""

    device, nbytes = "cuda:0", NBYTES

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """Return where it begins."""
        return self._address


def descriptors() -> int:
    """How many of memory this process has open; those of the double itself stay, one for each range."""
    return sum("dma-buf" in str(link.resolve()) for link in Path("/proc/self/fd").iterdir())


def move(cuda: Any, made: Callable[[int], object]) -> None:
    """Write into GPU memory from another engine, and read it back."""
    address, held = cuda.cuda_double_memory() + BEFORE, cuda.cuda_double_bytes() + BEFORE
    before = descriptors()
    with TransferEngine(CONFIG) as owner, TransferEngine(CONFIG) as peer:
        region = owner.register(made(address))
        place = peer.allocate(2 * NBYTES)
        view = place.view()
        view[:NBYTES] = pattern(1, NBYTES)
        remote = peer.import_region(region.descriptor())
        peer.write(place, remote, [[0, 0, NBYTES]]).wait(DEADLINE_S)
        assert ctypes.string_at(held, NBYTES) == pattern(1, NBYTES).tobytes()
        assert ctypes.string_at(held - 512, 512) == bytes(512)
        assert ctypes.string_at(held + NBYTES, 512) == bytes(512)
        ctypes.memset(held, 7, NBYTES)
        peer.read(place, remote, [[NBYTES, 0, NBYTES]]).wait(DEADLINE_S)
        assert bytes(view[NBYTES:]) == bytes([7]) * NBYTES
        ctypes.memset(held, 9, NBYTES)  # and as the local side
        theirs = owner.import_region(place.descriptor())
        owner.write(region, theirs, [[0, 0, NBYTES]]).wait(DEADLINE_S)
        assert bytes(view[:NBYTES]) == bytes([9]) * NBYTES
    sys.stdout.write(f"moved {cuda.cuda_double_left()} {descriptors() - before}")


def refuse(address: int) -> None:
    """Say why memory is not registered."""
    with TransferEngine(CONFIG) as engine:
        try:
            engine.register(Tensor(address))
        except TransferError as error:
            sys.stdout.write(f"{type(error).__name__} {error} ")


def main() -> None:
    """Do what the arguments say."""
    path, what = sys.argv[1:]
    if not path:
        return refuse(BEFORE)
    cuda = ctypes.CDLL(path)
    cuda.cuda_double_memory.restype = ctypes.c_uint64
    cuda.cuda_double_bytes.restype = ctypes.c_uint64
    assert cuda.cuInit(0) == 0
    if what in ("array", "tensor"):
        return move(cuda, Array if what == "array" else Tensor)
    cuda.cuda_double_set(int(what != "no-support"), int(what != "not-exportable"))
    refuse(cuda.cuda_double_memory() + BEFORE)
    sys.stdout.write(str(cuda.cuda_double_left()))


main()
