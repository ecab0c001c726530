"""A file that corrects what a machine says of itself."""

from __future__ import annotations

from pathlib import Path

import msgspec

from mooncake_transfer._errors import ConfigError
from mooncake_transfer.topology.model import Distance

__all__ = ["DistanceOverride", "Override"]


class DistanceOverride(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The distance between two devices, or a device and a node (``node:1``), whatever the machine says.

    Attributes:
        between: the two of them, in any order.
        distance: ``same-device``, ``same-switch``, ``same-root``, ``same-node`` or ``other-node``.
    """

    between: tuple[str, str]
    distance: str

    def __post_init__(self) -> None:
        names = [known.label.replace(" ", "-") for known in Distance]
        if self.distance not in names:
            raise ValueError(f"distance is {self.distance!r}; use one of {', '.join(names)}")

    @property
    def value(self) -> Distance:
        """The distance."""
        return Distance[self.distance.replace("-", "_").upper()]


class Override(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Corrections to a topology; as a file in TOML or JSON::

        hide = ["eth9", "gpu3"]
        nodes = {mlx5_0 = 1}
        numa_distances = [[10, 21], [21, 10]]
        [[distances]]
        between = ["gpu0", "mlx5_0"]
        distance = "same-switch"

    Attributes:
        hide: devices that are not to be used.
        nodes: for each device named, the node it is attached to.
        numa_distances: between nodes, in the order of the nodes; empty: as the machine says.
        distances: between devices.
    """

    hide: tuple[str, ...] = ()
    nodes: dict[str, int] = {}
    numa_distances: tuple[tuple[int, ...], ...] = ()
    distances: tuple[DistanceOverride, ...] = ()

    def __post_init__(self) -> None:
        if any(len(row) != len(self.numa_distances) or min(row) < 1 for row in self.numa_distances):
            raise ValueError("numa_distances must have one row and one positive number a node")

    @classmethod
    def load(cls, path: str | Path) -> Override:
        """Read a file: JSON when its name ends so, else TOML. Raises ConfigError, naming file and fault."""
        try:
            data = Path(path).read_bytes()
            if Path(path).suffix == ".json":
                return msgspec.json.decode(data, type=cls)
            return msgspec.toml.decode(data, type=cls)
        except OSError as error:
            raise ConfigError(f"cannot read the topology override {str(path)!r}: {error.strerror}") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(f"the topology override {str(path)!r} is wrong: {error}") from error
