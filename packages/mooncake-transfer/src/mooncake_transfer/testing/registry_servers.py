"""Real registries as processes of a test, to be killed, stopped and restarted: our server, etcd and Redis.

They keep nothing on disk that outlives a restart, and the kernel kills them when the test's process dies.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple
from urllib.parse import quote

import pytest

from mooncake_transfer.errors import RegistryUnavailable
from mooncake_transfer.registry import open_registry
from mooncake_transfer.testing.ports import free_port
from mooncake_transfer.testing.stopping import stop_process

__all__ = [
    "SERVERS",
    "RegistryServer",
    "TlsFiles",
    "etcd_members",
    "etcd_server",
    "find_program",
    "metadata_server",
    "redis_server",
    "skip_without_program",
]

PROGRAMS = {"etcd": "etcd", "redis": "redis-server"}

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02


class TlsFiles(NamedTuple):
    """PEM files: a CA, and a certificate of it with its key, good for servers and clients on 127.0.0.1."""

    ca: str
    cert: str
    key: str


class RegistryServer:
    """One server process. Use it as a context manager: it runs within.

    Attributes:
        url: what ``TransferConfig.registry`` takes.
        log: file with what it printed.
    """

    def __init__(
        self,
        url: str,
        command: Sequence[str],
        folder: Path,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """``command`` runs in ``folder``/data, which is new at each start; then ``prepare`` sets it up."""
        self.url = url
        self.log = folder / "log"
        self._command = list(command)
        self._data = folder / "data"
        self._prepare = prepare
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, fresh: bool = True) -> None:
        """Start with no entries, or with those it has on disk, and return when it answers.

        Raises TimeoutError with its log.
        """
        if fresh:
            shutil.rmtree(self._data, ignore_errors=True)
            self._data.mkdir(parents=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._command],
                cwd=self._data,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        self._await(self._prepare, deadline_s)
        self._await(self._ask, deadline_s)

    def _ask(self) -> None:
        registry = open_registry(self.url, START_TIMEOUT_S)
        try:
            registry.get("ready?")
        finally:
            registry.close()

    def _await(self, step: Callable[[], None], deadline_s: float) -> None:
        while True:
            try:
                return step()
            except (RegistryUnavailable, OSError) as error:
                ended = self._process is None or self._process.poll() is not None
                if ended or time.monotonic() > deadline_s:
                    lines = self.log.read_text(errors="replace")
                    raise TimeoutError(f"{self._command[0]} does not start ({error}):\n{lines}") from error
            time.sleep(POLL_S)

    def kill(self) -> None:
        """End it like a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None

    def pause(self) -> None:
        """Stop it from answering; its connections stay."""
        assert self._process is not None, "it does not run"
        stop_process(self._process.pid)

    def resume(self) -> None:
        """Let it answer again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it does not run"
        self._process.send_signal(number)

    def __enter__(self) -> RegistryServer:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def find_program(name: str) -> str:
    """The path of an installed program. Raises FileNotFoundError with how to install it."""
    found = shutil.which(name)
    if found is None:
        package = {"etcd": "etcd-server"}.get(name, name)
        raise FileNotFoundError(f"{name} is not installed; on Debian or Ubuntu: apt-get install {package}")
    return found


def skip_without_program(kind: str, *, required: bool) -> None:
    """Skip a test where the server of this kind is not installed; raise where it is ``required`` (in CI)."""
    if kind not in PROGRAMS:
        return
    try:
        find_program(PROGRAMS[kind])
    except FileNotFoundError as error:
        if required:
            raise
        pytest.skip(str(error))


def metadata_server(folder: Path, *, token: str = "", tls: TlsFiles | None = None) -> RegistryServer:
    """``mooncake metadata serve``. With ``tls``, clients need a certificate too."""
    port = free_port()
    command = [sys.executable, "-m", "mooncake_transfer.cli", "metadata", "serve", "--port", str(port)]
    if token:
        file = folder / "token"
        file.write_text(f"{token}\n")
        command += ["--token-file", str(file)]
    if tls is not None:
        command += ["--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-client-ca", tls.ca]
    return RegistryServer(
        _url("http", f":{quote(token, safe='')}@" if token else "", port, tls), command, folder
    )


def redis_server(
    folder: Path, *, user: str = "", password: str = "", tls: TlsFiles | None = None
) -> RegistryServer:
    """A Redis server; with ``user``, that one may touch keys of Mooncake only, and nobody else anything."""
    port = free_port()
    command = [find_program("redis-server"), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
    if user:
        command += ["--user", user, "on", f">{password}", "~mooncake/*", "~ready?", "+@all"]
        command += ["--user", "default", "off"]
    elif password:
        command += ["--requirepass", password]
    if tls is None:
        command += ["--port", str(port)]
    else:
        command += ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "yes"]
        command += ["--tls-cert-file", tls.cert, "--tls-key-file", tls.key, "--tls-ca-cert-file", tls.ca]
    return RegistryServer(
        _url("redis", f"{user}:{quote(password, safe='')}@" if password else "", port, tls), command, folder
    )


def etcd_server(
    folder: Path, *, password: str = "", tls: TlsFiles | None = None, options: Sequence[str] = ()
) -> RegistryServer:
    """An etcd of one node; with ``password``, its user ``root`` has that one and nobody else gets in.

    ``options``: further ones of its command line.
    """
    port = free_port()
    scheme = "http" if tls is None else "https"
    # A single node never talks to its peers, so any free port and a made-up address do.
    command = [find_program("etcd"), "--data-dir", ".", "--initial-cluster", "default=http://127.0.0.1:1"]
    command += ["--listen-peer-urls", "http://127.0.0.1:0", "--initial-advertise-peer-urls"]
    command += ["http://127.0.0.1:1", "--advertise-client-urls", f"{scheme}://127.0.0.1:{port}"]
    command += ["--listen-client-urls", f"{scheme}://127.0.0.1:{port}", "--log-level", "warn", *options]
    if tls is not None:
        command += ["--cert-file", tls.cert, "--key-file", tls.key]
        command += ["--trusted-ca-file", tls.ca, "--client-cert-auth"]
    url = _url("etcd", f"root:{quote(password, safe='')}@" if password else "", port, tls)
    if not password:
        return RegistryServer(url, command, folder)
    return RegistryServer(url, command, folder, lambda: _ask_for_passwords(port, password))


def etcd_members(folder: Path, count: int = 3) -> list[RegistryServer]:
    """The members of one etcd cluster, to be started at the same time: each waits for a majority."""
    peers = {f"member{number}": free_port() for number in range(count)}
    everyone = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in peers.items())
    members = []
    for name, peer_port in peers.items():
        port, peer = free_port(), f"http://127.0.0.1:{peer_port}"
        command = [find_program("etcd"), "--name", name, "--data-dir", ".", "--initial-cluster", everyone]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--log-level", "warn"]
        command += ["--listen-client-urls", f"http://127.0.0.1:{port}"]
        command += ["--advertise-client-urls", f"http://127.0.0.1:{port}"]
        members.append(RegistryServer(_url("etcd", "", port, None), command, folder / name))
    return members


def _ask_for_passwords(port: int, password: str) -> None:
    import httpx

    steps: list[tuple[str, dict[str, str]]] = [
        ("user/add", {"name": "root", "password": password}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("enable", {}),
    ]
    try:
        for path, body in steps:
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v3/auth/{path}", json=body, timeout=START_TIMEOUT_S, trust_env=False
            )
            answer.raise_for_status()
    except httpx.TransportError as error:
        raise ConnectionError(str(error)) from error


def _url(scheme: str, user: str, port: int, tls: TlsFiles | None) -> str:
    if tls is None:
        return f"{scheme}://{user}127.0.0.1:{port}"
    return f"{scheme}s://{user}127.0.0.1:{port}?ca={tls.ca}&cert={tls.cert}&key={tls.key}"


SERVERS: dict[str, Callable[[Path], RegistryServer]] = {
    "http": metadata_server,
    "etcd": etcd_server,
    "redis": redis_server,
}
