"""Files of a simulated machine: real ones in a temporary folder, which take virtual time.

They fail, and are torn when a process is killed or a machine loses power.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mooncake_store.errors import TierInUse, TierTimeout
from mooncake_store.tiers.files.access import Piece
from simulated.scheduler import Killed, Process, Scheduler

__all__ = ["Disk", "SimFiles", "SimWorkers"]

BLOCK_BYTES = 4096
USUAL_S, SLOW_S = 1e-3, 2.0
WRITTEN_BACK_S = 1.0  # after which a loss of power takes nothing of a write


class Disk:
    """The folder of one machine.

    Attributes:
        full: no room for another file.
        failing, slow: so many of the next operations fail, or take long.
    """

    def __init__(self, scheduler: Scheduler, folder: Path) -> None:
        self.scheduler = scheduler
        self.folder = folder
        self.full = False
        self.failing = self.slow = 0
        self._locks: dict[Path, Process] = {}
        self._files: dict[SimFile, Process] = {}
        self.system = self._system()
        self._before: dict[tuple[str, int], tuple[float, bytes]] = {}  # what a loss of power brings back
        folder.mkdir()

    # ---- as the modules of the tier see it

    def lock_folder(self, folder: Path) -> int:
        process = self.scheduler.here().process
        if folder in self._locks:
            raise TierInUse(f"{folder} is in use")
        self._locks[folder] = process
        process.on_death.append(partial(self._gone, process))
        return -1

    def _system(self) -> SimpleNamespace:
        """``os``, with a disk that may be full."""

        def allocate(fd: int, offset: int, nbytes: int) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "the disk is full")
            os.posix_fallocate(fd, offset, nbytes)

        def close(fd: int) -> None:
            if fd >= 0:
                os.close(fd)
            else:
                self._unlock(self.scheduler.here().process)

        system = SimpleNamespace(**{name: getattr(os, name) for name in dir(os)})
        system.posix_fallocate, system.close = allocate, close
        return system

    # ---- what happens to it

    def _unlock(self, process: Process) -> None:
        self._locks = {folder: owner for folder, owner in self._locks.items() if owner is not process}

    def _gone(self, process: Process) -> None:
        self._unlock(process)
        for file in [file for file, owner in self._files.items() if owner is process]:
            file.shut()

    def opened(self, file: SimFile) -> None:
        self._files[file] = self.scheduler.here().process

    def shut(self, file: SimFile) -> None:
        self._files.pop(file, None)

    def lose_power(self) -> None:
        """Of what was written lately, some blocks are as they were before."""
        for (path, at), (when_s, before) in self._before.items():
            young = self.scheduler.now_s - when_s < WRITTEN_BACK_S
            if young and self.scheduler.random.random() < 0.5 and Path(path).exists():
                with open(path, "r+b") as file:
                    file.seek(at)
                    file.write(before)
        self._before.clear()

    def write(self, path: str, fd: int, offset: int, data: bytes) -> None:
        """Write now; a loss of power may undo it, block by block."""
        for at in range(0, len(data), BLOCK_BYTES):
            before = os.pread(fd, min(BLOCK_BYTES, len(data) - at), offset + at)
            self._before[path, offset + at] = (self.scheduler.now_s, before)
        os.pwrite(fd, data, offset)

    def buckets(self) -> list[Path]:
        return sorted(self.folder.rglob("*.bucket"))

    def flip(self) -> bool:
        """One bit of a file is another; whether there was a file."""
        chance = self.scheduler.random
        files = [path for path in self.buckets() if path.stat().st_size]
        if not files:
            return False
        with open(chance.choice(files), "r+b") as file:
            at = chance.randrange(os.fstat(file.fileno()).st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
        return True

    def cut_short(self) -> bool:
        """A file ends earlier; whether there was one."""
        files = self.buckets()
        if not files:
            return False
        path = self.scheduler.random.choice(files)
        os.truncate(path, self.scheduler.random.randint(0, path.stat().st_size))
        return True

    def leave_foreign(self) -> bool:
        """A file that is not the tier's, under a name like those of its own."""
        files = self.buckets()
        if not files:
            return False
        chance = self.scheduler.random
        name = f"{chance.randrange(64):016x}-{chance.randbytes(16).hex()}.bucket"
        like = chance.choice(files)
        like.with_name(name).write_bytes(like.read_bytes())
        return True


class SimFiles:
    """``Files`` of the machine of the process that opens them."""

    name = "simulated"

    def __init__(self, disk: Disk) -> None:
        self.disk = disk

    def open(self, path: str | os.PathLike[str]) -> SimFile:
        return SimFile(self.disk, os.fspath(path))

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[Any]:
        yield np.zeros(max(nbytes, 1), dtype=np.uint8)[:nbytes]

    def lend_memory(self, memory: Any) -> None:
        """Nothing to do."""

    def close(self, timeout_s: float) -> None:
        """Nothing is kept."""


class SimFile:
    """One open file."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.disk, self.path = disk, path
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        disk.opened(self)

    def start(self, pieces: Sequence[Piece], *, write: bool) -> _Running:
        return _Running(self, pieces, write=write)

    def sync(self) -> None:
        """Nothing of it is lost any more."""
        for key in [key for key in self.disk._before if key[0] == self.path]:
            del self.disk._before[key]

    def close(self) -> None:
        self.shut()

    def shut(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.disk.shut(self)


class _Running:
    def __init__(self, file: SimFile, pieces: Sequence[Piece], *, write: bool) -> None:
        self._file, self._pieces, self._write = file, list(pieces), write
        disk = file.disk
        chance = disk.scheduler.random
        self._fails = disk.failing > 0
        disk.failing -= self._fails
        slow = disk.slow > 0
        disk.slow -= slow
        self._ready_s = disk.scheduler.now_s + chance.uniform(0, SLOW_S if slow else USUAL_S)

    def wait(self, deadline_s: float) -> None:
        scheduler = self._file.disk.scheduler
        until_s = scheduler.true_s(deadline_s - scheduler.monotonic_s())
        try:
            if self._ready_s > scheduler.now_s:
                scheduler.block(min(self._ready_s, until_s))
        except Killed:
            self._tear()
            raise
        if scheduler.now_s < self._ready_s:
            self._tear()
            raise TierTimeout("it did not end before its deadline")
        if self._fails:
            self._tear()
            raise OSError(errno.EIO, "the disk has failed")
        for piece in self._pieces:
            self._move(piece)

    def _move(self, piece: Piece) -> None:
        if self._write:
            self._file.disk.write(self._file.path, self._file.fd, piece.offset, piece.memory.tobytes())
            return
        data = os.pread(self._file.fd, piece.memory.nbytes, piece.offset)
        if len(data) < piece.memory.nbytes:
            raise OSError("the file ends too early")
        piece.memory[:] = np.frombuffer(data, dtype=np.uint8)

    def _tear(self) -> None:
        """Some of it has arrived."""
        if not self._write or self._file.fd < 0:
            return
        disk = self._file.disk
        for piece in self._pieces:
            data = piece.memory.tobytes()
            for at in range(0, len(data), BLOCK_BYTES):
                if disk.scheduler.random.random() < 0.5:
                    block = data[at : at + BLOCK_BYTES]
                    disk.write(self._file.path, self._file.fd, piece.offset + at, block)


class SimWorkers:
    """``Workers`` whose calls are done at once, by who asks for them."""

    def __init__(self, count: int, name: str) -> None:
        """Threads are not needed."""

    def submit(self, call: Callable[[], Any]) -> Any:
        done = call()
        return SimpleNamespace(result=lambda: done)

    def run_all(self, calls: Sequence[Callable[[], Any]], timeout_s: float) -> list[Any]:
        ended: list[Any] = []
        for call in calls:
            try:
                ended.append(call())
            except Exception as error:
                ended.append(error)
        return ended

    def close(self, timeout_s: float) -> None:
        """Nothing runs."""
