"""Places for values beyond memory: files of this machine, shared folders, object stores."""

from mooncake_store.tiers.cipher import Secret
from mooncake_store.tiers.contract import (
    Read,
    ReadOutcome,
    Record,
    RecordMeta,
    Stored,
    Tier,
    TierCounters,
    TierRoom,
    WriteOutcome,
)
from mooncake_store.tiers.file_tier import FileTier
from mooncake_store.tiers.objects import DirectoryTier, S3Tier

__all__ = [
    "DirectoryTier",
    "FileTier",
    "Read",
    "ReadOutcome",
    "Record",
    "RecordMeta",
    "S3Tier",
    "Secret",
    "Stored",
    "Tier",
    "TierCounters",
    "TierRoom",
    "WriteOutcome",
]
