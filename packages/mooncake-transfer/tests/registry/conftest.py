"""Servers for the tests of registries, and what the tests wait with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake_transfer.testing.registry_servers import SERVERS, RegistryServer, skip_without_program

NETWORKED = sorted(SERVERS)


def require(kind: str) -> None:
    skip_without_program(kind, required=os.environ.get("CI") == "true")


@pytest.fixture
def require_program() -> Callable[[str], None]:
    """For tests that start servers of their own."""
    return require


@pytest.fixture(params=NETWORKED)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RegistryServer]:
    """A server of each kind, for one test that may do anything to it."""
    require(request.param)
    with SERVERS[request.param](tmp_path) as running:
        yield running


@pytest.fixture(scope="module", params=["memory", *NETWORKED])
def shared_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a registry of each kind that the tests of a module share."""
    if request.param == "memory":
        yield f"memory:{request.module.__name__}"
        return
    require(request.param)
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as running:
        yield running.url
