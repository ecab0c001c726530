"""Memory that the engine allocates: shareable with same-host peers, on huge pages or a NUMA node if asked."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from mooncake_transfer._errors import ConfigError, MemoryUnavailable
from mooncake_transfer._memory.description import Memory
from mooncake_transfer._memory.numa import bind_to_node, check_node, free_bytes_of_node, node_of

__all__ = ["allocate_shareable", "available_bytes", "huge_page_bytes"]

MADV_HUGEPAGE = 14  # linux/mman.h
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25
TRANSPARENT = "transparent"
MFD_HUGETLB = 4  # linux/memfd.h
MFD_HUGE_SHIFT = 26
MEMFD_NAME_BYTES = 249  # mm/memfd.c: what is left of NAME_MAX after "memfd:"
HUGE_PAGES = Path("/sys/kernel/mm/hugepages")
TRANSPARENT_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


def available_bytes() -> int:
    """Memory this process may still take: what the system has left, within its control group.

    Raises MemoryUnavailable when no descriptor is left to look with.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError as error:
        raise MemoryUnavailable(f"cannot see how much memory there is: {error}; raise `ulimit -n`") from error
    meminfo = dict(line.split(":", 1) for line in lines)
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
    except OSError:  # no unified hierarchy, or the root group: no limit of its own
        return available
    return available if limit.strip() == "max" else min(available, max(0, int(limit) - int(used)))


def allocate_shareable(
    nbytes: int,
    name: str,
    *,
    prefault: bool = False,
    huge_pages: bool | str = False,
    numa_node: int | None = None,
) -> Memory:
    """Allocate zeroed memory that other processes can map, without any file that could be left behind.

    With ``prefault`` the system backs every page now, so that no first touch is slow or finds no memory left.
    ``huge_pages`` takes pages from the system's reserve: True for its default size, or ``"2M"``, ``"1G"``;
    ``"transparent"`` has the kernel make them of common memory (Linux 6.1), as many as it finds room for, and
    prefaults. The size is then rounded up to whole pages. Without it, the kernel is only advised to use them.
    ``numa_node`` binds the memory to that node, which may be a far one without CPUs.

    Raises ConfigError for a size that is not positive, an unknown page size or a node without memory, and
    MemoryUnavailable when the machine has less, or when the kernel forbids it.
    """
    if nbytes <= 0:
        raise ConfigError(f"cannot allocate {nbytes} bytes for region {name!r}; the size must be positive")
    transparent = huge_pages == TRANSPARENT
    page = huge_page_bytes(huge_pages) if huge_pages and not transparent else 0
    align = transparent_huge_page_bytes() if transparent else 0
    if unit := page or align:
        nbytes = -(-nbytes // unit) * unit
    if numa_node is not None:
        check_node(numa_node)
    _check_available(nbytes, name, page, numa_node)
    fd = _create_file(nbytes, name, page)
    try:
        mapping = _Mapping(fd, nbytes, align)
        if not page and nbytes >= 2 << 20:
            # Only advice: EINVAL from a kernel without transparent huge pages changes nothing.
            _libc.madvise(ctypes.c_void_p(mapping.address), ctypes.c_size_t(nbytes), MADV_HUGEPAGE)
        if numa_node is not None:
            bind_to_node(mapping.address, nbytes, numa_node)
        # A huge page that is missing on the node would otherwise kill the process at its first touch.
        if prefault or transparent or (page and numa_node is not None):
            mapping.back_with_pages()
        if transparent:
            mapping.collapse()
    except OSError as error:
        os.close(fd)
        raise MemoryUnavailable(f"cannot map {nbytes} bytes for region {name!r}: {error}") from error
    except BaseException:
        os.close(fd)
        raise
    node = node_of(mapping.address, nbytes) if numa_node is None else numa_node
    return Memory(mapping.address, nbytes, mapping, fd, numa_node=node)


def huge_page_bytes(size: bool | str) -> int:
    """Return the bytes of one huge page of ``size``: True (the default size), ``"2M"`` or ``"1G"``.

    Raises ConfigError for another size, MemoryUnavailable when this machine has no pages of it.
    """
    if size is True:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        if "Hugepagesize" not in fields:
            raise MemoryUnavailable("this kernel has no huge pages; leave huge_pages unset")
        return int(fields["Hugepagesize"].split()[0]) * 1024
    known = {"2M": 2 << 20, "1G": 1 << 30}
    if size not in known:
        raise ConfigError(f'huge_pages is {size!r}; use True, False, "transparent", "2M" or "1G"')
    page = known[str(size)]
    if not _reserve_of(page).is_dir():
        raise MemoryUnavailable(f"this machine has no huge pages of {size}; use huge_pages=True or False")
    return page


def transparent_huge_page_bytes() -> int:
    """Return the bytes of a page that MADV_COLLAPSE makes. Raises MemoryUnavailable without any."""
    try:
        return int(TRANSPARENT_SIZE.read_text())
    except OSError as error:
        raise MemoryUnavailable(
            f"this kernel has no transparent huge pages ({error}); use huge_pages=True or False"
        ) from error


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    # Not mmap.mmap: that keeps a second descriptor open for each region.
    place = _libc.mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(protection),
        ctypes.c_int(flags),
        ctypes.c_int(fd),
        ctypes.c_long(0),
    )
    if place is None or place == MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(place)


def _map_aligned(nbytes: int, align: int, fd: int) -> int:
    # Older kernels place a mapping of a file anywhere: room is taken first, and what sticks out given back.
    room = _map(None, nbytes + align, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1)
    address = -(-room // align) * align
    try:
        _map(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd)
    except OSError:
        _unmap(room, nbytes + align)
        raise
    if address > room:
        _unmap(room, address - room)
    if room + align > address:
        _unmap(address + nbytes, room + align - address)
    return address


class _Mapping:
    """A shared mapping of a whole file, unmapped when nobody refers to it any more."""

    def __init__(self, fd: int, nbytes: int, align: int):
        if align:
            self.address = _map_aligned(nbytes, align, fd)
        else:
            self.address = _map(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
        self.nbytes = nbytes
        # Not at exit: threads of drivers may still be copying when the interpreter ends.
        weakref.finalize(self, _unmap, self.address, nbytes).atexit = False

    def back_with_pages(self) -> None:
        """Have every page backed now. Raises OSError when there is no memory for them."""
        place = ctypes.c_void_p(self.address)
        if not _libc.madvise(place, ctypes.c_size_t(self.nbytes), ctypes.c_int(MADV_POPULATE_WRITE)):
            return
        error = ctypes.get_errno()
        if error != errno.EINVAL:  # EINVAL: a kernel before 5.14 does not know this advice
            raise OSError(error, os.strerror(error))
        content = memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")
        np.frombuffer(content, dtype=np.uint8)[:: mmap.PAGESIZE] = 0

    def collapse(self) -> None:
        """Have its pages, which are there, made huge ones. Raises OSError if the kernel cannot."""
        place, length = ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes)
        if _libc.madvise(place, length, ctypes.c_int(MADV_COLLAPSE)) == 0:
            return
        # Anything else: there was no room for some of them, and those stay as they are, which is only slower.
        if (error := ctypes.get_errno()) == errno.EINVAL:
            raise OSError(error, "the kernel makes no huge pages of shared memory (Linux 6.1 does)")


def _unmap(address: int, nbytes: int) -> None:
    _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _create_file(nbytes: int, name: str, page: int) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if page:
        flags |= MFD_HUGETLB | (page.bit_length() - 1) << MFD_HUGE_SHIFT
    # Cut where the kernel has no room for more, without a part of a character at the end.
    shown_as = f"mooncake-{name}".encode()[:MEMFD_NAME_BYTES].decode(errors="ignore")
    try:
        fd = os.memfd_create(shown_as, flags)
    except OSError as error:
        raise MemoryUnavailable(f"cannot make shareable memory for region {name!r}: {error}") from error
    try:
        os.ftruncate(fd, nbytes)
        # A peer that mapped it must never meet a hole: the size is fixed for good.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise MemoryUnavailable(f"cannot size {nbytes} bytes for region {name!r}: {error}") from error
    return fd


def _check_available(nbytes: int, name: str, page: int, node: int | None) -> None:
    where = "" if node is None else f" on NUMA node {node}"
    if page:
        _check_huge_pages(nbytes // page, name, page, node, where)
        return
    available = available_bytes() if node is None else min(available_bytes(), free_bytes_of_node(node))
    if nbytes > available:
        raise MemoryUnavailable(
            f"region {name!r} needs {nbytes} bytes ({nbytes / 2**30:.1f} GiB), "
            f"{available} ({available / 2**30:.1f} GiB) are available{where}; ask for less or free memory"
        )


def _check_huge_pages(pages: int, name: str, page: int, node: int | None, where: str) -> None:
    pool = _reserve_of(page)
    count = {entry: _number(pool / f"{entry}_hugepages") for entry in ("free", "resv", "nr", "nr_overcommit")}
    surplus = max(0, count["nr_overcommit"] - _number(pool / "surplus_hugepages"))
    free = count["free"] - count["resv"] + surplus
    if node is not None:
        free = min(free, _number(_reserve_of(page, node) / "free_hugepages"))
    if pages <= free:
        return
    is_default = page == huge_page_bytes(True)
    setting = (
        "/proc/sys/vm/nr_hugepages"
        if is_default and node is None
        else str(_reserve_of(page, node) / "nr_hugepages")
    )
    raise MemoryUnavailable(
        f"region {name!r} needs {pages} huge pages of {page >> 20} MiB, {free} are free{where} "
        f"of {count['nr']} on this machine; as root: echo {count['nr'] + pages - free} > {setting}"
    )


def _reserve_of(page: int, node: int | None = None) -> Path:
    base = HUGE_PAGES if node is None else Path(f"/sys/devices/system/node/node{node}/hugepages")
    return base / f"hugepages-{page >> 10}kB"


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except OSError:  # not counted here: as good as none
        return 0
