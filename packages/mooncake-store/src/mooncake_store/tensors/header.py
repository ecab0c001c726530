"""What stands before the bytes of a tensor: what it is, and which part of what."""

from __future__ import annotations

import msgspec
import torch

from mooncake_store._errors import TensorMismatch, ValueInvalid
from mooncake_store.keys import Key

__all__ = ["HEADER_BYTES", "Header", "dtype_named", "name_of"]

HEADER_BYTES = 256
MAGIC = b"MCTENSR1"
LENGTH_BYTES = 2


class Header(msgspec.Struct, array_like=True, frozen=True):
    """A value under the key of a tensor.

    Attributes:
        dtype: as torch names it, without ``torch.``.
        shape: of the bytes that follow.
        shards: (dim, size): no bytes follow, the tensor lies in so many shards along that dimension.
        whole: shape of the tensor that this is a shard of, or which lies in shards; else ``shape`` again.
    """

    dtype: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    shards: tuple[int, int] | None = None

    def encode(self) -> bytes:
        """HEADER_BYTES bytes. Raises ValueInvalid for a tensor with too many dimensions."""
        body = msgspec.msgpack.encode(self)
        text = MAGIC + len(body).to_bytes(LENGTH_BYTES, "little") + body
        if len(text) > HEADER_BYTES:
            raise ValueInvalid(f"a tensor of shape {self.shape} has too many dimensions to be stored")
        return text.ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def decode(data: bytes, key: Key) -> Header:
        """The header of a value that has been read. Raises TensorMismatch."""
        begin = len(MAGIC) + LENGTH_BYTES
        end = begin + int.from_bytes(data[len(MAGIC) : begin], "little")
        try:
            if data[: len(MAGIC)] != MAGIC:
                raise msgspec.DecodeError("it does not begin as one")
            return msgspec.msgpack.decode(data[begin:end], type=Header)
        except msgspec.DecodeError as error:
            raise TensorMismatch(
                f"the value of key {key!r:.80} is no tensor: {error}; read it with Store.get()"
            ) from None


def name_of(dtype: torch.dtype) -> str:
    """How a header calls a dtype."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str, key: Key) -> torch.dtype:
    """The dtype of a header. Raises TensorMismatch when this torch has none of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TensorMismatch(
            f"key {key!r:.80} is a tensor of {name}, which torch {torch.__version__} does not know"
        )
    return found
