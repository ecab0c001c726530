"""Versions of the protocol, and how client and master agree on one when the client joins.

The method's name carries the major version; masters of another one do not know it. Minors only add: fields at
the end of messages, with defaults, and messages. A side names the lowest and the highest minor it speaks, and
its features by name; the highest minor both speak is used, and the features both have. Raising the lowest
minor ends rolling upgrades from releases below it. Releases before minor 1 name nothing, which means minor 0.
"""

from __future__ import annotations

from mooncake_store._errors import ProtocolMismatch
from mooncake_store.protocol.base import METHOD

__all__ = ["FEATURES", "MINORS", "agree"]

MINORS = (0, 3)
# What is not in every release of these minors; a side uses a feature only when the other one names it too.
FEATURES: tuple[str, ...] = ("express",)


def agree(client: tuple[int, int], master: tuple[int, int]) -> int:
    """The minor to speak, given the lowest and highest of both sides. Raises ProtocolMismatch."""
    highest = min(client[1], master[1])
    if highest < max(client[0], master[0]):
        older = "client" if client[1] < master[1] else "master"
        raise ProtocolMismatch(
            f"client and master have no version of {METHOD} in common: the client speaks minors "
            f"{client[0]} to {client[1]}, the master {master[0]} to {master[1]}; "
            f"upgrade the {older}'s mooncake-store"
        )
    return highest
