"""What a policy of eviction is to the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["EvictionInfo", "EvictionPolicy", "Numbers"]

Numbers = NDArray[np.uint64]


class EvictionPolicy(Protocol):
    """Ids of objects, and which of them goes next. One master uses it, from one thread at a time, and has
    one for each tenant and priority.

    Batches come in the order in which they shall count. The blocks of a prefix come tail first: a block is
    then never younger than the blocks it builds on, so that an order by age takes a prefix from its tail, and
    what is left of it stays usable. ``mooncake_store.testing.EvictionContract`` tests what is said here.
    """

    def __len__(self) -> int:
        """Number of ids."""

    def __contains__(self, id: int, /) -> bool:
        """Whether the id is there, pinned or not."""

    def insert(self, ids: Numbers, keys: Numbers, nbytes: Numbers) -> None:
        """Add new ids. An object that was evicted and comes back has a new id and the key of before."""

    def touch(self, ids: Numbers) -> None:
        """Count one use of each."""

    def pin(self, ids: Numbers) -> None:
        """Keep each from being the victim until :meth:`unpin` has been called for it as often."""

    def unpin(self, ids: Numbers) -> None:
        """Take one pin from each."""

    def remove(self, ids: Numbers) -> None:
        """Forget ids, pinned or not. Of the last victim it is an eviction, of others it is not."""

    def victim(self) -> int | None:
        """The id to evict next, which stays until it is removed; None when every id is pinned."""


@dataclass(frozen=True, slots=True)
class EvictionInfo:
    """One policy that is installed.

    Attributes:
        name: what ``StoreConfig.eviction`` says.
        make: makes an empty one, for one tenant and priority of one master.
        compiled: the core's name of it, when it is one of this package.
    """

    name: str
    make: Callable[[], EvictionPolicy]
    compiled: str = ""
