"""The ranks of a group as one of them sees them: their windows, and who is still there.

Every rank writes its own window and reads the others'. So a rank that was given up and comes back late can
spoil nothing; at most it reads what is not meant for it any more, which `Channel.is_intact` finds out. Whom
one rank gives up, no rank hears any more: words that show what was posted end for all at once.
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
from typing import NoReturn

import torch
from torch.utils.dlpack import from_dlpack

from mooncake_ep import _core
from mooncake_ep._errors import PeerError

__all__ = ["FOREVER", "Hello", "Peers", "deadline_of"]

FOREVER = 2**62
HEAD_BYTES = 1 << 20
META_BYTES = 64 << 20
REGION_BYTES = 8 << 30
POSTED_WORDS = (2, 4)  # of the two channels, dispatches and combines
REACHED = 0  # of what a window's wait returns
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

    `share(object)` gives every rank the objects of all, in order of rank; None for ranks that are gone.
    Raises PeerError when a rank's window cannot be reached: it runs on another host, or hides its files.
    """

    def __init__(self, rank: int, size: int, share: Share) -> None:
        self.rank, self.size = rank, size
        self.rounds = 0
        self.alive = [True] * size
        self._share = share
        self._nonce = secrets.randbits(62) | 1
        self.windows: list[_core.Window | None] = []
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
        """Learn who the `size` ranks are now; all of them call this at once. Whoever is there is alive again.

        Raises PeerError, on every rank, when one of them cannot reach another.
        """
        if not 0 <= self.rank < size <= MOST_RANKS:
            raise PeerError(f"rank {self.rank} of {size}: there can be up to {MOST_RANKS} ranks")
        self.size = size
        mine = Hello(_machine(), os.getpid(), self.window.fd, self._nonce, self.rounds)
        told = self._share(mine)
        hellos = [hello if isinstance(hello, Hello) else None for hello in told]
        if len(hellos) != self.size or hellos[self.rank] is None:
            raise PeerError(f"{len(hellos)} ranks were asked for a hello, and the group has {self.size}")
        failure = ""
        try:
            self._open(hellos, mine.machine)
        except (OSError, PeerError) as error:
            failure = f"rank {self.rank}: {error}"
        # All rounds begin anew, above every number that was ever used.
        self.rounds = max(hello.rounds for hello in hellos if hello is not None) + 2
        for word in range(NONCE_WORD + 1, HEAD_BYTES // 64):
            self.window.store(word, self.rounds)
        self.alive = [window is not None for window in self.windows]
        failures = [str(told) for told in self._share(failure) if told]
        if failures:
            self.close()
            raise PeerError("; ".join(failures))

    def _open(self, hellos: Sequence[Hello | None], machine: str) -> None:
        self.close()
        for rank, hello in enumerate(hellos):
            window, pidfd = (None, -1) if hello is None else self._opened(rank, hello, machine)
            self.windows.append(window)
            self._pidfds.append(pidfd)

    def _opened(self, rank: int, hello: Hello, machine: str) -> tuple[_core.Window | None, int]:
        """A rank's window and the pidfd of its process; None and -1 when it has died since its hello."""
        if hello.machine != machine:
            raise PeerError(
                f"rank {rank} runs on another host, or in another PID namespace; ranks share memory and must "
                "be on one"
            )
        try:
            pidfd = os.pidfd_open(hello.pid)
        except ProcessLookupError:
            return None, -1
        try:
            window = self._window_of(rank, hello)
        except (OSError, PeerError):
            died = _core.has_died(pidfd)
            os.close(pidfd)
            if died:
                return None, -1
            raise
        return window, pidfd

    def _window_of(self, rank: int, hello: Hello) -> _core.Window:
        window = self.window
        if rank != self.rank:
            window = _core.Window.open(f"/proc/{hello.pid}/fd/{hello.fd}", WINDOW_BYTES)
        if window.load(NONCE_WORD) != hello.nonce:
            raise PeerError(f"what process {hello.pid} shares is not the window of rank {rank}")
        return window

    def close(self) -> None:
        """Let go of the peers. Safe to call twice."""
        self.windows = []
        for pidfd in self._pidfds:
            with contextlib.suppress(OSError):
                os.close(pidfd)
        self._pidfds = []

    def wait(self, rank: int, word: int, least: int, deadline_ns: int) -> bool:
        """Wait until a word of a rank is `least`, without giving it up when that does not come."""
        window = self.windows[rank]
        if window is None or not self.alive[rank]:
            return False
        return window.wait(word, least, deadline_ns, self._pidfds[rank]) == REACHED

    def expect(self, rank: int, word: int, least: int, deadline_ns: int) -> bool:
        """Wait until a word of a rank is `least`. When it died or took too long, give it up: False.

        All ranks decide alike: the word either came to be `least`, which then counts for all, or has ended.
        """
        if self.wait(rank, word, least, deadline_ns):
            return True
        if not self.alive[rank]:
            return False
        window = self.windows[rank]
        if window is not None and not window.end(word, least):
            return True  # it came after all
        self.give_up(rank)
        self.alive[rank] = False
        return False

    def give_up(self, rank: int) -> None:
        """Have a rank post nothing more, for all ranks; what it has posted counts."""
        window = self.windows[rank]
        if window is not None:
            for word in POSTED_WORDS:
                window.end(word, FOREVER)

    def require_membership(self) -> None:
        """Raise PeerError when others have given this rank up."""
        if any(self.window.ended(word) for word in POSTED_WORDS):
            self.refuse()

    def refuse(self) -> NoReturn:
        """Say that others have given this rank up."""
        raise PeerError(
            f"the others went on without rank {self.rank}, which took longer than their timeout_us: what it "
            "has to say does not count until all ranks call update_ep_member"
        )

    def window_of(self, rank: int) -> _core.Window:
        """The window of a rank that is there."""
        window = self.windows[rank]
        assert window is not None, "nobody looks at ranks that did not say hello"
        return window

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over a part of a rank's window."""
        count = 1
        for extent in shape:
            count *= extent
        if count == 0:
            return torch.empty(*shape, dtype=dtype)
        raw: torch.Tensor = from_dlpack(self.window_of(rank).memory(offset, count * dtype.itemsize))
        return raw.view(dtype).view(*shape)

    def address(self, rank: int, offset: int) -> int:
        """Where a part of a rank's window is in this process."""
        return int(self.window_of(rank).address) + offset

    def header(self, rank: int, offset: int) -> ctypes.Array[ctypes.c_int64]:
        """Sixteen numbers at the beginning of a region."""
        return (ctypes.c_int64 * 16).from_address(self.address(rank, offset))


def _machine() -> str:
    """Name what ranks must have in common to share memory: the running kernel, the PID namespace."""
    return f"{BOOT_ID.read_text().strip()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def deadline_of(timeout_us: int) -> int:
    """When a wait that begins now ends, in ns of the monotonic clock; -1: never."""
    return FOREVER if timeout_us < 0 else time.monotonic_ns() + timeout_us * 1000
