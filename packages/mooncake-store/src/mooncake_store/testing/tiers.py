"""The promises of a tier as a test class."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mooncake_store.tiers.contract import (
    Bytes,
    Read,
    ReadOutcome,
    Record,
    RecordMeta,
    Tier,
    WriteOutcome,
)

__all__ = ["TierContract", "digest_of", "record_of", "value_of"]

LIMIT_S = 20.0
SIZES = (0, 1, 511, 4096, 4097, 65_536, 1_000_003)


def digest_of(number: int) -> bytes:
    """A digest that no other number has."""
    return number.to_bytes(16, "little")


def value_of(number: int, nbytes: int, version: int = 1) -> Bytes:
    """Bytes that tell number and version in every part."""
    return np.random.default_rng([number, version]).integers(0, 256, nbytes, dtype=np.uint8)


def record_of(number: int, nbytes: int, version: int = 1, tenant: str = "") -> Record:
    """A record with such a value."""
    meta = RecordMeta(epoch=7, version=version, tenant=tenant, group="g", priority=3)
    return Record(digest_of(number), f"key-{number}".encode(), value_of(number, nbytes, version), meta)


def read_one(tier: Tier, number: int, nbytes: int, version: tuple[int, int] | None = None) -> bytes | None:
    """The value, or None for a miss; the test fails when it is anything else."""
    into = np.full(nbytes, 0xEE, dtype=np.uint8)
    (outcome,) = tier.read([Read(digest_of(number), into, version)], LIMIT_S)
    assert outcome in (ReadOutcome.GOOD, ReadOutcome.MISS)
    return into.tobytes() if outcome is ReadOutcome.GOOD else None


class TierContract:
    """Subclass it in a test file and give :meth:`open`; pytest runs every test that is here."""

    def open(self) -> Tier:
        """A tier of at least 16 MiB; at the second call in a test the same one, with what is in it."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """An empty one."""
        tier = self.open()
        yield tier
        tier.close()

    def test_values_of_all_sizes_come_back_as_they_were_written(self, tier: Tier) -> None:
        """In one batch, empty ones included."""
        records = [record_of(i, size) for i, size in enumerate(SIZES)]
        assert tier.write(records, LIMIT_S) == [WriteOutcome.STORED] * len(SIZES)
        into = [np.full(size, 0xEE, dtype=np.uint8) for size in SIZES]
        reads = [Read(record.digest, array) for record, array in zip(records, into, strict=True)]
        assert tier.read(reads[::-1], LIMIT_S) == [ReadOutcome.GOOD] * len(SIZES)
        for record, array in zip(records, into, strict=True):
            assert array.tobytes() == record.value.tobytes()
        assert tier.counters.written == tier.counters.read == len(SIZES)

    def test_memory_that_is_lent_and_not_aligned_works_too(self, tier: Tier) -> None:
        """Values at odd places of lent memory, and beside what must not change."""
        lent = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
        tier.lend_memory(lent)
        value, wanted = lent[13 : 13 + 200_000], lent[13 : 13 + 200_000].tobytes()
        assert tier.write([Record(digest_of(1), b"k", value)], LIMIT_S) == [WriteOutcome.STORED]
        before = lent.copy()
        for start in (500_001, 524_288):
            into = lent[start : start + 200_000]
            assert tier.read([Read(digest_of(1), into)], LIMIT_S) == [ReadOutcome.GOOD]
            assert into.tobytes() == wanted
            assert lent[:start].tobytes() == before[:start].tobytes()
            assert lent[start + 200_000 :].tobytes() == before[start + 200_000 :].tobytes()
            before = lent.copy()

    def test_one_value_is_read_twice_in_a_batch(self, tier: Tier) -> None:
        """Each place has it."""
        tier.write([record_of(1, 5001)], LIMIT_S)
        into = [np.zeros(5001, dtype=np.uint8) for _ in range(2)]
        reads = [Read(digest_of(1), array) for array in into]
        assert tier.read(reads, LIMIT_S) == [ReadOutcome.GOOD] * 2
        assert into[0].tobytes() == into[1].tobytes() == value_of(1, 5001).tobytes()

    def test_what_is_unknown_or_of_another_size_or_version_is_a_miss(self, tier: Tier) -> None:
        """And is counted."""
        tier.write([record_of(1, 5000)], LIMIT_S)
        assert read_one(tier, 2, 5000) is None
        assert read_one(tier, 1, 4999) is None
        assert read_one(tier, 1, 5000, (7, 2)) is None
        assert read_one(tier, 1, 5000, (7, 1)) == value_of(1, 5000).tobytes()
        assert tier.counters.missed == 3

    def test_find_says_what_is_there(self, tier: Tier) -> None:
        """Key, size, properties."""
        record = record_of(1, 5000, version=4, tenant="t")
        tier.write([record], LIMIT_S)
        found, missing = tier.find([digest_of(1), digest_of(2)], LIMIT_S)
        assert missing is None
        assert found is not None
        assert (found.digest, found.key, found.nbytes) == (record.digest, record.key, 5000)
        assert found.meta == record.meta

    def test_the_younger_version_wins(self, tier: Tier) -> None:
        """In whatever order they are written."""
        assert tier.write([record_of(1, 100, version=2)], LIMIT_S) == [WriteOutcome.STORED]
        assert tier.write([record_of(1, 100, version=1)], LIMIT_S) == [WriteOutcome.SUPERSEDED]
        assert tier.write([record_of(1, 100, version=2)], LIMIT_S) == [WriteOutcome.STORED]
        assert read_one(tier, 1, 100) == value_of(1, 100, 2).tobytes()
        assert tier.write([record_of(1, 300, version=3)], LIMIT_S) == [WriteOutcome.STORED]
        assert read_one(tier, 1, 300) == value_of(1, 300, 3).tobytes()
        assert read_one(tier, 1, 100) is None

    def test_what_is_dropped_is_gone_and_does_not_come_back(self, tier: Tier) -> None:
        """Of another version it is not dropped."""
        tier.write([record_of(i, 5000) for i in range(3)], LIMIT_S)
        items = [(digest_of(0), None), (digest_of(1), (7, 9)), (digest_of(2), (7, 1)), (digest_of(9), None)]
        assert tier.drop(items, LIMIT_S) == [True, False, True, False]
        assert tier.find([digest_of(i) for i in (0, 2)], LIMIT_S) == [None, None]
        assert read_one(tier, 0, 5000) is None
        tier.close()
        again = self.open()
        assert [found.digest for found in again.adopt(LIMIT_S)] == [digest_of(1)]
        assert read_one(again, 0, 5000) is None
        assert read_one(again, 1, 5000) == value_of(1, 5000).tobytes()
        again.close()

    def test_records_are_there_when_it_is_opened_again(self, tier: Tier) -> None:
        """With key, size and properties; long keys too. A replaced one does not come back."""
        long = Record(digest_of(50), b"k" * 65_000, value_of(50, 100), RecordMeta(epoch=1))
        tier.write([record_of(i, 70_000 + i) for i in range(20)] + [long], LIMIT_S)
        tier.write([record_of(3, 333, version=2)], LIMIT_S)
        tier.close()
        again = self.open()
        found = {one.digest: one for one in again.adopt(LIMIT_S)}
        assert set(found) == {digest_of(i) for i in [*range(20), 50]}
        assert found[digest_of(50)].key == long.key
        assert found[digest_of(5)].meta == record_of(5, 1).meta
        assert found[digest_of(3)].nbytes == 333
        assert read_one(again, 3, 333) == value_of(3, 333, 2).tobytes()
        assert read_one(again, 5, 70_005) == value_of(5, 70_005).tobytes()
        assert read_one(again, 50, 100) == long.value.tobytes()
        again.close()

    def test_threads_write_read_and_drop_at_once(self, tier: Tier) -> None:
        """Each finds its own."""

        def run(who: int) -> None:
            for turn in range(5):
                numbers = [1000 * who + 10 * turn + i for i in range(4)]
                outcomes = tier.write([record_of(n, 30_000 + n) for n in numbers], LIMIT_S)
                assert outcomes == [WriteOutcome.STORED] * 4
                for n in numbers:
                    assert read_one(tier, n, 30_000 + n) == value_of(n, 30_000 + n).tobytes()
                assert tier.drop([(digest_of(numbers[0]), None)], LIMIT_S) == [True]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run, range(4)))
        assert len(list(tier.adopt(LIMIT_S))) == 60

    def test_an_empty_batch_is_nothing(self, tier: Tier) -> None:
        """No error, no answer."""
        assert tier.write([], LIMIT_S) == []
        assert tier.read([], LIMIT_S) == []
        assert tier.find([], LIMIT_S) == []
        assert tier.drop([], LIMIT_S) == []
        assert list(tier.adopt(LIMIT_S)) == []

    def test_closing_twice_is_safe(self, tier: Tier) -> None:
        """And nothing works afterwards."""
        tier.close()
        tier.close()
        with pytest.raises(Exception, match="closed"):
            tier.read([Read(digest_of(1), np.zeros(1, dtype=np.uint8))], LIMIT_S)
