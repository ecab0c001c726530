"""``mooncake store node`` as a process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mooncake_store import StoreConfig

MIB = 1 << 20
Command = Callable[..., Any]


def test_a_node_lends_memory_to_a_cluster_until_it_is_told_to_end(
    command: Command, world: Any, fast: StoreConfig, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    cluster = f"sqlite:{tmp_path / 'cluster'}"
    command("master", "--cluster", cluster)
    node = command("node", "--master", cluster, "--lend", "8M")
    store = world.store(world.engine(), cluster, config=fast)
    assert store.stats().capacity_bytes == 8 * MIB
    store.put("k", bytes(MIB))
    assert store.get("k") == bytes(MIB)
    status, said = node.end()
    assert status == 0, said
    assert f"lends_bytes={8 * MIB}" in said
    assert said.rstrip().endswith("stopped")
    eventually(lambda: store.stats().capacity_bytes == 0)


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (("--lend", "8M"), 2, "no master was named"),
        (("--lend", "much", "--master", "127.0.0.1:1"), 2, "is no size"),
        (("--lend", "8M", "--master", "127.0.0.1:1"), 3, "no store master can be reached at 127.0.0.1:1"),
    ],
)
def test_a_node_that_cannot_work_says_why(
    command: Command, arguments: tuple[str, ...], status: int, reason: str
) -> None:
    node = command("node", *arguments, starts=False)
    assert node.ready == {}
    ended, said = node.wait()
    assert (ended, reason in said) == (status, True), said
