"""GPU memory for torch that peers map whole: a pluggable allocator for a pool of torch's own.

::

    from mooncake_driver_nvlink.allocator import torch_allocator

    pool = torch.cuda.MemPool(torch_allocator().allocator())
    with torch.cuda.use_mem_pool(pool):
        cache = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    region = engine.register(cache)

Memory of ``cudaMalloc`` can be opened by processes of the same host only. This is made by ``cuMemCreate``
with handles that can be passed on: descriptors, and fabric handles where the machine has them, so that hosts
of one NVLink domain reach it too.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from mooncake_transfer.errors import DriverUnavailable

if TYPE_CHECKING:
    from torch.cuda.memory import CUDAPluggableAllocator

__all__ = ["FREE", "MALLOC", "library_path", "torch_allocator"]

MALLOC, FREE = "mooncake_cuda_malloc", "mooncake_cuda_free"


def library_path(library: str = "") -> str:
    """Return the shared object with the functions ``MALLOC`` and ``FREE``, ready to be called.

    They have the signatures that ``CUDAPluggableAllocator`` asks for, so other frameworks may load them too.
    ``library``: path of the CUDA driver library; empty: ``libcuda.so.1``; the first one stays. Raises
    DriverUnavailable when it cannot be used.
    """
    found = importlib.util.find_spec("mooncake_driver_nvlink._core")
    if found is None or found.origin is None:
        raise DriverUnavailable(
            "the compiled core of mooncake-driver-nvlink is missing; "
            "reinstall it, with a C++20 compiler at hand"
        )
    from mooncake_driver_nvlink import _core

    if reason := _core.prepare_allocator(library):
        raise DriverUnavailable(f"GPU memory cannot be allocated here: {reason}")
    return found.origin


def torch_allocator(library: str = "") -> CUDAPluggableAllocator:
    """Make the allocator for ``torch.cuda.MemPool``.

    Raises DriverUnavailable as ``library_path`` does, and for a torch that is built without CUDA.
    """
    import torch
    from torch.cuda.memory import CUDAPluggableAllocator

    if torch.version.cuda is None:
        raise DriverUnavailable(f"torch {torch.__version__} is built without CUDA; install one that has it")
    return CUDAPluggableAllocator(library_path(library), MALLOC, FREE)
