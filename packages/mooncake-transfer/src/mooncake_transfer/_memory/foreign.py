"""Memory the user brings: buffers, arrays, tensors, GPU arrays, raw addresses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_transfer._arguments import number, shown
from mooncake_transfer._errors import ConfigError
from mooncake_transfer._memory.description import HOST, Memory, MemoryKind, is_contiguous
from mooncake_transfer._memory.dlpack import from_dlpack
from mooncake_transfer._memory.numa import node_of

__all__ = ["MemoryRange", "wrap"]

LARGEST_ORDINAL = (1 << 31) - 1
MAPS_LINE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+)")


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Memory by its address, for allocators that Python does not know.

    Attributes:
        address: its first byte in this process.
        nbytes: its size in bytes.
        owner: an object that keeps it valid, kept until the region is closed; None: the caller sees to it.
        device: ordinal of the CUDA device whose memory it is; ``HOST`` for main memory.
    """

    address: int
    nbytes: int
    owner: object = None
    device: int = HOST

    def __post_init__(self) -> None:
        """Raise ConfigError for what is no number."""
        number(self.address, "address")
        number(self.nbytes, "nbytes")
        number(self.device, "device", least=HOST, most=LARGEST_ORDINAL)


def wrap(memory: object) -> Memory:
    """Describe memory the user brings, in place.

    Taken, in this order: ``Memory`` as it is, ``MemoryRange``, a tensor with ``data_ptr()``, a writable and
    contiguous buffer, anything with ``__cuda_array_interface__``, anything with ``__dlpack__``.

    Raises ConfigError when it is none of these, or empty, read-only, not contiguous, or not mapped.
    """
    if isinstance(memory, Memory):
        return memory
    if isinstance(memory, MemoryRange):
        return _wrap_range(memory)
    if hasattr(memory, "data_ptr"):
        return _wrap_tensor(memory)
    try:
        view = memoryview(memory)  # type: ignore[arg-type]
    except TypeError:
        return _wrap_by_protocol(memory)
    problem = (
        "read-only"
        if view.readonly
        else "empty"
        if not view.nbytes
        else ""
        if view.c_contiguous
        else "not contiguous"
    )
    if problem:
        raise ConfigError(f"cannot register {type(memory).__name__} of {view.nbytes} bytes: it is {problem}")
    if _refers_to_objects(view):
        raise ConfigError(
            f"cannot register {type(memory).__name__} of {view.nbytes} bytes: it holds references to Python "
            "objects, which mean nothing elsewhere, and whose bytes are not to be changed"
        )
    flat = np.frombuffer(view, dtype=np.uint8)
    return _in_main_memory(flat.ctypes.data, view.nbytes, flat)


def _refers_to_objects(view: memoryview) -> bool:
    dtype = getattr(view.obj, "dtype", None)
    return getattr(dtype, "hasobject", False) or view.format.lstrip("@=<>!") == "O"


def _wrap_by_protocol(memory: object) -> Memory:
    interface = getattr(memory, "__cuda_array_interface__", None)
    if isinstance(interface, dict):
        return _wrap_cuda_array(interface, memory)
    if hasattr(memory, "__dlpack__"):
        return from_dlpack(memory)
    raise ConfigError(
        f"cannot register memory {shown(memory)}: it exposes no buffer; "
        "pass a tensor, an array or a MemoryRange"
    )


def _in_main_memory(address: int, nbytes: int, owner: object) -> Memory:
    return Memory(address, nbytes, owner, numa_node=node_of(address, nbytes))


def _wrap_tensor(tensor: Any) -> Memory:
    device = str(getattr(tensor, "device", "cpu"))
    kind, _, ordinal = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"cannot register a tensor on {device!r}; only CPUs and CUDA devices are known")
    try:
        nbytes, address = int(tensor.nbytes), int(tensor.data_ptr())
        contiguous = getattr(tensor, "is_contiguous", lambda: True)()
    except (RuntimeError, TypeError, ValueError) as error:  # it has no memory of its own, or not in one piece
        layout = getattr(tensor, "layout", "unknown")
        raise ConfigError(f"cannot register a tensor of layout {layout}: {error}") from None
    if not contiguous or nbytes == 0:
        raise ConfigError(f"cannot register a tensor of {nbytes} bytes: it must be contiguous and not empty")
    if kind == "cpu":
        return _in_main_memory(address, nbytes, tensor)
    return Memory(address, nbytes, tensor, kind=MemoryKind.CUDA, device=int(ordinal or 0))


def _wrap_cuda_array(interface: dict[str, Any], owner: object) -> Memory:
    what = type(owner).__name__
    try:
        address, readonly = interface["data"]
        shape = tuple(int(size) for size in interface["shape"])
        item = np.dtype(interface["typestr"]).itemsize
        contiguous = is_contiguous(shape, interface.get("strides"), item)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot register {what}: malformed __cuda_array_interface__: {error!r}") from None
    nbytes = item * int(np.prod(shape, dtype=np.int64))
    if readonly or not nbytes or not contiguous:
        problem = "read-only" if readonly else "not contiguous" if nbytes else "empty"
        raise ConfigError(f"cannot register {what} of {nbytes} bytes in GPU memory: it is {problem}")
    # The protocol does not say which device; an array that does (CuPy, Numba) has it as an attribute.
    device = getattr(owner, "device", 0)
    ordinal = device if isinstance(device, int) else getattr(device, "id", 0)
    return Memory(int(address), nbytes, owner, kind=MemoryKind.CUDA, device=int(ordinal))


def _wrap_range(given: MemoryRange) -> Memory:
    if given.nbytes <= 0 or given.address <= 0 or given.address + given.nbytes > 1 << 64:
        raise ConfigError(f"{given.nbytes} bytes at address {given.address:#x} are no range of memory")
    if given.device != HOST:
        return Memory(given.address, given.nbytes, given.owner, kind=MemoryKind.CUDA, device=given.device)
    gap = _first_gap(given.address, given.address + given.nbytes)
    if gap is not None:
        address, problem = gap
        raise ConfigError(
            f"cannot take {given.nbytes} bytes at {given.address:#x}: the byte at {address:#x} is {problem}; "
            "pass the range that was allocated"
        )
    return _in_main_memory(given.address, given.nbytes, given.owner)


def _first_gap(begin: int, end: int) -> tuple[int, str] | None:
    """Where a range stops to be mapped and writable, and what it is there; None when it never does."""
    at = begin
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = MAPS_LINE.match(line)
        if found is None or int(found[2], 16) <= at:
            continue
        if int(found[1], 16) > at:
            break
        if not found[3].startswith("rw"):
            return at, f"not writable ({found[3]})"
        at = int(found[2], 16)
        if at >= end:
            return None
    return at, "not mapped"
