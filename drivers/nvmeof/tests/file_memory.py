"""A file as a kind of memory, for what asks for such kinds."""

from __future__ import annotations

import tempfile

from mooncake_transfer.memory import FileSource

__all__ = ["FileMemory"]


class FileMemory:
    """What the suite calls DeviceMemory, as far as it is registered."""

    def __init__(self, nbytes: int) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the memory
        self._file.truncate(nbytes)
        self.source = FileSource(self._file.fileno())
