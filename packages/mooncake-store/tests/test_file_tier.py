"""What a file tier does with damage, little room, and processes that end in the middle."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from mooncake_store import errors
from mooncake_store.testing.tiers import LIMIT_S, digest_of, read_one, record_of, value_of
from mooncake_store.tiers import FileTier, Read, ReadOutcome, Record, RecordMeta, Secret, WriteOutcome
from mooncake_store.tiers.codec import BLOCK_BYTES
from mooncake_store.tiers.files import threads
from mooncake_store.tiers.workers import Workers

MIB = 1 << 20
STORED = WriteOutcome.STORED


@pytest.fixture
def open_tier(tmp_path):
    tiers = []

    def open_it(capacity=64 * MIB, bucket=4 * MIB, folder=tmp_path / "tier", **options):
        for tier in tiers:
            tier.close()
        options.setdefault("io", "threads")
        tiers.append(FileTier(folder, capacity, bucket_bytes=bucket, **options))
        return tiers[-1]

    yield open_it
    for tier in tiers:
        tier.close()


def buckets_of(tmp_path):
    return sorted((tmp_path / "tier").glob("*.bucket"))


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def outcome_of(tier, number, nbytes, version=1):
    into = np.zeros(nbytes, np.uint8)
    (outcome,) = tier.read([Read(digest_of(number), into)], LIMIT_S)
    if outcome is ReadOutcome.GOOD:
        assert into.tobytes() == value_of(number, nbytes, version).tobytes()
    return outcome


@pytest.mark.parametrize("io", ["threads", "driver"])
@pytest.mark.parametrize("secret", [None, Secret(bytes(32))])
def test_a_flipped_bit_is_a_miss_that_is_counted_and_not_given_again(tmp_path, open_tier, io, secret):
    if io == "driver":
        pytest.importorskip("mooncake_driver_nvmeof")
    gone = []
    tier = open_tier(io=io, secret=secret, on_gone=gone.extend)
    tier.write([record_of(i, 50_000) for i in range(4)], LIMIT_S)
    span = BLOCK_BYTES + 13 * BLOCK_BYTES
    flip(buckets_of(tmp_path)[0], 2 * span + BLOCK_BYTES + 49_999)
    assert [outcome_of(tier, i, 50_000).name for i in range(4)] == ["GOOD", "GOOD", "CORRUPT", "GOOD"]
    assert outcome_of(tier, 2, 50_000) is ReadOutcome.MISS
    assert (tier.counters.corrupt, tier.counters.read) == (1, 3)
    assert gone == [(digest_of(2), (7, 1))]
    again = open_tier(io=io, secret=secret)
    assert again.counters.adopted == 3
    assert outcome_of(again, 2, 50_000) is ReadOutcome.MISS


def test_a_damaged_header_hides_its_record_and_no_other(tmp_path, open_tier):
    open_tier().write([record_of(i, 50_000) for i in range(4)], LIMIT_S)
    tier = open_tier()
    tier.close()
    flip(buckets_of(tmp_path)[0], 14 * BLOCK_BYTES + 45)
    tier = open_tier()
    assert (tier.counters.adopted, tier.counters.damaged) == (3, 1)
    assert [outcome_of(tier, i, 50_000).name for i in range(4)] == ["GOOD", "MISS", "GOOD", "GOOD"]


def test_a_bucket_that_was_cut_short_loses_its_end_only(tmp_path, open_tier):
    tier = open_tier()
    tier.write([record_of(i, 50_000) for i in range(4)], LIMIT_S)
    tier.close()
    (bucket,) = buckets_of(tmp_path)
    os.truncate(bucket, 3 * 14 * BLOCK_BYTES + 5 * BLOCK_BYTES)
    tier = open_tier()
    assert (tier.counters.adopted, tier.counters.damaged) == (3, 1)
    assert outcome_of(tier, 3, 50_000) is ReadOutcome.MISS
    assert outcome_of(tier, 2, 50_000) is ReadOutcome.GOOD


def test_a_bucket_cut_under_an_open_tier_fails_what_it_lost_and_nothing_else(tmp_path, open_tier):
    tier = open_tier()
    tier.write([record_of(i, 50_000) for i in range(4)], LIMIT_S)
    os.truncate(buckets_of(tmp_path)[0], 3 * 14 * BLOCK_BYTES)
    into = [np.zeros(50_000, np.uint8) for _ in range(4)]
    outcomes = tier.read([Read(digest_of(i), into[i]) for i in range(4)], LIMIT_S)
    assert [outcome.name for outcome in outcomes] == ["GOOD", "GOOD", "GOOD", "FAILED"]
    assert tier.counters.failed == 1


def test_a_record_of_which_every_read_fails_is_given_up(tmp_path, open_tier):
    tier, gone = open_tier(), []
    tier.on_gone = gone.extend
    tier.write([record_of(i, 50_000) for i in range(4)], LIMIT_S)
    os.truncate(buckets_of(tmp_path)[0], 3 * 14 * BLOCK_BYTES)
    outcomes = [outcome_of(tier, 3, 50_000).name for _ in range(5)]
    assert outcomes == ["FAILED", "FAILED", "FAILED", "MISS", "MISS"]
    assert gone == [(digest_of(3), (7, 1))]
    assert [outcome_of(tier, i, 50_000).name for i in range(3)] == ["GOOD"] * 3
    assert tier.write([record_of(3, 50_000, version=2)], LIMIT_S) == [WriteOutcome.STORED]
    assert outcome_of(tier, 3, 50_000, version=2) is ReadOutcome.GOOD


def test_foreign_files_are_left_alone(tmp_path, open_tier):
    folder = tmp_path / "tier"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / f"{1:016x}-{'ab' * 16}.bucket").write_bytes(b"\xff" * 100_000)
    (folder / f"{2:016x}-{'cd' * 16}.bucket").mkdir()
    tier = open_tier()
    assert (tier.counters.foreign, tier.counters.adopted) == (2, 0)
    assert tier.write([record_of(1, 100)], LIMIT_S) == [STORED]
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_bucket_stored_as_a_value_is_not_taken_for_records(tmp_path, open_tier):
    tier = open_tier()
    tier.write([record_of(i, 50_000) for i in range(4)], LIMIT_S)
    copy = np.frombuffer(buckets_of(tmp_path)[0].read_bytes()[: 56 * BLOCK_BYTES], np.uint8)
    tier.write([Record(digest_of(9), b"copy", copy, RecordMeta(epoch=9))], LIMIT_S)
    tier.drop([(digest_of(i), None) for i in range(4)], LIMIT_S)
    tier.close()
    # Even where the record around it is damaged, so that what is in it is looked through.
    flip(buckets_of(tmp_path)[0], 56 * BLOCK_BYTES + 45)
    tier = open_tier()
    assert tier.counters.adopted == 0


def test_records_copied_into_another_bucket_or_place_are_none(tmp_path, open_tier):
    tier = open_tier()
    tier.write([record_of(i, 5000) for i in range(2)], LIMIT_S)
    tier.close()
    (bucket,) = buckets_of(tmp_path)
    data = bucket.read_bytes()
    bucket.write_bytes(data[: 3 * BLOCK_BYTES] + data[: 3 * BLOCK_BYTES])
    (tmp_path / "tier" / f"{9:016x}-{'ab' * 16}.bucket").write_bytes(data)
    tier = open_tier()
    assert [one.digest for one in tier.adopt(LIMIT_S)] == [digest_of(0)]


def test_whole_buckets_leave_and_the_least_recently_read_one_first(tmp_path, open_tier):
    gone = []
    tier = open_tier(capacity=4 * MIB, bucket=MIB, on_gone=gone.extend)
    for bucket in range(4):
        assert tier.write([record_of(10 * bucket + i, 400_000) for i in range(2)], LIMIT_S) == [STORED] * 2
    assert outcome_of(tier, 1, 400_000) is ReadOutcome.GOOD
    tier.write([record_of(90, 400_000)], LIMIT_S)
    assert {digest for digest, _ in gone} == {digest_of(10), digest_of(11)}
    assert tier.counters.retired == 2
    assert outcome_of(tier, 10, 400_000) is ReadOutcome.MISS
    assert outcome_of(tier, 0, 400_000) is ReadOutcome.GOOD
    room = tier.room()
    assert room.used_bytes <= room.capacity_bytes == 4 * MIB
    assert sum(path.stat().st_size for path in buckets_of(tmp_path)) == room.used_bytes
    assert room.records == 7


def test_a_value_larger_than_the_tier_is_refused_and_nothing_leaves(open_tier):
    tier = open_tier(capacity=4 * MIB, bucket=MIB)
    tier.write([record_of(1, 100)], LIMIT_S)
    assert tier.write([record_of(2, 5 * MIB)], LIMIT_S) == [WriteOutcome.FULL]
    assert tier.write([record_of(3, 2 * MIB)], LIMIT_S) == [STORED]  # a bucket of its own
    assert read_one(tier, 3, 2 * MIB) == value_of(3, 2 * MIB).tobytes()
    assert tier.counters.full == 1


def test_a_smaller_capacity_at_the_next_opening_is_kept(tmp_path, open_tier):
    tier = open_tier(capacity=16 * MIB, bucket=MIB)
    for i in range(12):
        tier.write([record_of(i, 900_000)], LIMIT_S)
    tier = open_tier(capacity=4 * MIB, bucket=MIB)
    assert tier.room().used_bytes <= 4 * MIB
    assert [outcome_of(tier, i, 900_000).name for i in (0, 11)] == ["MISS", "GOOD"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small file system")
@pytest.mark.parametrize("io", ["threads", "driver"])
def test_a_full_disk_refuses_values_and_what_is_there_stays_readable(tmp_path, open_tier, io):
    if io == "driver":
        pytest.importorskip("mooncake_driver_nvmeof")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "t", disk], check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    try:
        tier = open_tier(capacity=64 * MIB, bucket=MIB, folder=disk / "tier", io=io)
        for i in range(20):  # more than the disk holds: what was written first makes room
            assert tier.write([record_of(i, 900_000)], LIMIT_S) == [STORED]
        assert outcome_of(tier, 19, 900_000) is ReadOutcome.GOOD
        assert tier.counters.retired >= 12
        (disk / "others").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        room = tier.room()
        tier.close()
        tier = open_tier(capacity=64 * MIB, bucket=4 * MIB, folder=disk / "tier", io=io)
        assert tier.write([record_of(30, 3_900_000)], LIMIT_S) in ([STORED], [WriteOutcome.FULL])
        assert tier.room().records >= room.records - 5
        assert outcome_of(tier, 19, 900_000) is ReadOutcome.GOOD
        tier.close()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_limit_on_file_sizes_is_a_full_tier_and_no_signal(tmp_path):
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({MIB}, {MIB}))
from mooncake_store.testing.tiers import record_of
from mooncake_store.tiers import FileTier
tier = FileTier({str(tmp_path / "tier")!r}, {64 * MIB}, bucket_bytes={4 * MIB}, io="threads")
print(tier.write([record_of(1, 100)], 20.0)[0].name)
tier.close()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == ["FULL"], found.stderr


def test_another_secret_or_none_is_refused_and_nothing_is_lost(open_tier):
    right, wrong = Secret(bytes(32)), Secret(bytes(31) + b"\1")
    open_tier(secret=right).write([record_of(1, 5000, tenant="a")], LIMIT_S)
    with pytest.raises(errors.TierKeyWrong, match="written with another secret"):
        open_tier(secret=wrong)
    with pytest.raises(errors.TierKeyWrong, match="holds encrypted records, and no secret was given"):
        open_tier()
    assert read_one(open_tier(secret=right), 1, 5000) == value_of(1, 5000).tobytes()


def test_encrypted_files_show_neither_values_nor_keys_nor_tenants(tmp_path, open_tier):
    tier = open_tier(secret=Secret(bytes(32)))
    value = np.frombuffer(b"the content of a conversation " * 1000, np.uint8)
    tier.write([Record(digest_of(1), b"the-name-of-it", value, RecordMeta(tenant="the-tenant"))], LIMIT_S)
    raw = b"".join(path.read_bytes() for path in (tmp_path / "tier").iterdir())
    for text in (b"conversation", b"the-name", b"the-tenant"):
        assert text not in raw
    assert open_tier(secret=Secret(bytes(32))).find([digest_of(1)], LIMIT_S)[0].key == b"the-name-of-it"


@pytest.mark.parametrize("text", ["short", "zz" * 32, "ab" * 31])
def test_a_secret_that_is_none_is_refused_without_being_shown(tmp_path, text):
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(errors.ConfigError) as caught:
        Secret.from_file(file)
    assert text not in str(caught.value)
    file.write_text("ab" * 32 + "\n")
    assert Secret.from_file(file).check() == Secret(b"\xab" * 32).check()


def test_two_tiers_in_one_folder_are_refused(tmp_path, open_tier):
    open_tier()
    with pytest.raises(errors.TierInUse, match="give each process a folder of its own"):
        FileTier(tmp_path / "tier", 64 * MIB, io="threads")


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.TierUnavailable, match="cannot be used as a tier"):
        FileTier(tmp_path / "file", 64 * MIB)


def test_files_that_hang_are_given_up_at_the_deadline(open_tier, monkeypatch):
    tier = open_tier()
    tier.write([record_of(1, 5000)], LIMIT_S)
    released = threading.Event()

    def hang(*args, **options):
        released.wait(60)
        raise OSError("at last")

    monkeypatch.setattr(threads._File, "_once", hang)
    into = np.zeros(5000, np.uint8)
    assert tier.read([Read(digest_of(1), into)], 0.05) == [ReadOutcome.FAILED]
    assert tier.write([record_of(2, 5000)], 0.05) == [WriteOutcome.FAILED]
    assert tier.counters.timed_out == 2
    released.set()
    monkeypatch.undo()
    assert not into.any()
    assert outcome_of(tier, 1, 5000) is ReadOutcome.GOOD


def test_a_read_that_comes_too_late_does_not_touch_the_memory(open_tier, monkeypatch):
    tier = open_tier()
    tier.write([record_of(1, 5000)], LIMIT_S)
    released, finished = threading.Event(), threading.Event()
    real = threads._File._once

    def late(*args, **options):
        released.wait(60)
        try:
            return real(*args, **options)
        finally:
            finished.set()

    monkeypatch.setattr(threads._File, "_once", late)
    into = np.zeros(5000, np.uint8)
    assert tier.read([Read(digest_of(1), into)], 0.05) == [ReadOutcome.FAILED]
    released.set()
    assert finished.wait(LIMIT_S)
    tier.close()  # waits for the threads
    assert not into.any()


def test_workers_that_hang_do_not_keep_close(tmp_path):
    workers, released = Workers(2, "mooncake-test-worker"), threading.Event()
    found = workers.run_all([lambda: 1, released.wait, lambda: 1 // 0], 0.1)
    assert found[0] == 1
    assert isinstance(found[1], errors.TierTimeout)
    assert isinstance(found[2], ZeroDivisionError | errors.TierTimeout)
    workers.close(0.05)
    released.set()


@pytest.mark.parametrize("io", ["threads", "driver"])
def test_a_process_killed_while_it_writes_leaves_whole_values_or_none(tmp_path, open_tier, io):
    if io == "driver":
        pytest.importorskip("mooncake_driver_nvmeof")
    program = f"""
import itertools, json, sys
from mooncake_store.testing.tiers import record_of
from mooncake_store.tiers import FileTier
tier = FileTier({str(tmp_path / "tier")!r}, {64 * MIB}, bucket_bytes={4 * MIB}, io={io!r})
for batch in itertools.count():
    numbers = range(4 * batch, 4 * batch + 4)
    outcomes = tier.write([record_of(n, 300_001) for n in numbers], 20.0)
    print(json.dumps([n for n, o in zip(numbers, outcomes) if o.name == "STORED"]), flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        written = []
        for _ in range(8):
            written += json.loads(child.stdout.readline())
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(20)
        child.stdout.close()
    assert len(written) == 32
    tier = open_tier(io=io)
    assert {one.digest for one in tier.adopt(LIMIT_S)} >= {digest_of(n) for n in written}
    for one in list(tier.adopt(LIMIT_S)):
        number = int.from_bytes(one.digest, "little")
        found = outcome_of(tier, number, 300_001)  # compares the bytes of what is good
        assert found is ReadOutcome.GOOD or (found is ReadOutcome.CORRUPT and number not in written)


def test_without_the_driver_threads_do_it(open_tier, monkeypatch):
    from mooncake_store.tiers.files import choosing
    from mooncake_transfer.errors import DriverUnavailable

    def missing(**options):
        raise DriverUnavailable("no driver nvmeof is installed")

    monkeypatch.setattr(choosing, "DriverFiles", missing)
    tier = open_tier(io="auto")
    assert tier.write([record_of(1, 5000)], LIMIT_S) == [STORED]
    with pytest.raises(errors.ConfigError, match="pip install mooncake-driver-nvmeof"):
        open_tier(io="driver")


def test_direct_io_that_is_refused_is_not_tried_again(open_tier, monkeypatch):
    real = os.pwritev
    refused = []

    def refuse(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(22, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    tier = open_tier()
    for i in range(3):
        assert tier.write([record_of(i, 100_000)], LIMIT_S) == [STORED]
        assert outcome_of(tier, i, 100_000) is ReadOutcome.GOOD
    assert len(refused) <= 4  # those already under way when the first was refused


@pytest.mark.parametrize(("capacity", "bucket"), [(100, None), (4 * MIB, 2 * MIB), (4 * MIB, 0)])
def test_sizes_that_cannot_work_are_refused(tmp_path, capacity, bucket):
    with pytest.raises(errors.ConfigError, match="bytes"):
        FileTier(tmp_path / "tier", capacity, bucket_bytes=bucket)
