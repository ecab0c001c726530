"""What is checked before any process of a cluster starts: quick, and it changes nothing."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from mooncake_transfer.listening import join_address, listen
from mooncake_transfer.memory import available_bytes
from mooncake_transformers.cluster._errors import PortTaken, SpecError
from mooncake_transformers.cluster.spec import ClusterSpec
from mooncake_transformers.config import format_bytes

__all__ = ["check_can_start", "check_file_can_be_written"]


def check_can_start(spec: ClusterSpec) -> None:
    """Raise PortTaken or SpecError when the machine lacks the address, the port or the memory."""
    check_port_is_free(spec.host, spec.port)
    check_memory(spec)


def check_file_can_be_written(path: Path) -> None:
    """Raise SpecError unless there is a folder that a file at ``path`` can be made in."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise SpecError(f"cannot write {path}: there is no folder {folder}")
    if path.is_dir():
        raise SpecError(f"cannot write {path}: it is a folder; give a file's name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpecError(f"cannot write {path}: no permission to write in the folder {folder}")


def check_memory(spec: ClusterSpec) -> None:
    """Raise SpecError when the workers' segments and pools together are more than the memory available."""
    workers = spec.prefill_workers + spec.decode_workers
    needed = workers * (spec.segment_bytes + spec.pool_bytes)
    available = available_bytes()
    if needed > available:
        raise SpecError(
            f"not enough memory: {workers} workers with a segment of {format_bytes(spec.segment_bytes)} and "
            f"a pool of {format_bytes(spec.pool_bytes)} each need {needed} bytes ({needed / 2**30:.1f} GiB), "
            f"and {available} ({available / 2**30:.1f} GiB) are available; ask for less, or free memory"
        )


def check_port_is_free(host: str, port: int) -> None:
    """Raise PortTaken when somebody listens on ``host:port``, which port 0 never is, and SpecError when the
    machine does not have the address at all.
    """
    try:
        # As the gateway itself: connections of an earlier run that linger in TIME_WAIT are no obstacle.
        listen(host, port).close()
    except socket.gaierror as error:
        raise SpecError(
            f"the host {host!r} is unknown: {error.strerror}; give an address of this machine with --host"
        ) from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise SpecError(
                f"this machine does not have the address {host}; give one that it has with --host, for "
                "example 127.0.0.1"
            ) from error
        reason = f"cannot listen on {join_address(host, port)}: {error.strerror}"
        if error.errno != errno.EADDRINUSE:
            raise SpecError(f"{reason}; choose another address with --host or --port") from error
        raise PortTaken(
            f"{reason}; stop what listens there, or choose another with --port (0 is any)"
        ) from error
