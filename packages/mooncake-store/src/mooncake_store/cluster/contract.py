"""What a coordination service has to do: say which master leads, one at a time, with growing epochs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["MARGIN", "MAX_EPOCH", "Coordination", "Leader", "Term", "lease_clock_s"]

# Part of a term at its end in which its holder does not count on it any more: clocks run at slightly
# different speeds, and what was decided at the last moment takes a moment to be said.
MARGIN = 0.1
# Versions of objects begin with 20 bits of the epoch.
MAX_EPOCH = (1 << 20) - 1


def lease_clock_s() -> float:
    """The clock by which terms end: nobody sets it, it never goes back, and goes on while the machine sleeps.

    All processes of a machine read the same.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leader(NamedTuple):
    """Who leads.

    Attributes:
        address: ``host:port`` of the master's engine.
        epoch: greater than that of every leadership before it.
    """

    address: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Term:
    """One leadership, as its holder knows it.

    Attributes:
        leader: what others see.
        until_s: by the lease clock; afterwards somebody else may lead, unless :meth:`Coordination.keep` has
            given a later term.
        claim: what the service knows the leadership by; only its own coordination reads it.
    """

    leader: Leader
    until_s: float
    claim: str


class Coordination(Protocol):
    """Elects the leader of one cluster. Thread-safe.

    Calls raise CoordinationUnavailable when they got no answer or were refused; what was asked may then have
    happened or not. An implementation connects when it is first used and again after a loss, by itself. It
    keeps time by clocks that nobody sets, its own and the service's.

    Attributes:
        where: the cluster's URL as messages show it, without the password.
    """

    where: str

    def campaign(self, address: str, ttl_s: float, floor: int) -> Term | None:
        """Try once to lead, for ``ttl_s`` unless kept; None while somebody else does.

        Ask :meth:`leader` first: this may cost more.

        The epoch is above ``floor`` in any case: a service that lost everything has forgotten earlier ones.
        """

    def keep(self, term: Term, ttl_s: float) -> Term | None:
        """The same leadership, for another ``ttl_s`` from now on; None when it is over."""

    def resign(self, term: Term) -> None:
        """End a leadership, so that others need not wait for it to run out."""

    def leader(self) -> Leader | None:
        """Who leads now, or None."""

    def close(self) -> None:
        """Give connections back. Leaderships stay until they run out. Safe to call twice."""
