"""Mistakes that the store does not make; the simulation has to find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from simulated.run import Outcome, run_seed

from mooncake_store import membership
from mooncake_store.master.tiering import Tiering
from mooncake_store.membership import Membership
from mooncake_store.own_segment import OwnSegment
from mooncake_store.reader import Reading
from mooncake_store.tiers.losses import Losses

__all__ = ["MUTATIONS", "first_to_find"]

Mutation = Callable[[pytest.MonkeyPatch], None]


def reads_are_not_confirmed(patch: pytest.MonkeyPatch) -> None:
    def let_go(self: Membership, lease: int, epoch: int, asked_s: float, *, soon: bool) -> bool:
        with self._changed:
            self._leases.pop(lease, None)
        return True

    original = Reading._release
    patch.setattr(Membership, "let_go", let_go)
    patch.setattr(Reading, "_release", lambda self, in_order: original(self, in_order=True))


def owners_keep_their_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnSegment, "rekey", lambda self, timeout_s: bool(self._granted))


def leases_hold_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership, "SURE_LEASE", 1e9)


def what_is_replaced_stays_in_tiers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tiering, "_forget", lambda self, digest: self._tickets.pop(digest, None))


def losses_of_tiers_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Losses, "note", lambda self, tier, gone: None)
    patch.setattr(Tiering, "_purge", lambda self, unnamed: unnamed.clear())


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        reads_are_not_confirmed,
        owners_keep_their_key,
        leases_hold_for_ever,
        what_is_replaced_stays_in_tiers,
        losses_of_tiers_are_not_told,
    )
}


def first_to_find(name: str, seeds: Iterable[int]) -> Outcome | None:
    """What came of the first of the seeds that finds a mutation."""
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[name](patch)
        return next((outcome for outcome in map(run_seed, seeds) if outcome.failure), None)
