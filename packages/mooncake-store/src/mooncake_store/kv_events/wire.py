"""KV events as vLLM and SGLang send them: which prefix blocks a worker holds, and which it lost.

A message has three ZMQ frames: topic, sequence number (8 bytes, big-endian) and a msgpack batch. Two
encodings of the batch are in use and both are read: positional lists with the type first (SGLang, older vLLM;
also what is written here) and maps by field name with ``"type"`` (newer vLLM). Block hashes are integers or
bytes, whatever the engine uses.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from mooncake_store._errors import EventMalformed

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "EventBatch",
    "TokenId",
    "decode_batch",
    "decode_sequence",
    "encode_batch",
    "encode_sequence",
]

BlockHash = int | bytes
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    """A run of full blocks is now held; each continues the one before it.

    Attributes:
        block_hashes: the engine's names of the blocks, in order.
        parent_block_hash: the block the first one continues; None at the start of a prompt.
        token_ids: tokens of all the blocks, ``len(block_hashes) * block_size`` of them.
        block_size: tokens in a block.
        lora_id: adapter the cache belongs to, by number (deprecated by vLLM) or by ``lora_name``.
        medium: where the blocks lie; None counts as ``"GPU"``.
        extra_keys: what else went into each hash (images, salts); blocks that have any are not prefixes of
            plain text.
        group_idx: cache group of a hybrid model; None and 0 are the full-attention cache.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: list[TokenId]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    # Engines differ in what they append from here on, so any value is taken.
    lora_name: Any = None
    extra_keys: Any = None
    group_idx: Any = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    """The blocks are no longer held on that medium; ``group_idx`` as in BlockStored."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: Any = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, frozen=True, kw_only=True):
    """The worker holds nothing any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """Events that happened together.

    Attributes:
        ts: Unix time in seconds.
        events: in the order they happened.
        data_parallel_rank: which of several engines behind one address sent it.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_EVENT_TYPES: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
_STRUCT = TypeVar("_STRUCT", bound=msgspec.Struct)


def encode_batch(batch: EventBatch) -> bytes:
    """The batch as one msgpack payload, in the positional encoding."""
    return msgspec.msgpack.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Read a payload in either encoding. Event types that are not known are left out.

    Raises EventMalformed when the payload is not msgpack, or a known event has fields of the wrong type.
    """
    try:
        raw = _positional(msgspec.msgpack.decode(payload), _RawBatch)
        events = [event for event in map(_event, raw.events) if event is not None]
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise EventMalformed(f"KV event batch of {len(payload)} bytes cannot be read: {error}") from error
    return EventBatch(raw.ts, events, raw.data_parallel_rank)


def _event(raw: object) -> Event | None:
    tag = raw.get("type") if isinstance(raw, dict) else raw[0] if isinstance(raw, list) and raw else None
    if not isinstance(tag, str):
        raise ValueError(f"an event names no type: {str(raw)[:80]}")
    kind = _EVENT_TYPES.get(tag)
    return None if kind is None else _positional(raw, kind)


def _positional(raw: object, kind: type[_STRUCT]) -> _STRUCT:
    """Convert a list or a map of fields to ``kind``; a map is first laid out as the list would be."""
    if isinstance(raw, dict):
        tag = [kind.__struct_config__.tag] if kind.__struct_config__.tag is not None else []
        known = {field.name: field for field in msgspec.structs.fields(kind)}
        missing = [name for name, field in known.items() if field.required and name not in raw]
        if missing:
            raise ValueError(f"{kind.__name__} lacks {', '.join(missing)}")
        raw = [
            *tag,
            *(raw.get(name, None if field.required else field.default) for name, field in known.items()),
        ]
    return msgspec.convert(raw, kind)


def encode_sequence(sequence: int) -> bytes:
    """A sequence number as its frame; -1 is the mark that ends a replay."""
    return sequence.to_bytes(8, "big", signed=sequence < 0)


def decode_sequence(frame: bytes) -> int:
    """The sequence number in a frame, -1 for the end mark. Raises EventMalformed unless the frame has 8
    bytes."""
    if len(frame) != 8:
        raise EventMalformed(f"a sequence frame has 8 bytes, this one has {len(frame)}")
    return int.from_bytes(frame, "big", signed=True)
