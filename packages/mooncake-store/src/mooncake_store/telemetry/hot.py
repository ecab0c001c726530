"""Which objects are read most, found in little memory."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["HotDigests"]

DIGEST_BYTES = 16
KEPT = 256
SAMPLES = 8
HALVE_AFTER = 1 << 20


class HotDigests:
    """Counts reads of objects by digest, of the most frequent ones, by Space-Saving (Metwally et al., 2005).

    Of a batch a few keys are counted, with the weight of all; what is counted here is old after about a
    million reads, when everything is halved. Not thread-safe.
    """

    def __init__(self, kept: int = KEPT, halve_after: int = HALVE_AFTER) -> None:
        self._kept, self._halve_after = kept, halve_after
        self._counts: dict[bytes, int] = {}
        self._turn = 0
        self._floor = 0
        self._total = 0

    def count(self, digests: bytes) -> None:
        """Count a read of each digest, 16 bytes one after the other."""
        number = len(digests) // DIGEST_BYTES
        stride = -(-number // SAMPLES) or 1
        # Starts elsewhere each time, or the same places of batches would be looked at for ever.
        self._turn += 1
        for at in range(self._turn % stride, number, stride):
            self._add(digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES], stride)
        self._age(number)

    def add(self, samples: Iterable[tuple[bytes, int]]) -> None:
        """Count digests that each stand for so many reads."""
        reads = 0
        for digest, weight in samples:
            self._add(digest, weight)
            reads += weight
        self._age(reads)

    def top(self, number: int) -> list[tuple[bytes, int]]:
        """The most read, with about how often; most often first."""
        return sorted(self._counts.items(), key=lambda item: -item[1])[:number]

    def _age(self, reads: int) -> None:
        self._total += reads
        if self._total > self._halve_after:
            self._total //= 2
            self._floor //= 2
            self._counts = {digest: n // 2 for digest, n in self._counts.items() if n > 1}

    def _add(self, digest: bytes, weight: int) -> None:
        counts = self._counts
        if digest in counts:
            counts[digest] += weight
        else:
            counts[digest] = self._floor + weight
            if len(counts) > 2 * self._kept:
                self._shed()

    def _shed(self) -> None:
        """Let the rarer half go; whoever comes later may be one of them, and counts as often as they did.

        Half at once, as looking for the rarest each time would take longer than all the rest of a read.
        """
        ordered = sorted(self._counts.items(), key=lambda item: -item[1])
        self._floor = ordered[self._kept][1]
        self._counts = dict(ordered[: self._kept])
