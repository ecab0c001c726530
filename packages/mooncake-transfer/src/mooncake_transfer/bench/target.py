"""The side that is written to and read from: within ``mooncake bench serve``, here or on another host."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time

import msgspec

from mooncake_transfer._errors import ConfigError, RemoteError, TransferError
from mooncake_transfer.engine import TransferEngine
from mooncake_transfer.peer import Caller
from mooncake_transfer.region import Region, RemoteRegion

__all__ = ["BenchTarget", "LocalTarget", "request_region"]

REGION_METHOD = "mooncake.bench.region"
START_LIMIT_S = 60.0
END_LIMIT_S = 10.0


class BenchTarget:
    """Lends each peer one region of the size it asks for, until the peer goes away."""

    def __init__(self, engine: TransferEngine, max_bytes: int) -> None:
        """Answer requests that reach ``engine``, for at most ``max_bytes`` each."""
        self._engine = engine
        self._max_bytes = max_bytes
        self._lent: dict[int, Region] = {}
        engine.serve(REGION_METHOD, self._lend)
        engine.on_peer_lost(self._take_back)

    def _lend(self, payload: bytes, caller: Caller) -> bytes:
        nbytes = msgspec.msgpack.decode(payload, type=int)
        if not 0 < nbytes <= self._max_bytes:
            raise ConfigError(f"{nbytes} bytes were asked for; --max-size allows {self._max_bytes}")
        old = self._lent.pop(caller.connection, None)
        if old is not None:
            old.close()
        region = self._lent[caller.connection] = self._engine.allocate(nbytes, prefault=True)
        return region.descriptor()

    def _take_back(self, caller: Caller) -> None:
        region = self._lent.pop(caller.connection, None)
        if region is not None:
            region.close()


def request_region(engine: TransferEngine, address: str, nbytes: int) -> RemoteRegion:
    """Have the target at ``address`` lend a region. Raises PeerUnreachable, ConfigError, NoRoute."""
    try:
        descriptor = engine.connect(address).call(REGION_METHOD, msgspec.msgpack.encode(nbytes))
    except RemoteError as error:
        raise ConfigError(
            f"{address} lends no region ({error.kind}: {error.message}); "
            "is `mooncake bench serve` running there?"
        ) from None
    return engine.import_region(descriptor)


class LocalTarget:
    """``mooncake bench serve`` as a child process on this host. A context manager.

    Attributes:
        address: where it is reached.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start it. Raises TransferError when it does not come up."""
        ready, ready_end = os.pipe()
        lifeline_end, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "mooncake_transfer.cli", "bench", "serve"]
        command += ["--max-size", str(max_bytes)]
        command += ["--ready-fd", str(ready_end), "--lifeline-fd", str(lifeline_end)]
        self._process = subprocess.Popen(
            command, pass_fds=(ready_end, lifeline_end), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        os.close(ready_end)
        os.close(lifeline_end)
        try:
            with os.fdopen(ready, "rb") as pipe:
                self.address = str(self._read_ready(pipe.fileno())["address"])
        except BaseException:
            self.close()
            raise

    def _read_ready(self, fd: int) -> dict[str, object]:
        said, deadline_s = b"", time.monotonic() + START_LIMIT_S
        while not said.endswith(b"\n"):
            readable, _, _ = select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))
            more = os.read(fd, 4096) if readable else b""
            if not more:
                self._process.kill()
                _, errors = self._process.communicate(timeout=END_LIMIT_S)
                raise TransferError(f"the target on this host did not start: {errors.decode().strip()}")
            said += more
        return msgspec.json.decode(said, type=dict[str, object])

    def cpu_s(self) -> float:
        """Processor time it has used so far."""
        # The clock id of another process's CPU time, as clock_getcpuclockid(3) makes it.
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def close(self) -> None:
        """End it. Safe to call twice."""
        self._process.terminate()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_LIMIT_S)
        if self._process.stderr is not None:
            self._process.stderr.close()
        if self._lifeline >= 0:
            with contextlib.suppress(OSError):
                os.close(self._lifeline)
            self._lifeline = -1

    def __enter__(self) -> LocalTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
