"""``mooncake conductor`` as a process: ready, taken port, signals, lifeline."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from mooncake_conductor import ConductorConfig
from mooncake_conductor.errors import ConfigError, ListenFailed
from mooncake_conductor.server import listen
from mooncake_conductor.testing import FakeWorker, RunningConductor

TIMEOUT_S = 90.0  # of which the start of Python takes most on a busy machine


class Process:
    """A conductor that was started as a parent does it."""

    def __init__(self, *arguments: str) -> None:
        self._ready, ready = os.pipe()
        lifeline, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "mooncake_transfer.cli", "conductor", "--port", "0", *arguments]
        command += ["--ready-fd", str(ready), "--lifeline-fd", str(lifeline)]
        self.process = subprocess.Popen(command, pass_fds=(ready, lifeline), stderr=subprocess.PIPE)
        os.close(ready)
        os.close(lifeline)

    def url(self) -> str:
        assert select.select([self._ready], [], [], TIMEOUT_S)[0], "not ready in time"
        with os.fdopen(self._ready) as pipe:
            self._ready = -1
            return json.loads(pipe.read())["url"]

    def let_go(self) -> None:
        """Close the lifeline, as the kernel does when the parent dies."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def close(self) -> None:
        self.let_go()
        if self._ready >= 0:
            os.close(self._ready)
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def conductor() -> Iterator:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Process:
            process = Process(*arguments)
            stack.callback(process.close)
            return process

        yield start


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def test_the_process_says_where_it_serves_and_that_is_true(conductor) -> None:
    with FakeWorker("both") as worker:
        url = conductor("--worker", worker.url).url()
        assert status_of(f"{url}/health") == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_and_tells_the_client_in_mid_stream(conductor, number: int) -> None:
    with FakeWorker("both") as worker:
        worker.behaviour.stall_after_tokens = 1
        started = conductor("--worker", worker.url)
        body = json.dumps({"model": "fake", "prompt": "Hi", "stream": True}).encode()
        request = urllib.request.Request(f"{started.url()}/v1/completions", body)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            assert b"Hello" in answer.readline()
            started.process.send_signal(number)
            assert started.process.wait(TIMEOUT_S) == 0
            assert b'"code":"shutting_down"' in answer.read()
    assert b"Traceback" not in started.process.stderr.read()


def test_it_ends_with_its_parent(conductor) -> None:
    started = conductor()
    started.url()
    started.let_go()
    assert started.process.wait(TIMEOUT_S) == 70


def test_a_taken_port_is_exit_status_2_with_the_reason(conductor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = conductor("--port", str(port))
        _, stderr = started.process.communicate(timeout=TIMEOUT_S)
    assert started.process.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in stderr.decode()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--policy", "fastest"), "there is no placement policy 'fastest'"),
        (("--worker", "nonsense"), "'nonsense' is not the URL of a worker"),
    ],
)
def test_an_option_that_cannot_work_is_exit_status_2(conductor, arguments, reason: str) -> None:
    started = conductor(*arguments)
    _, stderr = started.process.communicate(timeout=TIMEOUT_S)
    assert started.process.returncode == 2
    assert reason in stderr.decode()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ListenFailed, match=r"cannot listen on 192\.0\.2\.1:0"):
        listen("192.0.2.1", 0)


def test_it_serves_at_ipv6_addresses_and_writes_them_in_brackets() -> None:
    with RunningConductor(ConductorConfig(host="::1")) as running:
        assert running.url.startswith("http://[::1]:")
        assert status_of(f"{running.url}/health") == 503
        port = port_of(running.url)
        with pytest.raises(ListenFailed, match=rf"cannot listen on \[::1\]:{port}: Address already in use"):
            listen("::1", port)


def test_a_server_that_cannot_start_gives_its_port_back() -> None:
    running = RunningConductor(ConductorConfig(policy="fastest"))
    with pytest.raises(ConfigError), running:
        pass
    listen("127.0.0.1", port_of(running.url)).close()


def test_a_port_is_free_again_after_the_server_ended() -> None:
    with RunningConductor(ConductorConfig()) as running:
        assert status_of(f"{running.url}/health") == 503
    listen("127.0.0.1", port_of(running.url)).close()
