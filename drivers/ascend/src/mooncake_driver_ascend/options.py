"""Options of the ascend driver, as users write them under ``TransferConfig.driver_options["ascend"]``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from mooncake_driver_ascend.shim_build import default_shim
from mooncake_transfer.driver_options import as_text, check_limits, checked
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.hooks import EndpointSpec

__all__ = ["AscendOptions", "endpoints", "render"]

# Inclusive; the compiled core checks the same limits.
LIMITS: dict[str, tuple[float, float]] = {
    "rdma_traffic_class": (0, 255),
    "rdma_service_level": (0, 7),
    "queue_depth": (1, 1 << 20),
    "in_flight_bytes": (1 << 20, 1 << 40),
    "answer_timeout_s": (0.2, 3600),
    "transfer_timeout_s": (0.1, 3600),
}
DEVICE = re.compile("[0-9]{1,4}")
POOL = re.compile(r"\d+:\d+")


class AscendOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the driver. Raises ConfigError for values that cannot work.

    Attributes:
        library: path of the ACL runtime; empty: ``libascendcl.so``, as the loader finds it.
        shim: path of what ``mooncake-ascend build-shim`` made; empty: where that puts it.
        devices: NPUs (as this process numbers them) whose memory is taken, with commas between; a single one
            may be a number, as the environment gives it. Each gets an endpoint of its own.
        host: numeric address of this machine that peers reach; HIXL advises against the loopback.
        buffer_pool: HIXL's BufferPool, buffers and MiB of each. Main memory needs it, and every engine the
            same; ``0:0`` switches it off.
        path: what HIXL's links go over: ``hccs``, ``rdma``, or ``auto``, as HIXL chooses. To name one needs
            CANN 9.1. By RDMA main memory of ``aclrtMallocHost`` is registered, and goes directly.
        rdma_traffic_class: HIXL's RdmaTrafficClass, a multiple of 4.
        rdma_service_level: HIXL's RdmaServiceLevel.
        queue_depth: how many operations may be under way or waiting to be fetched.
        in_flight_bytes: how much the engine keeps in flight on one connection; how late a cancel or a
            revoked key takes effect.
        answer_timeout_s: how long a peer may take to answer, and HIXL to connect.
        transfer_timeout_s: how long HIXL may take for a batch before its link counts as broken.
        allow_other_users: also serve processes of other users of this host that hold address and key.
    """

    library: str = ""
    shim: str = ""
    devices: str | int = "0"
    host: str = "127.0.0.1"
    buffer_pool: str = "4:8"
    path: Literal["auto", "hccs", "rdma"] = "auto"
    rdma_traffic_class: int = 132
    rdma_service_level: int = 4
    queue_depth: int = 4096
    in_flight_bytes: int = 64 << 20
    answer_timeout_s: float = 5.0
    transfer_timeout_s: float = 10.0
    allow_other_users: bool = False

    def __post_init__(self) -> None:
        check_limits("ascend", self, LIMITS)
        _listed(str(self.devices))
        if not POOL.fullmatch(self.buffer_pool):
            raise ConfigError(
                f"ascend option buffer_pool is {self.buffer_pool!r}; it must be like '4:8' (buffers, MiB)"
            )
        if self.rdma_traffic_class % 4:
            raise ConfigError(
                f"ascend option rdma_traffic_class is {self.rdma_traffic_class}; it must be a multiple of 4"
            )


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check options and turn those of the first NPU into strings for the core. Raises ConfigError."""
    return dict(endpoints(options)[0].options)


def endpoints(options: Mapping[str, object]) -> list[EndpointSpec]:
    """One endpoint for each NPU. Raises ConfigError."""
    given = checked("ascend", AscendOptions, options)
    text = as_text(given, without={"devices"})
    text["shim"] = given.shim or str(default_shim())
    return [EndpointSpec(f"npu:{npu}", {**text, "device": str(npu)}) for npu in _listed(str(given.devices))]


def _listed(devices: str) -> list[int]:
    """Split ``0,3`` into numbers of NPUs. Raises ConfigError."""
    parts = [part.strip() for part in devices.split(",")]
    numbers = [int(part) for part in parts if DEVICE.fullmatch(part)]
    if len(numbers) < len(parts):
        raise ConfigError(
            f"ascend option devices is {devices!r}; name one or more NPUs, with commas between: '0,1'"
        )
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"ascend option devices is {devices!r}; it names an NPU twice")
    return numbers
