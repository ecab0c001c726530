"""Finding the records in a bucket of an earlier life."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

from mooncake_store._errors import RecordInvalid
from mooncake_store.tiers.codec import BLOCK_BYTES, Header, decode_header, header_size, looks_like_header

__all__ = ["Scan", "scan"]

WINDOW_BYTES = 1 << 20


@dataclass(slots=True)
class Scan:
    """What was found.

    Attributes:
        headers: of records that were not dropped, in their order.
        end: where the last of them, or of those dropped, ends.
        damaged: stretches without a record where there should have been one.
    """

    headers: list[Header] = field(default_factory=list)
    end: int = 0
    damaged: int = 0


def scan(path: Path, place: bytes) -> Scan:
    """Read the headers of a bucket. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # One block of each record is wanted, and nothing of what follows it.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        size = os.fstat(fd).st_size
        found, at = Scan(), 0
        while at + BLOCK_BYTES <= size:
            header = _header_at(fd, at, place)
            if header is not None and at + header.span <= size:
                if not header.dropped:
                    found.headers.append(header)
                at += header.span
                found.end = at
                continue
            after = _next_record(fd, at + BLOCK_BYTES, size, place)
            # What was never written is no damage: the process ended before the bucket was full.
            found.damaged += after < size or _data_from(fd, at) < size
            at = after
        return found
    finally:
        os.close(fd)


def _header_at(fd: int, at: int, place: bytes) -> Header | None:
    data = os.pread(fd, BLOCK_BYTES, at)
    size = header_size(data)
    if size > BLOCK_BYTES:
        data = os.pread(fd, size, at)
    try:
        header = decode_header(data)
    except RecordInvalid:
        return None
    return header if header.place == place and header.offset == at else None


def _next_record(fd: int, at: int, size: int, place: bytes) -> int:
    """Where the next record begins; the file's size when there is none."""
    while (at := _data_from(fd, at)) < size:
        at -= at % BLOCK_BYTES
        window = os.pread(fd, WINDOW_BYTES, at)
        for within in range(0, len(window) - BLOCK_BYTES + 1, BLOCK_BYTES):
            block = window[within : within + 8]
            if looks_like_header(block) and _header_at(fd, at + within, place) is not None:
                return at + within
        if len(window) < WINDOW_BYTES:
            break
        at += WINDOW_BYTES
    return size


def _data_from(fd: int, at: int) -> int:
    """The first byte from ``at`` on that was ever written; a large number when there is none."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return 1 << 63
        raise
