"""Digests that name objects: of user keys, and of blocks of tokens.

A block's digest covers its own tokens and the digest of the block before it, back to a root made of
everything else the KV cache depends on. Equal digests therefore mean equal whole prefixes, for the same
model, layout and tenant.

All digests are xxh3-128: 16 bytes, about 6 GB/s a core. It is not a cryptographic hash: it does not stop
somebody who can choose the tokens from looking for collisions inside a tenant. Between tenants the root
differs.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from mooncake_store._core import key_digests
from mooncake_store._errors import ConfigError, KeyInvalid
from mooncake_store.config import MAX_KEY_BYTES

__all__ = ["DIGEST_BYTES", "block_digests", "key_bytes", "object_digests", "object_prefix", "root_digest"]

DIGEST_BYTES = 16
MAX_TOKEN_ID = 2**32 - 1

Key = str | bytes


def _framed(*fields: bytes) -> bytes:
    # Lengths first, so that no two different lists of fields run together into the same bytes.
    return b"".join(struct.pack("<Q", len(field)) + field for field in fields)


def root_digest(model: str, block_tokens: int, *, layout: str, tenant: str = "") -> bytes:
    """Digest under which chains of blocks begin.

    Args:
        model: what identifies the weights, revision and quantisation included.
        block_tokens: tokens in a block, at least 1.
        layout: what identifies the bytes of a block: dtype, shape, order of layers, parallel split.
        tenant: keeps the blocks of tenants apart.

    Returns: 16 bytes. Raises ConfigError for ``block_tokens`` below 1.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens is {block_tokens}; a block has at least one token")
    fields = (b"kv-root-1", model.encode(), struct.pack("<Q", block_tokens), layout.encode(), tenant.encode())
    return xxh3_128_digest(_framed(*fields))


def block_digests(token_ids: Sequence[int] | npt.ArrayLike, block_tokens: int, root: bytes) -> list[bytes]:
    """Digests of the full blocks of a token sequence, first block first; a last, partial block has none.

    Args:
        token_ids: one-dimensional integers from 0 to 2**32 - 1. An integer numpy array is the fast form.
        block_tokens: tokens in a block, at least 1.
        root: 16 bytes of :func:`root_digest`.

    Raises ConfigError for a wrong root, shape, dtype or token id.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens is {block_tokens}; a block has at least one token")
    if len(root) != DIGEST_BYTES:
        raise ConfigError(
            f"the root digest has {len(root)} bytes instead of {DIGEST_BYTES}; use root_digest()"
        )
    packed = _packed_tokens(token_ids).tobytes()
    digests = []
    digest = root
    block_bytes = 4 * block_tokens
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        digest = xxh3_128_digest(digest + packed[start : start + block_bytes])
        digests.append(digest)
    return digests


def _packed_tokens(token_ids: Sequence[int] | npt.ArrayLike) -> npt.NDArray[np.uint32]:
    tokens = np.asarray(token_ids)
    if tokens.size == 0:
        return np.empty(0, dtype="<u4")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"token_ids must be one-dimensional integers, not {tokens.dtype} of shape {tokens.shape}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > MAX_TOKEN_ID:
        raise ConfigError(f"token ids run from {low} to {high}; they must lie in 0..{MAX_TOKEN_ID}")
    return np.ascontiguousarray(tokens, dtype="<u4")


def key_bytes(key: Key) -> bytes:
    """The key as bytes (text is UTF-8). Raises KeyInvalid for another type, an empty key or one over 64
    KiB.
    """
    if isinstance(key, str):
        raw = key.encode()
    elif isinstance(key, bytes | bytearray | memoryview):
        raw = bytes(key)
    else:
        raise KeyInvalid(f"a key is text or bytes, not {type(key).__name__} ({key!r:.60})")
    if not raw:
        raise KeyInvalid("the key is empty; a key has at least one byte")
    if len(raw) > MAX_KEY_BYTES:
        raise KeyInvalid(
            f"the key has {len(raw)} bytes, at most {MAX_KEY_BYTES} are allowed; hash it ({raw[:24]!r}...)"
        )
    return raw


def shown_key(key: bytes) -> str | None:
    """A key as text; None when it is none."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None


def object_digests(tenant: str, keys: Sequence[str | bytes]) -> bytes:
    """The digests under which the master knows the keys of a tenant: 16 bytes each, one after the other.

    Raises ValueError for a key that is empty, longer than 64 KiB or neither text nor bytes.
    """
    return key_digests(object_prefix(tenant), list(keys))


@functools.lru_cache(maxsize=64)
def object_prefix(tenant: str) -> bytes:
    """What goes before the keys of a tenant in what their digests are made of."""
    return _framed(b"object-1", tenant.encode())
