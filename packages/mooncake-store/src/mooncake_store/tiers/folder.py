"""The folder of a tier on a file system: whose it is, and what it was written with."""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

import msgspec

from mooncake_store._errors import TierInUse, TierUnavailable
from mooncake_store.tiers.cipher import Secret, require_same

__all__ = [
    "Identity",
    "fresh_identity",
    "known_identity",
    "lock_folder",
    "prepare_folder",
    "write_atomically",
]

IDENTITY_FILE, LOCK_FILE = "tier.json", "tier.lock"
FORMAT = 1


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in ``tier.json``: kind and version of the format, a random name, what tells the secret."""

    kind: str
    format: int
    id: str
    secret: str


def prepare_folder(folder: Path, kind: str, secret: Secret | None) -> Identity:
    """Make the folder a tier, or see that it is one. Raises TierUnavailable, TierKeyWrong."""
    file = folder / IDENTITY_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_atomically(file, msgspec.json.encode(fresh_identity(kind, secret)), keep=True)
        data = file.read_bytes()
    except OSError as error:
        raise TierUnavailable(
            f"{folder} cannot be used as a tier: {error}; correct the path or its rights"
        ) from error
    found = known_identity(data, kind, str(folder))
    require_same(secret, found.secret, str(folder))
    return found


def fresh_identity(kind: str, secret: Secret | None) -> Identity:
    """That of a new tier."""
    return Identity(
        kind=kind, format=FORMAT, id=secrets.token_hex(8), secret=secret.check() if secret else ""
    )


def known_identity(data: bytes, kind: str, where: str) -> Identity:
    """That of a tier that is there. Raises TierUnavailable when it is another kind or unreadable."""
    try:
        found = msgspec.json.decode(data, type=Identity)
    except msgspec.DecodeError as error:
        raise TierUnavailable(
            f"{where} cannot be used as a tier, its {IDENTITY_FILE} is damaged: {error}; give another place"
        ) from error
    if found.kind != kind or found.format != FORMAT:
        raise TierUnavailable(
            f"{where} holds a tier of kind {found.kind!r}, format {found.format}, and not {kind!r}, "
            f"{FORMAT}; give another place"
        )
    return found


def lock_folder(folder: Path) -> int:
    """Have the folder for this process, until the descriptor is closed. Raises TierInUse."""
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise TierInUse(
            f"{folder} is in use by another process; give each process a folder of its own"
        ) from None
    return fd


def write_atomically(path: Path, data: bytes, *, keep: bool = False) -> None:
    """Have the file with all of its content, or as before. ``keep``: what is there stays. Raises OSError."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(6)}.part")
    try:
        part.write_bytes(data)
        if keep:
            with suppress(FileExistsError):
                os.link(part, path)
        else:
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
