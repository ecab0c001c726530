"""Values live on in tiers: after they had to leave memory, and after their owner's restart."""

import msgspec
import numpy as np
import pytest

from mooncake_store import Store, errors
from mooncake_store.tiers import FileTier
from mooncake_store.tiers.config import TierConfig
from mooncake_transfer import TransferEngine
from mooncake_transfer.testing.fake import FakeFabric

MIB = 1 << 20
SIZE = 100_000


@pytest.fixture
def settings(fast, tmp_path):
    """Settings of a store whose tier is a folder, and to which everything goes unless told otherwise."""

    def make(admission="all", folder="tier", **tier):
        config = TierConfig(
            kind="file", path=str(tmp_path / folder), capacity_bytes=64 * MIB, bucket_bytes=4 * MIB, **tier
        )
        return msgspec.structs.replace(fast, tiers=(config,), tier_admission=admission)

    return make


def tier_of(store) -> FileTier:
    return store._tiers._tiers[0]


def fill(store, content, numbers, size=SIZE, **options):
    for number in numbers:
        store.put(f"{number}", content(f"{number}".encode(), 1, size), **options)


def found(store, key):
    try:
        return store.get(key)
    except errors.KeyNotFound:
        return None


def known(store):
    """How many values the master knows in tiers."""
    (tiering,) = (g for g in store.master._state.context.groups if type(g).__name__ == "Tiering")
    return len(tiering._records)


def test_values_that_left_memory_are_read_from_the_tier(world, settings, content, eventually):
    store = world.store(lend=MIB, config=settings())
    for number in range(30):  # three times what memory holds
        fill(store, content, [number])
        eventually(lambda number=number: known(store) > number)
    assert store.stats().evicted > 10
    for number in range(30):
        assert store.exist(f"{number}")
        assert store.get(f"{number}") == content(f"{number}".encode(), 1, SIZE)
    region = world.stack.enter_context(store._engine.allocate(30 * SIZE))
    keys = [f"{number}" for number in range(30)]
    assert store.batch_get_into([*keys, "x"], region, np.arange(31) * SIZE % (30 * SIZE), SIZE) == [
        True
    ] * 30 + [False]
    for number in range(30):
        assert bytes(region.view()[number * SIZE : (number + 1) * SIZE]) == content(
            f"{number}".encode(), 1, SIZE
        )
    assert store.get_range("3", 5, 1000) == content(b"3", 1, SIZE)[5:1005]
    assert tier_of(store).counters.read > 0


def test_another_process_reads_from_the_owners_tier(world, settings, content, eventually):
    owner = world.store(lend=MIB, config=settings())
    for number in range(30):
        fill(owner, content, [number])
        eventually(lambda number=number: known(owner) > number)
    child = world.child(master=owner._engine.address)
    for number in range(30):
        assert child.ask(do="get", key=f"{number}", version=1)["result"]
    assert tier_of(owner).counters.read >= 15


def test_what_the_owner_of_a_tier_does_not_give_in_time_is_a_miss(
    world, settings, content, eventually, caplog
):
    fabric = world.stack.enter_context(FakeFabric())
    engines = [world.stack.enter_context(TransferEngine(fabric.config(host))) for host in ("owner", "reader")]
    owner = world.store(engines[0], lend=MIB, config=settings())
    for number in range(30):
        fill(owner, content, [number])
        eventually(lambda number=number: known(owner) > number)
    config = msgspec.structs.replace(settings(), tiers=(), transfer_timeout_s=4.0)
    engines[1].connect(engines[0].address)
    reader = world.store(engines[1], engines[0].address, config=config)
    fabric.device("owner").freeze()
    with pytest.raises(errors.KeyNotFound):
        reader.get("0")
    assert "1 values of a tier could not be read" in caplog.text
    assert "did not finish within" in caplog.text
    fabric.device("owner").thaw()
    eventually(lambda: found(reader, "0") == content(b"0", 1, SIZE))


def test_only_what_was_read_again_goes_to_the_tier(world, settings, content, eventually):
    store = world.store(lend=8 * MIB, config=settings(admission="second touch"))
    fill(store, content, range(4))
    store.get("2")
    eventually(lambda: known(store) == 1)
    assert [stored.key for stored in tier_of(store).adopt(20.0)] == [b"2"]


def test_a_replaced_or_removed_value_does_not_come_back_from_the_tier(world, settings, content, eventually):
    store = world.store(lend=MIB, config=settings())
    fill(store, content, range(3))
    eventually(lambda: known(store) == 3)
    store.put("0", content(b"0", 2, SIZE), if_exists="replace")
    store.remove("1")
    eventually(lambda: [s.key for s in tier_of(store).adopt(20.0)].count(b"1") == 0)
    for number in range(10, 40):
        fill(store, content, [number])
        eventually(lambda number=number: store.exist(f"{number}"))
    eventually(lambda: store.get("0") == content(b"0", 2, SIZE) if store.exist("0") else True)
    assert not store.exist("1")
    with pytest.raises(errors.KeyNotFound):
        store.get("1")


def test_removing_everything_removes_it_from_tiers_too(world, settings, content, eventually):
    store = world.store(lend=MIB, config=settings())
    fill(store, content, range(3))
    eventually(lambda: known(store) == 3)
    store.remove_all()
    assert store.batch_exist(["0", "1", "2"]) == [False] * 3
    eventually(lambda: not list(tier_of(store).adopt(20.0)))


def test_a_key_that_is_in_a_tier_only_exists_for_puts_too(world, settings, content, eventually):
    store = world.store(lend=MIB, config=settings())
    fill(store, content, [0])
    eventually(lambda: known(store) == 1)
    fill(store, content, range(1, 40))
    with pytest.raises(errors.KeyExists):
        store.put("0", b"other")
    store.put("0", b"other", if_exists="keep")
    assert store.get("0") == content(b"0", 1, SIZE)
    store.put("0", b"other", if_exists="replace")
    assert store.get("0") == b"other"


def test_values_come_back_into_memory_when_they_are_read_and_there_is_room(
    world, settings, content, eventually
):
    store = world.store(lend=MIB, config=settings())
    for number in range(20):
        fill(store, content, [number])
        eventually(lambda number=number: known(store) > number)
    for number in range(10, 20):
        store.remove(f"{number}")
    objects = store.stats().objects
    assert store.get("0") == content(b"0", 1, SIZE)
    eventually(lambda: store.stats().objects == objects + 1)
    reads = tier_of(store).counters.read
    assert store.get("0") == content(b"0", 1, SIZE)
    assert tier_of(store).counters.read == reads


def test_values_are_there_again_after_the_owner_was_closed_and_opened(world, settings, content, eventually):
    master = world.child(role="master")
    config = settings()
    with Store(world.engine(), master.info["address"], lend_bytes=MIB, config=config) as owner:
        fill(owner, content, range(5))
        eventually(lambda: owner._tiers.entered == 5)
    reader = world.store(master=master.info["address"])
    again = world.store(master=master.info["address"], lend=MIB, config=config)
    assert tier_of(again).counters.adopted == 5
    eventually(lambda: all(reader.batch_exist([f"{n}" for n in range(5)])))
    for number in range(5):
        assert reader.get(f"{number}") == content(f"{number}".encode(), 1, SIZE)


def test_what_was_replaced_while_the_owner_was_away_stays_replaced(world, settings, content, eventually):
    master = world.child(role="master")
    other = world.store(master=master.info["address"], lend=MIB)
    config = settings()
    with Store(world.engine(), master.info["address"], lend_bytes=MIB, config=config) as owner:
        fill(owner, content, range(3))
        eventually(lambda: owner._tiers.entered == 3)
    other.put("0", content(b"0", 2, SIZE), if_exists="replace")
    other.batch_remove(["1"])
    again = world.store(master=master.info["address"], lend=MIB, config=config)
    assert other.get("0") == content(b"0", 2, SIZE)
    other.batch_remove(["0"])
    assert not other.exist("0")
    eventually(lambda: len(list(tier_of(again).adopt(20.0))) == 1)
    assert other.get("2") == content(b"2", 1, SIZE)


def test_an_owner_killed_and_started_again_has_its_values_and_damage_is_a_miss(
    world, settings, content, eventually, tmp_path
):
    master = world.child(role="master")
    reader = world.store(master=master.info["address"])
    options = msgspec.to_builtins(settings())
    owner = world.child(master=master.info["address"], lend=8 * MIB, config=options)
    for number in range(5):
        owner.ask(do="put", key=f"{number}", version=1, nbytes=SIZE)
    eventually(lambda: owner.ask(do="tier_records")["result"] == 5)
    owner.kill()
    eventually(lambda: not any(reader.batch_exist([f"{n}" for n in range(5)])))
    (bucket,) = (tmp_path / "tier").glob("*.bucket")
    with open(bucket, "r+b") as file:
        file.seek(8192)
        byte = file.read(1)[0]
        file.seek(8192)
        file.write(bytes([byte ^ 1]))
    world.child(master=master.info["address"], lend=8 * MIB, config=options)
    found = {}
    for number in range(5):
        try:
            found[number] = reader.get(f"{number}") == content(f"{number}".encode(), 1, SIZE)
        except errors.KeyNotFound:
            found[number] = None
    assert sorted(map(str, found.values())) == ["None", "True", "True", "True", "True"]


def test_a_store_with_tiers_and_a_wrong_setting_leaves_nothing_behind(world, fast, tmp_path):
    config = msgspec.structs.replace(fast, tiers=(TierConfig(kind="file", path=str(tmp_path / "t")),))
    with pytest.raises(errors.ConfigError, match="capacity_bytes of a file tier is 0"):
        Store(world.engine(), lend_bytes=MIB, config=config)
