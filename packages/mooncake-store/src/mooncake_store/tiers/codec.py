"""The form of a record: a header that says everything about it, and the value, both with checksums.

A header fills whole blocks of 4 KiB, and the value begins after it::

    0    magic            8    format         10   flags          12   header bytes
    16   place (16)       32   offset         40   digest (16)    56   epoch
    64   version          72   value bytes    80   stored bytes   88   XXH3-64 of what is stored
    96   salt (16)        112  nonce (12)     124  meta bytes     128  XXH3-64 of the header
    136  meta: msgpack [key, tenant, group, priority, hard pin]

Integers are little-endian. ``place`` and ``offset`` say where it was written: a copy of it elsewhere, inside
another value say, is no record. Of an encrypted record meta and value are each AES-256-GCM with the same
nonce and different keys, tag last, bound to digest, version and size; the key of the meta, which names the
tenant, is derived without a tenant.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from mooncake_store._errors import RecordInvalid
from mooncake_store.tiers.cipher import NONCE_BYTES, SALT_BYTES, TAG_BYTES, Secret
from mooncake_store.tiers.contract import Bytes, Record, RecordMeta, Stored

__all__ = ["BLOCK_BYTES", "NOWHERE", "Codec", "Header", "rounded"]

BLOCK_BYTES = 4096
MAGIC, FORMAT = b"MCTIERR\n", 1
ENCRYPTED, DROPPED = 1, 2
NOWHERE = bytes(16)
_FIXED = struct.Struct("<8sHHI16sQ16sQQQQQ16s12sI")
_SUM = struct.Struct("<Q")
_META_AT = _FIXED.size + _SUM.size
_MAX_HEADER_BYTES = 1 << 20
assert _META_AT == 136


def rounded(nbytes: int) -> int:
    """``nbytes`` up to whole blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class _Meta(msgspec.Struct, array_like=True, frozen=True):
    key: bytes
    tenant: str
    group: str
    priority: int
    hard_pin: bool


@dataclass(frozen=True, slots=True)
class Header:
    """A header that was found whole.

    Attributes:
        nbytes: its own size; the value begins after that.
        dropped: the record was removed; nothing else of it is true but how much room it takes.
        value_bytes, stored_bytes: size of the value, and of what is stored of it.
        checksum: XXH3-64 of what is stored.
    """

    nbytes: int
    dropped: bool
    place: bytes
    offset: int
    digest: bytes
    epoch: int
    version: int
    value_bytes: int
    stored_bytes: int
    checksum: int
    salt: bytes
    nonce: bytes
    encrypted: bool
    meta: bytes

    @property
    def span(self) -> int:
        """Bytes from its beginning to where the next record may begin."""
        return self.nbytes + rounded(self.stored_bytes)

    def identity(self) -> bytes:
        """What encryption binds a record to."""
        return struct.pack("<16sQQQ", self.digest, self.epoch, self.version, self.value_bytes)


class Codec:
    """Makes records and reads them. Thread-safe."""

    def __init__(self, secret: Secret | None = None) -> None:
        self._secret = secret
        self._meta_decoder = msgspec.msgpack.Decoder(_Meta)

    def stored_bytes(self, value_bytes: int) -> int:
        """How much is stored of a value of that size."""
        return value_bytes + (TAG_BYTES if self._secret is not None and value_bytes else 0)

    def header_bytes(self, record: Record) -> int:
        """How large the record's header will be."""
        return rounded(_META_AT + len(_packed_meta(record)) + (TAG_BYTES if self._secret is not None else 0))

    @property
    def copies(self) -> bool:
        """Whether what is stored is something else than the value."""
        return self._secret is not None

    def seal(
        self, record: Record, place: bytes, offset: int, into: Bytes | None = None
    ) -> tuple[bytes, Bytes]:
        """The header for this place, and what to store: the value itself, or ``into`` with it encrypted."""
        meta, salt, nonce, stored = _packed_meta(record), bytes(SALT_BYTES), bytes(NONCE_BYTES), record.value
        flags = 0
        meta_of = record.meta
        identity = struct.pack("<16sQQQ", record.digest, meta_of.epoch, meta_of.version, record.value.nbytes)
        if self._secret is not None:
            flags, salt, nonce = ENCRYPTED, os.urandom(SALT_BYTES), os.urandom(NONCE_BYTES)
            for_meta, for_value = self._secret.keys("", salt)[0], self._secret.keys(meta_of.tenant, salt)[1]
            meta = for_meta.encrypt(nonce, meta, identity)
            if record.value.nbytes:
                assert into is not None
                stored = into[: record.value.nbytes + TAG_BYTES]
                for_value.encrypt_into(nonce, record.value.data, identity, stored.data)
        header = _encoded(
            flags,
            rounded(_META_AT + len(meta)),
            (place, offset, record.digest, meta_of.epoch, meta_of.version),
            (record.value.nbytes, stored.nbytes, xxhash.xxh3_64_intdigest(stored.data)),
            (salt, nonce),
            meta,
        )
        return header, stored

    @staticmethod
    def tombstone(header: Header) -> bytes:
        """A block that replaces the first one of a record: there was one, of this size."""
        return _encoded(
            DROPPED,
            header.nbytes,
            (header.place, header.offset, header.digest, header.epoch, header.version),
            (header.value_bytes, header.stored_bytes, 0),
            (bytes(SALT_BYTES), bytes(NONCE_BYTES)),
            b"",
        )[:BLOCK_BYTES]

    def stored(self, header: Header) -> Stored:
        """What the header says. Raises RecordInvalid when it cannot be decrypted or read."""
        meta = header.meta
        if header.encrypted:
            meta = self._decrypted_meta(header)
        try:
            found = self._meta_decoder.decode(meta)
        except msgspec.DecodeError as error:
            raise RecordInvalid(
                f"the record at {header.offset} has properties of another form: {error}"
            ) from None
        named = RecordMeta(
            epoch=header.epoch,
            version=header.version,
            tenant=found.tenant,
            group=found.group,
            priority=found.priority,
            hard_pin=found.hard_pin,
        )
        return Stored(header.digest, found.key, header.value_bytes, named)

    def _decrypted_meta(self, header: Header) -> bytes:
        from cryptography.exceptions import InvalidTag

        if self._secret is None:
            raise RecordInvalid(f"the record at {header.offset} is encrypted, and no secret was given")
        try:
            return self._secret.keys("", header.salt)[0].decrypt(header.nonce, header.meta, header.identity())
        except InvalidTag:
            raise RecordInvalid(
                f"the record at {header.offset} was encrypted with another secret, or changed"
            ) from None

    def open(self, header: Header, tenant: str, stored: Bytes, into: Bytes) -> bool:
        """Whether what is stored is what was written; then ``into`` holds the value.

        ``into`` may be ``stored`` itself where nothing is encrypted.
        """
        if stored.nbytes != header.stored_bytes or xxhash.xxh3_64_intdigest(stored.data) != header.checksum:
            return False
        if not header.encrypted or not header.value_bytes:
            if header.value_bytes and into.ctypes.data != stored.ctypes.data:
                into[:] = stored
            return True
        return self._decrypted(header, tenant, stored, into)

    def _decrypted(self, header: Header, tenant: str, stored: Bytes, into: Bytes) -> bool:
        from cryptography.exceptions import InvalidTag

        if self._secret is None:
            return False
        try:
            value_key = self._secret.keys(tenant, header.salt)[1]
            value_key.decrypt_into(header.nonce, stored.data, header.identity(), into.data)
        except InvalidTag:
            into[:] = 0  # nothing that was not proven is left there
            return False
        return True


def _packed_meta(record: Record) -> bytes:
    meta = record.meta
    return msgspec.msgpack.encode(_Meta(record.key, meta.tenant, meta.group, meta.priority, meta.hard_pin))


def _encoded(
    flags: int,
    header_bytes: int,
    identity: tuple[bytes, int, bytes, int, int],
    sizes: tuple[int, int, int],
    secrets: tuple[bytes, bytes],
    meta: bytes,
) -> bytes:
    fixed = _FIXED.pack(MAGIC, FORMAT, flags, header_bytes, *identity, *sizes, *secrets, len(meta))
    checksum = _SUM.pack(xxhash.xxh3_64_intdigest(fixed + meta))
    return (fixed + checksum + meta).ljust(header_bytes, b"\0")


def looks_like_header(block: bytes | memoryview) -> bool:
    """Whether a record may begin here."""
    return bytes(block[:8]) == MAGIC


def header_size(block: bytes | memoryview) -> int:
    """How many bytes the header that begins here has, by what it says; 0 when it is none.

    That much is needed by :func:`decode_header`; at least one block.
    """
    if len(block) < _META_AT or not looks_like_header(block):
        return 0
    size = int(_FIXED.unpack_from(block)[3])
    return size if BLOCK_BYTES <= size <= _MAX_HEADER_BYTES and size % BLOCK_BYTES == 0 else 0


def decode_header(data: bytes | memoryview) -> Header:
    """The header at the beginning of ``data``. Raises RecordInvalid when it is none, or not whole."""
    if not header_size(data):
        raise RecordInvalid("no record begins here")
    fields = _FIXED.unpack_from(data)
    _, form, flags, nbytes, place, offset, digest, epoch, version, *rest = fields
    value_bytes, stored_bytes, checksum, salt, nonce, meta_bytes = rest
    meta = bytes(data[_META_AT : _META_AT + meta_bytes])
    (expected,) = _SUM.unpack_from(data, _FIXED.size)
    if len(meta) != meta_bytes or xxhash.xxh3_64_intdigest(bytes(data[: _FIXED.size]) + meta) != expected:
        raise RecordInvalid(f"the header of the record at {offset} is damaged")
    if form != FORMAT:
        raise RecordInvalid(f"the record at {offset} has format {form}; this version reads format {FORMAT}")
    return Header(
        nbytes=nbytes,
        dropped=bool(flags & DROPPED),
        place=place,
        offset=offset,
        digest=digest,
        epoch=epoch,
        version=version,
        value_bytes=value_bytes,
        stored_bytes=stored_bytes,
        checksum=checksum,
        salt=salt,
        nonce=nonce,
        encrypted=bool(flags & ENCRYPTED),
        meta=meta,
    )


def empty(nbytes: int) -> Bytes:
    """Memory whose content does not matter yet."""
    return np.empty(nbytes, dtype=np.uint8)
