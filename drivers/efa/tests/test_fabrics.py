"""Which fabric of libfabric's efa provider is taken, and GPU memory on the one that has it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from fabric_double import config_over_the_double, double

from mooncake_transfer import TransferEngine
from mooncake_transfer.errors import DriverUnavailable
from mooncake_transfer.memory import MemoryRange
from mooncake_transfer.testing import pattern

DIRECT, EFA = 1, 2  # Offer of double/double.hpp
NBYTES = 3 << 20
GPU = 3
DEADLINE_S = 30.0


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """The double, which afterwards has what it has by itself."""
    found = double()
    found.double_opened.restype = ctypes.c_char_p
    found.double_gpu_registrations.restype = ctypes.c_uint64
    yield found
    found.double_offer(DIRECT)


class GpuBytes:
    """Memory that the double takes for a GPU's."""

    def __init__(self, library: ctypes.CDLL, seed: int) -> None:
        self.bytes = pattern(seed, NBYTES).copy()
        self._mark, self._at = library.double_gpu, ctypes.c_uint64(self.bytes.ctypes.data)
        self.range = MemoryRange(self.bytes.ctypes.data, NBYTES, owner=self, device=GPU)
        self._mark(self._at, ctypes.c_uint64(NBYTES), GPU)

    def forget(self) -> None:
        """Have it be main memory again, before it goes back to the allocator."""
        self._mark(self._at, ctypes.c_uint64(NBYTES), -1)


@pytest.mark.parametrize(
    ("offers", "taken"), [(DIRECT, b"efa-direct"), (EFA, b"efa"), (DIRECT | EFA, b"efa-direct")]
)
def test_efa_direct_is_taken_where_there_is_one_and_else_efa(
    library: ctypes.CDLL, offers: int, taken: bytes
) -> None:
    library.double_offer(offers)
    with TransferEngine(config_over_the_double()) as engine:
        assert library.double_opened() == taken
        place, source = engine.allocate(NBYTES), engine.allocate(NBYTES)
        np.frombuffer(source.view(), np.uint8)[:] = pattern(1, NBYTES)
        with TransferEngine(config_over_the_double()) as owner:
            target = owner.allocate(NBYTES)
            remote = engine.import_region(target.descriptor())
            engine.write(source, remote, [[0, 0, NBYTES]]).wait(DEADLINE_S)
            engine.read(place, remote, [[0, 0, NBYTES]]).wait(DEADLINE_S)
            assert bytes(place.view()) == bytes(source.view())


def test_gpu_memory_is_registered_as_that_of_its_device_on_both_sides(library: ctypes.CDLL) -> None:
    """The double ends the process for another device, for main memory, and without a local descriptor."""
    library.double_offer(EFA)
    before = library.double_gpu_registrations()
    near, far = GpuBytes(library, 1), GpuBytes(library, 2)
    with TransferEngine(config_over_the_double()) as user, TransferEngine(config_over_the_double()) as owner:
        remote = user.import_region(owner.register(far.range).descriptor())
        local = user.register(near.range)
        user.write(local, remote, [[0, 0, NBYTES]]).wait(DEADLINE_S)
        assert np.array_equal(far.bytes, pattern(1, NBYTES))
        far.bytes[:] = pattern(3, NBYTES)
        user.read(local, remote, [[0, 0, NBYTES]]).wait(DEADLINE_S)
        assert np.array_equal(near.bytes, pattern(3, NBYTES))
    assert library.double_gpu_registrations() >= before + 2
    near.forget()
    far.forget()


def test_a_fabric_without_gpu_memory_says_so(library: ctypes.CDLL) -> None:
    memory = GpuBytes(library, 1)
    with (
        TransferEngine(config_over_the_double()) as engine,
        pytest.raises(DriverUnavailable, match="none takes this kind of memory"),
    ):
        engine.register(memory.range)
    memory.forget()
