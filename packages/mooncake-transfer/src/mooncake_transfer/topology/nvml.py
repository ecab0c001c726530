"""What NVIDIA's management library says of the GPUs, where it is installed."""

from __future__ import annotations

import ctypes

import msgspec

__all__ = ["GpuInfo", "ask_nvml"]

LIBRARY = "libnvidia-ml.so.1"
NAME_BYTES = 96


class GpuInfo(msgspec.Struct, frozen=True):
    """A GPU as its driver describes it."""

    model: str = ""
    memory_bytes: int = 0


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t of version 3."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def ask_nvml(library: str = LIBRARY) -> dict[str, GpuInfo]:
    """Return the GPUs that the library shows, by PCI address as in sysfs; none without it or its driver."""
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2():
            return {}
    except (OSError, AttributeError):  # not installed, or none of NVIDIA's
        return {}
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return {}
        return dict(filter(None, (_ask_gpu(nvml, index) for index in range(count.value))))
    except AttributeError:  # a library from before these calls
        return {}
    finally:
        nvml.nvmlShutdown()


def _ask_gpu(nvml: ctypes.CDLL, index: int) -> tuple[str, GpuInfo] | None:
    handle, pci, memory = ctypes.c_void_p(), _PciInfo(), _Memory()
    name = ctypes.create_string_buffer(NAME_BYTES)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
        return None
    if nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci)):
        return None
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(NAME_BYTES))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    # NVML lists whole GPUs, which are function 0 of their device.
    address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    return address, GpuInfo(name.value.decode(errors="replace"), memory.total)
