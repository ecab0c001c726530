"""Which bytes of values lie where in local memory: ranges, and parts of values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mooncake_store._errors import SizeMismatch, ValueInvalid
from mooncake_store.keys import Key

__all__ = [
    "READ",
    "WRITTEN",
    "Uints",
    "as_parts",
    "as_ranges",
    "cut",
    "require_inside",
    "sizes_and_places",
]

Uints = npt.NDArray[np.uint64]
# Columns of a placement (see protocol.Placement), and of parts.
POSITION, INSIDE, SEGMENT, OFFSET, NBYTES = range(5)
READ = ("key", "offset in the value", "offset", "nbytes")
WRITTEN = ("key", "offset", "nbytes")
MEMORY = "memory"  # one more column, where users give several


def as_ranges(
    offsets: npt.ArrayLike, nbytes: npt.ArrayLike, count: int, region_bytes: int
) -> tuple[Uints, Uints]:
    """Offsets and sizes as uint64 arrays of ``count``; a single size goes for all.

    Raises ValueInvalid when the numbers do not fit the keys or a range is not inside the region.
    """
    if count == 1 and _lies_inside(offsets, nbytes, region_bytes):
        return np.array([offsets], dtype=np.uint64), np.array([nbytes], dtype=np.uint64)  # the fast way
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


def _lies_inside(offset: object, nbytes: object, region_bytes: int) -> bool:
    if type(offset) is not int or type(nbytes) is not int:
        return False
    return 0 <= offset <= offset + nbytes <= region_bytes


def as_parts(
    parts: npt.ArrayLike, columns: Sequence[str], keys: int, bounds: Sequence[int] | int
) -> tuple[Uints, Uints]:
    """Rows of parts as uint64, columns as in READ or WRITTEN, and the number of the memory of each.

    ``keys``: how many there are. ``bounds``: the bytes of the memory; or of each, where the second column of
    ``parts`` is the number of one.

    Raises ValueInvalid when they have another shape, or a number is negative or not inside what it is of.
    """
    several = not isinstance(bounds, int)
    names = [columns[0], MEMORY, *columns[1:]] if several else list(columns)
    array = np.asarray(parts)
    if array.size == 0:
        array = np.empty((0, len(names)), dtype=np.uint64)
    if array.dtype.kind not in "iu" or array.ndim != 2 or array.shape[1] != len(names):
        raise ValueInvalid(
            f"parts must be rows of {len(names)} integers ({', '.join(names)}), not {array.dtype} of "
            f"shape {array.shape}"
        )
    if array.dtype.kind == "i" and array.size and int(array.min()) < 0:
        raise ValueInvalid(f"parts hold a negative number: {int(array.min())}")
    array = array.astype(np.uint64)
    _require_below("key", array[:, 0], keys)
    if isinstance(bounds, int):
        found: Uints = np.zeros(len(array), dtype=np.uint64)
        as_ranges(array[:, -2], array[:, -1], len(array), bounds)
        return array, found
    _require_below(MEMORY, array[:, 1], len(bounds))
    for number, nbytes in enumerate(bounds):
        mine = array[array[:, 1] == number]
        as_ranges(mine[:, -2], mine[:, -1], len(mine), nbytes)
    return np.delete(array, 1, axis=1), array[:, 1].copy()


def _require_below(what: str, numbers: Uints, count: int) -> None:
    if len(numbers) and int(numbers.max()) >= count:
        raise ValueInvalid(f"a part names {what} number {int(numbers.max())}; there are {count}")


def cut(rows: Uints, parts: Uints) -> Uints:
    """Cut what lies where parts of values begin and end.

    ``rows`` are of a placement, ``parts`` as in READ; the result is rows of a placement that has parts in the
    place of values. Parts may overlap; those of values not placed have no rows.
    """
    rows = rows[np.argsort(rows[:, POSITION], kind="stable")]
    first = np.searchsorted(rows[:, POSITION], parts[:, 0], side="left")
    count = np.searchsorted(rows[:, POSITION], parts[:, 0], side="right") - first
    # Each part beside each extent of its value; a value has few.
    part = np.repeat(np.arange(len(parts)), count)
    nth = np.arange(len(part)) - np.repeat(np.cumsum(count) - count, count)
    extent, wanted = rows[np.repeat(first, count) + nth], parts[part]
    begin = np.maximum(extent[:, INSIDE], wanted[:, 1])
    end = np.minimum(extent[:, INSIDE] + extent[:, NBYTES], wanted[:, 1] + wanted[:, 3])
    meet = end > begin
    offset = extent[:, OFFSET] + begin - extent[:, INSIDE]
    number = part.astype(np.uint64)
    columns = (number, begin - wanted[:, 1], extent[:, SEGMENT], offset, end - begin)
    found: Uints = np.stack(columns, axis=1)[meet]
    return found


def sizes_and_places(parts: Uints, count: int) -> tuple[Uints, Uints]:
    """The sizes of ``count`` values that are made of parts (WRITTEN), and the parts as READ has them."""
    order = np.argsort(parts[:, 0], kind="stable")
    owners, nbytes = parts[order, 0].astype(np.intp), parts[order, 2]
    sizes: Uints = np.zeros(count, dtype=np.uint64)
    np.add.at(sizes, owners, nbytes)
    before = np.cumsum(nbytes) - nbytes
    inside = np.empty_like(before)
    inside[order] = before - before[np.searchsorted(owners, owners)]
    return sizes, np.stack((parts[:, 0], inside, parts[:, 1], parts[:, 2]), axis=1)


def require_inside(parts: Uints, found: npt.NDArray[np.bool_], sizes: Uints, keys: Sequence[Key]) -> None:
    """Raise SizeMismatch when a part (READ) reaches beyond a value that was found."""
    owners = parts[:, 0].astype(np.intp)
    ends = parts[:, 1] + parts[:, 3]
    beyond = (ends > sizes[owners]) | (ends < parts[:, 1])
    wrong = np.flatnonzero(found[owners] & beyond)
    if wrong.size:
        number, start, _, nbytes = parts[wrong[0]].tolist()
        raise SizeMismatch(
            f"key {keys[number]!r:.80} has {sizes[number]} bytes, not {nbytes} from {start} on as asked for"
        )


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
