"""Encryption of records: AES-256-GCM, by keys derived from one secret, the tenant and a salt."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_store._errors import ConfigError, TierKeyWrong

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["NONCE_BYTES", "SALT_BYTES", "TAG_BYTES", "Secret"]

SECRET_BYTES, SALT_BYTES, NONCE_BYTES, TAG_BYTES = 32, 16, 12, 16
CHECKED = b"mooncake-store tier"


class Secret:
    """The 32 bytes from which every key comes. Never shown by ``repr``."""

    def __init__(self, secret: bytes) -> None:
        """Raises ConfigError for another length, or when ``cryptography`` is not installed."""
        if len(secret) != SECRET_BYTES:
            raise ConfigError(
                f"the tier's secret has {len(secret)} bytes, it must have {SECRET_BYTES}; make one with "
                "`openssl rand -base64 32`"
            )
        _require_cryptography()
        self._secret = secret

    @classmethod
    def from_text(cls, text: str, source: str) -> Secret:
        """From base64 or hexadecimal, as found in ``source``. Raises ConfigError, without the text."""
        packed = "".join(text.split())
        try:
            is_hex = len(packed) == 2 * SECRET_BYTES
            raw = bytes.fromhex(packed) if is_hex else base64.b64decode(packed, validate=True)
        except (ValueError, binascii.Error):
            raise ConfigError(f"{source} holds neither base64 nor hexadecimal digits") from None
        return cls(raw)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Secret:
        """From a file. Raises ConfigError."""
        try:
            text = Path(path).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the tier's secret cannot be read from {os.fspath(path)}: {error}") from error
        return cls.from_text(text, os.fspath(path))

    def keys(self, tenant: str, salt: bytes) -> tuple[AESGCM, AESGCM]:
        """For one record of a tenant: what encrypts its key and properties, and what encrypts its value.

        Each record has a salt of its own, so no key is used for more than one message.
        """
        return _keys(self._secret, tenant, salt)

    def check(self) -> str:
        """What tells secrets apart without telling anything about them."""
        from cryptography.hazmat.primitives import hashes, hmac

        code = hmac.HMAC(self._secret, hashes.SHA256())
        code.update(CHECKED)
        return code.finalize()[:8].hex()

    def __repr__(self) -> str:
        return "Secret(...)"


def _keys(secret: bytes, tenant: str, salt: bytes) -> tuple[AESGCM, AESGCM]:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # RFC 5869; the info says what the keys are for and whose they are.
    derived = HKDF(hashes.SHA256(), 64, salt, b"mooncake-store tier 1\0" + tenant.encode()).derive(secret)
    return AESGCM(derived[:32]), AESGCM(derived[32:])


def _require_cryptography() -> None:
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"encrypted tiers need the package cryptography ({error}); pip install mooncake-store[encryption]"
        ) from error


def require_same(secret: Secret | None, check: str, where: str) -> None:
    """Raise TierKeyWrong unless records of a tier with this check can be read with the secret."""
    ours = "" if secret is None else secret.check()
    if ours == check:
        return
    if not check:
        what = "it holds records that are not encrypted, and a secret was given"
    elif not ours:
        what = "it holds encrypted records, and no secret was given"
    else:
        what = "it was written with another secret"
    raise TierKeyWrong(f"{where} is not opened: {what}; give the right one, or another place")
