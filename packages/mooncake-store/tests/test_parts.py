"""Values in parts: made of several places of a region, read in any pieces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store import errors
from mooncake_store.parts import cut

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def pair(world):
    """An owner with the master and a segment, and a guest without one."""
    owner_engine, guest_engine = world.engine("shm"), world.engine("shm")
    owner = world.store(owner_engine, lend=4 * MIB)
    guest = world.store(guest_engine, owner_engine.address)
    return owner, guest


def cut_slowly(rows, parts):
    """What cut() does, one byte range at a time."""
    found = []
    for number, (position, start, _, nbytes) in enumerate(parts):
        for at, inside, segment, offset, length in rows:
            begin, end = max(start, inside), min(start + nbytes, inside + length)
            if at == position and begin < end:
                found.append((number, begin - start, segment, offset + begin - inside, end - begin))
    return sorted(found)


@st.composite
def placements(draw):
    """Rows of a placement of a few values of up to 4 extents, and parts of them."""
    rows, sizes = [], []
    for position in range(draw(st.integers(1, 4))):
        inside = 0
        for _ in range(draw(st.integers(0, 4))):
            length = draw(st.integers(1, 50))
            rows.append((position, inside, draw(st.integers(1, 3)), draw(st.integers(0, 999)), length))
            inside += length
        sizes.append(inside)
    one = st.tuples(
        st.integers(0, len(sizes) - 1), st.integers(0, 200), st.integers(0, 999), st.integers(0, 99)
    )
    return draw(st.permutations(rows)), draw(st.lists(one, max_size=8))


@given(placements())
def test_parts_are_cut_where_extents_end(given_):
    rows, parts = given_
    found = cut(
        np.array(rows, dtype=np.uint64).reshape(-1, 5), np.array(parts, dtype=np.uint64).reshape(-1, 4)
    )
    assert sorted(map(tuple, found.tolist())) == cut_slowly(rows, parts)


def scatter(owner, content):
    """Leave no room in one piece larger than 256 KiB, so that larger values get several extents."""
    for i in range(16):
        owner.put(b"fill-%d" % i, content(b"f", i, 256 * KIB), if_exists="error")
    for i in range(0, 16, 2):
        owner.remove(b"fill-%d" % i)


def test_ranges_of_a_value_in_several_extents(pair, content, world):
    owner, _ = pair
    scatter(owner, content)
    value = content(b"v", 1, 900 * KIB + 5)
    owner.put("v", value)
    for store in pair:
        region = world.region(store.engine, bytes(MIB))
        parts = [[0, 0, 10, 3], [0, 250 * KIB, 4096, 300 * KIB], [0, 900 * KIB, 500 * KIB, 5], [0, 7, 0, 0]]
        assert store.batch_get_parts_into(["v"], region, parts) == [True]
        for _, start, offset, nbytes in parts:
            assert bytes(region.view()[offset : offset + nbytes]) == value[start : start + nbytes]
        assert bytes(region.view()[:10]) == bytes(10)
        assert store.get_range("v", 255 * KIB, 600 * KIB) == value[255 * KIB : 855 * KIB]
        assert store.get_range("v", len(value), 0) == b""


def test_values_of_parts_are_their_parts_in_order(pair, content, world):
    owner, _ = pair
    scatter(owner, content)
    data = content(b"d", 1, MIB)
    for number, store in enumerate(pair):
        region = world.region(store.engine, data)
        keys = [f"a{number}", f"empty{number}", f"b{number}"]
        parts = [[2, 500 * KIB, 300 * KIB], [0, 5, 10], [2, 0, 77], [0, 600 * KIB, 100 * KIB], [2, 0, 77]]
        assert store.batch_put_parts(keys, region, parts) == [True] * 3
        expected = {
            keys[0]: data[5:15] + data[600 * KIB : 700 * KIB],
            keys[1]: b"",
            keys[2]: data[500 * KIB : 800 * KIB] + data[:77] + data[:77],
        }
        for reader in pair:
            assert {key: reader.get(key) for key in keys} == expected
        for key in keys:
            store.remove(key)


def test_some_of_the_keys_exist_and_the_others_are_stored_from_their_own_parts(pair, content, world):
    owner, guest = pair
    data = content(b"d", 1, 64 * KIB)
    region = world.region(guest.engine, data)
    owner.put("old", b"stays")
    parts = [[0, 0, 100], [1, 100, 100], [2, 200, 100], [2, 5000, 9]]
    assert guest.batch_put_parts(["new", "old", "newer"], region, parts) == [True, False, True]
    assert owner.get("old") == b"stays"
    assert owner.get("new") == data[:100]
    assert owner.get("newer") == data[200:300] + data[5000:5009]


def test_parts_of_several_regions(pair, content, world):
    owner, guest = pair
    data = content(b"a", 1, 8 * KIB), content(b"b", 1, 300 * KIB)
    for number, store in enumerate(pair):
        regions = [world.region(store.engine, part) for part in data]
        keys = [f"x{number}", f"y{number}"]
        parts = [[0, 0, 0, 256], [1, 1, 0, 1000], [0, 1, 5000, 200 * KIB], [1, 0, 7, 3]]
        assert store.batch_put_parts(keys, regions, parts) == [True, True]
        x, y = data[0][:256] + data[1][5000 : 5000 + 200 * KIB], data[1][:1000] + data[0][7:10]
        for reader in pair:
            assert [reader.get(key) for key in keys] == [x, y]
            back = [world.region(reader.engine, bytes(4 * KIB)), world.region(reader.engine, bytes(MIB))]
            wanted = [[0, 0, 0, 100, 256], [0, 1, 256, 0, 200 * KIB], [1, 0, 1000, 0, 3]]
            assert reader.batch_get_parts_into(keys, back, wanted) == [True, True]
            assert bytes(back[0].view()[100:356]) == x[:256]
            assert bytes(back[1].view()[: 200 * KIB]) == x[256:]
            assert bytes(back[0].view()[:3]) == y[1000:]
    with pytest.raises(errors.ValueInvalid, match="memory number 2; there are 2"):
        owner.batch_put_parts(["z"], [world.region(owner.engine, b"1")] * 2, [[0, 2, 0, 1]])
    assert guest.stats().reservations == 0


def test_parts_of_buffers_that_no_engine_knows(pair, content):
    data = bytearray(content(b"a", 1, 8 * KIB)), content(b"b", 1, 300 * KIB)
    for number, store in enumerate(pair):
        key = f"k{number}"
        assert store.batch_put_parts([key], data, [[0, 1, 1000, 200 * KIB], [0, 0, 5, 100]]) == [True]
        for reader in pair:
            assert reader.get(key) == data[1][1000 : 1000 + 200 * KIB] + data[0][5:105]
            back = bytearray(300), np.zeros(200 * KIB, dtype=np.uint8)
            wanted = [[0, 1, 0, 0, 200 * KIB], [0, 0, 200 * KIB, 200, 100]]
            assert reader.batch_get_parts_into([key], back, wanted) == [True]
            assert back[0] == bytes(200) + data[0][5:105]
            assert back[1].tobytes() == data[1][1000 : 1000 + 200 * KIB]
            with pytest.raises(errors.ValueInvalid, match="the bytes to read into cannot be written"):
                reader.batch_get_parts_into([key], [b"123"], [[0, 0, 0, 0, 1]])


def test_several_buffers_make_one_value(pair):
    owner, guest = pair
    guest.put_parts("k", [b"one", bytearray(b"two"), np.arange(3, dtype=np.uint8), b""])
    assert owner.get("k") == b"onetwo\x00\x01\x02"
    guest.put_parts("nothing", [])
    assert owner.get("nothing") == b""


def test_a_key_that_is_missing_does_not_spoil_the_parts_of_others(pair, world):
    owner, guest = pair
    owner.put("k", b"0123456789")
    region = world.region(guest.engine, bytes(4096))
    parts = [[1, 2, 0, 3], [0, 0, 100, 50], [1, 9, 3, 1]]
    assert guest.batch_get_parts_into(["missing", "k"], region, parts) == [False, True]
    assert bytes(region.view()[:4]) == b"2349"
    with pytest.raises(errors.KeyNotFound):
        guest.get_range("missing", 0, 1)


@pytest.mark.parametrize(
    ("parts", "error", "says"),
    [
        ([[0, 8, 0, 3]], errors.SizeMismatch, "'k' has 10 bytes, not 3 from 8 on"),
        (
            np.array([[0, 2**64 - 1, 0, 2]], dtype=np.uint64),
            errors.SizeMismatch,
            "not 2 from 18446744073709551615 on",
        ),
        ([[0, 0, 4095, 2]], errors.ValueInvalid, "2 bytes at offset 4095"),
        ([[1, 0, 0, 1]], errors.ValueInvalid, "names key number 1; there are 1"),
        ([[0, -1, 0, 1]], errors.ValueInvalid, "negative number: -1"),
        ([[0, 0, 1]], errors.ValueInvalid, "rows of 4 integers"),
        ([[0.0, 0, 0, 1]], errors.ValueInvalid, "not float64"),
    ],
)
def test_parts_that_make_no_sense_are_refused_before_anything_moves(pair, world, parts, error, says):
    owner, guest = pair
    owner.put("k", b"0123456789")
    region = world.region(guest.engine, b"x" * 4096)
    with pytest.raises(error, match=says):
        guest.batch_get_parts_into(["k"], region, parts)
    assert bytes(region.view()) == b"x" * 4096
    assert guest.stats().leases == 0
