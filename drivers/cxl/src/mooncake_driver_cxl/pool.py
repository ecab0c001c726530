"""Memory of a pool, by hand: allocate it, keep it under a name, find it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mooncake_driver_cxl.options import render
from mooncake_transfer.errors import ConfigError, DriverUnavailable, MemoryUnavailable
from mooncake_transfer.memory import Memory, MemoryRange

if TYPE_CHECKING:
    from mooncake_driver_cxl import _core

__all__ = ["Block", "BlockInfo", "Pool"]

Result = TypeVar("Result")

NAME_BYTES = 63  # kNameBytes of core/layout.hpp, less the NUL at its end


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What the pool's table says of a block.

    Attributes:
        name: what it was allocated as.
        nbytes: its size, in whole pages.
        kept: it stays in the pool when its owner ends.
        owned: a process that lives has it.
    """

    name: str
    nbytes: int
    kept: bool
    owned: bool


class Block:
    """Memory in a pool, for ``TransferEngine.register(block.range)``.

    It is given back when nothing refers to the block or its range any more; a kept one then stays in the pool
    under its name.

    Attributes:
        name: what it was allocated as.
        nbytes: its size in bytes.
        offset: where it begins in the pool.
        range: its memory, as the engine takes it.
    """

    def __init__(self, core: _core.Block) -> None:
        self._core = core
        self.name = core.name
        self.nbytes = core.nbytes
        self.offset = core.offset
        self.range = MemoryRange(core.address, core.nbytes, owner=core)

    def flush(self, offset: int = 0, length: int | None = None) -> None:
        """Write what this process stored there from the caches to memory, for readers on other machines.

        Raises ConfigError for a range outside the block. ``length`` None: up to the end.
        """
        _translated(lambda: self._core.flush(offset, self.nbytes - offset if length is None else length))

    def refresh(self, offset: int = 0, length: int | None = None) -> None:
        """Drop the range from the caches, so that what another machine wrote there is read.

        Raises ConfigError for a range outside the block. ``length`` None: up to the end.
        """
        _translated(lambda: self._core.refresh(offset, self.nbytes - offset if length is None else length))


class Pool:
    """A pool that this process maps, as a member that keeps its blocks alive. Thread-safe.

    It stays mapped, and this process its member, as long as the object, a block of it or a view of one lives.

    Attributes:
        uuid: 16 bytes that name the pool; new at each formatting.
        nbytes: size of the device or file.
        host: number of this machine; its share is where blocks are allocated.
        hosts: how many machines have a share.
    """

    def __init__(self, core: _core.Pool) -> None:
        self._core = core
        self.uuid = core.uuid
        self.nbytes = core.nbytes
        self.host = core.host
        self.hosts = core.hosts

    @classmethod
    def open(cls, path: str, **options: object) -> Pool:
        """Map the pool of a path and join it; ``options`` as in CxlOptions.

        Raises ConfigError when there is no pool, another machine has this host number, or the path is
        wrong; DriverUnavailable when it cannot be opened; MemoryUnavailable when it cannot be mapped.
        """
        from mooncake_driver_cxl import _core

        rendered = list(render({**options, "path": path}).items())
        return cls(_translated(lambda: _core.open_pool(rendered)))

    @staticmethod
    def format(path: str, *, overwrite: bool = False, **options: object) -> None:
        """Make an empty pool of a device or file. With ``overwrite``, whatever it holds is lost.

        No process may have it open. Raises as ``open`` does, and ConfigError when it is not empty.
        """
        from mooncake_driver_cxl import _core

        rendered = list(render({**options, "path": path}).items())
        _translated(lambda: _core.format_pool(rendered, overwrite))

    def allocate(self, nbytes: int, *, name: str = "", keep: bool = False) -> Block:
        """Take zeroed memory of this machine's share.

        With ``keep`` it stays in the pool, under its name, when this process ends, however that happens.
        Raises MemoryUnavailable when no piece is as large, ConfigError when the name is taken or missing.
        """
        if nbytes <= 0:
            raise ConfigError(f"cannot allocate {nbytes} bytes; the size must be positive")
        return Block(_translated(lambda: self._core.allocate(nbytes, name, keep)))

    def reopen(self, name: str) -> Block:
        """Take over a kept block, bytes and all, whose owner has gone.

        Raises ConfigError when this machine's share has none of the name, or its owner lives.
        """
        return Block(_translated(lambda: self._core.adopt(name)))

    def drop(self, name: str) -> None:
        """Remove a kept block that nobody owns. Raises ConfigError as ``reopen`` does."""
        _translated(lambda: self._core.drop(name))

    def blocks(self) -> list[BlockInfo]:
        """Every block of this machine's share, by its place. Raises DriverUnavailable for a damaged table."""
        return [BlockInfo(*row) for row in _translated(self._core.blocks)]

    @property
    def free_bytes(self) -> int:
        """What is left of this machine's share, all pieces together."""
        return _translated(self._core.free_bytes)


def allocate(options: dict[str, object], name: str, nbytes: int) -> Memory:
    """Memory in the pool of an engine's options, for ``TransferEngine.allocate(driver="cxl")``."""
    if not options.get("path"):
        raise ConfigError("the cxl driver has no pool: set driver_options['cxl']['path']")
    rest = {option: value for option, value in options.items() if option != "path"}
    # What the pool has room for, without a part of a character at its end.
    name = name.encode()[:NAME_BYTES].decode(errors="ignore")
    block = Pool.open(str(options["path"]), **rest).allocate(nbytes, name=name)
    return Memory(block.range.address, nbytes, block.range.owner)


def _translated(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except MemoryError as error:
        raise MemoryUnavailable(str(error)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise DriverUnavailable(str(error)) from None
