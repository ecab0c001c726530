"""The ranks of a group as one of them sees them: their windows, and who is still there.

Every rank writes its own window and reads the others'. So a rank that was given up and comes back late can
spoil nothing; at most it reads what is not meant for it any more, which `Channel.is_intact` finds out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.dlpack import from_dlpack

from mooncake_ep import _core
from mooncake_ep._errors import PeerError

__all__ = ["FOREVER", "Hello", "Peers", "deadline_of"]

FOREVER = 2**62
HEAD_BYTES = 1 << 20
META_BYTES = 64 << 20
REGION_BYTES = 8 << 30
REGIONS = 4  # two channels, each with two rounds in turns
WINDOW_BYTES = HEAD_BYTES + REGIONS * REGION_BYTES
NONCE_WORD = 1
MOST_RANKS = 1024
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Share = Callable[[object], Sequence[object]]


@dataclass(frozen=True)
class Hello:
    """What a rank tells the others: where its window is, on which machine, how many rounds it began."""

    machine: str
    pid: int
    fd: int
    nonce: int
    rounds: int


class Peers:
    """All ranks of a group on one host. Not thread-safe: one thread of a rank uses it.

    `share(object)` gives every rank the objects of all, in order of rank: `all_gather_object` of the group.
    Raises PeerError when a rank's window cannot be reached: it runs on another host, or hides its files.
    """

    def __init__(self, rank: int, size: int, share: Share) -> None:
        self.rank, self.size = rank, size
        self.rounds = 0
        self.alive = [True] * size
        self._share = share
        self._nonce = secrets.randbits(62) | 1
        self.windows: list[_core.Window] = []
        self._pidfds: list[int] = []
        try:
            self.window = _core.Window.create(WINDOW_BYTES)
        except OSError as error:
            raise PeerError(
                f"cannot reserve {WINDOW_BYTES >> 30} GiB of addresses for shared memory: {error}; "
                "raise the limit of virtual memory (ulimit -v)"
            ) from error
        self.window.store(NONCE_WORD, self._nonce)
        self.meet(size)

    def meet(self, size: int) -> None:
        """Learn who the `size` ranks are now; all of them call this at once. Everybody is alive again.

        Raises PeerError, on every rank, when one of them cannot reach another.
        """
        if not 0 <= self.rank < size <= MOST_RANKS:
            raise PeerError(f"rank {self.rank} of {size}: there can be up to {MOST_RANKS} ranks")
        self.size = size
        machine = BOOT_ID.read_text().strip()
        mine = Hello(machine, os.getpid(), self.window.fd, self._nonce, self.rounds)
        hellos = [hello for hello in self._share(mine) if isinstance(hello, Hello)]
        if len(hellos) != self.size:
            raise PeerError(f"{len(hellos)} of {self.size} ranks said hello")
        failure = ""
        try:
            self._open(hellos, machine)
        except (OSError, PeerError) as error:
            failure = f"rank {self.rank}: {error}"
        # All rounds begin anew, above every number that was ever used.
        self.rounds = max(hello.rounds for hello in hellos) + 2
        for word in range(NONCE_WORD + 1, HEAD_BYTES // 64):
            self.window.store(word, self.rounds)
        self.alive = [True] * self.size
        failures = [str(told) for told in self._share(failure) if told]
        if failures:
            self.close()
            raise PeerError("; ".join(failures))

    def _open(self, hellos: Sequence[Hello], machine: str) -> None:
        self.close()
        for rank, hello in enumerate(hellos):
            if hello.machine != machine:
                raise PeerError(f"rank {rank} runs on another host; ranks share memory and must be on one")
            self._pidfds.append(os.pidfd_open(hello.pid))
            window = self.window
            if rank != self.rank:
                window = _core.Window.open(f"/proc/{hello.pid}/fd/{hello.fd}", WINDOW_BYTES)
            if window.load(NONCE_WORD) != hello.nonce:
                raise PeerError(f"what process {hello.pid} shares is not the window of rank {rank}")
            self.windows.append(window)

    def close(self) -> None:
        """Let go of the peers. Safe to call twice."""
        self.windows = []
        for pidfd in self._pidfds:
            with contextlib.suppress(OSError):
                os.close(pidfd)
        self._pidfds = []

    def wait(self, rank: int, word: int, least: int, deadline_ns: int) -> bool:
        """Wait until a word of a rank is `least`. When it died or took too long, give it up: False."""
        if not self.alive[rank]:
            return False
        if self.windows[rank].wait(word, least, deadline_ns, self._pidfds[rank]) == 0:
            return True
        self.alive[rank] = False
        return False

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a part of a rank's window."""
        count = 1
        for extent in shape:
            count *= extent
        if count == 0:
            return torch.empty(*shape, dtype=dtype)
        raw: torch.Tensor = from_dlpack(self.windows[rank].memory(offset, count * dtype.itemsize))
        return raw.view(dtype).view(*shape)

    def address(self, rank: int, offset: int) -> int:
        """Where a part of a rank's window is in this process."""
        return int(self.windows[rank].address) + offset

    def header(self, rank: int, offset: int) -> ctypes.Array[ctypes.c_int64]:
        """Sixteen numbers at the beginning of a region."""
        return (ctypes.c_int64 * 16).from_address(self.address(rank, offset))


def deadline_of(timeout_us: int) -> int:
    """When a wait that begins now ends, in ns of the monotonic clock; -1: never."""
    return FOREVER if timeout_us < 0 else time.monotonic_ns() + timeout_us * 1000
