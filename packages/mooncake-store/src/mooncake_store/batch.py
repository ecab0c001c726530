"""Arguments of the batch calls, checked and in the form the wire wants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mooncake_store._errors import ValueInvalid
from mooncake_store.keys import DIGEST_BYTES, Key, key_bytes, object_digests
from mooncake_store.mover import Uints

__all__ = ["Batch", "as_bytes", "as_ranges"]


class Batch:
    """Keys of one call.

    Attributes:
        keys: as bytes.
        digests: one 16-byte item each, as the master knows them.
    """

    def __init__(self, tenant: str, keys: Sequence[Key]) -> None:
        """Raises KeyInvalid."""
        if isinstance(keys, str | bytes):
            raise ValueInvalid(
                f"keys is one key ({keys!r:.60}), not a sequence of keys; use the call for one key"
            )
        self.keys = [key_bytes(key) for key in keys]
        self.digests = np.frombuffer(object_digests(tenant, self.keys), dtype=f"V{DIGEST_BYTES}")

    def __len__(self) -> int:
        return len(self.keys)


def as_ranges(
    offsets: npt.ArrayLike, nbytes: npt.ArrayLike, count: int, region_bytes: int
) -> tuple[Uints, Uints]:
    """Offsets and sizes as uint64 arrays of ``count``; a single size goes for all.

    Raises ValueInvalid when the numbers do not fit the keys or a range is not inside the region.
    """
    starts, sizes = _as_uints("offsets", offsets, count), _as_uints("nbytes", nbytes, count)
    ends = starts + sizes
    # uint64 wraps around: an end before its start is outside, too.
    outside = np.flatnonzero((ends > region_bytes) | (ends < starts))
    if outside.size:
        first = int(outside[0])
        raise ValueInvalid(
            f"{sizes[first]} bytes at offset {starts[first]} (entry {first}) are not inside the region of "
            f"{region_bytes} bytes"
        )
    return starts, sizes


def _as_uints(name: str, numbers: npt.ArrayLike, count: int) -> Uints:
    array = np.asarray(numbers)
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.uint64)
    if array.dtype.kind not in "iu" or array.ndim > 1 or (array.ndim == 1 and len(array) != count):
        raise ValueInvalid(
            f"{name} must be {count} integers, one per key, not {array.dtype} of shape {array.shape}"
        )
    if array.dtype.kind == "i" and array.size and int(array.min()) < 0:
        raise ValueInvalid(f"{name} holds a negative number: {int(array.min())}")
    return np.broadcast_to(array.astype(np.uint64), (count,))


def as_bytes(data: object) -> npt.NDArray[np.uint8]:
    """The bytes of any contiguous buffer, without a copy. Raises ValueInvalid for what is none."""
    try:
        view = memoryview(data)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueInvalid(
            f"a value is a buffer (bytes, bytearray, array, ...), not {type(data).__name__}"
        ) from error
    if not view.c_contiguous:
        raise ValueInvalid(
            f"the value ({type(data).__name__} of {view.nbytes} bytes) is not contiguous; copy it first"
        )
    return np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)
