"""Starts the contestants of the transfer benchmark, or says why one cannot take part."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import peers
from contestant import Contestant, ContestantFailed
from transfer import cases

AGENTS = Path(__file__).resolve().parents[1] / "agents"

LABELS = {
    cases.SHM: "ours, shm",
    cases.NIXL: "nixl 1.5.1, default",
    cases.NIXL_TCP: "nixl 1.5.1, tcp",
    cases.NIXL_TCP_SEEN: "nixl 1.5.1, tcp, until notified",
    cases.UPSTREAM: "upstream 0.3.13.post1, tcp",
    cases.GLOO: "gloo of torch 2.13.0, send + answer",
    cases.COPY: "plain copy, best of 4 ways",
    cases.SOCKET: "bare sockets, polling",
    cases.UPSTREAM_STORE: "upstream's store 0.3.13.post1, tcp",
    cases.REDIS: "redis, unix socket",
}
UPSTREAMS = (cases.UPSTREAM, cases.UPSTREAM_STORE)
# Those with a side that polls for ever; they would take the cores of others.
SPINNING = (cases.NIXL, cases.NIXL_TCP, cases.NIXL_TCP_SEEN, cases.SOCKET)

Progress = Callable[[str], None]
Started = AbstractContextManager[tuple[dict[str, Contestant], dict[str, str]]]
Start = Callable[[Iterable[str], Path | None, Progress], Started]


def _command(name: str, folder: Path | None, pool: str) -> list[str]:
    """The command of an agent. Raises PeerMissing."""
    if name in (cases.SHM, cases.TCP, cases.CXL):
        own = [sys.executable, str(AGENTS / "ours.py"), "--driver", name.removeprefix("ours-")]
        return [*own, "--pool", pool] if name == cases.CXL else own
    if folder is None:
        raise peers.PeerMissing("peers were not asked for (--without-peers)")
    if name in (cases.COPY, cases.SOCKET):
        library = peers.library_of(name, folder)
        return [sys.executable, str(AGENTS / f"{name}.py"), "--library", str(library)]
    if name == cases.UPSTREAM:
        return [str(peers.python_of(peers.UPSTREAM, folder)), str(AGENTS / "upstream.py")]
    python = str(peers.python_of(peers.NIXL, folder))
    if name == cases.GLOO:
        return [python, str(AGENTS / "gloo.py")]
    options = {
        cases.NIXL: [],
        cases.NIXL_TCP: ["--tls", "tcp,self"],
        cases.NIXL_TCP_SEEN: ["--tls", "tcp,self", "--visible"],
    }
    return [python, str(AGENTS / "nixl_peer.py"), *options[name]]


def started(names: Iterable[str], folder: Path | None, progress: Progress, pool: str = "") -> Started:
    """Start contestants of the transfer bench. ``pool``: path of the pool for the driver cxl."""
    return starting(names, lambda name: _command(name, folder, pool), progress)


@contextlib.contextmanager
def starting(
    names: Iterable[str], command: Callable[[str], list[str]], progress: Progress
) -> Iterator[tuple[dict[str, Contestant], dict[str, str]]]:
    """Start those of ``names`` that can be had; gives them, and the reasons of the others.

    ``command`` gives the command of an agent, or raises PeerMissing.
    """
    running: dict[str, Contestant] = {}
    absent: dict[str, str] = {}
    try:
        for name in names:
            progress(f"starting {LABELS.get(name, name)}")
            try:
                running[name] = Contestant(name, command(name), name in SPINNING)
            except peers.PeerMissing as missing:
                absent[name] = str(missing)
            except ContestantFailed as failure:
                remedy = f" ({peers.UPSTREAM.remedy})" if name in UPSTREAMS else ""
                absent[name] = f"{failure}{remedy}"
        yield running, absent
    finally:
        for contestant in running.values():
            contestant.close()
