"""The express way where leaderships end, where tenants are kept apart, and where there are tiers."""

import msgspec
import pytest

from mooncake_store import Master, StoreConfig, errors
from mooncake_store._core import Tenure, express_answer, express_ask
from mooncake_store.cluster.contract import lease_clock_s
from mooncake_store.keys import object_digests
from mooncake_store.policy import TenantPolicy
from mooncake_store.protocol.express import EXPRESS_METHOD, OtherWay, other_way
from mooncake_store.tiers.config import TierConfig
from mooncake_transfer import Peer

KIB, MIB = 1 << 10, 1 << 20
LOCATE, EXIST, RESERVE = 1, 3, 4
RULES = """
[[allow]]
token_sha256 = "1ec1c26b50d5d3c58d9583181af8076655fe00756bf7285940ba3670f99fcba0"
tenants = ["red"]

[[allow]]
token_sha256 = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8"
lend = true
tenants = ["*"]
"""


class Office:
    """A leadership that ends when a test says so."""

    epoch = 5

    def __init__(self):
        self.tenure = Tenure()
        self.tenure.last(lease_clock_s() + 60)

    def held(self):
        return self.tenure.held()

    def outranked(self, epoch):
        raise AssertionError("nobody has seen more")


@pytest.fixture
def decided(monkeypatch):
    """Names of the requests that masters of this process have decided on in Python, bare of what members do
    by themselves.
    """
    found = []
    handle = Master._handle

    def noting(self, request, *asker):
        name = type(request).__name__
        if name in ("Locate", "Release", "Exist", "Reserve", "Commit"):
            found.append(name)
        return handle(self, request, *asker)

    monkeypatch.setattr(Master, "_handle", noting)
    return found


def nothing_is(decided, use):
    """Whether it went the express way as a whole; a busy machine makes the desk send things the other way."""
    decided.clear()
    use()
    return not decided


@pytest.fixture
def tried(monkeypatch):
    """Notes what this process's Python sends the express way, whatever comes of it."""
    found = []
    call = Peer.call

    def noting(self, method, payload=b"", *, timeout_s=None):
        if method == EXPRESS_METHOD:
            found.append(payload[0])
        return call(self, method, payload, timeout_s=timeout_s)

    monkeypatch.setattr(Peer, "call", noting)
    return found


@pytest.fixture
def quiet():
    """Heartbeats go the other way, so there are none while calls are counted."""
    return StoreConfig(heartbeat_s=60.0, lease_ttl_s=600.0, client_ttl_s=600.0, put_wait_s=0.1)


def led(world, quiet, **settings):
    """An office, the master in it, and a client of another engine."""
    engine, office = world.engine(), Office()
    config = msgspec.structs.replace(quiet, recovery=True, **settings)
    world.stack.enter_context(Master(engine, config, office=office))
    world.store(world.engine(), engine.address, config=config, lend=MIB)
    return office, world.store(world.engine(), engine.address, config=config)


def asked(store, kind, **fields):
    """The bare answer to a request of a member, whatever its own code would ask."""
    member = store._member
    return member._link._peer.call(EXPRESS_METHOD, express_ask(kind, member._epoch, member.client, **fields))


def test_a_leader_answers_the_express_way_as_long_as_it_leads(world, quiet, decided, eventually):
    office, guest = led(world, quiet)

    def use():
        guest.put("a", b"1" * 5000, if_exists="replace")
        assert guest.get("a") == b"1" * 5000
        assert guest.batch_exist(["a", "b"]) == [True, False]

    eventually(lambda: nothing_is(decided, use))
    office.tenure.last(lease_clock_s())
    answer = asked(guest, EXIST, digests=bytes(16))
    assert express_answer(answer) is None
    assert other_way(answer) is OtherWay.FOR_A_MOMENT
    with pytest.raises(errors.MasterUnreachable):
        guest.get("a")


def confined(world, quiet, tmp_path):
    """A client trusted with all, and one with its tenant only."""
    for name, token in (("red", "s3cret"), ("node", "password")):
        (tmp_path / name).write_text(token)
    rules = tmp_path / "access.toml"
    rules.write_text(RULES)
    engine = world.engine()
    config = msgspec.structs.replace(quiet, access_file=str(rules))
    world.stack.enter_context(Master(engine, config))

    def client(name, tenant, lend=0):
        mine = msgspec.structs.replace(quiet, token_file=str(tmp_path / name), tenant=tenant)
        return world.store(world.engine(), engine.address, lend=lend, config=mine)

    return client("node", "blue", lend=MIB), client("red", "red")


def test_who_is_confined_to_a_tenant_goes_the_express_way_and_sees_no_other(
    world, quiet, tmp_path, decided, eventually
):
    node, red = confined(world, quiet, tmp_path)
    node.put("k", b"blue")
    red.put("first", b"1")

    def use():
        red.put("k", b"red", if_exists="replace")
        assert (red.get("k"), node.get("k")) == (b"red", b"blue")
        assert red.batch_exist(["k", "x"]) == [True, False]

    eventually(lambda: nothing_is(decided, use))
    digests = object_digests("red", ["k"]) + object_digests("blue", ["k"])
    assert express_answer(asked(red, EXIST, digests=digests)) == b"\1\0"
    assert express_answer(asked(node, EXIST, digests=digests)) == b"\1\1"
    _, there, sizes, *_ = express_answer(asked(red, LOCATE, digests=digests))
    assert there == b"\1\0"
    assert sizes[8:] == bytes(8)


def test_who_is_confined_reserves_nothing_under_a_digest_of_another_tenant(world, quiet, tmp_path):
    node, red = confined(world, quiet, tmp_path)
    size = (5).to_bytes(8, "little")
    for tenant, key in (("blue", b"k"), ("red", b"other")):
        answer = asked(red, RESERVE, digests=object_digests(tenant, ["k"]), sizes=size, keys=[key])
        assert other_way(answer) is OtherWay.THIS_ONE
    assert express_answer(asked(red, RESERVE, digests=object_digests("red", ["k"]), sizes=size, keys=[b"k"]))
    assert not node.exist("k")


@pytest.fixture
def tiered(world, quiet, tmp_path):
    """A store with a tier that takes what was read after it was put, and a client of another engine."""
    tier = TierConfig(kind="file", path=str(tmp_path / "tier"), capacity_bytes=16 * MIB, bucket_bytes=MIB)
    config = msgspec.structs.replace(
        quiet, tiers=(tier,), heartbeat_s=0.1
    )  # the owner asks no master far away
    owner = world.store(lend=4 * MIB, config=config)
    return owner, world.store(world.engine(), owner.engine.address, config=quiet)


def test_with_tiers_what_lies_in_memory_is_read_the_express_way(tiered, decided, eventually):
    _, guest = tiered
    guest.put("a", b"1" * 5000)

    def use():
        assert guest.get("a") == b"1" * 5000
        assert guest.exist("a")

    eventually(lambda: nothing_is(decided, use))
    assert not guest.exist("b")
    assert decided == ["Exist"]


def test_with_tiers_what_is_missed_sends_nothing_else_the_other_way(tiered, decided, eventually):
    _, guest = tiered
    guest.put("a", b"1")

    def use():
        assert not guest.exist("b")
        decided.clear()
        assert guest.exist("a")  # though it is only a moment later

    eventually(lambda: nothing_is(decided, use))


def test_with_tiers_a_put_is_tried_the_express_way_once_and_never_again(tiered, tried, decided):
    _, guest = tiered
    for number in range(3):
        guest.put(f"k{number}", b"1")
    before = tried.count(RESERVE)
    assert before <= 1
    for number in range(3):
        guest.put(f"m{number}", b"1")
    assert tried.count(RESERVE) == before
    assert decided == ["Reserve", "Commit"] * 6


def test_what_was_read_the_express_way_is_worth_a_place_in_a_tier(tiered, eventually):
    owner, guest = tiered
    guest.put("a", b"1" * 5000)
    guest.put("never read", b"1" * 5000)
    guest.get("a")
    eventually(lambda: owner.report().tiers[0].records == 1)
    owner.remove("a")
    eventually(lambda: owner.report().tiers[0].records == 0)


def test_a_tenant_with_a_limit_of_its_rate_tries_the_express_way_once(world, quiet, tried):
    engine = world.engine()
    limited = {"slow": TenantPolicy(keys_per_s=1e6)}
    world.stack.enter_context(Master(engine, msgspec.structs.replace(quiet, tenants=limited)))
    config = msgspec.structs.replace(quiet, tenant="slow")
    slow = world.store(world.engine(), engine.address, config=config)
    for _ in range(3):
        assert not slow.exist("a")
    assert tried == [EXIST]
