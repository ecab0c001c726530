"""
Compiled core of the cxl driver. The engine calls it through the capsule, without Python.
"""

from collections.abc import Sequence

from typing_extensions import CapsuleType


def driver() -> CapsuleType:
    """The driver's C function table, as a PyCapsule."""

class Block:
    """A piece of the pool; given back when nothing refers to it any more."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def name(self) -> str: ...

    def flush(self, offset: int, length: int) -> None:
        """Write the range from the caches to memory."""

    def refresh(self, offset: int, length: int) -> None:
        """Drop the range from the caches."""

class Pool:
    """A mapped pool, and this process as a member of it."""

    @property
    def uuid(self) -> bytes: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def host(self) -> int: ...

    @property
    def hosts(self) -> int: ...

    def allocate(self, nbytes: int, name: str, keep: bool) -> Block:
        """Take zeroed bytes of this host's share."""

    def adopt(self, name: str) -> Block:
        """Take over a kept block that nobody owns now."""

    def drop(self, name: str) -> None:
        """Remove a kept block that nobody owns."""

    def blocks(self) -> list[tuple[str, int, bool, bool]]:
        """
        Name, bytes, whether it is kept, whether it has an owner, of every block of this host.
        """

    def free_bytes(self) -> int:
        """What is left of this host's share, all pieces together."""

def open_pool(options: Sequence[tuple[str, str]]) -> Pool:
    """Map and join the pool that the options of an endpoint name."""

def format_pool(options: Sequence[tuple[str, str]], overwrite: bool) -> None:
    """Write an empty pool over what is there."""
