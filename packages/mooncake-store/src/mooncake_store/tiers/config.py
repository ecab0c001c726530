"""Settings of one tier, and the tier they mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from mooncake_store._errors import ConfigError
from mooncake_store.tiers.cipher import Secret
from mooncake_store.tiers.contract import Tier
from mooncake_store.tiers.file_tier import FileTier
from mooncake_store.tiers.objects import DirectoryTier, S3Tier

__all__ = ["TierConfig", "open_tier", "read_tiers"]


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one tier.

    Attributes:
        kind: ``file``: a folder of this machine, for one process; ``directory``: one of a shared file system;
            ``s3``: a bucket.
        path: the folder; of ``s3`` the bucket, and after a slash what begins the names of objects.
        capacity_bytes: how much may be in it; ``file`` needs it, ``s3`` has no limit of its own.
        secret_file, secret_env: where the 32 bytes stand, in base64 or hexadecimal, by which records are
            encrypted; neither: they are not.
        durable: a write is done once it is on the medium (``file``, ``directory``).
        io, direct, in_flight, bucket_bytes: of ``file``, see FileTier.
        endpoint, region: of ``s3``, see S3Tier.
    """

    kind: Literal["file", "directory", "s3"]
    path: str
    capacity_bytes: int = 0
    secret_file: str | None = None
    secret_env: str | None = None
    durable: bool = False
    io: str = "auto"
    direct: bool = True
    in_flight: int = 64
    bucket_bytes: int | None = None
    endpoint: str | None = None
    region: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tier: tuple[TierConfig, ...]


def read_tiers(path: str | os.PathLike[str]) -> tuple[TierConfig, ...]:
    """The ``[[tier]]`` tables of a TOML file. Raises ConfigError."""
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=_File).tier
    except (OSError, ValueError) as error:
        raise ConfigError(f"{os.fspath(path)} does not say what tiers there are: {error}") from error


def open_tier(config: TierConfig) -> Tier:
    """Open it. Raises ConfigError and what the kind raises."""
    secret = _secret(config)
    if config.kind == "file":
        return FileTier(
            config.path,
            config.capacity_bytes,
            bucket_bytes=config.bucket_bytes,
            secret=secret,
            io=config.io,
            direct=config.direct,
            in_flight=config.in_flight,
            durable=config.durable,
        )
    if config.kind == "directory":
        return DirectoryTier(config.path, config.capacity_bytes, secret=secret, durable=config.durable)
    bucket, _, prefix = config.path.partition("/")
    return S3Tier(bucket, prefix=prefix, endpoint=config.endpoint, region=config.region, secret=secret)


def _secret(config: TierConfig) -> Secret | None:
    if config.secret_file is not None and config.secret_env is not None:
        raise ConfigError("a tier has secret_file and secret_env; give one of them")
    if config.secret_file is not None:
        return Secret.from_file(config.secret_file)
    if config.secret_env is None:
        return None
    text = os.environ.get(config.secret_env)
    if text is None:
        raise ConfigError(f"secret_env names {config.secret_env}, which is not in the environment")
    return Secret.from_text(text, config.secret_env)
