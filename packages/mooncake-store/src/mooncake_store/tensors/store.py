"""Tensors by key: put, get, and shards that are read in other numbers than they were written."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mooncake_store._errors import KeyExists, KeyNotFound, SizeMismatch, TensorMismatch, ValueInvalid
from mooncake_store.client import Store
from mooncake_store.keys import Key, key_bytes
from mooncake_store.parts import Uints
from mooncake_store.policy import PutPolicy
from mooncake_store.protocol import IfExists
from mooncake_store.tensors.boxes import Shard, overlap, shape_of
from mooncake_store.tensors.header import HEADER_BYTES, Header, dtype_named, name_of
from mooncake_transfer import Region

__all__ = ["TensorStore"]

Bytes = npt.NDArray[np.uint8]
WHOLE = Shard(0, 0, 1)
ATTEMPTS = 5  # to read a tensor that others replace


class TensorStore:
    """Torch tensors in a store. Thread-safe; closes nothing.

    A tensor is one value: a header of 256 bytes, then its elements in C order. One that is put in shards is
    a value for each shard, and one that says how it is cut; it can then be read whole or in any other
    number of shards, each reader taking only its own bytes. Shards are values of their own: to replace a
    sharded tensor, use another key, or readers may meet shards of both.

    Where ``region`` is given, the tensors' memory lies in it (``engine.register(tensor)``, or a tensor made
    over ``region.view()``), and bytes move without a copy in between. Tensors of other devices are copied
    through main memory.

    ``policy`` says how the values are kept, as in ``Store.put``. What a store raises is raised here too.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    # ---- puts

    def put(
        self,
        key: Key,
        tensor: torch.Tensor,
        *,
        region: Region | None = None,
        if_exists: IfExists = "error",
        policy: PutPolicy | None = None,
    ) -> None:
        """Store a tensor. Raises KeyExists, StoreFull, PutFailed."""
        self._put_one(key, tensor, tuple(tensor.shape), region, if_exists, policy)

    def put_shard(
        self,
        key: Key,
        tensor: torch.Tensor,
        shard: Shard,
        *,
        whole: Sequence[int] | None = None,
        region: Region | None = None,
        if_exists: IfExists = "error",
        policy: PutPolicy | None = None,
    ) -> None:
        """Store one shard; every rank stores its own, in any order.

        Args:
            whole: shape of the whole tensor, needed where its dimension cannot be divided by the number of
                shards.

        Raises TensorMismatch when the tensor does not have the shape of this shard, or the key is cut in
        another way already; ConfigError, KeyExists, StoreFull, PutFailed.
        """
        if whole is None:
            shape_of(tensor.shape, shard)
            whole = [n * shard.size if dim == shard.dim else n for dim, n in enumerate(tensor.shape)]
        expected = shape_of(whole, shard)
        if tuple(tensor.shape) != expected:
            raise TensorMismatch(
                f"{shard} of a tensor of shape {tuple(whole)} has the shape {expected}, not "
                f"{tuple(tensor.shape)}; give the whole's shape as `whole`"
            )
        index = Header(name_of(tensor.dtype), (), tuple(whole), (shard.dim, shard.size))
        stored = self._put_one(_shard_key(key, shard), tensor, tuple(whole), region, if_exists, policy)
        if_cut: IfExists = "replace" if if_exists == "replace" else "error"
        try:
            self.store.put(key, index.encode(), if_exists=if_cut, policy=policy)
        except KeyExists:
            if (found := self._header(key)) != index:
                if stored:  # what was kept is the other tensor's
                    self.store.batch_remove([_shard_key(key, shard)])
                raise TensorMismatch(
                    f"key {key!r:.80} is {_described(found)} already, and shall be {_described(index)}; "
                    "remove it first"
                ) from None

    def batch_put(
        self,
        keys: Sequence[Key],
        tensors: Sequence[torch.Tensor],
        *,
        region: Region | None = None,
        if_exists: IfExists = "keep",
        policy: PutPolicy | None = None,
    ) -> list[bool]:
        """Store many tensors in one go; per key, whether it was stored now. As ``Store.batch_put_from``."""
        if len(keys) != len(tensors):
            raise ValueInvalid(
                f"there are {len(keys)} keys and {len(tensors)} tensors; one of each is needed"
            )
        headers = [Header(name_of(t.dtype), tuple(t.shape), tuple(t.shape)).encode() for t in tensors]
        memories: list[object] = [b"".join(headers)]
        if region is not None:
            memories.append(region)
        parts: list[tuple[int, int, int, int]] = []
        for number, tensor in enumerate(tensors):
            memory, offset = _source(tensor, region)
            if memory is not region:
                memories.append(memory)
            parts.append((number, 0, number * HEADER_BYTES, HEADER_BYTES))
            parts.append((number, len(memories) - 1, offset, tensor.nbytes))
        return self.store.batch_put_parts(keys, memories, parts, if_exists=if_exists, policy=policy)

    def _put_one(
        self,
        key: Key,
        tensor: torch.Tensor,
        whole: tuple[int, ...],
        region: Region | None,
        if_exists: IfExists,
        policy: PutPolicy | None,
    ) -> bool:
        """Whether it was stored by this call; False where another was there, and is to be kept."""
        header = Header(name_of(tensor.dtype), tuple(tensor.shape), whole).encode()
        memory, offset = _source(tensor, region)
        parts = [(0, 0, HEADER_BYTES), (1, offset, tensor.nbytes)]
        if_there: IfExists = "replace" if if_exists == "replace" else "error"
        try:
            self.store.put_parts(key, [header, memory], parts, if_exists=if_there, policy=policy)
        except KeyExists:
            if if_exists != "keep":
                raise
            return False
        return True

    # ---- gets

    def get(self, key: Key, shard: Shard = WHOLE) -> torch.Tensor:
        """Read a tensor, or one shard of it, into a new tensor in main memory.

        It does not matter in how many shards it was put. Raises KeyNotFound, TensorMismatch when the value
        is no tensor, ConfigError when it has no such dimension.
        """
        (tensor,) = self._get([key], shard)
        if tensor is None:
            raise _missing(key)
        return tensor

    def get_into(
        self, key: Key, tensor: torch.Tensor, shard: Shard = WHOLE, *, region: Region | None = None
    ) -> None:
        """Read a tensor, or one shard of it, into one that is there.

        Raises TensorMismatch, before anything is written, when it has another dtype or shape or the value is
        no tensor; KeyNotFound, when part of it may have been written.
        """
        for _ in range(ATTEMPTS):
            header = self._header(key)
            shape = _wanted_shape(header, shard)
            if (name_of(tensor.dtype), tuple(tensor.shape)) != (header.dtype, shape):
                raise TensorMismatch(
                    f"key {key!r:.80} has {header.dtype} of shape {shape}, the tensor to read into is "
                    f"{name_of(tensor.dtype)} of shape {tuple(tensor.shape)}"
                )
            direct = tensor.device.type == "cpu" and tensor.is_contiguous()
            here = tensor if direct or region is not None else torch.empty(shape, dtype=tensor.dtype)
            memory, offset = _source(here, region)
            (end,) = self._fetch([_Wanted(key, header, shard, memory, offset)])
            if end is End.MISSING:
                raise _missing(key)
            if end is End.WHOLE:
                if here is not tensor:
                    with torch.no_grad():
                        tensor.copy_(here)
                return
        raise _restless(key)

    def batch_get(self, keys: Sequence[Key], shard: Shard = WHOLE) -> list[torch.Tensor | None]:
        """Read many tensors, with two calls to the master in all; None for a miss.

        Raises TensorMismatch when a value is no tensor, ConfigError when one has no such dimension.
        """
        return self._get(keys, shard)

    def describe(self, key: Key) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor, whole. Raises KeyNotFound, TensorMismatch."""
        header = self._header(key)
        return dtype_named(header.dtype, key), header.whole

    def remove(self, key: Key) -> None:
        """Remove a tensor with all its shards. Raises KeyNotFound, TensorMismatch."""
        header = self._header(key)
        if header.shards is not None:
            dim, size = header.shards
            self.store.batch_remove([_shard_key(key, Shard(dim, rank, size)) for rank in range(size)])
        self.store.remove(key)

    # ---- whole files

    def put_safetensors(
        self, prefix: str, file: str, *, if_exists: IfExists = "error", policy: PutPolicy | None = None
    ) -> list[str]:
        """Store every tensor of a safetensors file under ``prefix`` and its name; returns the keys.

        Raises KeyExists, StoreFull, PutFailed at the first that is not stored; those before it are.
        """
        from safetensors import safe_open

        keys = []
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                self.put(prefix + name, tensors.get_tensor(name), if_exists=if_exists, policy=policy)
                keys.append(prefix + name)
        return keys

    def save_safetensors(self, keys: Mapping[str, Key], file: str) -> None:
        """Write tensors of the store to a safetensors file, ``keys`` by their names there.

        Raises KeyNotFound, and then writes nothing.
        """
        from safetensors.torch import save_file

        save_file({name: self.get(key) for name, key in keys.items()}, file)

    # ---- inside

    def _header(self, key: Key) -> Header:
        (header,) = self._headers([key])
        if header is None:
            raise _missing(key)
        return header

    def _headers(self, keys: Sequence[Key]) -> list[Header | None]:
        data = np.zeros((len(keys), HEADER_BYTES), dtype=np.uint8)
        parts = [(i, 0, 0, i * HEADER_BYTES, HEADER_BYTES) for i in range(len(keys))]
        try:
            found = self.store.batch_get_parts_into(keys, [data], parts)
        except SizeMismatch as error:
            raise TensorMismatch(f"no tensor is so small: {error}; read it with Store.get()") from None
        return [
            Header.decode(row.tobytes(), key) if there else None
            for key, row, there in zip(keys, data, found, strict=True)
        ]

    def _get(self, keys: Sequence[Key], shard: Shard) -> list[torch.Tensor | None]:
        tensors: list[torch.Tensor | None] = [None] * len(keys)
        todo = list(range(len(keys)))
        for _ in range(ATTEMPTS):
            wanted: dict[int, _Wanted] = {}
            for place, header in zip(todo, self._headers([keys[i] for i in todo]), strict=True):
                if header is not None:
                    dtype = dtype_named(header.dtype, keys[place])
                    tensor = tensors[place] = torch.empty(_wanted_shape(header, shard), dtype=dtype)
                    wanted[place] = _Wanted(keys[place], header, shard, _flat(tensor), 0)
            ends = dict(zip(wanted, self._fetch(list(wanted.values())), strict=True))
            for place in todo:
                if ends.get(place) is not End.WHOLE:
                    tensors[place] = None
            todo = [place for place, end in ends.items() if end is End.CHANGED]
            if not todo:
                return tensors
        raise _restless(keys[todo[0]])

    def _fetch(self, wanted: Sequence[_Wanted]) -> list[End]:
        # All values of all tensors at once, each with its header again: by now it may be another's.
        keys, owners, headers = list[Key](), list[int](), list[bytes]()
        parts = [np.empty((0, 5), dtype=np.uint64)]
        for owner, one in enumerate(wanted):
            for key, header, rows in _values_with(one):
                ahead = np.array([len(keys), owner], dtype=np.uint64)
                parts.append(np.hstack((np.broadcast_to(ahead, (len(rows), 2)), rows)))
                again = [len(keys), len(wanted), 0, len(keys) * HEADER_BYTES, HEADER_BYTES]
                parts.append(np.array([again], dtype=np.uint64))
                keys.append(key)
                owners.append(owner)
                headers.append(header.encode())
        found = bytearray(len(keys) * HEADER_BYTES)
        memories = [*(one.memory for one in wanted), found]
        try:
            good = self.store.batch_get_parts_into(keys, memories, np.concatenate(parts))
        except SizeMismatch:  # of a value that came meanwhile
            return [End.CHANGED] * len(wanted)
        ends = [End.WHOLE] * len(wanted)
        for number, (owner, there) in enumerate(zip(owners, good, strict=True)):
            if not there:
                ends[owner] = End.MISSING
            elif (
                found[number * HEADER_BYTES :][:HEADER_BYTES] != headers[number] and ends[owner] is End.WHOLE
            ):
                ends[owner] = End.CHANGED
        return ends


class End(enum.Enum):
    """How the reading of a tensor ended. CHANGED: another value is under one of its keys now."""

    WHOLE = 0
    MISSING = 1
    CHANGED = 2


class _Wanted(NamedTuple):
    """A tensor, or a shard of it, on its way to ``offset`` of ``memory``."""

    key: Key
    header: Header
    shard: Shard
    memory: object
    offset: int


def _values_with(wanted: _Wanted) -> Iterator[tuple[Key, Header, Uints]]:
    """Values that have something of it, and rows of offset in the value, offset in the memory, bytes."""
    key, index = wanted.key, wanted.header
    itemsize = dtype_named(index.dtype, key).itemsize
    dim, size = index.shards or (WHOLE.dim, WHOLE.size)
    whole = index.whole or (1,)  # a single number is a row of one
    for rank in range(size):
        stored = Shard(dim, rank, size)
        rows = overlap(whole, itemsize, stored, wanted.shard)
        if len(rows) == 0:
            continue
        rows[:, 0] += np.uint64(HEADER_BYTES)
        rows[:, 1] += np.uint64(wanted.offset)
        if index.shards is None:
            yield key, index, rows
        else:
            yield _shard_key(key, stored), Header(index.dtype, shape_of(whole, stored), whole), rows


def _missing(key: Key) -> KeyNotFound:
    return KeyNotFound(
        f"key {key!r:.80} is not in the store, or not whole: never put, evicted, or lost with its owner"
    )


def _restless(key: Key) -> TensorMismatch:
    return TensorMismatch(
        f"key {key!r:.80} was replaced by another tensor each of the {ATTEMPTS} times it was read; put "
        "versions under keys of their own"
    )


def _shard_key(key: Key, shard: Shard) -> bytes:
    return key_bytes(key) + f"#shard-{shard.rank}-of-{shard.size}-dim-{shard.dim}".encode()


def _wanted_shape(header: Header, shard: Shard) -> tuple[int, ...]:
    return header.whole if shard == WHOLE else shape_of(header.whole, shard)


def _described(header: Header) -> str:
    how = "in one piece"
    if header.shards is not None:
        how = f"in {header.shards[1]} shards along dimension {header.shards[0]}"
    return f"{header.dtype} of shape {header.whole} {how}"


def _flat(tensor: torch.Tensor) -> Bytes:
    flat: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def _source(tensor: torch.Tensor, region: Region | None) -> tuple[object, int]:
    if region is not None:
        return region, _offset_in(tensor, region)
    return _flat(tensor.detach().cpu().contiguous()), 0


def _offset_in(tensor: torch.Tensor, region: Region) -> int:
    if not tensor.is_contiguous():
        raise ValueInvalid(f"a tensor of strides {tensor.stride()} is not contiguous; leave `region` out")
    offset = tensor.data_ptr() - region.address
    if tensor.nbytes and not 0 <= offset <= region.nbytes - tensor.nbytes:
        raise ValueInvalid(
            f"the tensor's {tensor.nbytes} bytes do not lie in region {region.name!r}; leave `region` out"
        )
    return offset if tensor.nbytes else 0
