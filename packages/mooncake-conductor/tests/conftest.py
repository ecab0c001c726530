"""A cluster of fake workers behind a conductor, and a plain HTTP client, all on real sockets."""

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

import pytest

from mooncake_conductor import ConductorConfig
from mooncake_conductor.testing import FakeWorker, RunningConductor, wait_until

TIMEOUT_S = 20.0
# Short where a test has to wait for it, long enough for a machine with other work to do.
QUICK = {"probe_interval_s": 0.1, "replay_interval_s": 0.1, "connect_timeout_s": 5.0, "idle_timeout_s": 4.0}


@dataclass
class Answer:
    """An HTTP answer."""

    status: int
    headers: Message
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


@dataclass
class Client:
    """Talks to one gateway. Every call has a deadline."""

    url: str

    def request(self, method: str, path: str, body: Any = None) -> Answer:
        with contextlib.closing(self._connection()) as connection:
            self._send(connection, method, path, body)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> Answer:
        return self.request("POST", path, body)

    @contextlib.contextmanager
    def sent(self, path: str, body: Any) -> Iterator[http.client.HTTPConnection]:
        """A request whose answer nobody waits for yet; leaving cuts the connection."""
        with contextlib.closing(self._connection()) as connection:
            self._send(connection, "POST", path, body)
            yield connection

    @contextlib.contextmanager
    def opened(self, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        """A streamed answer that is read line by line; leaving cuts the connection."""
        with self.sent(path, body) as connection:
            yield connection.getresponse()

    def stream(self, path: str, body: Any) -> list[Any]:
        """All events of a streamed answer; ``[DONE]`` as text."""
        with self.opened(path, {**body, "stream": True}) as response:
            assert response.status == 200, response.read()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            lines = response.read().split(b"\n\n")
        assert lines.pop() == b""
        data = [line.removeprefix(b"data: ") for line in lines]
        return [item.decode() if item == b"[DONE]" else json.loads(item) for item in data]

    def metric(self, name: str, **labels: str) -> float:
        """Value of a metric; 0 when it is not there yet."""
        shown = "".join(f'{key}="{value}",' for key, value in sorted(labels.items())).rstrip(",")
        start = f"mooncake_conductor_{name}{{{shown}}} " if labels else f"mooncake_conductor_{name} "
        for line in self.get("/metrics").raw.decode().splitlines():
            if line.startswith(start):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=TIMEOUT_S)

    @staticmethod
    def _send(connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> None:
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, raw, {"Content-Type": "application/json"})


@dataclass
class Cluster:
    """A conductor and its workers."""

    client: Client
    workers: list[FakeWorker] = field(default_factory=list)

    @property
    def prefill(self) -> FakeWorker:
        return next(worker for worker in self.workers if worker.role == "prefill")

    @property
    def decode(self) -> FakeWorker:
        return next(worker for worker in self.workers if worker.role == "decode")

    def shown(self, worker: FakeWorker) -> dict[str, Any]:
        """The worker as ``GET /workers`` shows it."""
        return next(item for item in self.client.get("/workers").json["workers"] if item["url"] == worker.url)

    def wait_for_state(self, worker: FakeWorker, state: str) -> None:
        wait_until(lambda: self.shown(worker)["state"] == state, f"{worker.url} is {state}")


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """Starts a conductor in front of workers of the given roles."""
    with contextlib.ExitStack() as stack:

        def start(*roles: str, **config: Any) -> Cluster:
            workers = [stack.enter_context(FakeWorker(role)) for role in roles]
            urls = tuple(worker.url for worker in workers)
            running = stack.enter_context(
                RunningConductor(ConductorConfig(workers=urls, **{**QUICK, **config}))
            )
            return Cluster(Client(running.url), workers)

        yield start


@pytest.fixture
def pair(cluster: Callable[..., Cluster]) -> Cluster:
    """One prefill and one decode worker."""
    return cluster("prefill", "decode")
