"""The part of the driver suite about notices: messages of a driver behind the bytes of a write."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mooncake_transfer import RemoteRegion, Transfer, TransferEngine
from mooncake_transfer.errors import TransferError
from mooncake_transfer.testing.fixtures import DEADLINE_S, DriverFixtures, wait_until
from mooncake_transfer.testing.owner import NOTICE_METHOD, Target
from mooncake_transfer.testing.pattern import digest, pattern
from mooncake_transfer.testing.peer_process import PeerProcess

__all__ = ["Notifies"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64, 4 * KIB, 64 * KIB, MIB + 64, 16 * MIB)
PEERS = 6
PEER_LOSS_S = 15.0
FIRST_SEED, OTHER_SEED = 1, 2


class Notifies(DriverFixtures):
    """A notice comes once, when every byte of the writes before it is visible. Needs ``Quirks.notices``."""

    @pytest.fixture
    def with_notices(self) -> None:
        """Skips the test for a driver without."""
        if not self.quirks.notices:
            pytest.skip(f"driver {self.driver!r} has no notices")

    def notices_sent(self, engine: TransferEngine) -> int:
        """How many notifications the driver has carried for the engine."""
        return sum(row["notices_sent"] for row in engine.stats().values())

    def agree(self, engine: TransferEngine, remote: RemoteRegion, number: int) -> None:
        """Write until the driver carries notifications; until the peer has agreed, the channel does."""
        step = self.quirks.alignment
        local, _ = self.local(engine, step, FIRST_SEED)
        before = self.notices_sent(engine)

        def carried() -> bool:
            told = (NOTICE_METHOD, b"%d:agree" % number)
            engine.write(local, remote, [[0, 0, step]], notify=told).wait(DEADLINE_S)
            return self.notices_sent(engine) > before

        wait_until(carried, "the driver carries notifications")
        local.close(DEADLINE_S)

    def told(self, target: Target) -> list[tuple[str, str]]:
        """What the target was told since it began to listen, without what ``agree`` said."""
        return [(payload, held) for payload, held in target.told() if not payload.endswith("agree")]

    @pytest.mark.usefixtures("with_notices")
    def test_a_notice_comes_after_the_last_byte(self, engine: TransferEngine, target: Target) -> None:
        """Of writes of all sizes, cut as the driver needs it."""
        target.listen()
        for index, size in enumerate(SIZES):
            owned = target.allocate(size, OTHER_SEED)
            remote = engine.import_region(owned.descriptor)
            self.agree(engine, remote, owned.number)
            local, memory = self.local(engine, size, FIRST_SEED)
            before = self.notices_sent(engine)
            for round_ in range(3):
                memory[:] = pattern(10 + round_, size)
                told = (NOTICE_METHOD, b"%d:%d" % (owned.number, round_))
                engine.write(local, remote, [[0, 0, size]], notify=told).wait(DEADLINE_S)
                count = 3 * index + round_ + 1
                wait_until(lambda: len(self.told(target)) >= count, "it is told")  # noqa: B023
                expected = (f"{owned.number}:{round_}", digest(pattern(10 + round_, size)))
                assert self.told(target)[-1] == expected, f"{size} bytes"
            assert self.notices_sent(engine) == before + 3
            local.close(DEADLINE_S)

    @pytest.mark.usefixtures("with_notices")
    def test_every_notice_comes_once(self, engine: TransferEngine, target: Target) -> None:
        """Hundreds at once, more than fit into queues, each behind a write of its own."""
        target.listen()
        size, count = 64 * KIB, 300
        owned = target.allocate(size, OTHER_SEED)
        remote = engine.import_region(owned.descriptor)
        self.agree(engine, remote, owned.number)
        local, _ = self.local(engine, size, FIRST_SEED)
        transfers = [engine.prepare_write(local, remote, [[0, 0, size]]) for _ in range(count)]
        for number, transfer in enumerate(transfers):
            transfer.post(notify=(NOTICE_METHOD, b"%d:%d" % (owned.number, number)))
        for transfer in transfers:
            transfer.wait(DEADLINE_S)
        wait_until(lambda: len(self.told(target)) >= count, "all are told")
        # One after another, to see that nothing comes late.
        for number in range(count, count + 50):
            told = (NOTICE_METHOD, b"%d:%d" % (owned.number, number))
            engine.write(local, remote, [[0, 0, size]], notify=told).wait(DEADLINE_S)
        wait_until(lambda: len(self.told(target)) >= count + 50, "the last one is told")
        numbers = [int(payload.split(":")[1]) for payload, _ in self.told(target)]
        assert sorted(numbers) == list(range(count + 50))
        assert numbers[count:] == list(range(count, count + 50)), "one that was done before another began"

    @pytest.mark.usefixtures("with_notices")
    def test_notices_of_many_connections_come_with_their_own_writes(
        self, engine: TransferEngine, engines: Callable[[], TransferEngine]
    ) -> None:
        """To several peers at once, round after round."""
        size = 256 * KIB
        targets = [self.owner(engines()) for _ in range(PEERS)]
        for target in targets:
            target.listen()
        owned = [target.allocate(size, OTHER_SEED) for target in targets]
        remotes = [engine.import_region(one.descriptor) for one in owned]
        for remote, one in zip(remotes, owned, strict=True):
            self.agree(engine, remote, one.number)
        local, memory = self.local(engine, size, FIRST_SEED)
        rows = np.array([[0, 0, size]], np.uint64)
        for round_ in range(5):
            memory[:] = pattern(20 + round_, size)
            running: list[Transfer] = [
                engine.write(local, remote, rows, notify=(NOTICE_METHOD, b"%d:%d" % (one.number, round_)))
                for remote, one in zip(remotes, owned, strict=True)
            ]
            for transfer in running:
                transfer.wait(DEADLINE_S)
            expected = digest(pattern(20 + round_, size))
            for target, one in zip(targets, owned, strict=True):
                wait_until(lambda: len(self.told(target)) > round_, "each is told")  # noqa: B023
                assert self.told(target)[round_] == (f"{one.number}:{round_}", expected)
        for target in targets:
            target.clear()

    @pytest.mark.usefixtures("with_notices")
    def test_a_notice_for_a_peer_that_has_died_fails(self, engine: TransferEngine, peer: PeerProcess) -> None:
        """And the transfer with it, in time."""
        peer.listen()
        size = MIB
        owned = peer.allocate(size, OTHER_SEED)
        remote = engine.import_region(owned.descriptor)
        self.agree(engine, remote, owned.number)
        local, _ = self.local(engine, size, FIRST_SEED)
        peer.kill()
        with pytest.raises(TransferError):
            engine.write(local, remote, [[0, 0, size]], notify=(NOTICE_METHOD, b"%d:1" % owned.number)).wait(
                PEER_LOSS_S
            )
