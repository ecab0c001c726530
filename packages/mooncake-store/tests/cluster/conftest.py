"""Coordination services of every kind, as real servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from mooncake_store.cluster import Coordination, open_coordination
from mooncake_store.testing.processes import StoreProcess
from mooncake_transfer.testing.registry_servers import SERVERS, RegistryServer, skip_without_program

KINDS = ["etcd", "redis", "sqlite"]
TIMEOUT_S = 5.0
Open = Callable[..., Coordination]


@pytest.fixture
def command() -> Iterator[Callable[..., StoreProcess]]:
    """Starts commands of ``mooncake store``, which end with the test."""
    with ExitStack() as stack:

        def start(*arguments: str, starts: bool = True) -> StoreProcess:
            started = StoreProcess(*arguments, starts=starts)
            stack.callback(started.close)
            return started

        yield start


def cluster_url(server: RegistryServer, name: str) -> str:
    """The URL of a cluster at a server."""
    base, mark, options = server.url.partition("?")
    return f"{base}/{name}{mark}{options}"


def require(kind: str) -> None:
    skip_without_program(kind, required=os.environ.get("CI") == "true")


@pytest.fixture
def require_program() -> Callable[[str], None]:
    """For tests that start servers of their own."""
    return require


@pytest.fixture(scope="module", params=KINDS)
def shared_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """Makes the URL of a cluster of a given name, at a service that the tests of a module share."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sqlite":
        yield lambda name: f"sqlite:{folder / name}"
        return
    require(request.param)
    with SERVERS[request.param](folder) as server:
        yield lambda name: cluster_url(server, name)


@pytest.fixture
def url(shared_cluster: Callable[[str], str], request: pytest.FixtureRequest) -> str:
    """A cluster for this test alone."""
    return shared_cluster(request.node.originalname[:60])


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens coordinations that are closed after the test."""
    with ExitStack() as stack:
        yield lambda url, timeout_s=TIMEOUT_S: stack.enter_context(closing(open_coordination(url, timeout_s)))


@pytest.fixture(params=["etcd", "redis"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RegistryServer]:
    """A server for one test that may do anything to it."""
    require(request.param)
    with SERVERS[request.param](tmp_path) as running:
        yield running
