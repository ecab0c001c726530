"""What was put under which key, and whether what is read can be right."""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import dataclass

__all__ = ["History", "Violation", "content"]

_HEAD = struct.Struct("<QQ")
FOREVER = float("inf")


class Violation(AssertionError):
    """Something that the store promises does not hold."""


def content(number: int, key: str, nbytes: int) -> bytes:
    """The value of one put: in every 16 bytes, which put of which key it is."""
    head = _HEAD.pack(number, int.from_bytes(key.encode()[-8:], "little"))
    return (head * (nbytes // len(head) + 1))[:nbytes]


@dataclass
class Put:
    """One value of a key; ``nbytes`` is None for the removal of it."""

    number: int
    key: str
    nbytes: int | None
    began_s: float
    ended_s: float = (
        FOREVER  # when it was known to be stored; FOREVER: nobody knows whether it is, or will be
    )
    sure: bool = False


class History:
    """All puts and removals of one simulated store.

    Attributes:
        loss_s: when a master or the standing of an owner was last lost: what was put or removed shortly
            before may be undone by that.
        reads, ordered: good reads, and those of them of which the order was known.
    """

    def __init__(self) -> None:
        self.loss_s = 0.0
        self.reads = self.ordered = self.misses = 0
        self.stored = 0
        self._last = 0
        self._puts: dict[int, Put] = {}
        self._of_key: dict[str, list[Put]] = defaultdict(list)

    def begin(self, key: str, nbytes: int | None, now_s: float) -> Put:
        """A put (or removal) begins."""
        self._last += 1
        put = Put(self._last, key, nbytes, now_s)
        self._puts[put.number] = put
        self._of_key[key].append(put)
        return put

    def end(self, put: Put, now_s: float) -> None:
        """It has come about."""
        put.ended_s, put.sure = now_s, True
        self.stored += put.nbytes is not None

    def forget(self, put: Put) -> None:
        """It certainly has not come about."""
        self._of_key[put.key].remove(put)
        del self._puts[put.number]

    def read(self, key: str, value: bytes, began_s: float) -> None:
        """A read has given this value. Raises Violation."""
        self.reads += 1
        found = self._matching(key, value)
        if not found:
            raise Violation(f"{key} was read as {len(value)} bytes that were never put there: {value[:48]!r}")
        if all(self._was_over(put, began_s) for put in found):
            put = found[-1]
            raise Violation(
                f"{key} was read as put {put.number} of {put.ended_s:.3f}, which had been replaced or removed"
                f" before {began_s:.3f}"
            )
        self.ordered += all(put.began_s > self.loss_s for put in found)

    def missed(self) -> None:
        """A read has found nothing, which is always allowed."""
        self.misses += 1

    def _matching(self, key: str, value: bytes) -> list[Put]:
        if len(value) >= _HEAD.size:
            number = _HEAD.unpack_from(value)[0]
            candidates = [self._puts[number]] if number in self._puts else []
        else:
            candidates = self._of_key[key]
        return [
            put
            for put in candidates
            if put.key == key and put.nbytes == len(value) and content(put.number, key, put.nbytes) == value
        ]

    def _was_over(self, put: Put, began_s: float) -> bool:
        """Whether something later of the key had certainly come about, and nothing may have undone it."""
        if put.ended_s == FOREVER or put.began_s <= self.loss_s:
            return False
        return any(
            other.sure and other.began_s > put.ended_s and other.ended_s < began_s
            for other in self._of_key[put.key]
        )
