"""Options of the nvmeof driver, as users write them under ``TransferConfig.driver_options["nvmeof"]``."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from mooncake_transfer.driver_options import as_text, check_limits, checked
from mooncake_transfer.errors import ConfigError

__all__ = ["NvmeofOptions", "default_host_nqn", "render"]

HOST_NQN_FILE = Path("/etc/nvme/hostnqn")
MACHINE_ID_FILE = Path("/etc/machine-id")

# Inclusive; the compiled core checks the same limits.
LIMITS: dict[str, tuple[float, float]] = {
    "in_flight": (1, 1 << 15),
    "chunk_bytes": (4096, 1 << 30),
    "workers": (1, 256),
    "queue_depth": (1, 1 << 15),
    "io_queues": (1, 64),
    "queue_entries": (2, 1024),
    "connect_timeout_s": (0.01, 3600),
    "command_timeout_s": (0.01, 3600),
    "keep_alive_s": (0, 3600),
    "fence_s": (0, 3600),
}


class NvmeofOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one endpoint. Raises ConfigError for values that cannot work.

    Attributes:
        io: how files are read and written: ``io_uring``, ``threads``, or ``auto``, which takes threads where
            the kernel or a container forbids io_uring.
        direct: past the page cache (O_DIRECT), where the file system does that.
        durable: a write is complete when its bytes are on the medium, not in a cache (RWF_DSYNC).
        polled: completions of direct I/O are polled for, which takes the processor and saves interrupts; for
            drives with poll queues.
        passthrough: blocks of whole NVMe namespaces (``/dev/nvme0n1``) are moved by NVMe commands to
            ``/dev/ng0n1``, past the block layer, where this process may open that.
        gpudirect: GPU memory is moved to and from files and block devices by cuFile (GPUDirect Storage),
            which then must be there, and a GPU.
        register_buffers: memory is pinned when it is first used, up to 64 MiB at a time, so that the kernel
            need not find its pages for every operation.
        in_flight: how many operations the engine keeps under way with one peer.
        chunk_bytes: the largest operation; longer blocks are cut.
        workers: most threads, for I/O that is not aligned and where there is no io_uring.
        queue_depth: how many operations may be under way or waiting to be fetched, over all peers.
        host: an address of this host, at which peers of other hosts ask for regions on namespaces that both
            reach, and are told when they are taken back; empty: only peers of this host are served.
        host_nqn: the name by which NVMe/TCP targets know this host; empty: what /etc/nvme/hostnqn says, else
            one made of the machine's id.
        header_digest: headers of NVMe/TCP carry checksums (CRC32C).
        data_digest: the data too, which costs both sides time.
        io_queues: connections to a target beside that for administration; it may grant fewer.
        queue_entries: commands under way on each, plus one; it may grant fewer.
        connect_timeout_s: how long each of connecting, asking and setting up queues may take.
        command_timeout_s: a target that does not finish a command within this is given up and connected
            anew.
        keep_alive_s: how often a target is asked whether it is there; it drops this host after twice as long.
            0: never.
        fence_s: after a connection was lost with writes under way, later writes wait so long, since the
            target may still apply the earlier ones.
    """

    io: Literal["auto", "io_uring", "threads"] = "auto"
    direct: bool = True
    durable: bool = False
    polled: bool = False
    passthrough: bool = False
    gpudirect: bool = False
    register_buffers: bool = True
    in_flight: int = 64
    chunk_bytes: int = 1 << 20
    workers: int = 8
    queue_depth: int = 1024
    host: str = ""
    host_nqn: str = ""
    header_digest: bool = False
    data_digest: bool = False
    io_queues: int = 2
    queue_entries: int = 128
    connect_timeout_s: float = 5.0
    command_timeout_s: float = 30.0
    keep_alive_s: float = 5.0
    fence_s: float = 10.0

    def __post_init__(self) -> None:
        check_limits("nvmeof", self, LIMITS)
        if len(self.host_nqn) > 223:
            raise ConfigError(f"host_nqn has {len(self.host_nqn)} letters; a name of a host has at most 223")


def default_host_nqn() -> str:
    """The name of this host, as nvme-cli knows it; where it knows none, one that stays the same."""
    try:
        if name := HOST_NQN_FILE.read_text().strip():
            return name[:223]
    except OSError:
        pass  # nvme-cli is not installed
    try:
        seed = MACHINE_ID_FILE.read_text().strip()
    except OSError:
        seed = ""  # a container without one
    return f"nqn.2014-08.org.nvmexpress:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, seed or socket.gethostname())}"


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check the user's options and write them as the strings that the core reads."""
    known = checked("nvmeof", NvmeofOptions, options)
    return as_text(known) | {"host_nqn": known.host_nqn or default_host_nqn()}
