"""What every kind of coordination promises, on real services."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncake_store import errors
from mooncake_store.cluster import Coordination, Leader, open_coordination
from mooncake_store.cluster.contract import lease_clock_s
from mooncake_transfer.testing.certificates import make_tls
from mooncake_transfer.testing.registry_servers import etcd_server, redis_server

Open = Callable[..., Coordination]
LONG_S, SHORT_S = 60.0, 1.0
PASSWORD = "pa:s/s@w?rd%25#"


def test_one_leads_until_it_resigns_and_every_leadership_has_a_higher_epoch(url: str, opened: Open) -> None:
    first, second = opened(url), opened(url)
    assert first.leader() is None
    epochs: list[int] = []
    for _ in range(3):
        for mine, other in ((first, second), (second, first)):
            term = mine.campaign("10.0.0.1:1", LONG_S, 0)
            assert term is not None
            assert other.campaign("10.0.0.2:2", LONG_S, 0) is None
            assert mine.campaign("10.0.0.1:1", LONG_S, 0) is None
            assert other.leader() == mine.leader() == term.leader == Leader("10.0.0.1:1", term.leader.epoch)
            epochs.append(term.leader.epoch)
            mine.resign(term)
            assert other.leader() is None
    assert epochs == sorted(set(epochs))


def test_of_candidates_at_once_one_wins(url: str, opened: Open) -> None:
    start, won = threading.Barrier(6), []

    def run(number: int) -> None:
        mine = opened(url)
        start.wait(20)
        if mine.campaign(f"10.0.0.{number}:1", LONG_S, 0) is not None:
            won.append(f"10.0.0.{number}:1")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    leader = opened(url).leader()
    assert leader is not None
    assert won == [leader.address]


def test_a_leadership_that_is_not_kept_ends_at_its_holder_before_it_ends_for_others(
    url: str, opened: Open, eventually: Callable[..., Any]
) -> None:
    holder, other = opened(url), opened(url)
    term = holder.campaign("10.0.0.1:1", SHORT_S, 0)
    assert term is not None
    successor = eventually(lambda: other.campaign("10.0.0.2:2", LONG_S, 0), 20)
    assert lease_clock_s() > term.until_s
    assert successor.leader.epoch > term.leader.epoch
    assert holder.keep(term, SHORT_S) is None
    holder.resign(term)  # of a leadership that is over: nothing happens to the one that is not
    assert other.leader() == successor.leader
    assert other.keep(successor, LONG_S) is not None


def test_a_leadership_that_is_kept_lasts(url: str, opened: Open) -> None:
    holder, other = opened(url), opened(url)
    ttl_s = 4.0
    term = holder.campaign("10.0.0.1:1", ttl_s, 0)
    assert term is not None
    until_s = time.monotonic() + 1.2 * ttl_s
    while time.monotonic() < until_s:
        kept = holder.keep(term, ttl_s)
        assert kept is not None
        assert kept.until_s >= term.until_s
        assert kept.leader == term.leader
        term = kept
        assert other.campaign("10.0.0.2:2", ttl_s, 0) is None
        time.sleep(0.3)


def test_an_epoch_is_above_the_floor_whatever_the_service_remembers(url: str, opened: Open) -> None:
    mine = opened(url)
    floor = 1 << 18
    for _ in range(2):
        term = mine.campaign("10.0.0.1:1", LONG_S, floor)
        assert term is not None
        assert term.leader.epoch > floor
        assert mine.leader() == term.leader
        kept = mine.keep(term, LONG_S)
        assert kept is not None
        floor = term.leader.epoch
        mine.resign(kept)


def test_clusters_of_one_service_do_not_see_each_other(
    shared_cluster: Callable[[str], str], opened: Open
) -> None:
    one, two = opened(shared_cluster("one")), opened(shared_cluster("two"))
    assert one.campaign("10.0.0.1:1", LONG_S, 0) is not None
    assert two.leader() is None
    assert two.campaign("10.0.0.2:2", LONG_S, 0) is not None


@pytest.mark.parametrize("kind", ["etcd", "redis"])
def test_passwords_and_certificates_are_those_of_the_registry(
    kind: str, tmp_path: Path, opened: Open, require_program: Callable[[str], None]
) -> None:
    require_program(kind)
    make = {"etcd": etcd_server, "redis": redis_server}[kind]
    (tmp_path / "plain").mkdir()
    with make(tmp_path / "plain", password=PASSWORD) as server:
        term = opened(f"{server.url}/c").campaign("10.0.0.1:1", LONG_S, 0)
        assert term is not None
        wrong = server.url.replace(server.url.split(":")[2].split("@")[0], "wrong")
        with pytest.raises(errors.CoordinationUnavailable) as refused:
            opened(f"{wrong}/c").leader()
        assert "wrong" not in str(refused.value)
    tls, stranger = make_tls(tmp_path / "good"), make_tls(tmp_path / "other")
    with make(tmp_path, tls=tls) as server:
        base, _, options = server.url.partition("?")
        assert opened(f"{base}/c?{options}").campaign("10.0.0.1:1", LONG_S, 0) is not None
        with pytest.raises(errors.CoordinationUnavailable):
            opened(f"{base}/c?{options.replace(tls.ca, stranger.ca)}").leader()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("consul://h/c", "no known scheme"),
        ("etcd://h", "no usable name"),
        ("etcd://h/a/b", "no usable name"),
        ("etcd://u@h/c", "both user and password"),
        ("redis://h/x/c", "no number of a database"),
        ("redis://a,b/c", "several servers"),
        ("sqlite:", "names no file"),
    ],
)
def test_a_url_that_cannot_work_is_refused(wrong: str, reason: str) -> None:
    with pytest.raises(errors.ConfigError, match=reason):
        open_coordination(wrong, 1.0)


def test_a_file_that_cannot_be_is_named(tmp_path: Path, opened: Open) -> None:
    with pytest.raises(errors.CoordinationUnavailable, match="missing-folder"):
        opened(f"sqlite:{tmp_path}/missing-folder/file").leader()
