"""Policies come by their names, those of this package and of others alike."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from mooncake_store import Store, StoreConfig, errors
from mooncake_store._core import EvictionQueue
from mooncake_store.eviction import find_eviction, finding
from mooncake_transfer import plugins

YOUNGEST_FIRST = """
from mooncake_store._core import EvictionQueue
from mooncake_store.eviction import EvictionInfo
from mooncake_store.hooks import hookimpl

class YoungestFirst:
    def __init__(self):
        self.ids, self.pins = [], {}
    def __len__(self):
        return len(self.ids)
    def __contains__(self, id):
        return id in self.ids
    def insert(self, ids, keys, nbytes):
        self.ids += ids.tolist()
    def touch(self, ids):
        pass
    def pin(self, ids):
        for id in ids.tolist():
            self.pins[id] = self.pins.get(id, 0) + 1
    def unpin(self, ids):
        for id in ids.tolist():
            self.pins[id] -= 1
    def remove(self, ids):
        for id in ids.tolist():
            self.ids.remove(id)
            self.pins.pop(id, None)
    def victim(self):
        return next((id for id in reversed(self.ids) if not self.pins.get(id)), None)

@hookimpl
def mooncake_store_eviction_policies():
    return [EvictionInfo("youngest-first", YoungestFirst), EvictionInfo("clock", YoungestFirst)]
"""
BROKEN = "import a_library_that_is_not_there"


@pytest.fixture
def youngest_first(tmp_path, monkeypatch):
    for name, source in {"young_plugin": YOUNGEST_FIRST, "broken_plugin": BROKEN}.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    real = plugins.entry_points
    ours = [EntryPoint(name, name, finding.EVICTION_GROUP) for name in ("broken_plugin", "young_plugin")]
    monkeypatch.setattr(
        plugins,
        "entry_points",
        lambda group: [*real(group=group), *(ours if group == finding.EVICTION_GROUP else [])],
    )
    finding._installed.cache_clear()
    yield
    finding._installed.cache_clear()


@pytest.mark.parametrize("name", ["clock", "lru", "arc", "gdsf"])
def test_the_policies_of_this_package_are_found(name):
    policy = find_eviction(name).make()
    assert isinstance(policy, EvictionQueue)
    assert len(policy) == 0


def test_an_unknown_policy_is_refused_with_those_there_are(world):
    config = StoreConfig(eviction="magic")
    with pytest.raises(errors.ConfigError, match=r"'magic'; installed are arc, clock, gdsf, lru"):
        Store(world.engine(), lend_bytes=1 << 20, config=config)


@pytest.mark.usefixtures("youngest_first")
def test_a_policy_of_another_package_rules_the_store_and_a_broken_one_stops_nothing(world):
    store = world.store(world.engine(), lend=1 << 20, config=StoreConfig(eviction="youngest-first"))
    for number in range(12):
        store.put(f"{number}", bytes(np.full(100 << 10, number, np.uint8)))
    left = [number for number in range(12) if store.exist(f"{number}")]
    assert left == [*range(9), 11]
    assert store.get("0") == bytes(100 << 10)


@pytest.mark.usefixtures("youngest_first")
def test_the_first_of_two_policies_with_one_name_is_kept():
    assert isinstance(find_eviction("clock").make(), EvictionQueue)


@pytest.mark.parametrize("name", ["lru", "arc", "gdsf"])
def test_a_full_store_works_with_every_policy(world, name):
    store = world.store(world.engine(), lend=1 << 20, config=StoreConfig(eviction=name))
    for number in range(40):
        store.put(f"{number}", bytes([number]) * (100 << 10))
        assert store.get(f"{number}") == bytes([number]) * (100 << 10)
    assert store.stats().evicted == 40 - store.stats().objects


ENDLESS = """
import threading

from mooncake_store._core import ObjectMap, PutOptions

begun = threading.Event()

def policy():
    while True:
        begun.set()

def put():
    objects = ObjectMap(4096, 0.0, policy)
    objects.add_member(1)
    objects.add_segment(1, 1, 0, 1 << 20, False)
    size = (4096).to_bytes(8, "little")
    slots = objects.reserve(bytes(16), size, PutOptions(writer=1))[1]
    objects.commit(slots, [], [b"key"], False, 1.0)

threading.Thread(target=put, daemon=True).start()
assert begun.wait(10)
"""


def test_an_interpreter_ends_while_a_daemon_thread_is_in_a_policy():
    ended = subprocess.run(
        [sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
