import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store import keys
from mooncake_store.errors import ConfigError, KeyInvalid

ROOT = keys.root_digest("smollm2", 4, layout="float32")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, tokens, st.integers(1, 8))
def test_two_sequences_share_exactly_the_digests_of_their_common_full_blocks(a, b, block_tokens):
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    left, right = (keys.block_digests(x, block_tokens, ROOT) for x in (a, b))
    assert [len(left), len(right)] == [len(a) // block_tokens, len(b) // block_tokens]
    shared = common // block_tokens
    assert left[:shared] == right[:shared]
    assert not set(left[shared:]) & set(right[shared:])


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">i4", "<i8"])
def test_the_form_of_the_token_ids_does_not_matter(dtype):
    ids = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert keys.block_digests(np.array(ids, dtype=dtype), 4, ROOT) == keys.block_digests(ids, 4, ROOT)
    assert keys.block_digests(np.array(ids + ids, dtype=dtype)[::2], 4, ROOT) == keys.block_digests(
        (ids + ids)[::2], 4, ROOT
    )


def test_digests_stay_the_same_from_release_to_release():
    # Workers of different versions share one store; a change here needs a new name in root_digest().
    assert ROOT.hex() == "77fc25ca85cc5645a8898dbb0758a11e"
    assert [d.hex() for d in keys.block_digests(range(8), 4, ROOT)] == [
        "e04daa7628db3a59dc9563d20ab5e94f",
        "a799a6a07acaae23da45339b2b5befb0",
    ]
    assert keys.object_digests("t", [b"k"]).hex() == "d5d2204eb82a4d9a283525f915d82cbe"


def test_every_part_of_a_root_changes_it():
    roots = {
        keys.root_digest("m", 16, layout="a"),
        keys.root_digest("n", 16, layout="a"),
        keys.root_digest("m", 32, layout="a"),
        keys.root_digest("m", 16, layout="b"),
        keys.root_digest("m", 16, layout="a", tenant="x"),
        keys.root_digest("m", 16, layout="", tenant="a"),
    }
    assert len(roots) == 6
    assert {len(root) for root in roots} == {16}


def test_tenants_do_not_share_objects():
    assert keys.object_digests("a", [b"bc"]) != keys.object_digests("ab", [b"c"])
    assert len(keys.object_digests("", [b"1", b"2"])) == 32


@pytest.mark.parametrize(
    ("ids", "block", "root", "says"),
    [
        ([1, 2, -1], 2, ROOT, "-1"),
        ([1, 2**32], 2, ROOT, str(2**32)),
        ([1.0, 2.0], 2, ROOT, "float64"),
        ([[1, 2]], 2, ROOT, "shape"),
        ([1, 2], 0, ROOT, "block_tokens is 0"),
        ([1, 2], 2, b"short", "5 bytes"),
    ],
)
def test_what_cannot_be_hashed_is_refused_with_the_reason(ids, block, root, says):
    with pytest.raises(ConfigError, match=says):
        keys.block_digests(ids, block, root)


def test_a_root_needs_a_block_size():
    with pytest.raises(ConfigError, match="block_tokens is 0"):
        keys.root_digest("m", 0, layout="")


def test_a_key_is_text_or_bytes_of_reasonable_length():
    assert keys.key_bytes("käse") == "käse".encode()
    assert keys.key_bytes(bytearray(b"x")) == b"x"
    assert len(keys.key_bytes(b"x" * (64 << 10))) == 64 << 10
    for wrong, says in [
        (7, "int"),
        (None, "NoneType"),
        ("", "empty"),
        (b"x" * ((64 << 10) + 1), "65537 bytes"),
    ]:
        with pytest.raises(KeyInvalid, match=says):
            keys.key_bytes(wrong)
