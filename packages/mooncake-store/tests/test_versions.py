"""Client and master agree on a version of the protocol, or say why not."""

import msgspec
import pytest

from mooncake_store import Master, PutPolicy, Store, errors, protocol
from mooncake_store.master import joining
from mooncake_store.protocol.versions import MINORS, agree

MIB = 1 << 20


@pytest.mark.parametrize(
    ("client", "master", "minor"), [((0, 1), (0, 1), 1), ((0, 3), (1, 2), 2), ((2, 2), (0, 5), 2)]
)
def test_the_highest_minor_that_both_speak_is_used(client, master, minor):
    assert agree(client, master) == minor


@pytest.mark.parametrize(
    ("client", "master", "older"), [((0, 0), (1, 2), "client"), ((3, 4), (0, 2), "master")]
)
def test_without_a_common_minor_both_are_named_and_the_older(client, master, older):
    reason = f"minors {client[0]} to {client[1]}, the master {master[0]} to {master[1]}; upgrade the {older}"
    with pytest.raises(errors.ProtocolMismatch, match=reason):
        agree(client, master)


class OldClient:
    """Speaks minor 0, as releases before the negotiation did: messages without the fields that came since."""

    def __init__(self, engine, address):
        self._peer = engine.connect(address)
        self.client, self.epoch = 77, 0

    def ask(self, name, *fields):
        request = msgspec.msgpack.encode([name, *fields])
        return msgspec.msgpack.decode(self._peer.call(protocol.METHOD, request, timeout_s=20.0))

    def mount(self):
        name, self.epoch, segment, *_ = self.ask("Mount", self.client, 0, b"")
        return name, segment

    def exist(self, digest):
        return self.ask("Exist", self.epoch, self.client, digest)[:2]


def test_a_client_of_an_older_minor_works_with_this_master(world, fast):
    engine = world.engine()
    world.stack.enter_context(Master(engine, fast))
    old = OldClient(world.engine(), engine.address)
    assert old.mount() == ("Mounted", 0)
    assert old.exist(bytes(16)) == ["Found", b"\0"]
    store = world.store(world.engine(), engine.address, lend=MIB)
    store.put("k", b"1")
    assert store.stats().clients == 2


def test_a_master_that_speaks_an_older_minor_is_joined(world, fast, monkeypatch):
    engine = world.engine()
    world.stack.enter_context(Master(engine, fast))
    monkeypatch.setattr(joining, "MINORS", (0, 0))
    store = world.store(world.engine(), engine.address, lend=MIB)
    store.put("k", b"1")
    assert store.get("k") == b"1"


def test_a_master_before_stripes_takes_policies_without_them(world, fast, monkeypatch):
    engine = world.engine()
    world.stack.enter_context(Master(engine, fast))
    monkeypatch.setattr(joining, "MINORS", (0, 2))
    store = world.store(world.engine(), engine.address, lend=MIB)
    store.put("k", b"1", policy=PutPolicy(priority=3, session="s"))
    assert store.get("k") == b"1"
    reason = "stripes is 2, and the store master speaks minor 2"
    with pytest.raises(errors.ProtocolMismatch, match=reason):
        store.put("striped", b"1", policy=PutPolicy(stripes=2))
    session = store.write_session(["striped"], [1], policy=PutPolicy(stripes=2))
    with pytest.raises(errors.ProtocolMismatch, match=reason), session:
        pass


class PolicyBeforeStripes(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """As releases up to minor 2 decode it."""

    replicas: int = 1
    preferred_segments: tuple[int, ...] = ()
    same_node: bool = False
    soft_pin_s: float | None = None
    hard_pin: bool = False
    group: str = ""
    priority: int = 0
    session: str = ""


class LaterPolicy(PolicyBeforeStripes, frozen=True, kw_only=True, array_like=True):
    """As a later release may send it."""

    stripes: int = 1
    later: str = "new"


@pytest.mark.parametrize(
    "given", [{}, {"replicas": 2}, {"soft_pin_s": 1.5, "priority": 3}, {"hard_pin": True, "session": "s"}]
)
def test_policies_are_understood_by_releases_that_know_fewer_fields_and_of_those_that_know_more(given):
    policy = PutPolicy(**given)
    request = protocol.Reserve(
        digests=bytes(16), keys=[b"k"], sizes=bytes(8), if_exists="keep", avoid=[], policy=policy
    )
    sent = protocol.encode(request)
    assert protocol.decode_request(sent) == request
    fields = msgspec.msgpack.decode(sent)
    at = len(request.__struct_fields__) - request.__struct_fields__[::-1].index("policy")
    old = msgspec.convert(fields[at], PolicyBeforeStripes)
    assert msgspec.to_builtins(old) == msgspec.to_builtins(policy)[:8]
    fields[at] = LaterPolicy(**given)
    assert protocol.decode_request(msgspec.msgpack.encode(fields)) == request


def test_a_refusal_names_both_sides(world, fast, monkeypatch):
    engine = world.engine()
    world.stack.enter_context(Master(engine, fast))
    later = MINORS[1] + 1
    monkeypatch.setattr(joining, "MINORS", (later, later))
    with pytest.raises(errors.ProtocolMismatch, match=f"minors 0 to {MINORS[1]}.*master {later} to {later}"):
        Store(world.engine(), engine.address, config=fast)
