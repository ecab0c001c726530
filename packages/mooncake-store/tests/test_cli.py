"""``mooncake store master`` as a process."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

MIB = 1 << 20


class MasterProcess:
    """The command, with a ready pipe and a lifeline."""

    def __init__(self, *arguments):
        ready, ready_end = os.pipe()
        lifeline_end, self.lifeline = os.pipe()
        command = [sys.executable, "-m", "mooncake_transfer.cli", "store", "master", *arguments]
        command += ["--ready-fd", str(ready_end), "--lifeline-fd", str(lifeline_end)]
        self.process = subprocess.Popen(
            command, pass_fds=(ready_end, lifeline_end), stderr=subprocess.PIPE, text=True
        )
        os.close(ready_end)
        os.close(lifeline_end)
        with os.fdopen(ready) as pipe:
            self.ready = pipe.read()

    def let_go(self):
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None

    def end(self):
        """Wait for its end; give the exit status and what it said."""
        try:
            _, said = self.process.communicate(timeout=20)
        finally:
            self.process.kill()
            self.process.wait(10)
            self.let_go()
        return self.process.returncode, said


@pytest.fixture
def start(world):
    def started(*arguments):
        master = MasterProcess(*arguments)
        world.stack.callback(master.process.stderr.close)
        world.stack.callback(master.let_go)
        world.stack.callback(master.process.wait, 10)
        world.stack.callback(master.process.kill)
        return master

    return started


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_master_says_when_it_is_ready_serves_and_ends_cleanly(world, start, number):
    master = start("--port", "0")
    address = json.loads(master.ready)["address"]
    engine = world.engine()
    store = world.store(engine, address, lend=MIB)
    store.put("k", b"1")
    assert world.store(world.engine(), address).get("k") == b"1"
    master.process.send_signal(number)
    status, said = master.end()
    assert status == 0, said
    assert f"ready address={address}" in said
    assert "joined client=" in said
    assert f"lends_bytes={MIB}" in said
    assert said.rstrip().endswith("stopped")


def test_the_master_dies_with_its_parent(start):
    master = start("--port", "0")
    assert json.loads(master.ready)["address"].startswith("127.0.0.1:")
    master.let_go()
    assert master.end()[0] == 70


def test_a_taken_port_is_an_error_that_names_it_and_ends_with_status_2(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        master = start("--port", str(port))
        status, said = master.end()
    assert master.ready == ""
    assert status == 2, said
    assert str(port) in said
    assert "in use" in said
    assert "Traceback" not in said


def test_a_setting_that_cannot_work_is_refused_with_status_2(start):
    status, said = start("--lease-ttl-s", "0").end()
    assert status == 2, said
    assert "lease_ttl_s is 0.0" in said
