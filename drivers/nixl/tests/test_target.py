"""What an owner of memory tells whom, over real sockets; an agent that only counts stands for NIXL's."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from mooncake_driver_nixl.options import NixlOptions
from mooncake_driver_nixl.target import Region, Target
from mooncake_driver_nixl.wire import (
    VERSION,
    Ask,
    Grant,
    Hello,
    Line,
    Message,
    PeerAddress,
    Released,
    Withdrawn,
)
from mooncake_transfer.python_driver import DriverFailure, EndpointMemory, StatusCode

DEADLINE_S = 10.0
KEY, READ_KEY = b"k" * 16, b"r" * 16
MEMORY = EndpointMemory(0, 0, 0x1000, 4096, -1, 0, 7, -1)


class Agent:
    """Counts what is registered."""

    name = "agent"

    def __init__(self) -> None:
        self.registered: list[object] = []

    def register_memory(self, described: list[tuple[int, int, int, str]], kind: str) -> object:
        """Keep it."""
        assert kind == "DRAM"
        self.registered.append(described)
        return described

    def deregister_memory(self, registration: object) -> None:
        """Drop it; what is not there raises ValueError."""
        self.registered.remove(registration)

    def get_partial_agent_metadata(
        self, _registration: object, _connect: bool, _backends: list[str]
    ) -> bytes:
        """What a peer would need."""
        return b"metadata"


class Owner:
    """A target on this thread, and peers of it."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.selector = selectors.DefaultSelector()
        self.agent = Agent()
        self.refused = 0
        options = NixlOptions(host=host, answer_timeout_s=0.2)
        self.target = Target(options, self.selector, self.agent, self.count)
        self.address = msgspec.msgpack.decode(self.target.address, type=PeerAddress)

    def count(self) -> None:
        """Count a refusal."""
        self.refused += 1

    def until(self, condition: Callable[[], bool]) -> None:
        """Serve until the condition holds."""
        limit = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < limit
            for key, events in self.selector.select(0.01):
                if key.fileobj in self.selector.get_map():
                    key.data(events)
            self.target.drop_silent()


class Peer:
    """The initiator's end of a line."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.told: list[Message] = []
        self.ends: list[str] = []
        self.socket = socket.create_connection((owner.address.host, owner.address.port))
        self.line = Line(owner.selector, self.socket, self.told.append, self.ends.append)

    def greet(self, secret: bytes | None = None) -> Peer:
        """Say hello."""
        self.line.send(Hello(VERSION, self.owner.address.secret if secret is None else secret))
        return self

    def ask(self, key: bytes, region_id: int = 7) -> Grant:
        """Ask for a region and return the answer."""
        before = len(self.told)
        self.line.send(Ask(1, region_id, key))
        self.owner.until(lambda: len(self.told) > before)
        answer = self.told[-1]
        assert isinstance(answer, Grant)
        return answer


@pytest.fixture(params=["127.0.0.1"])
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    made = Owner(request.param)
    yield made
    made.target.close()
    made.selector.close()
    assert not made.agent.registered


@pytest.fixture
def region(owner: Owner) -> Region:
    return owner.target.add(MEMORY, KEY)


@pytest.fixture
def peer(owner: Owner) -> Iterator[Peer]:
    made = Peer(owner).greet()
    yield made
    made.line.close()


@pytest.mark.parametrize("owner", ["127.0.0.1", "::1"], indirect=True)
def test_who_has_the_key_is_told_how_to_reach_the_region(peer: Peer, region: Region) -> None:
    answer = peer.ask(KEY)
    assert (answer.reason, answer.access, answer.address, answer.length) == ("", 3, 0x1000, 4096)
    assert (answer.agent, answer.metadata) == ("agent", b"metadata")
    assert list(region.leases) == [answer.lease]


@pytest.mark.usefixtures("region")
@pytest.mark.parametrize(("key", "region_id"), [(b"x" * 16, 7), (KEY[:15], 7), (KEY, 8)])
def test_who_has_not_is_told_nothing_but_that(owner: Owner, peer: Peer, key: bytes, region_id: int) -> None:
    answer = peer.ask(key, region_id)
    assert answer == Grant(1, reason=answer.reason)
    assert f"region {region_id}" in answer.reason
    assert owner.refused == 1


def test_a_lesser_key_gives_lesser_rights(peer: Peer, region: Region) -> None:
    region.keys[READ_KEY] = 1
    assert peer.ask(READ_KEY).access == 1


def test_memory_stays_with_nixl_until_its_last_user_has_let_go(
    owner: Owner, peer: Peer, region: Region
) -> None:
    lease = peer.ask(KEY).lease
    assert not owner.target.remove(region)
    owner.until(lambda: Withdrawn(lease) in peer.told)
    assert owner.agent.registered
    assert "revoked" in peer.ask(KEY).reason
    peer.line.send(Released(lease))
    owner.until(lambda: owner.target.remove(region))
    assert not owner.agent.registered


def test_a_peer_cannot_release_what_another_uses(owner: Owner, peer: Peer, region: Region) -> None:
    lease = peer.ask(KEY).lease
    other = Peer(owner).greet()
    other.line.send(Released(lease))
    other.ask(KEY)
    assert lease in region.leases
    other.line.close()
    owner.until(lambda: len(region.leases) == 1)


def test_revoking_one_key_leaves_the_users_of_others(owner: Owner, peer: Peer, region: Region) -> None:
    region.keys[READ_KEY] = 1
    peer.ask(KEY)
    reader = peer.ask(READ_KEY).lease
    assert not owner.target.revoke(region, READ_KEY)
    owner.until(lambda: Withdrawn(reader) in peer.told)
    assert peer.ask(KEY).access == 3
    with pytest.raises(DriverFailure, match="never had this key") as failed:
        owner.target.revoke(region, b"x" * 16)
    assert failed.value.code is StatusCode.INVALID


def test_who_does_not_know_the_secret_is_turned_away(owner: Owner) -> None:
    stranger = Peer(owner).greet(b"guessed")
    owner.until(lambda: bool(stranger.ends))
    assert not stranger.told


def test_who_says_nothing_is_turned_away(owner: Owner) -> None:
    silent = Peer(owner)
    owner.until(lambda: bool(silent.ends))


@pytest.mark.parametrize("noise", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"GET / HTTP/1.1\r\n\r\n"])
def test_noise_ends_a_line_and_nothing_else(owner: Owner, peer: Peer, region: Region, noise: bytes) -> None:
    loud = Peer(owner).greet()
    owner.until(lambda: not loud.line._unsent)
    loud.socket.sendall(noise)
    owner.until(lambda: bool(loud.ends))
    assert peer.ask(KEY).lease in region.leases


def test_memory_of_devices_is_refused(owner: Owner) -> None:
    with pytest.raises(DriverFailure, match="main memory only"):
        owner.target.add(MEMORY._replace(kind=1), KEY)
