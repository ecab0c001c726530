"""GPU memory that users register: CUDA makes a DMA-BUF of it. Over doubles of both libraries."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_transfer.testing.compiling import compiled

GPU = Path(__file__).parent / "gpu"
DEADLINE_S = 120


def build(*flags: str) -> Path:
    """A double of libcuda; the name within is what makes the loader take it for the library of that name."""
    shared = ("-O2", "-shared", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1")
    return compiled("libcuda.so.1", [GPU / "cuda_double.cpp"], *shared, *flags)


@pytest.fixture(scope="session")
def cuda() -> Path:
    """The double of libcuda, built."""
    return build()


def run(library: Path | str, what: str) -> str:
    """Run the program and return what it said."""
    command = [sys.executable, str(GPU / "program.py"), str(library), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("what", ["array", "tensor"])
def test_gpu_memory_moves_both_ways_and_nothing_beside_it_does(cuda: Path, what: str) -> None:
    contexts, descriptors = 0, 1  # the double's own
    assert run(cuda, what) == f"moved {contexts} {descriptors}"


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("no-support", "CUDA makes no DMA-BUF of memory of device 0: it needs NVIDIA's open kernel modules"),
        ("not-exportable", "CUDA_ERROR_INVALID_VALUE (1); only memory of cudaMalloc, and mappings"),
    ],
)
def test_what_cannot_be_a_dma_buf_is_refused_with_the_reason(cuda: Path, what: str, reason: str) -> None:
    said = run(cuda, what)
    assert said.startswith("DriverUnavailable ")
    assert reason in said
    assert said.endswith(" 0"), "no context stays current or retained"


def test_a_libcuda_without_the_call_is_named() -> None:
    said = run(build("-DWITHOUT_DMA_BUF"), "old")
    assert "libcuda.so.1 has no cuMemGetHandleForAddressRange; install a newer version of it" in said


def test_without_libcuda_its_package_is_named() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        said = run("", "no-library")
        assert "libcuda.so.1: cannot open shared object file" in said
        assert "install NVIDIA's driver, 515 or newer (CUDA 11.7)" in said
    else:
        pytest.skip("this machine has libcuda")
