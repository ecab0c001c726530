"""Files and block devices as regions."""

from __future__ import annotations

import array
import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from mooncake_transfer._arguments import flag, number, text, wrong
from mooncake_transfer._errors import ConfigError
from mooncake_transfer._memory.description import Memory, MemoryKind

__all__ = ["DeviceSource", "FileSource", "device_source", "file_source"]

BLKGETSIZE64 = 0x80081272  # linux/fs.h
LARGEST_DESCRIPTOR = (1 << 31) - 1
LARGEST_OFFSET = (1 << 63) - 1  # off_t
BLOCKS = Path("/sys/dev/block")


@dataclass(frozen=True, slots=True)
class FileSource:
    """A part of a file or of a block device.

    Attributes:
        file: its path, or an open descriptor, which is duplicated.
        offset: where the part begins, in bytes.
        nbytes: its size in bytes; None: up to the end.
        writable: whether it is opened for writing; False for what is only read, by peers with a
            ``descriptor("r")`` and by this engine as the source of its writes.
    """

    file: str | os.PathLike[str] | int
    offset: int = 0
    nbytes: int | None = None
    writable: bool = True

    def __post_init__(self) -> None:
        """Raise ConfigError for what is no file, no number, or neither True nor False."""
        if isinstance(self.file, bool) or not isinstance(self.file, str | os.PathLike | int):
            raise wrong("file", self.file, "a path, or an open descriptor")
        if isinstance(self.file, int):
            number(self.file, "file", least=0, most=LARGEST_DESCRIPTOR)
        elif b"\0" in os.fsencode(self.file):
            raise wrong("file", self.file, "a path without the character NUL")
        number(self.offset, "offset")
        if self.nbytes is not None:
            number(self.nbytes, "nbytes")
        flag(self.writable, "writable")


@dataclass(frozen=True, slots=True)
class DeviceSource:
    """A part of a block device that the system does not know, but a driver reaches: an NVMe namespace, say.

    Attributes:
        location: its URL, as the driver makes it (``mooncake_driver_nvmeof.namespace(...).source()``).
        nbytes: the size of the part in bytes.
        offset: where the part begins, in bytes.
    """

    location: str
    nbytes: int
    offset: int = 0

    def __post_init__(self) -> None:
        """Raise ConfigError for what is no text or no number."""
        text(self.location, "location")
        number(self.nbytes, "nbytes", most=LARGEST_OFFSET)
        number(self.offset, "offset", most=LARGEST_OFFSET)


def device_source(source: DeviceSource) -> Memory:
    """Describe a device that a driver reaches (kind BLOCK). Raises ConfigError for a part that cannot be."""
    if not source.location or source.nbytes <= 0 or source.offset < 0:
        raise ConfigError(
            f"{source!r} names no part of a device; it needs a location, nbytes > 0 and offset >= 0"
        )
    return Memory(
        0, source.nbytes, None, fd_offset=source.offset, kind=MemoryKind.BLOCK, location=source.location
    )


def file_source(source: FileSource) -> Memory:
    """Describe a file (kind FILE) or a block device (kind BLOCK); which one, the file itself says.

    The file does not grow: the part must lie inside it. Raises ConfigError when it does not, when it cannot
    be opened as asked, or when it is something else, such as a folder or a pipe.
    """
    fd = _open(source)
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            kind, size = MemoryKind.FILE, status.st_size
            device = status.st_dev
        elif stat.S_ISBLK(status.st_mode):
            kind, size, device = MemoryKind.BLOCK, _block_device_bytes(fd), status.st_rdev
        else:
            raise ConfigError(f"{source.file!r} is no file and no block device (mode {status.st_mode:o})")
        nbytes = size - source.offset if source.nbytes is None else source.nbytes
        if source.offset < 0 or nbytes <= 0 or source.offset + nbytes > size:
            raise ConfigError(
                f"{source.file!r} holds {size} bytes; {nbytes} from {source.offset} on do not lie in it; "
                "make the file larger first (os.truncate) or take a smaller part"
            )
        _check_access(fd, source)
    except BaseException:
        os.close(fd)
        raise
    return Memory(
        0,
        nbytes,
        None,
        fd,
        source.offset,
        kind,
        numa_node=_node_of_block_device(device),
        writable=source.writable,
    )


def _open(source: FileSource) -> int:
    try:
        if isinstance(source.file, int):
            return os.dup(source.file)
        return os.open(source.file, (os.O_RDWR if source.writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        wanted = "reading and writing" if source.writable else "reading"
        remedy = "; use writable=False for what peers only read" if source.writable else ""
        raise ConfigError(f"cannot open {source.file!r} for {wanted}: {error.strerror}{remedy}") from error


def _check_access(fd: int, source: FileSource) -> None:
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if mode == os.O_WRONLY or (source.writable and mode != os.O_RDWR):
        need = "for reading and writing" if source.writable else "for reading"
        raise ConfigError(f"descriptor {source.file!r} is not open {need}; open it so, or set writable=False")


def _block_device_bytes(fd: int) -> int:
    size = array.array("Q", [0])
    try:
        fcntl.ioctl(fd, BLKGETSIZE64, size)
    except OSError as error:
        raise ConfigError(f"cannot ask a block device for its size: {error}") from error
    return size[0]


def _node_of_block_device(device: int) -> int:
    """The NUMA node of the controller behind a block device; -1 when there is none or it does not say."""
    try:
        place = (BLOCKS / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:
        return -1
    for folder in (place, *place.parents):
        # A drive that several controllers may lead to hangs below none of them; its subsystem lists them.
        nodes = {_number(file) for file in (folder / "numa_node", *folder.glob("nvme*/numa_node"))} - {-1}
        if nodes:
            return nodes.pop() if len(nodes) == 1 else -1
    return -1


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not here: the controller is further up
        return -1
