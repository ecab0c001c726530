"""Checksums of values: made by who puts them, compared by who got the bytes over a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

from mooncake_store._core import value_sums
from mooncake_store.parts import Uints
from mooncake_transfer import MemoryKind, Region, RemoteRegion, TransferEngine

if TYPE_CHECKING:
    from mooncake_store.mover import LocalMemory
    from mooncake_store.writer import Source

__all__ = ["UNKNOWN", "crosses_network", "may_compare", "sums_in", "sums_of"]

UNKNOWN = 0  # in the place of a checksum
# Drivers that move bytes within one machine's memory, where what was written is what is read.
WITHIN_A_HOST = frozenset({"shm", "cxl"})
MOST_PARTS = 4096  # of values that come in parts: hashing more would take longer than moving them
SHORT = 17  # bytes; below, a value is filled up, see core/digests.hpp
FILLED = 24


def crosses_network(engine: TransferEngine, remote: RemoteRegion) -> bool:
    """Whether bytes of a peer's region come by a driver that is not known to stay within a host; also where
    comparing everything was asked for.
    """
    if engine.config.integrity != "off":
        return True
    address = remote.peer.address
    return not any(rail.peer == address and rail.driver in WITHIN_A_HOST for rail in engine.rails())


def may_compare(local: Region, remote: RemoteRegion) -> bool:
    """Whether the engine can compare what has moved at both ends."""
    return local.kind is MemoryKind.DRAM and remote.kind is MemoryKind.DRAM


def sums_in(memory: LocalMemory, offsets: Uints, sizes: Uints) -> Uints:
    """Checksums of values that lie there, in whole."""
    content = memory.content
    starts, lengths = offsets.astype("<u8").tobytes(), sizes.astype("<u8").tobytes()
    found = value_sums(content.ctypes.data, content.nbytes, starts, lengths)
    return np.frombuffer(found, dtype=np.uint64)


def sums_of(sources: list[Source], sizes: Uints) -> Uints | None:
    """Checksums of values that come from these sources; None where they are not made: of memory that this
    process cannot look into, and of very many parts.
    """
    if not all(source.memory.readable for source in sources):
        return None
    if len(sources) == 1 and sources[0].parts is None:
        return sums_in(sources[0].memory, sources[0].offsets, sizes)
    given = [(source.memory, source.parts) for source in sources if source.parts is not None]
    if len(given) != len(sources) or sum(len(parts) for _, parts in given) > MOST_PARTS:
        return None
    return _sums_of_parts(given, sizes)


def _sums_of_parts(given: list[tuple[LocalMemory, Uints]], sizes: Uints) -> Uints:
    """Of values made of parts: rows of position, offset inside the value, local offset, bytes."""
    pieces: list[list[tuple[int, memoryview]]] = [[] for _ in range(len(sizes))]
    for memory, parts in given:
        view = memoryview(memory.content.data)
        for position, inside, start, nbytes in parts.tolist():
            pieces[position].append((inside, view[start : start + nbytes]))
    sums = [_sum([piece for _, piece in sorted(found, key=_place)]) for found in pieces]
    return np.array(sums, dtype=np.uint64)


def _place(piece: tuple[int, memoryview]) -> int:
    return piece[0]


def _sum(pieces: list[memoryview]) -> int:
    """As core/digests.cpp has it for a value in one piece."""
    nbytes = sum(map(len, pieces))
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    if nbytes < SHORT:
        state.update(bytes(FILLED - 1 - nbytes) + bytes([nbytes]))
    return int(state.intdigest()) & 0xFFFF_FFFF_FFFF_FFFF or 1
