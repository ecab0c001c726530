"""Reading a DLPack capsule: where its memory lies, without taking it over.

The layout is that of ``dlpack.h``, versions 0.x (``dltensor``) and 1.x (``dltensor_versioned``).
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from mooncake_transfer._errors import ConfigError
from mooncake_transfer._memory.description import HOST, Memory, MemoryKind, is_contiguous
from mooncake_transfer._memory.numa import node_of

__all__ = ["from_dlpack"]

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


class _Tensor(ctypes.Structure):
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
    )


class _VersionedHead(ctypes.Structure):
    """What stands before the tensor in a managed tensor of version 1."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


_api = ctypes.pythonapi
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p


def from_dlpack(source: Any) -> Memory:
    """Describe memory of an object with ``__dlpack__``: of a CPU or CUDA device, pinned or managed by CUDA.

    The capsule is kept, so the producer keeps the memory. No stream is given: what fills the memory on a GPU
    has ended, or the transfers are ordered by the caller. Raises ConfigError.
    """
    what = type(source).__name__
    try:
        capsule = _capsule_of(source)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot register {what}: its __dlpack__ refuses: {error}") from error
    tensor, flags = _parse(capsule, what)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    nbytes = math.prod(shape) * ((tensor.bits * tensor.lanes + 7) // 8)
    problem = ""
    if nbytes == 0:
        problem = "empty"
    elif flags & READ_ONLY:
        problem = "read-only"
    elif not is_contiguous(shape, strides, 1):
        problem = "not contiguous"
    if problem:
        raise ConfigError(f"cannot register {what} of {nbytes} bytes: it is {problem}")
    address = (tensor.data or 0) + tensor.byte_offset
    # Managed memory is reached by the CPU too, yet its pages wander: what drives CUDA memory can treat it.
    if tensor.device_type in (CUDA, CUDA_MANAGED):
        return Memory(address, nbytes, capsule, kind=MemoryKind.CUDA, device=tensor.device_id)
    if tensor.device_type in (CPU, CUDA_HOST):
        return Memory(address, nbytes, capsule, device=HOST, numa_node=node_of(address, nbytes))
    raise ConfigError(
        f"cannot register {what} on DLPack device type {tensor.device_type}; "
        "memory of CPUs and of CUDA devices is known"
    )


def _capsule_of(source: Any) -> object:
    try:
        return source.__dlpack__(max_version=(1, 0))
    except TypeError:  # a producer from before version 1.0 takes no such argument
        return source.__dlpack__()


def _parse(capsule: object, what: str) -> tuple[_Tensor, int]:
    if _api.PyCapsule_IsValid(capsule, b"dltensor"):
        return _Tensor.from_address(_api.PyCapsule_GetPointer(capsule, b"dltensor")), 0
    if _api.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        address = _api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        head = _VersionedHead.from_address(address)
        if head.major != 1:
            raise ConfigError(f"cannot register {what}: DLPack version {head.major} is unknown; 0 and 1 work")
        return _Tensor.from_address(address + ctypes.sizeof(_VersionedHead)), head.flags
    raise ConfigError(f"cannot register {what}: its __dlpack__ gives no unused DLPack capsule")
