"""Every kind of tier keeps what the contract says."""

from typing import ClassVar

import pytest

from mooncake_store.testing import TierContract
from mooncake_store.tiers import DirectoryTier, FileTier, S3Tier, Secret

MIB = 1 << 20


class TestFilesByThreads(TierContract):
    options: ClassVar = {"io": "threads"}

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path / "tier"

    def open(self):
        return FileTier(self.folder, 64 * MIB, bucket_bytes=4 * MIB, **self.options)


class TestFilesByThreadsThroughThePageCache(TestFilesByThreads):
    options: ClassVar = {"io": "threads", "direct": False, "durable": True}


class TestEncryptedFiles(TestFilesByThreads):
    options: ClassVar = {"io": "threads", "secret": Secret(bytes(range(32)))}


class TestFilesByTheDriver(TestFilesByThreads):
    options: ClassVar = {"io": "driver"}

    @pytest.fixture(autouse=True)
    def _driver(self):
        pytest.importorskip("mooncake_driver_nvmeof")


class TestEncryptedFilesByTheDriver(TestFilesByTheDriver):
    options: ClassVar = {"io": "driver", "secret": Secret(bytes(range(32)))}


class TestDirectories(TierContract):
    options: ClassVar = {}

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path / "tier"

    def open(self):
        return DirectoryTier(self.folder, 64 * MIB, **self.options)


class TestEncryptedDirectories(TestDirectories):
    options: ClassVar = {"secret": Secret(bytes(range(32))), "durable": True}


class TestS3(TierContract):
    @pytest.fixture(autouse=True)
    def _place(self, s3_place):
        self.place = s3_place

    def open(self):
        return S3Tier(**self.place)
