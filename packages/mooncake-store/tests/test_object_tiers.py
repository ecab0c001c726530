"""What shared folders and S3 do with damage, little room, several processes, and servers that are away."""

import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from mooncake_store import errors
from mooncake_store.testing.tiers import LIMIT_S, digest_of, read_one, record_of, value_of
from mooncake_store.tiers import DirectoryTier, Read, ReadOutcome, S3Tier, Secret, WriteOutcome
from mooncake_store.tiers.objects import directory, s3

MIB = 1 << 20
STORED = WriteOutcome.STORED


def outcome_of(tier, number, nbytes, limit_s=LIMIT_S, version=None):
    into = np.zeros(nbytes, np.uint8)
    (outcome,) = tier.read([Read(digest_of(number), into, version)], limit_s)
    if outcome is ReadOutcome.GOOD:
        assert into.tobytes() == value_of(number, nbytes).tobytes()
    return outcome


@pytest.fixture
def folder_tier(tmp_path):
    tier = DirectoryTier(tmp_path / "tier")
    yield tier
    tier.close()


@pytest.fixture
def s3_tier(s3_place):
    tier = S3Tier(**s3_place)
    yield tier
    tier.close()


def files_of(tmp_path):
    return sorted((tmp_path / "tier").glob("??/*.record"))


def test_damaged_files_are_misses_put_aside(tmp_path, folder_tier):
    gone = []
    folder_tier.on_gone = gone.extend
    folder_tier.write([record_of(i, 50_000) for i in range(4)], LIMIT_S)
    flipped, cut, swapped = files_of(tmp_path)[:3]
    with open(flipped, "r+b") as file:
        file.seek(30_000)
        file.write(bytes([file.read(1)[0] ^ 1]))
    os.truncate(cut, 20_000)
    swapped.write_bytes(files_of(tmp_path)[3].read_bytes())
    outcomes = [outcome_of(folder_tier, i, 50_000, version=(7, 1)) for i in range(4)]
    assert [outcome.name for outcome in outcomes] == ["CORRUPT"] * 3 + ["GOOD"]
    # Also of those whose headers say nothing of it any more.
    assert sorted(gone) == [(digest_of(i), (7, 1)) for i in range(3)]
    assert [outcome_of(folder_tier, i, 50_000).name for i in range(4)] == ["MISS"] * 3 + ["GOOD"]
    assert folder_tier.counters.corrupt == len(gone) == 3
    assert len(list((tmp_path / "tier" / "quarantine").iterdir())) == 3


def test_what_is_left_of_writers_that_died_is_not_found_and_goes(tmp_path, folder_tier):
    folder_tier.write([record_of(1, 100)], LIMIT_S)
    (path,) = files_of(tmp_path)
    old, new = (path.with_name(f"{path.name[:32]}.{name}.part") for name in ("old", "new"))
    for part in (old, new):
        part.write_bytes(b"half")
    before = time.time() - 2 * directory.ABANDONED_AFTER_S
    os.utime(old, (before, before))
    (tmp_path / "tier" / "notes.txt").write_text("mine")
    assert [one.digest for one in folder_tier.adopt(LIMIT_S)] == [digest_of(1)]
    assert (old.exists(), new.exists()) == (False, True)


def test_the_records_not_read_for_longest_leave_a_folder_with_a_limit(tmp_path):
    gone = []
    tier = DirectoryTier(tmp_path / "tier", capacity_bytes=MIB, on_gone=gone.extend)
    for i in range(8):
        assert tier.write([record_of(i, 100_000)], LIMIT_S) == [STORED]
        (path,) = (tmp_path / "tier").glob(f"*/{digest_of(i).hex()}.record")
        os.utime(path, (1000 + i, 1000 + i))
    assert outcome_of(tier, 0, 100_000) is ReadOutcome.GOOD  # a read counts as a use
    tier.write([record_of(i, 100_000) for i in range(10, 13)], LIMIT_S)
    assert [outcome_of(tier, i, 100_000).name for i in (0, 1, 12)] == ["GOOD", "MISS", "GOOD"]
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= MIB
    assert tier.counters.retired == len(gone) >= 2
    assert (digest_of(1), (7, 1)) in gone
    tier.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
def test_a_full_folder_refuses_values_and_leaves_nothing_half(tmp_path):
    disk = tmp_path / "tier"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "t", disk], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        tier = DirectoryTier(disk)
        outcomes = [tier.write([record_of(i, 300_000)], LIMIT_S)[0] for i in range(5)]
        assert outcomes == [STORED] * 3 + [WriteOutcome.FULL] * 2
        assert tier.counters.full == 2
        assert list(disk.rglob("*.part")) == []
        assert outcome_of(tier, 2, 300_000) is ReadOutcome.GOOD
        tier.close()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_processes_share_a_folder_and_see_whole_values_only(tmp_path, folder_tier):
    program = f"""
from mooncake_store.testing.tiers import record_of
from mooncake_store.tiers import DirectoryTier
tier = DirectoryTier({str(tmp_path / "tier")!r})
print("ready", flush=True)
for version in range(1, 1 << 30):
    tier.write([record_of(1, 200_000, version=version)], 20.0)
"""
    children = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        seen, deadline_s = set(), time.monotonic() + LIMIT_S
        while len(seen) < 5:
            assert time.monotonic() < deadline_s
            (found,) = folder_tier.find([digest_of(1)], LIMIT_S)
            into = np.zeros(200_000, np.uint8)
            (outcome,) = folder_tier.read([Read(digest_of(1), into)], LIMIT_S)
            if found is None or outcome is ReadOutcome.MISS:
                continue
            assert outcome is ReadOutcome.GOOD
            version = found.meta.version
            candidates = range(max(1, version - 1), version + 50)
            assert any(into.tobytes() == value_of(1, 200_000, v).tobytes() for v in candidates)
            seen.add(version)
    finally:
        for child in children:
            child.kill()
            child.wait(20)
            child.stdout.close()
    assert read_one(folder_tier, 1, 200_000) is not None


def test_another_secret_is_refused(tmp_path, folder_tier, s3_tier, s3_place):
    for open_it in (
        lambda secret: DirectoryTier(tmp_path / "tier", secret=secret),
        lambda secret: S3Tier(**s3_place, secret=secret),
    ):
        with pytest.raises(errors.TierKeyWrong, match="not encrypted, and a secret was given"):
            open_it(Secret(bytes(32)))


def test_objects_of_s3_are_encrypted_by_option(s3_place):
    for turn in range(2):
        tier = S3Tier(**s3_place, secret=Secret(bytes(32)))
        if not turn:
            assert tier.write([record_of(1, 5000, tenant="t")], LIMIT_S) == [STORED]
        assert outcome_of(tier, 1, 5000) is ReadOutcome.GOOD
        tier.close()


def test_large_values_go_to_s3_in_parts_and_come_back_in_ranges(s3_tier, monkeypatch):
    monkeypatch.setattr(s3, "PART_BYTES", 5 * MIB)
    sizes = (3 * MIB, 10 * MIB, 23 * MIB + 1)
    assert s3_tier.write([record_of(i, size) for i, size in enumerate(sizes)], LIMIT_S) == [STORED] * 3
    for i, size in enumerate(sizes):
        assert outcome_of(s3_tier, i, size) is ReadOutcome.GOOD
    assert [one.nbytes for one in s3_tier.find([digest_of(i) for i in range(3)], LIMIT_S)] == list(sizes)


def test_damaged_objects_of_s3_are_misses(s3_tier, s3_place):
    boto3 = pytest.importorskip("boto3")
    s3_tier.write([record_of(i, 50_000) for i in range(3)], LIMIT_S)
    client = boto3.client("s3", endpoint_url=s3_place["endpoint"])
    prefix = s3_place["prefix"]
    names = [f"{prefix}{digest_of(i).hex()}" for i in range(3)]
    data = bytearray(client.get_object(Bucket="values", Key=names[0])["Body"].read())
    data[30_000] ^= 1
    client.put_object(Bucket="values", Key=names[0], Body=bytes(data))
    client.put_object(Bucket="values", Key=names[1], Body=b"something else")
    client.put_object(Bucket="values", Key=f"{prefix}notes", Body=b"mine")
    client.close()
    assert [outcome_of(s3_tier, i, 50_000).name for i in range(3)] == ["CORRUPT", "CORRUPT", "GOOD"]
    assert [outcome_of(s3_tier, i, 50_000).name for i in range(3)] == ["MISS", "MISS", "GOOD"]
    assert [one.digest for one in s3_tier.adopt(LIMIT_S)] == [digest_of(2)]


def test_a_bucket_that_is_not_there_is_a_typed_error(s3_place):
    with pytest.raises(errors.TierUnavailable, match="bucket 'other' cannot be used as a tier"):
        S3Tier("other", endpoint=s3_place["endpoint"])


def test_a_server_that_is_away_is_a_typed_error_and_never_a_hang(s3_tier, monkeypatch):
    s3_tier.write([record_of(1, 100)], LIMIT_S)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(errors.TierUnavailable, match="cannot be reached"):
            S3Tier("values", endpoint=url, request_timeout_s=0.05)
        hanging = S3Tier.__new__(S3Tier)
        hanging.__dict__.update(s3_tier.__dict__)
        place = s3._Bucket(s3._client(url, "us-east-1", 4, 1.0, 30.0), "values", "kv/", 4)
        monkeypatch.setattr(hanging, "_place", place)
        began = time.monotonic()
        assert outcome_of(hanging, 1, 100, limit_s=0.2) is ReadOutcome.FAILED
        assert hanging.write([record_of(2, 100)], 0.2) == [WriteOutcome.FAILED]
        assert time.monotonic() - began < 20
        assert s3_tier.counters.timed_out == 2
    place.close()


def test_without_boto3_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(errors.ConfigError, match=r"pip install mooncake-store\[s3\]"):
        S3Tier("values")
