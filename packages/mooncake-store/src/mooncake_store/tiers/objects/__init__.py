"""Tiers that keep each record as an object of its own, which several processes may share."""

from mooncake_store.tiers.objects.directory import DirectoryTier
from mooncake_store.tiers.objects.s3 import S3Tier

__all__ = ["DirectoryTier", "S3Tier"]
