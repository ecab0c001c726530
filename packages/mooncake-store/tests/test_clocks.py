"""Nothing that the store decides depends on a clock that somebody may set."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mooncake_store

SOURCES = Path(mooncake_store.__file__).parent
# The time in an event for others, and ages of files that several machines share.
# The epoch of a master alone rises over restarts by it. Set back, it costs records of tiers.
READ_WALL_CLOCK = {"kv_events/publisher.py", "master/server.py", "tiers/objects/directory.py"}
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
// A wall clock that somebody sets, back and forth by a day, four times a second.
static time_t set_by(void) {
  struct timespec now;
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  real(CLOCK_MONOTONIC, &now);
  return now.tv_nsec / 250000000 % 2 ? 86400 : -86400;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += set_by();
  return failed;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec exact;
  int failed = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  (void)zone;
  return failed;
}
time_t time(time_t *out) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (out) *out = exact.tv_sec;
  return exact.tv_sec;
}
"""
STORE = """
import sys, time
from mooncake_store import Store, StoreConfig
from mooncake_store.tiers.config import TierConfig
from mooncake_transfer import TransferEngine

MIB = 1 << 20
began_s, began = time.monotonic(), time.time()
while abs(time.time() - began) < 80_000:
    assert time.monotonic() - began_s < 30, "nobody sets the clock"
    time.sleep(0.05)
tier = TierConfig(kind="file", path=sys.argv[1], capacity_bytes=16 * MIB, bucket_bytes=4 * MIB)
times = dict(lease_ttl_s=4.0, reservation_ttl_s=4.0, client_ttl_s=8.0, heartbeat_s=0.1)
config, tiered = StoreConfig(**times), StoreConfig(**times, tiers=(tier,), tier_admission="all")
with TransferEngine() as engine, Store(engine, lend_bytes=4 * MIB, config=tiered) as owner:
    with TransferEngine() as other, Store(other, engine.address, config=config) as client:
        began_s = time.monotonic()
        number = 0
        while time.monotonic() - began_s < 4.5:  # longer than any lease
            value = number.to_bytes(4, "little") * 25_000
            client.put(f"{number}", value)
            assert client.get(f"{number}") == owner.get(f"{number}") == value
            number += 1
        reader = client.open_value(f"{number - 1}")
        while time.monotonic() - began_s < 9.0:
            assert reader.read(0, 4) == (number - 1).to_bytes(4, "little")
            time.sleep(0.05)
        reader.close()
        stats = client.stats()
        assert (stats.lost, stats.clients) == (0, 2), stats
"""


def wall_clock_reads(path):
    """Lines that ask for the time of day."""
    names = {"time", "time_ns", "now", "utcnow", "today", "localtime", "CLOCK_REALTIME"}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.attr in names and node.value.id in ("time", "datetime", "date"):
            yield node.lineno


def test_only_what_is_for_people_and_files_reads_a_clock_that_can_be_set():
    readers = {
        str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.py") if any(wall_clock_reads(path))
    }
    assert readers == READ_WALL_CLOCK


def test_a_wall_clock_that_jumps_by_days_is_noticed_by_nobody(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, shim = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    subprocess.run(
        [sys.executable, "-c", STORE, str(tmp_path / "tier")],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        check=True,
        timeout=100,
    )
