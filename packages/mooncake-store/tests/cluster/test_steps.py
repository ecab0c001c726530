"""Somebody dies or hangs at a step of a put or get: the value is right or missing, and the store goes on.

Steps are those of compiled code or of Python, whichever takes a call that far.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake_store import Store, StoreConfig, errors
from mooncake_store.cluster import Coordination
from mooncake_store.testing.steps import GET_STEPS, PUT_STEPS, Steps
from mooncake_transfer import TransferEngine
from mooncake_transfer.testing.registry_servers import SERVERS
from mooncake_transfer.testing.stopping import stop_process, stopped_process

LONG_S = 40.0
NBYTES = 200_000
# What a caller may get when somebody dies meanwhile; each says that a retry is safe.
SAFE = (
    errors.MasterUnreachable,
    errors.PutFailed,
    errors.StoreFull,
    errors.KeyNotFound,
    errors.LeaseExpired,
)


class Cluster:
    """Two masters and two owners, each a process; whoever was killed is replaced."""

    def __init__(self, url: str, coordination: Coordination, world: Any, settings: StoreConfig) -> None:
        self._coordination = coordination
        self._world = world
        config = msgspec.to_builtins(settings)
        self._master = {"role": "cluster-master", "cluster": url, "config": config}
        self._owner = {"master": url, "lend": 8 << 20, "config": config}
        self._masters: dict[str, Any] = {}
        self._owners: list[Any] = []
        self.refill()

    def refill(self) -> None:
        with ThreadPoolExecutor(4) as pool:
            masters = [pool.submit(self._world.child, **self._master) for _ in range(2 - len(self._masters))]
            owners = [pool.submit(self._world.child, **self._owner) for _ in range(2 - len(self._owners))]
        self._masters |= {(child := master.result()).info["address"]: child for master in masters}
        self._owners += [owner.result() for owner in owners]

    def take(self, victim: str) -> subprocess.Popen[str]:
        """The process of a victim, which is none of the cluster's from now on."""
        found = self._owners.pop() if victim == "owner" else self._masters.pop(self._address(victim))
        process: subprocess.Popen[str] = found.process
        return process

    def process(self, victim: str) -> subprocess.Popen[str]:
        """The process of a victim, which stays."""
        found = self._owners[-1] if victim == "owner" else self._masters[self._address(victim)]
        process: subprocess.Popen[str] = found.process
        return process

    def _address(self, victim: str) -> str:
        leader = self._coordination.leader()
        assert leader is not None
        others = [address for address in self._masters if address != leader.address]
        return leader.address if victim == "leader" else others[0]


@pytest.fixture
def settings(fast: StoreConfig) -> StoreConfig:
    times = {"leader_ttl_s": 3.0, "connect_timeout_s": 20.0, "call_timeout_s": 2.0, "transfer_timeout_s": 1.0}
    return msgspec.structs.replace(fast, **times)


@pytest.fixture
def url(
    request: pytest.FixtureRequest, tmp_path: Path, require_program: Callable[[str], None]
) -> Iterator[str]:
    """Of a cluster at SQLite, or at what a test asks for."""
    kind = getattr(request, "param", "sqlite")
    if kind == "sqlite":
        yield f"sqlite:{tmp_path / 'cluster'}"
        return
    require_program(kind)
    with SERVERS[kind](tmp_path) as server:
        yield f"{server.url}/cluster"


@pytest.fixture
def cluster(url: str, world: Any, settings: StoreConfig, opened: Callable[..., Coordination]) -> Cluster:
    return Cluster(url, opened(url), world, settings)


def opened_to_be_seen(
    world: Any, engine: TransferEngine, url: str, settings: StoreConfig
) -> tuple[Steps, Store]:
    steps = Steps()
    with steps.watch(engine):
        return steps, world.store(engine, url, config=settings)


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except SAFE as error:
        return error


def is_right(store: Store, key: str, value: bytes) -> bool:
    """Whether the store answers; what it has under the key must be the value, or nothing."""
    try:
        found = store.get(key)
    except errors.KeyNotFound:
        return True
    except (errors.MasterUnreachable, errors.LeaseExpired):
        return False
    assert found == value, f"{key} has other bytes"
    return True


def stores(store: Store, key: str, value: bytes) -> bool:
    try:
        store.put(key, value, if_exists="replace")
        return bool(store.get(key) == value)
    except SAFE:
        return False


@pytest.mark.parametrize("url", ["sqlite", "etcd"], indirect=True)
@pytest.mark.parametrize("victim", ["leader", "follower", "owner"])
def test_a_process_killed_at_any_step_of_a_put_or_get(
    cluster: Cluster,
    url: str,
    world: Any,
    settings: StoreConfig,
    eventually: Any,
    content: Any,
    victim: str,
) -> None:
    steps, store = opened_to_be_seen(world, world.engine(), url, settings)
    for number, step in enumerate((*PUT_STEPS, *GET_STEPS)):
        key, value = f"key-{number}", content(b"k%d" % number, 1, NBYTES)
        putting = number < len(PUT_STEPS)
        for _ in range(5):
            epoch = store._member._epoch
            if not putting:
                eventually(partial(stores, store, key, value), LONG_S)
            with steps.before(store, step, lambda: cluster.take(victim).kill()) as done:
                got = attempt(partial(store.put, key, value) if putting else partial(store.get, key))
            if done:
                break
            # A leader that a busy machine keeps from renewing its leadership is followed by another, which
            # may not know what was put last, or not answer for a moment. Nothing else is an excuse.
            eventually(lambda epoch=epoch: store._member._epoch != epoch, LONG_S)
        assert done == [step]
        assert putting or got == value or isinstance(got, SAFE), (
            f"a get had other bytes when a {victim} died before {step}"
        )
        eventually(lambda key=key, value=value: is_right(store, key, value), LONG_S)
        cluster.refill()
        eventually(lambda key=key, value=value: stores(store, key, value), LONG_S)
    assert steps.compiled, "compiled code took none of the steps"


@pytest.mark.parametrize("victim", ["leader", "follower", "owner"])
def test_a_process_stopped_at_any_step_of_a_put_or_get_that_goes_on_later(
    cluster: Cluster,
    url: str,
    world: Any,
    settings: StoreConfig,
    eventually: Any,
    content: Any,
    victim: str,
) -> None:
    steps, store = opened_to_be_seen(world, world.engine("tcp"), url, settings)
    for number, step in enumerate((*PUT_STEPS, *GET_STEPS)):
        key, value = f"key-{number}", content(b"k%d" % number, 1, NBYTES)
        putting = number < len(PUT_STEPS)
        if not putting:
            eventually(partial(stores, store, key, value), LONG_S)
        with ExitStack() as stack:

            def stop(stack: ExitStack = stack) -> None:
                stack.enter_context(stopped_process(cluster.process(victim).pid))

            with steps.before(store, step, stop) as done:
                got = attempt(partial(store.put, key, value) if putting else partial(store.get, key))
            assert done == [step] or isinstance(got, SAFE)
            assert putting or got == value or isinstance(got, SAFE)
            # The others go on without it.
            eventually(partial(stores, store, f"other-{number}", value), LONG_S)
        # It goes on now, and is late.
        eventually(partial(is_right, store, key, value), LONG_S)
        eventually(partial(stores, store, key, value), LONG_S)
    assert steps.compiled, "compiled code took none of the steps"


@pytest.mark.parametrize("ends", ["killed", "stopped"])
def test_a_client_killed_or_stopped_at_any_step_of_a_put_or_get(
    cluster: Cluster, url: str, world: Any, settings: StoreConfig, eventually: Any, content: Any, ends: str
) -> None:
    store = world.store(world.engine(), url, config=settings)
    options = {"master": url, "config": msgspec.to_builtins(settings), "watched": True}
    child, compiled = None, 0
    for number, step in enumerate((*PUT_STEPS, *GET_STEPS)):
        key, putting = f"key-{number}", number < len(PUT_STEPS)
        if not putting:
            eventually(partial(stores, store, key, content(key.encode(), 1, NBYTES)), LONG_S)
        child = child or world.child(**options)
        for _ in range(5):
            reached = child.ask(do="wait_before", step=step, putting=putting, key=key, nbytes=NBYTES)
            if reached["result"] == step:
                break
            # Its leader was followed by another on a busy machine, which may not know what was put last.
            assert reached["result"] in ("refused", "missed")
            if not putting:
                eventually(partial(stores, store, key, content(key.encode(), 1, NBYTES)), LONG_S)
        assert reached["result"] == step
        compiled += reached["compiled"]
        if ends == "killed":
            child.process.kill()
        else:
            stop_process(child.process.pid)
        world.stack.callback(child.process.send_signal, signal.SIGCONT)  # or it could not end
        # Somebody else wants the key, and may have it: nothing of the other is in the way for long.
        value = content(key.encode(), 2, NBYTES)
        eventually(partial(stores, store, key, value), LONG_S)
        if ends == "killed":
            child.close()
            child = None
        else:
            eventually(partial(reservation_is_over, store), LONG_S)
            child.process.send_signal(signal.SIGCONT)
            child.tell(go=True)
            late = child.answer()["result"]
            assert late in ("put", "refused", "missed", 1, 2), f"a client stopped before {step} got {late}"
        eventually(partial(has_one_of, store, key, content), LONG_S)
    assert compiled, "compiled code took none of the steps"


def reservation_is_over(store: Store) -> bool:
    """Whether the master waits for nobody's commit, and nobody reads."""
    try:
        stats = store.stats()
    except errors.MasterUnreachable:
        return False
    return stats.reservations == 0 and stats.leases == 0


def has_one_of(store: Store, key: str, content: Any) -> bool:
    """Whether the store answers; what it has is one of the two values put, whole, or nothing."""
    try:
        found = store.get(key)
    except errors.KeyNotFound:
        return True  # a leader that a busy machine took its term from knew it alone
    except SAFE:
        return False
    assert found in (content(key.encode(), 1, NBYTES), content(key.encode(), 2, NBYTES))
    return True
