"""Records that leave a tier without the master's doing: a key that cannot be read can be put again."""

import os
import time

import msgspec
import numpy as np
import pytest

from mooncake_store import Store, errors
from mooncake_store._errors import MasterUnreachable
from mooncake_store.keys import object_digests
from mooncake_store.master import Master
from mooncake_store.protocol import tiers as messages
from mooncake_store.testing.tiers import digest_of as number_digest
from mooncake_store.testing.tiers import record_of, value_of
from mooncake_store.tiers import DirectoryTier, FileTier, Record, RecordMeta, S3Tier
from mooncake_store.tiers.config import TierConfig
from mooncake_store.tiers.losses import Losses
from mooncake_store.tiers.staging import Staging
from mooncake_transfer import TransferEngine
from mooncake_transfer.errors import RegionBusy
from mooncake_transfer.testing.fake import FakeFabric

MIB = 1 << 20
SIZE = 100_000


@pytest.fixture
def config(fast):
    return msgspec.structs.replace(fast, tier_admission="all")


def found(store, key):
    try:
        return store.get(key)
    except errors.KeyNotFound:
        return None


def fill(store, content, count, eventually):
    """Put values, of which the first ones then lie in the tier only."""
    for number in range(count):
        store.put(f"{number}", content(f"{number}".encode(), 1, SIZE))
        eventually(lambda number=number: store._tiers.entered > number)


def digest_of(store, key):
    return object_digests(store.config.tenant, [key])


def require_puttable(store, key, eventually):
    """It is not there, for nobody."""
    assert found(store, key) is None
    eventually(lambda: not store.exist(key))
    store.put(key, b"new")
    assert store.get(key) == b"new"


def test_what_makes_room_in_a_folder_is_not_believed_to_be_there(
    world, config, content, tmp_path, eventually
):
    tier = DirectoryTier(tmp_path / "tier", capacity_bytes=MIB)
    store = world.stack.enter_context(Store(world.engine(), lend_bytes=MIB // 2, config=config, tiers=[tier]))
    told = []
    note, tier.on_gone = tier.on_gone, lambda gone: (told.extend(gone), note(gone))
    fill(store, content, 20, eventually)
    assert tier.counters.retired >= 8
    assert len(told) == tier.counters.retired
    # Nobody has read: the tier itself has told it.
    eventually(lambda: sum(store.batch_exist([f"{n}" for n in range(20)])) <= 12)
    require_puttable(store, "0", eventually)


def test_what_a_rule_of_a_bucket_removes_is_not_believed_in_after_a_read(
    world, config, content, s3_place, eventually
):
    boto3 = pytest.importorskip("boto3")
    store = world.stack.enter_context(
        Store(world.engine(), lend_bytes=MIB // 2, config=config, tiers=[S3Tier(**s3_place)])
    )
    fill(store, content, 8, eventually)
    assert store.get("0") == content(b"0", 1, SIZE)
    client = boto3.client("s3", endpoint_url=s3_place["endpoint"])
    client.delete_object(Bucket=s3_place["bucket"], Key=f"{s3_place['prefix']}{digest_of(store, '1').hex()}")
    assert store.exist("1")  # nobody has looked
    require_puttable(store, "1", eventually)
    assert store.get("0") == content(b"0", 1, SIZE)


def test_an_object_that_is_none_any_more_is_not_believed_in_after_a_read(
    world, config, content, tmp_path, eventually
):
    tier = DirectoryTier(tmp_path / "tier")
    store = world.stack.enter_context(Store(world.engine(), lend_bytes=MIB // 2, config=config, tiers=[tier]))
    fill(store, content, 8, eventually)
    (path,) = (tmp_path / "tier").glob(f"*/{digest_of(store, '1').hex()}.record")
    path.write_bytes(b"\0" * path.stat().st_size)
    require_puttable(store, "1", eventually)
    assert tier.counters.corrupt == 1


def test_an_object_replaced_by_another_cluster_is_not_believed_in_after_a_read(
    world, config, content, tmp_path, eventually
):
    tier = DirectoryTier(tmp_path / "tier")
    store = world.stack.enter_context(Store(world.engine(), lend_bytes=MIB // 2, config=config, tiers=[tier]))
    fill(store, content, 8, eventually)
    digest = digest_of(store, "1")
    (stored,) = tier.find([digest], 20.0)
    older = msgspec.structs.replace(stored.meta, epoch=stored.meta.epoch + 1)
    tier.write([Record(digest, b"1", np.zeros(SIZE, np.uint8), older)], 20.0)
    require_puttable(store, "1", eventually)


def test_who_names_another_size_makes_nothing_lost(world, config, content, tmp_path, eventually):
    tier = DirectoryTier(tmp_path / "tier")
    store = world.stack.enter_context(Store(world.engine(), lend_bytes=MIB // 2, config=config, tiers=[tier]))
    fill(store, content, 8, eventually)
    (stored,) = tier.find([digest_of(store, "1")], 20.0)
    numbers = np.array([stored.meta.epoch, stored.meta.version, SIZE - 1], dtype="<u8").tobytes()
    (number,) = store._tiers._numbers
    lease = store._tiers.stage(messages.Stage(tier=number, digests=stored.digest, numbers=numbers))
    store._tiers.staging.end(lease.id)
    assert lease.offsets == [-1]
    assert len(store._tiers._losses) == 0
    assert store.get("1") == content(b"1", 1, SIZE)


def test_news_that_did_not_reach_the_master_is_told_again(
    world, config, content, tmp_path, eventually, monkeypatch
):
    tier = DirectoryTier(tmp_path / "tier")
    store = world.stack.enter_context(Store(world.engine(), lend_bytes=MIB // 2, config=config, tiers=[tier]))
    fill(store, content, 8, eventually)
    ask, failed = store._member.ask, []

    def ask_in_vain(request, answer):
        if isinstance(request, messages.RecordsLost) and len(failed) < 3:
            failed.append(request)
            raise MasterUnreachable("the answer did not come in time")
        return ask(request, answer)

    monkeypatch.setattr(store._member, "ask", ask_in_vain)
    for number in (0, 1):
        assert tier.drop([(digest_of(store, f"{number}"), None)], 20.0) == [True]
        assert found(store, f"{number}") is None
    for number in (0, 1):
        require_puttable(store, f"{number}", eventually)
    assert len(failed) == 3


def test_too_much_news_is_told_by_naming_what_is_left(
    world, config, content, tmp_path, eventually, monkeypatch
):
    monkeypatch.setattr("mooncake_store.tiers.owner.MAX_LOST", 2)
    tier = FileTier(tmp_path / "tier", 64 * MIB)
    store = world.stack.enter_context(Store(world.engine(), lend_bytes=MIB // 2, config=config, tiers=[tier]))
    fill(store, content, 12, eventually)
    gone = [(digest_of(store, f"{n}"), None) for n in range(6)]
    lost = [(s.digest, (s.meta.epoch, s.meta.version)) for s in tier.find([d for d, _ in gone], 20.0)]
    assert tier.drop(gone, 20.0) == [True] * 6
    tier.on_gone(lost)
    assert len(store._tiers._losses) == 0
    eventually(lambda: store.batch_exist([f"{n}" for n in range(6)]) == [False] * 6)
    assert store.get("7") == content(b"7", 1, SIZE)


def test_what_was_lost_while_its_owner_was_away_is_not_believed_to_be_there(
    world, config, content, tmp_path, eventually
):
    master = world.child(role="master")
    kept = TierConfig(kind="file", path=str(tmp_path / "tier"), capacity_bytes=8 * MIB, bucket_bytes=MIB)
    config = msgspec.structs.replace(config, tiers=(kept,))
    with Store(world.engine(), master.info["address"], lend_bytes=4 * MIB, config=config) as owner:
        fill(owner, content, 20, eventually)
    first, *others = sorted((tmp_path / "tier").glob("*.bucket"))
    assert others
    os.truncate(first, 4096 * 30)  # the first record, and a part of the next
    smaller = msgspec.structs.replace(kept, capacity_bytes=5 * MIB)
    config = msgspec.structs.replace(config, tiers=(smaller,), tier_admission="second touch")
    again = world.store(master=master.info["address"], lend=4 * MIB, config=config)
    assert 0 < again._tiers.opened[0].counters.adopted < 20
    eventually(lambda: not again._tiers._losses and again._tiers._mounted)
    keys = [f"{n}" for n in range(20)]
    eventually(lambda: again.batch_exist(keys) == [found(again, key) is not None for key in keys])
    lost = [key for key in keys if not again.exist(key)]
    assert 0 < len(lost) < 20
    require_puttable(again, lost[0], eventually)


def test_losses_are_told_by_tier_and_thrown_away_when_there_are_too_many():
    losses, one, two = Losses(5), object(), object()
    losses.note(one, [(b"a", (1, 1)), (b"b", (1, 2))])
    losses.note(two, [(b"c", (1, 3))])
    assert len(losses) == 3
    assert losses.take() == [(one, [(b"a", (1, 1)), (b"b", (1, 2))]), (two, [(b"c", (1, 3))])]
    assert losses.take() == []
    assert not losses.take_overflow()
    losses.note(one, [(b"%d" % n, (1, n)) for n in range(6)])
    assert (len(losses), losses.take()) == (0, [])
    assert (losses.take_overflow(), losses.take_overflow()) == (True, False)


# ---- versions of several masters


def test_epochs_of_masters_that_follow_each_other_rise(world):
    epochs = []
    for _ in range(3):
        with world.engine() as engine, Master(engine) as master:
            epochs.append(master.epoch)
        time.sleep(0.002)  # they are told apart by the millisecond
    assert epochs == sorted(epochs)
    assert len(set(epochs)) == 3
    assert epochs[-1] < 1 << 63


def test_a_value_replaces_what_a_tier_has_of_a_master_with_a_higher_epoch(
    world, config, content, tmp_path, eventually
):
    tier = FileTier(tmp_path / "tier", 64 * MIB)
    digest = object_digests("", ["key"])
    store = world.stack.enter_context(Store(world.engine(), lend_bytes=MIB, config=config, tiers=[tier]))
    old = RecordMeta(epoch=(1 << 63) - 1, version=1)
    tier.write([Record(digest, b"key", np.zeros(SIZE, np.uint8), old)], 20.0)
    store.put("key", content(b"key", 1, SIZE))
    eventually(lambda: store._tiers.entered == 1)
    (stored,) = tier.find([digest], 20.0)
    assert stored.meta.epoch == store.master.epoch


# ---- the thread of an owner, and its memory


def test_an_error_of_a_tier_does_not_end_the_owners_thread(
    world, config, content, tmp_path, eventually, monkeypatch, caplog
):
    tier = DirectoryTier(tmp_path / "tier")
    store = world.stack.enter_context(Store(world.engine(), lend_bytes=MIB, config=config, tiers=[tier]))
    write, failed = tier.write, []

    def write_once_in_vain(records, timeout_s):
        if not failed:
            failed.append(records)
            raise RuntimeError("a tier of another package is broken")
        return write(records, timeout_s)

    monkeypatch.setattr(tier, "write", write_once_in_vain)
    store.put("0", content(b"0", 1, SIZE))
    eventually(lambda: failed)
    store.put("1", content(b"1", 1, SIZE))
    eventually(lambda: store._tiers.entered == 1)
    assert "the tiers of this store go on after an error" in caplog.text
    assert "a tier of another package is broken" in caplog.text


def test_memory_of_a_large_value_that_peers_still_use_is_given_back_later(
    world, content, tmp_path, monkeypatch
):
    monkeypatch.setattr("mooncake_store.tiers.staging.CLOSE_WAIT_S", 0.01)
    fabric = world.stack.enter_context(FakeFabric())
    owner, reader = (
        world.stack.enter_context(TransferEngine(fabric.config(host))) for host in ("owner", "reader")
    )
    tier = DirectoryTier(tmp_path / "tier")
    world.stack.callback(tier.close)
    tier.write([record_of(1, SIZE), record_of(2, 100)], 20.0)
    staging = Staging(owner, 4096, ttl_s=0.05)
    world.stack.callback(staging.close)
    large = staging.stage(tier, [(number_digest(1), 7, 1, SIZE)], 5.0)
    remote = reader.import_region(large.descriptor)
    local = reader.allocate(SIZE)
    fabric.device("owner").hold()
    transfer = reader.read(local, remote, [[0, 0, SIZE]])
    deadline_s = time.monotonic() + 20.0
    while not fabric.device("owner").held():
        assert time.monotonic() < deadline_s
    while large.id in staging._leases:
        # Another value's call: it neither fails nor waits for that reader.
        small = staging.stage(tier, [(number_digest(2), 7, 1, 100)], 5.0)
        assert small.offsets != [-1]
        assert staging.end(small.id)
        assert time.monotonic() < deadline_s
    assert staging._to_close == [large.region]
    with pytest.raises(RegionBusy):
        large.region.close(0.01)
    fabric.device("owner").release()
    transfer.wait(20.0)
    assert local.view()[:SIZE] == value_of(1, SIZE).tobytes()
    assert not staging.end(large.id)
    assert staging._to_close == []
