"""``mooncake store master`` as a process."""

import signal
import socket

import pytest

from mooncake_store.testing.processes import StoreProcess

MIB = 1 << 20


@pytest.fixture
def start(world):
    def started(*arguments, starts=True):
        return world.stack.enter_context(StoreProcess("master", *arguments, starts=starts))

    return started


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_master_says_when_it_is_ready_serves_and_ends_cleanly(world, start, number):
    master = start("--port", "0")
    address = master.address
    engine = world.engine()
    store = world.store(engine, address, lend=MIB)
    store.put("k", b"1")
    assert world.store(world.engine(), address).get("k") == b"1"
    status, said = master.end(number)
    assert status == 0, said
    assert f"ready address={address}" in said
    assert "joined client=" in said
    assert f"lends_bytes={MIB}" in said
    assert said.rstrip().endswith("stopped")


def test_the_master_dies_with_its_parent(start):
    master = start("--port", "0")
    assert master.address.startswith("127.0.0.1:")
    master.let_go()
    assert master.wait()[0] == 70


def test_a_taken_port_is_an_error_that_names_it_and_ends_with_status_2(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        master = start("--port", str(port), starts=False)
        status, said = master.wait()
    assert master.ready == {}
    assert status == 2, said
    assert str(port) in said
    assert "in use" in said
    assert "Traceback" not in said


def test_a_setting_that_cannot_work_is_refused_with_status_2(start):
    status, said = start("--lease-ttl-s", "0", starts=False).wait()
    assert status == 2, said
    assert "lease_ttl_s is 0.0" in said
    status, said = start("--eviction", "magic", starts=False).wait()
    assert status == 2, said
    assert "no eviction policy 'magic'" in said
