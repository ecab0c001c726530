"""Memory of regions for the suite's peers: a namespace behind a target in the peer's process."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
from nvme_target import NvmeTarget

from mooncake_driver_nvmeof import namespace

__all__ = ["ServedNamespace"]


class ServedNamespace:
    """What the suite calls DeviceMemory; it listens at the address in NVME_TARGET_HOST."""

    def __init__(self, nbytes: int) -> None:
        self._target = NvmeTarget(blocks=nbytes // 512, host=os.environ["NVME_TARGET_HOST"])
        self.source = namespace(self._target.url).source(nbytes=nbytes)

    def get(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._target.memory, np.uint8).copy()

    def set(self, array: npt.NDArray[np.uint8]) -> None:
        self._target.memory[:] = array.tobytes()
