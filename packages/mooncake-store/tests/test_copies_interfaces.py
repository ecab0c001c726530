"""Copies and draining by commands; nodes that are told to end, and owners that die meanwhile."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mooncake_store import PutPolicy, Store, StoreConfig
from mooncake_store.testing.processes import StoreProcess
from mooncake_transfer.cli import build_app

MIB = 1 << 20
KEYS = [f"key-{number}" for number in range(24)]


@pytest.fixture
def command() -> Iterator[Callable[..., StoreProcess]]:
    """Starts commands of ``mooncake store``, which end with the test."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(StoreProcess(*arguments))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["store", *arguments])


def segment_at(store: Store, address: str) -> int:
    (found,) = [one.segment for one in store.report(0).segments if one.address == address]
    return found


class Nodes:
    """A master, nodes and a client, all of them processes but the client."""

    def __init__(
        self, command: Callable[..., StoreProcess], world: Any, fast: StoreConfig, count: int
    ) -> None:
        self._command = command
        self.master = command("master")
        self.nodes = [self.node() for _ in range(count)]
        self.store: Store = world.store(world.engine(), self.master.address, config=fast)
        self.ids = [segment_at(self.store, node.address) for node in self.nodes]

    def node(self) -> StoreProcess:
        return self._command("node", "--master", self.master.address, "--lend", "32M", "--drain-s", "60")

    def fill(self, content: Any, node: int, **policy: Any) -> None:
        for key in KEYS:
            self.store.put(
                key,
                content(key.encode(), 1, MIB),
                policy=PutPolicy(preferred_segments=(self.ids[node],), **policy),
            )


@pytest.fixture
def nodes(command: Callable[..., StoreProcess], world: Any, fast: StoreConfig) -> Callable[[int], Nodes]:
    return lambda count: Nodes(command, world, fast, count)


def test_a_node_that_is_told_to_end_hands_its_values_over_while_they_are_read(
    nodes: Callable[[int], Nodes], content: Any
) -> None:
    few = nodes(2)
    few.fill(content, 0)
    wanted = {key: content(key.encode(), 1, MIB) for key in KEYS}
    stop, misses, reads = threading.Event(), [], [0]

    def read() -> None:
        while not stop.is_set():
            for key, value in wanted.items():
                if few.store.get(key) != value:
                    misses.append(key)
                reads[0] += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        status, said = few.nodes[0].end()
    finally:
        stop.set()
        reader.join(60.0)
    assert status == 0, said
    assert "drained done=True" in said
    assert not misses
    assert reads[0] > 0
    assert {key: few.store.get(key) for key in KEYS} == wanted
    assert few.store.replicas(KEYS[0]) == [few.ids[1]]


def test_a_second_signal_makes_a_draining_node_leave_at_once(
    nodes: Callable[[int], Nodes], content: Any, eventually: Any
) -> None:
    few = nodes(2)
    few.fill(content, 0)
    reader = few.store.open_value(KEYS[0])  # holds up the end
    node = few.nodes[0].process
    node.send_signal(signal.SIGTERM)
    eventually(lambda: few.store.stats().copied >= len(KEYS), 30.0)
    assert node.poll() is None, "somebody still reads there"
    status, said = few.nodes[0].end()
    assert status == 0, said
    assert "drained done=False" in said
    reader.give_up()
    assert few.store.get(KEYS[1]) == content(KEYS[1].encode(), 1, MIB)


@pytest.mark.parametrize("dies", [0, 1], ids=["the draining owner", "an owner that takes values"])
def test_an_owner_killed_while_a_node_drains_makes_no_value_wrong(
    nodes: Callable[[int], Nodes], content: Any, eventually: Any, dies: int
) -> None:
    few = nodes(3)
    few.fill(content, 0)
    few.nodes[0].process.send_signal(signal.SIGTERM)
    eventually(lambda: few.store.stats().copied > 0, 30.0)
    few.nodes[dies].process.kill()
    if dies == 1:
        assert few.nodes[0].process.wait(90) == 0
    eventually(lambda: few.store.stats().segments == (2 if dies == 0 else 1), 30.0)
    there = [key for key, found in zip(KEYS, few.store.batch_exist(KEYS), strict=True) if found]
    for key in there:
        assert few.store.get(key) == content(key.encode(), 1, MIB)
    if dies == 1:  # what had moved to it and was gone here is lost with it, nothing else
        assert len(there) + few.store.stats().lost == len(KEYS)


def test_the_second_replica_comes_again_after_its_owner_was_killed(
    nodes: Callable[[int], Nodes], content: Any, eventually: Any
) -> None:
    few = nodes(3)
    few.fill(content, 0, replicas=2)
    few.nodes[0].process.kill()
    eventually(lambda: few.store.stats().segments == 2, 30.0)

    def repaired() -> bool:
        found = few.store.batch_replicas(KEYS)
        return all(one is not None and len(one) == 2 for one in found)

    eventually(repaired, 30.0)
    few.nodes[1].process.kill()
    eventually(lambda: few.store.stats().segments == 1, 30.0)
    assert {key: few.store.get(key) for key in KEYS} == {key: content(key.encode(), 1, MIB) for key in KEYS}


def test_commands_copy_move_replicate_and_drain(nodes: Callable[[int], Nodes], content: Any) -> None:
    few = nodes(2)
    few.fill(content, 0)
    where, (one, two) = ("--master", few.master.address), few.ids
    first, second = (node.address for node in few.nodes)
    assert run("copy", KEYS[0], second, *where).exit_code == 0
    assert set(few.store.replicas(KEYS[0])) == {one, two}
    assert run("move", KEYS[1], f"{one:x}", f"{two:x}", *where).exit_code == 0
    assert few.store.replicas(KEYS[1]) == [two]
    done = run("replicate", KEYS[2], "unknown", "--replicas", "2", "--json", *where)
    assert done.exit_code == 1
    assert [each["outcome"] for each in json.loads(done.stdout)] == ["stored", "gone"]
    assert "unknown: gone" in done.stderr
    assert "no room" not in run("copy", "unknown", second, *where).stderr
    assert run("copy", KEYS[0], "nowhere:1", *where).exit_code == 2
    done = run("drain", first, "--json", *where)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["done"] is True
    assert json.loads(done.stdout)["left_bytes"] == 0
    done = run("drain", second, "--timeout-s", "20", *where)
    assert done.exit_code == 1
    assert f"{len(KEYS)} values are left" in done.stderr
    assert "nowhere" in done.stderr
    assert run("drain", first, "--cancel", *where).exit_code == 0
    assert run("drain", second, *where).exit_code == 0
    assert few.store.replicas(KEYS[3]) == [one]
