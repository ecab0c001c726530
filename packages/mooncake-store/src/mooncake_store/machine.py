"""Which machine this is."""

from __future__ import annotations

import functools
import socket
from pathlib import Path

from xxhash import xxh3_64_intdigest

__all__ = ["this_machine"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def this_machine() -> int:
    """A number that processes of one machine share, until it boots; never 0."""
    try:
        name = BOOT_ID.read_bytes()
    except OSError:
        name = socket.gethostname().encode()
    return xxh3_64_intdigest(name) >> 1 | 1
