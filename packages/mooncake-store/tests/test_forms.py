"""Messages, settings, arguments: what goes through unchanged and what is refused."""

import msgspec
import numpy as np
import pytest

from mooncake_store import Store, StoreConfig, errors, protocol
from mooncake_store.batch import as_bytes
from mooncake_store.parts import as_ranges
from mooncake_store.policy import PutPolicy
from mooncake_store.protocol import Placement, codec, fencing, tiers

PLACEMENT = Placement(rows=b"12345678" * 5, segments={1: b"d", 2**40: b""})
MESSAGES = [
    protocol.Mount(
        client=2**63 - 1, nbytes=2**50, descriptor=b"\0\xff", segment=2**63 - 1, tenant="t", node=2**63 - 1
    ),
    protocol.Unmount(epoch=1, client=2),
    protocol.Reserve(
        epoch=1,
        client=2,
        digests=b"d" * 32,
        keys=[b"a", b""],
        sizes=b"s" * 16,
        if_exists="keep",
        avoid=[3],
        policy=PutPolicy(replicas=2, preferred_segments=(2**63 - 1,), soft_pin_s=1.5, group="g"),
    ),
    protocol.Pin(epoch=1, client=2, digests=b"d" * 16, soft_pin_s=None),
    protocol.Unpin(epoch=1, client=2, digests=b"d" * 16),
    protocol.EndSession(epoch=1, client=2, session="s"),
    protocol.RemoveAll(epoch=1, client=2),
    protocol.GetSizes(epoch=1, client=2, digests=b"d" * 16),
    protocol.FindOwners(epoch=1, client=2),
    protocol.Renew(epoch=1, client=2, reservation=3),
    tiers.MountTiers(epoch=1, client=2, address="host:1", tiers=[("nvme", True)], touches=2),
    tiers.AdoptRecords(epoch=1, client=2, tier=1, digests=b"d" * 16, numbers=b"n" * 8),
    tiers.TakeOffloads(epoch=1, client=2, most=5),
    tiers.Offloaded(epoch=1, client=2, tier=1, digests=b"d" * 16, numbers=b"n" * 8, done=b"\1"),
    tiers.RecordsLost(epoch=1, client=2, tier=1, digests=b"d" * 16, numbers=b"n" * 8),
    protocol.Commit(epoch=1, client=2, reservation=9, failed=[0, 4], if_exists="replace", notices_seen=5),
    protocol.Locate(epoch=1, client=2, digests=b""),
    protocol.Release(epoch=1, client=2, lease=4),
    protocol.Exist(epoch=1, client=2, digests=b"d" * 16),
    protocol.Remove(epoch=1, client=2, digests=b"d" * 16),
    protocol.Heartbeat(epoch=1, client=2, leases=[1, 2], notices_seen=0),
    protocol.GetStats(epoch=1, client=2),
    protocol.Authenticate(token="secret"),
    protocol.GetReport(epoch=1, client=2, hot=3),
    protocol.Adopt(epoch=1, client=2, frames=b"frames", last=True),
    protocol.AskCopies(epoch=1, client=2, digests=b"d" * 16, target=2**63 - 1, source=3),
    protocol.LookAfterCopies(epoch=1, client=2, job=3),
    protocol.FindReplicas(epoch=1, client=2, digests=b"d" * 16),
    protocol.Drain(epoch=1, client=2, segment=2**63 - 1, on=None),
    protocol.TakeCopies(epoch=1, client=2, most_bytes=2**40),
    protocol.EndCopies(epoch=1, client=2, copy=3, failed=[1], keys=[b"k", b""]),
    fencing.Regrant(epoch=1, client=2, previous=b"old", descriptor=b"new"),
    fencing.Fenced(epoch=1, client=2, descriptor=b"new"),
    fencing.Reach(epoch=1, client=2, descriptors=[b"old", b""]),
]
REPLIES = [
    protocol.Mounted(epoch=2**63 - 1, segment=0, lease_ttl_s=1.5, reservation_ttl_s=2.0),
    protocol.Reserved(reservation=1, outcomes=b"\0\2", placement=PLACEMENT, room=(5, 4, 3, 2, 1), wait=True),
    protocol.Committed(outcomes=b"\3", notices=[(1, b"frames")]),
    protocol.Located(lease=1, found=b"\1\0", sizes=b"8" * 16, placement=PLACEMENT, others=[b"r" * 40]),
    protocol.Counted(count=4),
    protocol.CopiesAsked(job=1, outcomes=b"\1\0"),
    protocol.Replicas(segments=[[1, 2**63 - 1], None, []]),
    protocol.CopiesToMake(
        copy=1, versions=b"v" * 8, sizes=b"s" * 8, source=PLACEMENT, target=PLACEMENT, more=True
    ),
    protocol.CopiesEnded(outcomes=b"\1"),
    protocol.Drained(segment=1, on=True, moved=3, reasons={"FULL": 2}),
    tiers.TiersMounted(tiers=[1, 2]),
    tiers.Offloads(
        mounted=True, digests=b"d" * 16, keys=[(b"k", "t")], versions=b"v" * 8, drop=[(1, b"d", 2, 3)]
    ),
    tiers.RecordsTaken(taken=b"\1"),
    protocol.Adopted(adopted=1, waiting=2, refused=3),
    protocol.Sizes(sizes=b"8" * 8),
    protocol.Owners(owners=[(2**63 - 1, "host:1", b"ticket")]),
    protocol.Limited(retry_after_s=0.5),
    protocol.Released(expired=False, broken=[1]),
    protocol.Found(found=b"\0\1"),
    protocol.Alive(notices=[], segments=[1, 2], expired=[3], broken=[2**63 - 1]),
    fencing.Reached(descriptors=[b"new", b""]),
    protocol.Done(),
    protocol.Stale(epoch=3, reason="why"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_request_survives_the_wire(message):
    assert protocol.decode_request(protocol.encode(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_every_reply_survives_the_wire(message):
    assert protocol.decode_reply(protocol.encode(message)) == message


def test_every_message_there_is_was_tried():
    assert {type(m) for m in MESSAGES} == {message for group in codec.GROUPS for message in group.REQUESTS}
    general = {protocol.Done, protocol.Stale, protocol.Limited, protocol.StoreStats, protocol.StoreReport}
    assert {type(m) for m in REPLIES} | general == general | {
        message for group in codec.GROUPS for message in group.REPLIES
    }


@pytest.mark.parametrize("payload", [b"", b"\xc0", b"junk", msgspec.msgpack.encode(["Remove", 1, 2, 3])])
def test_what_is_no_request_is_refused(payload):
    with pytest.raises(msgspec.DecodeError):
        protocol.decode_request(payload)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lease_ttl_s": 0}, "lease_ttl_s is 0"),
        ({"call_timeout_s": float("nan")}, "call_timeout_s is nan"),
        ({"put_wait_s": -1}, "put_wait_s is -1"),
        ({"granule_bytes": 3000}, "granule_bytes is 3000"),
        ({"evict_reserve_fraction": 0.6}, "evict_reserve_fraction is 0.6"),
        ({"staging_bytes": 0}, "at least 1"),
    ],
)
def test_a_setting_that_cannot_work_is_named(settings, says):
    with pytest.raises(errors.ConfigError, match=says):
        StoreConfig(**settings)


def test_ranges_keep_their_values_in_every_integer_form():
    for form in ([0, 5], np.array([0, 5], dtype=np.int32), np.array([0, 5], dtype=np.uint64)):
        starts, sizes = as_ranges(form, 3, 2, 8)
        assert (starts.tolist(), sizes.tolist()) == ([0, 5], [3, 3])
        assert starts.dtype == sizes.dtype == np.uint64
    with pytest.raises(errors.ValueInvalid, match=r"3 bytes at offset 5 \(entry 1\).*7 bytes"):
        as_ranges([0, 5], 3, 2, 7)


@pytest.mark.parametrize(
    "data", [b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), np.frombuffer(b"abcd", "<u2")]
)
def test_any_contiguous_buffer_is_a_value(data):
    assert as_bytes(data).tobytes() == b"abcd"
    assert as_bytes(b"").nbytes == 0


def test_errors_can_be_caught_by_their_builtin_kin():
    assert issubclass(errors.KeyNotFound, KeyError)
    assert issubclass(errors.ConfigError, ValueError)
    assert str(errors.KeyNotFound("plain text")) == "plain text"
    assert all(issubclass(getattr(errors, name), errors.StoreError) for name in errors.__all__)
    assert Store.__doc__
