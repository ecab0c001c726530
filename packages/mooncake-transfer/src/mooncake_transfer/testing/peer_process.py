"""The test's end of a peer in a process of its own."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec

from mooncake_transfer import TransferConfig
from mooncake_transfer.testing.owner import OwnedRegion
from mooncake_transfer.testing.stopping import stop_process

__all__ = ["PeerProcess", "PeerProcessError"]

START_S = 90.0  # for Python to import all of it where many start at once
ANSWER_S = 30.0
EXIT_S = 30.0


class PeerProcessError(AssertionError):
    """The peer did not do what a test asked for.

    Attributes:
        kind: class name of the exception it met, or ``""`` when it did not answer.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {message}" if kind else message)


class PeerProcess:
    """A Target in a process of its own. Dies with this process, however that ends. A context manager.

    Attributes:
        address: where its engine's channel listens.
    """

    def __init__(self, config: TransferConfig, *, prefix: Sequence[str] = (), kind: str = "engine") -> None:
        """Start it and wait until it listens. Raises PeerProcessError.

        ``prefix``: a command that runs another in its own process, such as ``ip netns exec NAME``.
        ``kind``: what its regions are made of when nothing else is asked for.
        """
        lifeline, self._lifeline = os.pipe()
        command = [*prefix, sys.executable, "-m", "mooncake_transfer.testing.peer"]
        command += [msgspec.json.encode(config).decode(), str(lifeline)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[lifeline]
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)
        self._received = b""
        self._kind = kind
        try:
            self.address = str(self.answer(START_S))
        except BaseException:
            self.kill()
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    # ---- what a Target does

    def allocate(self, nbytes: int, seed: int, kind: str | None = None) -> OwnedRegion:
        """Register bytes of one of KINDS (None: the peer's own), filled with ``pattern(seed, nbytes)``."""
        number, descriptor = self.ask("allocate", nbytes=nbytes, seed=seed, kind=kind or self._kind)
        return OwnedRegion(number, base64.b64decode(descriptor))

    def digest(self, number: int) -> str:
        """Fingerprint what a region's memory holds, also after it was closed."""
        return str(self.ask("digest", number=number))

    def fill(self, number: int, seed: int) -> None:
        """Overwrite a region's memory with another pattern, also after it was closed."""
        self.ask("fill", number=number, seed=seed)

    def close_region(self, number: int, timeout_s: float) -> None:
        """Close a region. Raises PeerProcessError of the kind that ``Region.close`` raised."""
        self.ask("close_region", number=number, timeout_s=timeout_s)

    def grant(self, number: int, access: str) -> bytes:
        """Return a descriptor of a region with a key of its own, for ``r``, ``w`` or ``rw``."""
        return base64.b64decode(self.ask("grant", number=number, access=access))

    def revoke(self, number: int, descriptor: bytes, timeout_s: float) -> None:
        """Take back what ``grant`` gave. Raises PeerProcessError, of the kind ``Region.revoke`` raised."""
        encoded = base64.b64encode(descriptor).decode()
        self.ask("revoke", number=number, descriptor=encoded, timeout_s=timeout_s)

    def write(self, number: int, descriptor: bytes, blocks: list[list[int]], timeout_s: float) -> None:
        """Write blocks of an own region to another one and wait for the end."""
        self.begin_write(number, descriptor, blocks, timeout_s)
        self.answer()

    def listen(self) -> None:
        """From now on keep what comes to NOTICE_METHOD, and nothing of what came before."""
        self.ask("listen")

    def told(self) -> list[tuple[str, str]]:
        """Return what came since: the payload, and the digest of its region at that moment."""
        return [(payload, held) for payload, held in self.ask("told")]

    def clear(self) -> None:
        """Close every region and forget it."""
        self.ask("clear")

    # ---- what only a process can

    def begin_write(self, number: int, descriptor: bytes, blocks: list[list[int]], timeout_s: float) -> None:
        """Ask for ``write`` without waiting; ``answer()`` tells how it ended."""
        encoded = base64.b64encode(descriptor).decode()
        self.tell("write", number=number, descriptor=encoded, blocks=blocks, timeout_s=timeout_s)

    def begin_read(self, number: int, descriptor: bytes, blocks: list[list[int]], timeout_s: float) -> None:
        """As ``begin_write``, into the own region."""
        encoded = base64.b64encode(descriptor).decode()
        self.tell("read", number=number, descriptor=encoded, blocks=blocks, timeout_s=timeout_s)

    def pause(self) -> None:
        """Stop it from running (SIGSTOP), all of its threads; its sockets and memory stay."""
        stop_process(self.pid)

    def resume(self) -> None:
        """Let it run again."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it by SIGKILL and wait until it is gone."""
        self._process.kill()
        self._process.wait(EXIT_S)

    def close(self) -> None:
        """End it, politely at first. Safe to call twice, and after ``kill()``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            self._process.stdin.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise PeerProcessError("", f"peer {self.pid} did not end within {EXIT_S:g} s") from None
        finally:
            self._process.stdout.close()
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the pipe

    def ask(self, command: str, **arguments: Any) -> Any:
        """Have a command done and return its result. Raises PeerProcessError."""
        self.tell(command, **arguments)
        return self.answer()

    def tell(self, command: str, **arguments: Any) -> None:
        """Send a command; ``answer()`` has to be called for each, in order."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """Wait for the next result. Raises PeerProcessError when it is an error or does not come."""
        while b"\n" not in self._received:
            self._received += self._read_some(timeout_s)
        line, _, self._received = self._received.partition(b"\n")
        message = json.loads(line)
        if "error" in message:
            raise PeerProcessError(*message["error"])
        return message["result"]

    def _read_some(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise PeerProcessError("", f"peer {self.pid} did not answer within {timeout_s:g} s")
        received = os.read(self._process.stdout.fileno(), 1 << 16)
        if not received:
            raise PeerProcessError("", f"peer {self.pid} ended with status {self._process.wait(EXIT_S)}")
        return received
