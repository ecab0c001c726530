"""Many values read piece by piece under one lease, without a call to the master for each piece."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

import numpy as np
import numpy.typing as npt

from mooncake_store.batch import Batch
from mooncake_store.parts import READ, Uints, as_parts, require_inside
from mooncake_store.reader import Reading
from mooncake_store.write_session import OpenMemories
from mooncake_transfer import Region

__all__ = ["ReadSession"]


class ReadSession:
    """Values being read; a context manager, for one thread at a time. See ``Store.read_session``."""

    def __init__(self, reading: Reading, open_memories: OpenMemories, batch: Batch) -> None:
        self._reading, self._open_memories, self._batch = reading, open_memories, batch

    @property
    def found(self) -> npt.NDArray[np.bool_]:
        """Per key, whether it has a value."""
        return self._reading.found

    @property
    def sizes(self) -> Uints:
        """Per key, the bytes of its value; 0 where there is none."""
        return self._reading.sizes

    @property
    def good(self) -> npt.NDArray[np.bool_]:
        """Per key, whether all that was read of it is right; known at the end of the context."""
        return self._reading.good

    @property
    def expired(self) -> npt.NDArray[np.bool_]:
        """Per key, whether it is not ``good`` only because the lease is not known to have held: a retry is
        safe; known at the end.
        """
        return self._reading.expired

    def read_parts(self, memories: Region | Sequence[object], parts: npt.ArrayLike) -> None:
        """Read parts of the values found; what they are is said at ``Store.batch_get_parts_into``.

        Whether they are right is known only at the end. Raises ValueInvalid, SizeMismatch.
        """
        with ExitStack() as stack:
            opened, bounds = self._open_memories(stack, memories, False)
            wanted, where = as_parts(parts, READ, len(self._batch), bounds)
            require_inside(wanted, self.found, self.sizes, self._batch.keys)
            for number, memory in enumerate(opened):
                self._reading.fetch_parts(memory, wanted[where == number])

    def __enter__(self) -> ReadSession:
        """Take the lease, which is renewed until the end. Raises MasterError, RateLimited, StoreClosed."""
        self._reading.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.__exit__(kind, error, trace)
