"""Asking NVIDIA's management library, against one with the same calls that this test compiles."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mooncake_transfer.topology.nvml import GpuInfo, ask_nvml

# Structs and signatures as in nvml.h: nvmlPciInfo_t and nvmlMemory_t.
LIBRARY = """
#include <stdio.h>
#include <string.h>
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned long long total, free, used; } Memory;
int nvmlInit_v2(void) { return BROKEN; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)(0x700000000000UL + index);
  return index == 1 ? 3 : 0;
}
int nvmlDeviceGetPciInfo_v3(void *device, Pci *pci) {
  memset(pci, 0, sizeof *pci);
  pci->domain = 1;
  pci->bus = 0x40 + ((unsigned long)device & 15);
  pci->device = 10;
  return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned size) {
  snprintf(name, size, "Example %lu", (unsigned long)device & 15);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) { memory->total = 141ULL << 30; return 0; }
"""


def build(folder: Path, broken: int) -> str:
    """Compile the library; ``broken``: what its first call returns."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler (cc) on this machine")
    source, target = folder / "nvml.c", folder / f"nvml{broken}.so"
    source.write_text(LIBRARY)
    line = [compiler, "-shared", "-fPIC", f"-DBROKEN={broken}", "-o", str(target), str(source)]
    subprocess.run(line, check=True, timeout=60)
    return str(target)


def test_gpus_are_known_by_their_pci_address(tmp_path: Path) -> None:
    assert ask_nvml(build(tmp_path, 0)) == {
        "0001:40:0a.0": GpuInfo("Example 0", 141 << 30),
        "0001:42:0a.0": GpuInfo("Example 2", 141 << 30),
    }


def test_a_library_without_its_driver_shows_no_gpu(tmp_path: Path) -> None:
    assert ask_nvml(build(tmp_path, 9)) == {}
