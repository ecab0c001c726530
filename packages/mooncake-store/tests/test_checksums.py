"""Values that come over a network are compared with their checksums; what differs is no value."""

import msgspec
import numpy as np
import pytest
import xxhash

from mooncake_store import PutPolicy, checksums, errors
from mooncake_store._core import value_sums
from mooncake_store.mover import Mover
from mooncake_store.tiers.config import TierConfig
from mooncake_transfer import TransferEngine
from mooncake_transfer.errors import IntegrityError

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def pair(world):
    """An owner with the master, and a guest that reaches it over tcp."""
    engine = world.engine("tcp")
    owner = world.store(engine, lend=4 * MIB)
    return owner, world.store(world.engine("tcp"), engine.address)


def flip(store, value):
    """Change one bit of a value where it lies in this store's segment."""
    memory = store.segment.view()
    at = bytes(memory).find(value)
    assert at >= 0
    memory[at + len(value) // 2] ^= 4


def reads(guest, world):
    region = world.region(guest.engine, bytes(MIB))

    def many(key, nbytes):
        if guest.batch_get_into([key, "unknown"], region, [0, 0], nbytes) == [False, False]:
            raise errors.KeyNotFound("a miss")
        return bytes(region.view()[:nbytes])

    return {
        "get": lambda key, nbytes: guest.get(key),
        "get_into": lambda key, nbytes: bytes(region.view()[: guest.get_into(key, region, 0, MIB)]),
        "batch_get_into": many,
    }


@pytest.mark.parametrize("nbytes", [0, 1, 16, 17, 128, 129, 240, 241, 1024, 1025, 4095, 70_001])
def test_checksums_are_those_of_xxhash_however_the_value_is_cut(nbytes):
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes + 3, dtype=np.uint8)
    numbers = [np.array([number], dtype="<u8").tobytes() for number in (3, nbytes)]
    found = int.from_bytes(value_sums(data.ctypes.data, data.nbytes, *numbers), "little")
    value = data[3:].tobytes()
    cut = nbytes // 3
    assert found == checksums._sum([memoryview(value)[:cut], memoryview(value)[cut:]])
    if nbytes > 240:
        assert found == xxhash.xxh3_64_intdigest(value)
    elif nbytes > 16:
        assert found == xxhash.xxh3_128_intdigest(value) & 0xFFFF_FFFF_FFFF_FFFF
    with pytest.raises(ValueError, match="does not lie"):
        value_sums(data.ctypes.data, data.nbytes - 1, *numbers)


@pytest.mark.parametrize("how", ["get", "get_into", "batch_get_into"])
@pytest.mark.parametrize("put", ["put", "put_parts", "batch_put_from", "own"])
def test_a_value_whose_bytes_have_changed_in_their_segment_is_a_miss_and_not_given_again(
    pair, world, content, how, put
):
    owner, guest = pair
    value = content(b"k", 1, 60 * KIB)
    read = reads(guest, world)[how]
    if put == "own":
        owner.put("k", value)
    elif put == "put":
        guest.put("k", value)
    elif put == "put_parts":
        guest.put_parts("k", [value[:1000], value[1000:]])
    else:
        region = world.region(guest.engine, value)
        assert guest.batch_put_from(["k"], region, [0], len(value)) == [True]
    guest.put("other", b"o" * 5000)
    assert read("k", len(value)) == value
    flip(owner, value)
    with pytest.raises(errors.KeyNotFound):
        read("k", len(value))
    numbers = guest.numbers()
    assert (numbers.differed_memory, numbers.differed_wire) == (1, 0)
    assert owner.stats().corrupt == 1
    assert guest.batch_exist(["k", "other"]) == [False, True]
    guest.put("k", value)
    assert read("k", len(value)) == value


def test_another_replica_is_read_when_one_has_changed_and_the_changed_one_is_replaced(
    world, content, eventually
):
    engines = [world.engine("tcp") for _ in range(3)]
    owner = world.store(engines[0], lend=4 * MIB)
    second = world.store(engines[1], engines[0].address, lend=4 * MIB)
    guest = world.store(engines[2], engines[0].address)
    value = content(b"k", 1, 60 * KIB)
    guest.put("k", value, policy=PutPolicy(replicas=2))
    flip(owner, value)
    for _ in range(20):  # readers are spread over the replicas
        assert guest.get("k") == value
    eventually(lambda: len(guest.replicas("k")) == 2)
    flip(second, value)
    for _ in range(20):
        assert guest.get("k") == value
    assert owner.stats().corrupt in (1, 2)
    assert guest.numbers().differed_wire == 0


def test_bytes_that_change_on_their_way_are_read_once_more_and_condemn_nobody(pair, monkeypatch, content):
    owner, guest = pair
    guest._quick = None  # whose moves cannot be looked into
    value = content(b"k", 1, 60 * KIB)
    owner.put("k", value)
    move, left = Mover.read, [1]

    def damaging(mover, memory, layout, *arguments, **options):
        moved = move(mover, memory, layout, *arguments, **options)
        if mover is guest._mover and left.pop() if left else False:
            content_ = bytearray(memory._whole)
            content_[5] ^= 1
            memory._whole = bytes(content_)
        return moved

    monkeypatch.setattr(Mover, "read", damaging)
    assert guest.get("k") == value
    numbers = guest.numbers()
    assert (numbers.differed_memory, numbers.differed_wire) == (0, 1)
    assert owner.stats().corrupt == 0
    assert guest.exist("k")


@pytest.fixture
def compared(monkeypatch):
    """Whether reads and writes of engines were to be compared at both ends."""
    seen = []
    for name in ("read", "write"):
        move = getattr(TransferEngine, name)

        def watched(engine, local, remote, blocks, _move=move, _name=name, **options):
            seen.append((_name, options.get("verify")))
            return _move(engine, local, remote, blocks, **options)

        monkeypatch.setattr(TransferEngine, name, watched)
    return seen


def test_parts_and_values_without_a_checksum_are_compared_at_both_ends(pair, world, compared, content):
    owner, guest = pair
    value = content(b"k", 1, 60 * KIB)
    region = world.region(guest.engine, value)
    with guest.write_session(["k"], [len(value)]) as session:
        session.write_parts(region, [[0, 0, 0, len(value)]])
    assert session.stored.tolist() == [True]
    assert guest.get("k") == value  # whole, but nobody knows its checksum
    assert guest.get_range("k", 10, 100) == value[10:110]
    assert compared == [("write", True), ("read", True), ("read", True)]
    compared.clear()
    owner.put("summed", value)
    assert guest.batch_get_into(["summed"], region, [0], len(value)) == [True]
    assert compared == [("read", None)]


def test_pieces_that_differ_at_both_ends_are_a_miss_that_is_counted(pair, world, monkeypatch, content):
    owner, guest = pair
    owner.put("k", content(b"k", 1, 60 * KIB))
    begin = TransferEngine.read

    def differing(engine, local, remote, blocks, **options):
        assert options["verify"]
        raise IntegrityError("they differ")

    monkeypatch.setattr(TransferEngine, "read", differing)
    with pytest.raises(errors.KeyNotFound):
        guest.get_range("k", 10, 100)
    assert guest.numbers().differed_wire == 1
    monkeypatch.setattr(TransferEngine, "read", begin)
    assert guest.exist("k")


def test_what_stays_within_a_host_is_not_compared(world, compared, content):
    engine = world.engine("shm", "tcp")
    owner = world.store(engine, lend=4 * MIB)
    guest = world.store(world.engine("shm", "tcp"), engine.address)
    value = content(b"k", 1, 60 * KIB)
    owner.put("k", value)
    assert guest.get_range("k", 10, 100) == value[10:110]
    assert guest.get("k") == value
    assert {verify for _, verify in compared} == {None}
    assert not guest._mover.is_far(owner.segment_id)


def test_checksums_can_be_left_out(world, fast, compared, content):
    config = msgspec.structs.replace(fast, checksums=False)
    engine = world.engine("tcp")
    owner = world.store(engine, lend=4 * MIB, config=config)
    guest = world.store(world.engine("tcp"), engine.address, config=config)
    value = content(b"k", 1, 60 * KIB)
    guest.put("k", value)
    guest._quick = None
    assert guest.get("k") == value
    assert owner.master._state.context.map.sums((0).to_bytes(4, "little")) == bytes(8)
    assert {verify for _, verify in compared} == {None}


def test_compiled_calls_stay_on_where_everything_is_compared(world, content):
    engine = world.engine("shm")
    owner = world.store(engine, lend=4 * MIB)
    guest = world.store(world.engine("shm", integrity="full"), engine.address)
    assert guest._quick is not None
    value = content(b"k", 1, 60 * KIB)
    owner.put("k", value)
    region = world.region(guest.engine, bytes(MIB))
    assert guest.get_into("k", region, 0, MIB) == len(value)
    flip(owner, value)
    with pytest.raises(errors.KeyNotFound):
        guest.get_into("k", region, 0, MIB)


def test_values_that_were_given_one_place_are_not_taken_for_damaged_ones(pair, world):
    """b overwrites the end of a, each time it is read, and c that of b."""
    _, guest = pair
    region = world.region(guest.engine, bytes(MIB))
    keys = ["a", "b", "c"]
    for key in keys:
        guest.put(key, key.encode() * 10_000)
    guest.batch_get_into(keys, region, [0, 8000, 16_000], 10_000)
    assert guest.numbers().differed_memory == 0
    assert [guest.get(key) for key in keys] == [key.encode() * 10_000 for key in keys]


def test_the_count_of_what_the_way_has_damaged_never_goes_down(pair, content):
    owner, guest = pair
    for number in range(3):
        value = content(b"k%d" % number, 1, 5000)
        guest.put(f"k{number}", value)
        flip(owner, value)
        with pytest.raises(errors.KeyNotFound):
            guest.get(f"k{number}")
        assert (guest.numbers().differed_memory, guest.numbers().differed_wire) == (number + 1, 0)


def test_damaged_memory_is_not_written_to_a_tier_as_what_was_put(world, fast, tmp_path, content, eventually):
    tier = TierConfig(kind="file", path=str(tmp_path / "tier"), capacity_bytes=16 * MIB, bucket_bytes=MIB)
    owner = world.store(lend=4 * MIB, config=msgspec.structs.replace(fast, tiers=(tier,)))
    damaged, sound = content(b"d", 1, 9000), content(b"s", 1, 9000)
    owner.put("damaged", damaged)
    owner.put("sound", sound)
    flip(owner, damaged)
    for key in ("damaged", "sound"):
        owner.exist(key)
        owner.batch_get_into([key], world.region(owner.engine, bytes(9000)), [0], 9000)
    eventually(lambda: owner.report().tiers[0].records == 1)
    owner._tiers._turn()
    assert owner.report().tiers[0].records == 1
