"""The wire format of KV events, in both encodings engines use."""

import msgspec
import pytest

from mooncake_store.errors import EventMalformed
from mooncake_store.kv_events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    decode_sequence,
    encode_batch,
    encode_sequence,
)

STORED = BlockStored(
    block_hashes=[7, b"\x01" * 32], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=2, medium="CPU"
)


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def test_what_is_encoded_is_a_positional_list_with_the_tag_first() -> None:
    batch = EventBatch(1.5, [STORED, BlockRemoved(block_hashes=[7], medium="CPU"), AllBlocksCleared()], 3)
    raw = msgspec.msgpack.decode(encode_batch(batch))
    assert raw[0] == 1.5
    assert raw[2] == 3
    assert raw[1][0][:7] == ["BlockStored", [7, b"\x01" * 32], None, [1, 2, 3, 4], 2, None, "CPU"]
    assert raw[1][1][:3] == ["BlockRemoved", [7], "CPU"]
    assert raw[1][2] == ["AllBlocksCleared"]


def test_a_batch_survives_its_own_encoding() -> None:
    batch = EventBatch(1.5, [STORED, BlockRemoved(block_hashes=[b"x"]), AllBlocksCleared()], None)
    assert decode_batch(encode_batch(batch)) == batch


def test_maps_by_field_name_are_read_with_defaults_left_out() -> None:
    payload = packed(
        {
            "ts": 2.0,
            "events": [
                {
                    "type": "BlockStored",
                    "block_hashes": [2**64 - 1],
                    "parent_block_hash": b"p" * 32,
                    "token_ids": [5, 6],
                    "block_size": 2,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "kv_cache_spec_kind": "full_attention",
                },
                {"type": "BlockRemoved", "block_hashes": [1], "medium": None},
                {"type": "AllBlocksCleared"},
            ],
        }
    )
    batch = decode_batch(payload)
    assert batch.data_parallel_rank is None
    stored, removed, cleared = batch.events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash, stored.medium) == ([2**64 - 1], b"p" * 32, "GPU")
    assert removed == BlockRemoved(block_hashes=[1])
    assert cleared == AllBlocksCleared()


def test_short_lists_of_older_engines_and_long_ones_of_newer_ones_are_read() -> None:
    old = ["BlockStored", [1], None, [5, 6], 2, None]
    new = [
        "BlockStored",
        [1],
        None,
        [5, 6],
        2,
        None,
        "CPU",
        {"a": 1},
        [None],
        0,
        "full_attention",
        128,
        "more",
    ]
    batch = decode_batch(packed([1.0, [old, new, ["BlockRemoved", [1]]]]))
    assert [getattr(event, "medium", None) for event in batch.events] == [None, "CPU", None]


def test_event_types_of_the_future_are_left_out() -> None:
    batch = decode_batch(packed([1.0, [["BlockMoved", [1]], {"type": "BlockSeen"}, ["AllBlocksCleared"]]]))
    assert batch.events == [AllBlocksCleared()]


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(b"", id="empty"),
        pytest.param(packed("text"), id="no batch"),
        pytest.param(packed([1.0]), id="no events"),
        pytest.param(packed({"ts": 1.0}), id="map without events"),
        pytest.param(packed([1.0, [[]]]), id="no tag"),
        pytest.param(packed([1.0, [7]]), id="event is a number"),
        pytest.param(packed([1.0, [["BlockStored", [1], None, ["a"], 1]]]), id="tokens are text"),
        pytest.param(packed([1.0, [["BlockStored", [1], None, [-1], 1]]]), id="negative token"),
        pytest.param(packed([1.0, [["BlockStored", [1.5], None, [1], 1]]]), id="hash is a float"),
        pytest.param(packed([1.0, [["BlockStored", [1], None, [1]]]]), id="list too short"),
        pytest.param(packed([1.0, [{"type": "BlockStored", "block_hashes": [1]}]]), id="map lacks tokens"),
    ],
)
def test_what_is_no_event_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(EventMalformed):
        decode_batch(payload)


@pytest.mark.parametrize("sequence", [0, 1, 2**40, -1])
def test_a_sequence_number_survives_its_frame(sequence: int) -> None:
    assert decode_sequence(encode_sequence(sequence)) == sequence


def test_the_end_of_a_replay_is_all_ones() -> None:
    assert encode_sequence(-1) == b"\xff" * 8


def test_a_sequence_frame_of_another_length_is_refused() -> None:
    with pytest.raises(EventMalformed, match="8 bytes"):
        decode_sequence(b"\0" * 7)
