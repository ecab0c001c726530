"""What clients and masters count, and how Prometheus sees it."""

import gc
import itertools
import threading
import time

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mooncake_store import StoreStats, listing
from mooncake_store.errors import KeyNotFound, StoreFull
from mooncake_store.metrics import COUNTED, MasterCollector, StoreCollector
from mooncake_store.telemetry import HotDigests, Latencies, cumulative, quantile_s
from mooncake_store.telemetry.shown import name_of
from mooncake_store.tiers.config import TierConfig

MIB = 1 << 20


def scraped(*collectors):
    """Every sample that Prometheus would see, by name and labels."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_latency_is_in_the_bucket_that_it_lies_below():
    latencies = Latencies()
    for seconds in (0.0, 0.9e-6, 1e-6, 3e-6, 100.0):
        latencies.observe("x", seconds, failed=seconds > 1)
    latency = latencies.snapshot()["x"]
    assert (latency.count, latency.failures) == (5, 1)
    counts = dict(cumulative(latency))
    assert [counts[bound] for bound in ("1e-06", "2e-06", "4e-06", "+Inf")] == [2, 3, 4, 5]
    assert quantile_s(latency, 0.5) == 2e-6
    assert quantile_s(latency, 0.99) == float("inf")
    latencies.observe("x", 1.0)
    assert latency.count == 5, "a snapshot is a copy"


def test_what_is_read_most_is_found_among_many():
    hot = HotDigests(kept=32)
    rare = (number.to_bytes(16, "big") for number in itertools.count(1000))
    often = [bytes([i]) * 16 for i in range(5)]
    for round_ in range(400):
        for digest in often[: 1 + round_ % 5]:
            hot.count(digest)
        hot.count(next(rare))
    top = hot.top(3)
    assert [digest for digest, _ in top] == often[:3]
    assert top[0][1] == pytest.approx(400, rel=0.05)


def test_of_a_large_batch_every_place_is_counted_in_turn():
    hot = HotDigests()
    batch = b"".join(number.to_bytes(16, "big") for number in range(100))
    for _ in range(130):
        hot.count(batch)
    counts = dict(hot.top(1000))
    assert len(counts) == 100
    assert all(reads == pytest.approx(130, rel=0.3) for reads in counts.values())


def test_old_reads_count_less():
    hot = HotDigests(halve_after=100)
    for _ in range(100):
        hot.count(b"a" * 16)
    for _ in range(60):
        hot.count(b"b" * 16)
    assert [digest for digest, _ in hot.top(2)] == [b"b" * 16, b"a" * 16]


def test_a_client_counts_what_it_moves(world):
    store = world.store(lend=MIB)
    store.put("a", bytes(5000))
    store.put("a", bytes(5000), if_exists="keep")
    with pytest.raises(StoreFull):
        store.put("big", bytes(2 * MIB))
    store.get("a")
    store.get_range("a", 10, 100)
    with pytest.raises(KeyNotFound):
        store.get("b")
    numbers = store.numbers()
    assert (numbers.stored, numbers.kept, numbers.refused, numbers.failed) == (1, 1, 1, 0)
    assert (numbers.hits, numbers.misses) == (2, 1)
    assert (numbers.written_bytes, numbers.read_bytes) == (5000, 5100)
    assert (numbers.calls["put"].count, numbers.calls["put"].failures) == (3, 0)
    assert numbers.calls["master.Locate"].count == 3
    assert sum(numbers.calls["get"].buckets) == numbers.calls["get"].count == 3
    samples = scraped(StoreCollector(store))
    assert samples["mooncake_store_client_hits_total",] == 2
    assert samples["mooncake_store_client_call_seconds_count", "put"] == 3


def test_a_report_says_where_the_room_is_and_what_is_hot(world, eventually):
    store = world.store(lend=MIB)
    for key in "abc":
        store.put(key, bytes(100_000))
    store.remove("b")
    for _ in range(5):
        store.get("c")
    store.get("a")
    eventually(lambda: store.stats().leases == 0)
    report = store.report(hot=1)
    (segment,) = report.segments
    assert segment.capacity_bytes == MIB
    assert segment.evictable_bytes == 2 * 102_400
    assert segment.free_bytes == MIB - 2 * 102_400
    assert segment.largest_hole_bytes == MIB - 3 * 102_400
    (hottest,) = report.hot
    assert (hottest.reads, hottest.nbytes) == (5, 100_000)
    assert report.requests["Locate"].count == 6
    assert report.stats == store.stats()
    assert segment.value_bytes == 200_000
    (tenant,) = report.tenants
    assert (tenant.tenant, tenant.used_bytes, tenant.quota_bytes) == ("", 2 * 102_400, None)
    assert (tenant.clients, tenant.hits, tenant.misses) == (1, 6, 0)


def test_every_number_of_the_store_is_a_metric_with_an_explanation(world, eventually):
    store = world.store(lend=MIB)
    store.put("a", bytes(1000))
    store.get("a")
    eventually(lambda: store.stats().leases == 0)
    samples = scraped(MasterCollector(store.master))
    stats = store.stats()
    for field in StoreStats.__struct_fields__:
        suffix = "_total" if field in COUNTED else ""
        assert samples[f"mooncake_store_master_{field}{suffix}",] == getattr(stats, field), field
    (segment,) = store.report().segments
    name = f"{segment.segment:x}"
    assert samples["mooncake_store_master_segment_free_bytes", segment.address, name] == segment.free_bytes
    assert samples["mooncake_store_master_segment_fragmentation_ratio", segment.address, name] == 0
    assert samples["mooncake_store_master_segment_useful_ratio", segment.address, name] == 1000 / 4096
    assert samples["mooncake_store_master_tenant_hits_total", ""] == 1
    assert samples["mooncake_store_master_request_seconds_count", "Reserve"] == 1


def test_collectors_keep_no_store_alive(world):
    store = world.store(lend=MIB)
    collectors = [MasterCollector(store.master), StoreCollector(store)]
    world.stack.pop_all().close()
    del store
    gc.collect()
    assert scraped(*collectors) == {}


def test_a_client_shows_the_tiers_that_it_has_open(world, fast, tmp_path, eventually):
    config = TierConfig(kind="file", path=str(tmp_path / "tier"), capacity_bytes=8 * MIB, bucket_bytes=MIB)
    store = world.store(lend=MIB, config=msgspec.structs.replace(fast, tiers=(config,)))
    (tier,) = store.tiers
    tier.counters.add(written=3)
    samples = scraped(StoreCollector(store))
    assert samples["mooncake_store_client_tier_written_total", tier.id] == 3
    assert samples["mooncake_store_client_tier_capacity_bytes", tier.id] == tier.room().capacity_bytes
    eventually(lambda: [shown.tier for shown in store.report().tiers] == [tier.id])


def test_hot_objects_have_their_keys_for_clients_of_their_tenant_only(world, fast, eventually):
    engine = world.engine()
    master = world.store(engine)
    owner = world.store(world.engine(), engine.address, lend=1 << 20)
    red, blue = (
        world.store(world.engine(), engine.address, config=msgspec.structs.replace(fast, tenant=name))
        for name in ("red", "blue")
    )
    red.put("its key", b"1")
    red.put(b"\xff\x00", b"2")
    for _ in range(3):
        assert red.get("its key") == b"1"
        assert red.get(b"\xff\x00") == b"2"
    assert {one.key for one in red.report().hot} == {b"its key", b"\xff\x00"}
    assert {name_of(one) for one in red.report().hot} == {"its key", "hex ff00"}
    for other in (blue, master, owner):
        (first, _) = other.report().hot
        assert first.key == b""
        assert name_of(first) == f"digest {first.digest}"
    red.remove("its key")  # it is known now, and nobody is asked
    assert b"its key" in {one.key for one in red.report().hot}


def test_an_owner_that_does_not_answer_does_not_keep_a_report_from_being_shown(world, monkeypatch):
    engine = world.engine()
    world.store(engine)
    owner = world.store(world.engine(), engine.address, lend=1 << 20)
    guest = world.store(world.engine(), engine.address)
    guest.put("k", b"1")
    assert guest.get("k") == b"1"
    monkeypatch.setattr(listing, "NAMES_WAIT_S", 0.2)
    go_on = threading.Event()
    monkeypatch.setattr(owner._listing, "_names_here", lambda wanted: go_on.wait(5) and [])
    try:
        (hot,) = guest.report().hot
        assert hot.key == b""
        began_s = time.monotonic()
        guest.report()  # it is not asked again so soon
        assert time.monotonic() - began_s < 0.2
    finally:
        go_on.set()
