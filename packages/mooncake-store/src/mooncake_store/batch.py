"""Arguments of the batch calls, checked and in the form the wire wants."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mooncake_store._errors import ValueInvalid
from mooncake_store.keys import DIGEST_BYTES, Key, key_bytes, object_digests

__all__ = ["Batch", "Digests", "as_bools", "as_bytes"]


class Digests:
    """Values of one call, as the master knows them.

    Attributes:
        packed: 16 bytes each, one after the other.
    """

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @functools.cached_property
    def digests(self) -> npt.NDArray[np.void]:
        """One 16-byte item each."""
        return np.frombuffer(self.packed, dtype=f"V{DIGEST_BYTES}")

    def __len__(self) -> int:
        return len(self.packed) // DIGEST_BYTES


class Batch(Digests):
    """Keys of one call."""

    def __init__(self, tenant: str, keys: Sequence[Key]) -> None:
        """Raises KeyInvalid."""
        if isinstance(keys, str | bytes):
            raise ValueInvalid(
                f"keys is one key ({keys!r:.60}), not a sequence of keys; use the call for one key"
            )
        self._given = list(keys)
        try:
            packed = object_digests(tenant, self._given)
        except ValueError:
            self._given = [key_bytes(key) for key in self._given]  # says which key is wrong
            packed = object_digests(tenant, self._given)
        super().__init__(packed)

    @functools.cached_property
    def keys(self) -> list[bytes]:
        """The keys as bytes."""
        return [key_bytes(key) for key in self._given]


def as_bools(found: bytes) -> list[bool]:
    """What the master says of each key in one byte."""
    bools: list[bool] = np.frombuffer(found, dtype=np.bool_).tolist()
    return bools


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
