"""Joining a master that answers badly: no key that was shown is shown again, and no value is lost for it."""

import msgspec
import pytest

from mooncake_store import StoreConfig, protocol
from mooncake_store._errors import ConfigError, MasterUnreachable
from mooncake_store.link import LocalLink
from mooncake_store.master import Master
from mooncake_store.membership import Membership
from mooncake_store.notices import Notices
from mooncake_store.own_segment import OwnSegment
from mooncake_store.telemetry import ClientCounters

LONG_S = 20.0


class BadLink:
    """Records what it is asked, lets any token pass, and loses the first ``lost`` answers to Mount."""

    def __init__(self, master, lost):
        self._link = LocalLink(master, lambda: None)
        self._lost = lost
        self.mounts = []

    def call(self, request, timeout_s):
        if isinstance(request, protocol.Authenticate):
            return protocol.Done()
        reply = self._link.call(request, timeout_s)
        if isinstance(request, protocol.Mount):
            self.mounts.append(request)
            if len(self.mounts) <= self._lost:
                raise MasterUnreachable("the answer is lost")
        return reply


@pytest.fixture
def joining(world, fast):
    """Makes a member that is yet to join, its segment and its link."""

    def make(lost=0, **settings):
        config = msgspec.structs.replace(fast, heartbeat_s=100.0, recovery=True, **settings)
        engine = world.engine()
        master = world.stack.enter_context(Master(engine, config))
        segment = OwnSegment(engine, 1 << 16)
        world.stack.callback(segment.close, LONG_S)
        link = BadLink(master, lost)
        member = Membership(
            lambda: link, config, segment, Notices(""), lambda *_: None, engine.address, ClientCounters()
        )
        world.stack.callback(member.close)
        return member, segment, link

    return make


def test_a_key_shown_to_a_master_whose_answer_was_lost_is_taken_back(joining):
    member, segment, link = joining(lost=1)
    with pytest.raises(MasterUnreachable, match="the answer is lost"):
        member.start()
    member.start()
    first, second = link.mounts
    assert first.segment != second.segment
    assert first.descriptor != second.descriptor
    assert (second.segment, second.descriptor) == (segment.id, segment.descriptor())


def test_a_token_that_cannot_be_read_for_a_while_costs_no_value(joining, tmp_path, eventually):
    token = tmp_path / "token"
    token.write_text("secret")
    member, segment, link = joining(token_file=str(token), reconnect_max_s=StoreConfig().reconnect_max_s)
    member.start()
    memory = segment.region
    token.unlink()
    member._lose(link, "the test ends the connection")
    with pytest.raises(ConfigError, match="token"):
        member._join()
    token.write_text("secret")
    eventually(lambda: len(link.mounts) == 2)
    assert segment.region is memory
    assert link.mounts[1].keeps
    assert link.mounts[1].segment == link.mounts[0].segment
    assert link.mounts[1].descriptor != link.mounts[0].descriptor
