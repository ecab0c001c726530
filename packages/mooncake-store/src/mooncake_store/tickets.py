"""What shows an owner that its master lets somebody see keys."""

from __future__ import annotations

import hashlib
import hmac

__all__ = ["ticket"]


def ticket(secret: bytes, tenant: str) -> bytes:
    """What shows an owner, to whom its master has given a secret, that somebody may see a tenant's keys."""
    return hmac.digest(secret, b"keys of " + tenant.encode(), hashlib.sha256) if secret else b""
