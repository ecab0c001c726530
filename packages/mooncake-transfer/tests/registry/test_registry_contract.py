"""What every registry promises, on the real ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from mooncake_transfer.registry import Registry, open_registry
from mooncake_transfer.registry.records import ENGINES, engine_key, name_of, region_key

TTL_S = 60.0
DEADLINE_S = 20.0
ODD_NAMES = [
    "a b",
    "ünï-cödé",
    "100%",
    "a:b",
    "..",
    "[x]*?\\",
    "q?a=b&c#d",
    "1\n2",
    "'\"",
    "{}",
    "\x00",
]


@pytest.fixture
def registry(shared_url: str) -> Iterator[Registry]:
    opened = open_registry(shared_url, 5.0)
    try:
        yield opened
        opened.remove(opened.list("mooncake/"))
    finally:
        opened.close()


def test_an_entry_is_put_only_in_the_place_of_what_the_writer_has_seen(registry: Registry) -> None:
    key = engine_key("a")
    assert registry.get(key) is None
    assert not registry.replace(key, b"never", b"1", TTL_S)
    assert registry.replace(key, None, b"1", TTL_S)
    assert not registry.replace(key, None, b"2", TTL_S)
    assert not registry.replace(key, b"0", b"2", TTL_S)
    assert registry.get(key) == b"1"
    assert registry.replace(key, b"1", b"2", TTL_S)
    assert registry.get(key) == b"2"


def test_of_writers_at_once_one_wins(registry: Registry, shared_url: str) -> None:
    won: list[int] = []

    def claim(number: int) -> None:
        mine = open_registry(shared_url, 5.0)
        if mine.replace(engine_key("contested"), None, b"%d" % number, TTL_S):
            won.append(number)
        mine.close()

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(won) == 1
    assert registry.get(engine_key("contested")) == b"%d" % won[0]


def test_renewing_tells_which_entries_are_no_longer_as_they_were(registry: Registry) -> None:
    for name in ("kept", "changed"):
        assert registry.replace(engine_key(name), None, b"1", TTL_S)
    assert registry.replace(engine_key("changed"), b"1", b"2", TTL_S)
    entries = {engine_key(name): b"1" for name in ("kept", "changed", "gone")}
    assert registry.renew(entries, TTL_S) == {engine_key("changed"), engine_key("gone")}
    assert registry.get(engine_key("changed")) == b"2"


def test_removing_leaves_entries_of_others_alone(registry: Registry) -> None:
    for name in ("mine", "other"):
        assert registry.replace(engine_key(name), None, name.encode(), TTL_S)
    registry.remove({engine_key(name): b"mine" for name in ("mine", "other", "gone")})
    assert registry.list(ENGINES) == {engine_key("other"): b"other"}


def test_an_entry_that_nobody_renews_expires_and_a_renewed_one_stays(shared_url: str) -> None:
    ttl_s = 4.0
    # Two clients, as two engines are: an etcd lease belongs to one.
    dying, living = open_registry(shared_url, 5.0), open_registry(shared_url, 5.0)
    assert dying.replace(engine_key("dies"), None, b"1", ttl_s)
    assert living.replace(engine_key("lives"), None, b"1", ttl_s)
    deadline_s = time.monotonic() + DEADLINE_S
    while living.get(engine_key("dies")) is not None:
        assert living.renew({engine_key("lives"): b"1"}, ttl_s) == set()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert living.get(engine_key("lives")) == b"1"
    assert dying.renew({engine_key("dies"): b"1"}, ttl_s) == {engine_key("dies")}
    assert dying.replace(engine_key("dies"), None, b"2", TTL_S)
    living.remove({engine_key("lives"): b"1"})
    dying.remove({engine_key("dies"): b"2"})
    for client in (dying, living):
        client.close()


@pytest.mark.parametrize("name", ODD_NAMES)
def test_any_name_comes_back_as_it_was(registry: Registry, name: str) -> None:
    for key in (engine_key(name), region_key(name, f"{name}/{name}")):
        assert registry.replace(key, None, name.encode(), TTL_S)
        assert registry.get(key) == name.encode()
        assert list(registry.list(key)) == [key]
        assert registry.renew({key: name.encode()}, TTL_S) == set()
    assert [name_of(key) for key in registry.list(ENGINES)] == [name]


def test_a_thousand_names_are_listed_renewed_and_removed(registry: Registry) -> None:
    entries = {engine_key(f"engine-{number}"): b"x" * 200 for number in range(1000)}
    for key, value in entries.items():
        assert registry.replace(key, None, value, TTL_S)
    assert registry.list(ENGINES) == entries
    started_s = time.monotonic()
    assert registry.renew(entries, TTL_S) == set()
    assert time.monotonic() - started_s < TTL_S / 3
    registry.remove(entries)
    assert registry.list(ENGINES) == {}
