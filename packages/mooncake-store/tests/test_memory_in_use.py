"""Memory that a driver does not let go of is used for nothing else."""

import msgspec
import numpy as np
import pytest

from mooncake_store import Store, errors
from mooncake_store.local_memory import Registered, Staged, StagingBuffers
from mooncake_store.testing.tiers import digest_of, record_of
from mooncake_store.tiers import FileTier
from mooncake_store.tiers.staging import Staging
from mooncake_transfer import TransferEngine
from mooncake_transfer.testing.fake import FakeFabric

MIB = 1 << 20
SIZE = 100_000


class Stores:
    """An owner, and a client whose transfers to and from it can be held."""

    def __init__(self, world, fast):
        fabric = world.stack.enter_context(FakeFabric())
        engines = [
            world.stack.enter_context(TransferEngine(fabric.config(host))) for host in ("owner", "client")
        ]
        engines[1].connect(engines[0].address)
        self.device = fabric.device("owner")
        world.stack.callback(self.device.release)
        config = msgspec.structs.replace(fast, transfer_timeout_s=0.2)
        self.owner = world.store(engines[0], lend=8 * MIB, config=config)
        self.client = world.store(engines[1], engines[0].address, config=config)


@pytest.fixture
def stores(world, fast):
    return Stores(world, fast)


def test_a_buffer_is_given_up_when_a_driver_still_writes_to_it(stores, content, eventually, caplog):
    staging = stores.client._staging
    for key in (b"a", b"b"):
        stores.owner.put(key.decode(), content(key, 1, SIZE))
    assert stores.client.get("a") == content(b"a", 1, SIZE)
    (used,) = (region for region, _ in staging._idle)
    stores.device.hold()
    with pytest.raises(errors.KeyNotFound):
        stores.client.get("a")
    assert "a driver does not let go" in caplog.text
    lost = [region for region, _ in staging._lost]
    assert used in lost
    assert not {id(region) for region, _ in staging._idle} & {id(region) for region in lost}
    # What comes late reaches the memory that was given up, and no other.
    used.view()[:SIZE] = bytes(SIZE)
    stores.device.release()
    eventually(lambda: bytes(used.view()[:SIZE]) == content(b"a", 1, SIZE))
    assert stores.client.get("b") == content(b"b", 1, SIZE)


def test_a_put_gives_up_the_buffer_that_is_still_read_from(stores, content, eventually):
    staging = stores.client._staging
    stores.client.put("warm", content(b"warm", 1, SIZE))
    stores.device.hold()
    with pytest.raises(errors.PutFailed):
        stores.client.put("key", content(b"key", 1, SIZE))
    assert staging._lost
    assert not {id(region) for region, _ in staging._idle} & {id(region) for region, _ in staging._lost}
    stores.device.release()
    eventually(lambda: put_again(stores.client, content))
    assert stores.client.get("key") == content(b"key", 1, SIZE)


def put_again(store, content):
    try:
        store.put("key", content(b"key", 1, SIZE), if_exists="replace")
    except errors.PutFailed:
        return False
    return True


def test_memory_of_the_tiers_owner_that_is_in_use_is_replaced(world, fast, tmp_path):
    tier = FileTier(tmp_path / "tier", 8 * MIB)
    store = world.stack.enter_context(Store(world.engine(), lend_bytes=MIB, config=fast, tiers=[tier]))
    tiers = store._tiers
    before = tiers._region
    memory = Registered(before)
    memory.keep()
    tiers._let_go(memory)
    after = tiers._offload_region()
    assert after is not before
    assert tiers._given_up == [before]
    before.view()[:4] = b"late"  # it stays memory
    store.put("key", np.arange(1000, dtype=np.uint8))
    memory = Registered(after)
    tiers._let_go(memory)
    assert tiers._offload_region() is after


def test_a_lease_whose_memory_is_in_use_is_never_given_out_again(world, tmp_path):
    tier = FileTier(tmp_path / "tier", 8 * MIB)
    world.stack.callback(tier.close)
    tier.write([record_of(i, 4096) for i in range(3)], 20.0)
    staging = Staging(world.engine(), 8192, ttl_s=5.0)
    world.stack.callback(staging.close)
    reads = [[(digest_of(i), 7, 1, 4096)] for i in range(3)]
    kept, other = (staging.stage(tier, read, 5.0) for read in reads[:2])
    staging.hold(kept)
    staging.give_up(kept)
    for lease in (kept, other):
        assert staging.end(lease.id)
    staging.release(kept)
    for _ in range(3):
        again = staging.stage(tier, reads[2], 5.0)
        assert again.offsets == other.offsets
        assert staging.end(again.id)


def test_staged_memory_keeps_its_buffer_when_told(world):
    buffers = StagingBuffers(world.engine(), 4096)
    world.stack.callback(buffers.close)
    array = np.zeros(100, dtype=np.uint8)
    with Staged(array, buffers, holds_data=True) as memory:
        kept = memory.region()
        memory.keep()
    with Staged(array, buffers, holds_data=True) as memory:
        assert memory.region() is not kept
    assert [region for region, _ in buffers._lost] == [kept]
