"""The part of the driver suite that moves bytes and looks where they went."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from mooncake_transfer import TransferEngine
from mooncake_transfer.testing.fixtures import DEADLINE_S, Bytes, DriverFixtures
from mooncake_transfer.testing.owner import Target
from mooncake_transfer.testing.pattern import digest, pattern

__all__ = ["MovesBytes"]

KIB = 1 << 10
MIB = 1 << 20
SIZES = (1, 63, 64, 4095, 4096, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB - 1, MIB, MIB + 1, 16 * MIB)
LOCAL_SEED, REMOTE_SEED = 1, 2
Blocks = npt.NDArray[np.uint64]


def _moved(to: Bytes, source: Bytes, blocks: Blocks) -> Bytes:
    """What memory holds after blocks (offset there, offset in the source, length) were copied into it."""
    result: Bytes = to.copy()
    for at, taken_at, length in blocks.tolist():
        result[at : at + length] = source[taken_at : taken_at + length]
    return result


def _network_address() -> str | None:
    """An address of this machine that others could reach, if it has any. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation: only a route is looked up
        except OSError:
            return None
        return str(probe.getsockname()[0])


class MovesBytes(DriverFixtures):
    """Every byte arrives where it should, and no other byte changes."""

    def check_both_ways(self, engine: TransferEngine, target: Target, nbytes: int, blocks: Blocks) -> None:
        """Write blocks to a region of the target, then read them into another place, comparing whole regions.

        ``blocks``: N x 3, no two of which overlap at the target.
        """
        owned = target.allocate(nbytes, REMOTE_SEED)
        remote = engine.import_region(owned.descriptor)
        source, sent = self.local(engine, nbytes, LOCAL_SEED)
        engine.write(source, remote, blocks).wait(DEADLINE_S)
        expected = _moved(pattern(REMOTE_SEED, nbytes), sent, blocks[:, [1, 0, 2]])
        assert target.digest(owned.number) == digest(expected)
        assert np.array_equal(sent, pattern(LOCAL_SEED, nbytes))
        # Read from where it was written to where it was written from, into fresh memory: no two overlap there
        # unless they did in the source, and then they hold the same.
        place, received = self.local(engine, nbytes, 3)
        engine.read(place, remote, blocks).wait(DEADLINE_S)
        assert np.array_equal(received, _moved(pattern(3, nbytes), expected, blocks))
        assert target.digest(owned.number) == digest(expected)
        for region in (source, place):
            region.close(DEADLINE_S)

    def sizes(self) -> Iterator[int]:
        """Sizes at every edge, those of the driver's own slices among them."""
        most = self.quirks.max_slice_bytes
        edges = (most - 1, most, most + 1) if most else ()
        yield from (size for size in (*SIZES, *edges) if size > 0 and size % self.quirks.alignment == 0)

    def test_a_block_of_any_size_arrives_whole_and_alone(
        self, engine: TransferEngine, target: Target
    ) -> None:
        """At every edge: 1 byte, around 64, 4 Ki, 64 Ki, 1 Mi, 16 MiB, and around the driver's slices."""
        for size in self.sizes():
            step = self.quirks.alignment
            self.check_both_ways(
                engine, target, size + 8 * step, np.array([[step, 5 * step, size]], np.uint64)
            )
            target.clear()

    def test_blocks_at_unaligned_offsets_arrive(self, engine: TransferEngine, target: Target) -> None:
        """Offsets that share no power of two, on either side."""
        if self.quirks.alignment > 1:
            pytest.skip(f"driver {self.driver!r} needs offsets that are multiples of {self.quirks.alignment}")
        blocks = [[1, 2, 1], [7, 4095, 4099], [8191, 16381, 65521], [200_003, 100_003, 70_001]]
        self.check_both_ways(engine, target, 300_007, np.array(blocks, np.uint64))

    def test_a_thousand_scattered_blocks_arrive(self, engine: TransferEngine, target: Target) -> None:
        """One N x 3 batch, in no order, of lengths from one byte to a slot."""
        slot, count = 4096, 1000
        random = np.random.default_rng(4)
        blocks = np.empty((count, 3), dtype=np.uint64)
        blocks[:, 0] = random.permutation(count) * slot
        blocks[:, 1] = random.permutation(count) * slot
        step = self.quirks.alignment
        blocks[:, 2] = random.integers(1, slot // step + 1, count) * step
        self.check_both_ways(engine, target, count * slot, blocks)

    def test_empty_blocks_are_skipped(self, engine: TransferEngine, target: Target) -> None:
        """Between others, at a region's very end, and when there is nothing else."""
        nbytes = 64 * KIB
        blocks = np.array([[0, 0, 0], [4096, 0, 4096], [nbytes, nbytes, 0], [0, 8192, 4096]], np.uint64)
        self.check_both_ways(engine, target, nbytes, blocks)
        remote = engine.import_region(target.allocate(nbytes, REMOTE_SEED).descriptor)
        local, _ = self.local(engine, nbytes, LOCAL_SEED)
        for nothing in (blocks[:1], np.empty((0, 3), np.uint64)):
            transfer = engine.read(local, remote, nothing)
            transfer.wait(DEADLINE_S)
            assert (transfer.nbytes, transfer.bytes_done) == (0, 0)

    def test_blocks_may_share_their_source(self, engine: TransferEngine, target: Target) -> None:
        """A piece of local memory written to many places, a piece of remote memory read many times."""
        length = 8192
        starts = np.arange(64, dtype=np.uint64)
        blocks = np.stack([starts // 2 * 4096, starts * length, np.full(64, length, np.uint64)], axis=1)
        nbytes = 64 * length
        owned = target.allocate(nbytes, REMOTE_SEED)
        remote = engine.import_region(owned.descriptor)
        source, sent = self.local(engine, nbytes, LOCAL_SEED)
        engine.write(source, remote, blocks).wait(DEADLINE_S)
        written = _moved(pattern(REMOTE_SEED, nbytes), sent, blocks[:, [1, 0, 2]])
        assert target.digest(owned.number) == digest(written)
        place, received = self.local(engine, nbytes, 3)
        engine.read(place, remote, blocks[:, [1, 0, 2]]).wait(DEADLINE_S)
        assert np.array_equal(received, _moved(pattern(3, nbytes), written, blocks[:, [1, 0, 2]]))

    def test_blocks_of_one_transfer_take_effect_in_order(
        self, engine: TransferEngine, target: Target
    ) -> None:
        """Many blocks for one place: the last one stays. Only for drivers that promise it."""
        if not self.quirks.ordered:
            pytest.skip(f"driver {self.driver!r} promises no order")
        count, length = 500, 4096
        owned = target.allocate(length, REMOTE_SEED)
        source, sent = self.local(engine, count * length, LOCAL_SEED)
        blocks = [[index * length, 0, length] for index in range(count)]
        engine.write(source, engine.import_region(owned.descriptor), blocks).wait(DEADLINE_S)
        assert target.digest(owned.number) == digest(sent[-length:])

    @pytest.mark.parametrize("kind", ["numpy", "bytearray"])
    def test_memory_that_the_user_brings_moves_too(
        self, engine: TransferEngine, target: Target, kind: str
    ) -> None:
        """Memory that the engine did not allocate, on both sides, or on ours where peers reach no such."""
        nbytes = MIB + 8 * self.quirks.alignment
        plain = self.quirks.target_kind == "engine" and not self.quirks.own_memory_only
        owned = target.allocate(nbytes, REMOTE_SEED, kind if plain else None)
        remote = engine.import_region(owned.descriptor)
        memory = np.zeros(nbytes, np.uint8) if kind == "numpy" else bytearray(nbytes)
        with_bytes = np.frombuffer(memory, np.uint8)
        local = engine.register(memory)
        engine.read(local, remote, [[0, 0, nbytes]]).wait(DEADLINE_S)
        assert np.array_equal(with_bytes, pattern(REMOTE_SEED, nbytes))
        with_bytes[:] = pattern(LOCAL_SEED, nbytes)
        engine.write(local, remote, [[0, 0, nbytes]]).wait(DEADLINE_S)
        assert target.digest(owned.number) == digest(pattern(LOCAL_SEED, nbytes))
        local.close(DEADLINE_S)

    def test_one_engine_reads_from_many_peers_at_once(
        self, engine: TransferEngine, engines: Callable[[], TransferEngine]
    ) -> None:
        """Eight peers, all transfers in flight together, no mix-up."""
        nbytes, count = MIB, 8
        owners = [self.owner(engines()) for _ in range(count)]
        remotes = [
            engine.import_region(owner.allocate(nbytes, 10 + index).descriptor)
            for index, owner in enumerate(owners)
        ]
        local, received = self.local(engine, count * nbytes, LOCAL_SEED)
        transfers = [
            engine.read(local, remote, [[index * nbytes, 0, nbytes]]) for index, remote in enumerate(remotes)
        ]
        for transfer in transfers:
            transfer.wait(DEADLINE_S)
        for index in range(count):
            assert np.array_equal(
                received[index * nbytes : (index + 1) * nbytes], pattern(10 + index, nbytes)
            )

    def test_two_engines_write_to_one_region_at_once(self, engine: TransferEngine, target: Target) -> None:
        """Interleaved blocks of two initiators: each finds its place."""
        slot, count = 4096, 512
        owned = self.owner(engine).allocate(2 * count * slot, REMOTE_SEED)
        other = target.allocate(count * slot, 6, "engine")
        even = [[index * slot, 2 * index * slot, slot] for index in range(count)]
        odd = [[index * slot, (2 * index + 1) * slot, slot] for index in range(count)]
        local, sent = self.local(engine, count * slot, 5)
        remote = engine.import_region(owned.descriptor)
        with ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(target.write, other.number, owned.descriptor, odd, DEADLINE_S)
            for _ in range(5):
                engine.write(local, remote, even).wait(DEADLINE_S)
            theirs.result(DEADLINE_S)
        place, received = self.local(engine, 2 * count * slot, 3)
        engine.read(place, remote, [[0, 0, 2 * count * slot]]).wait(DEADLINE_S)
        rows = received.reshape(2 * count, slot)
        assert np.array_equal(rows[0::2].ravel(), sent)
        assert np.array_equal(rows[1::2].ravel(), pattern(6, count * slot))

    def test_threads_may_transfer_at_the_same_time(self, engine: TransferEngine, target: Target) -> None:
        """Four threads on one engine, each with its own part of the same two regions."""
        part, threads = 256 * KIB, 4
        owned = target.allocate(threads * part, REMOTE_SEED)
        remote = engine.import_region(owned.descriptor)
        local, received = self.local(engine, threads * part, LOCAL_SEED)

        def move(thread: int) -> None:
            for _ in range(20):
                at = thread * part
                received[at : at + part] = 0
                engine.read(local, remote, [[at, at, part]]).wait(DEADLINE_S)
                expected = pattern(REMOTE_SEED, threads * part)[at : at + part]
                assert np.array_equal(received[at : at + part], expected)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(move, range(threads), timeout=DEADLINE_S))

    def test_a_peer_is_reached_through_an_address_of_the_network(self, engine: TransferEngine) -> None:
        """Not only through the loopback interface."""
        if self.quirks.same_host_only or self.quirks.same_process_only:
            pytest.skip(f"driver {self.driver!r} uses no network")
        host = _network_address()
        if host is None:
            pytest.skip("this machine has no address but its own loopback")
        nbytes = MIB
        with self.peer_process(self.config(host=host)) as peer:
            assert peer.address.startswith(f"{host}:")
            owned = peer.allocate(nbytes, REMOTE_SEED)
            local, received = self.local(engine, nbytes, LOCAL_SEED)
            engine.read(local, engine.import_region(owned.descriptor), [[0, 0, nbytes]]).wait(DEADLINE_S)
            assert np.array_equal(received, pattern(REMOTE_SEED, nbytes))
