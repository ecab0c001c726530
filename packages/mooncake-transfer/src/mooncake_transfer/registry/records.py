"""What engines write into a registry: small JSON values under keys that people can read."""

from __future__ import annotations

from urllib.parse import quote, unquote

import msgspec

__all__ = ["ENGINES", "REGIONS", "EngineRecord", "RegionRecord", "engine_key", "name_of", "region_key"]

ENGINES = "mooncake/engines/"
REGIONS = "mooncake/regions/"


class EngineRecord(msgspec.Struct, frozen=True):
    """Where a name leads.

    Attributes:
        address: ``host:port`` of the engine's channel.
        epoch: the incarnation that answers there; another one means that the entry is out of date.
        generation: of two engines that claim one name, the one with the greater number has it.
    """

    address: str
    epoch: int
    generation: int


class RegionRecord(msgspec.Struct, frozen=True):
    """A published region.

    Attributes:
        epoch: the incarnation of the engine that has it.
        generation: as in the engine's own record.
        descriptor: what ``Region.descriptor()`` gave; who can read it has the access it grants.
    """

    epoch: int
    generation: int
    descriptor: bytes


def engine_key(name: str) -> str:
    """The key of an engine's record."""
    return ENGINES + quote(name, safe="")


def region_key(engine: str, region: str) -> str:
    """The key of a published region's record."""
    return f"{REGIONS}{quote(engine, safe='')}/{quote(region, safe='')}"


def name_of(key: str) -> str:
    """The name, or ``engine/region``, that a key stands for."""
    return unquote(key.removeprefix(ENGINES).removeprefix(REGIONS))
