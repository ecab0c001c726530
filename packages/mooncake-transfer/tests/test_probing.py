"""A probe that crashes, hangs, leaves or talks takes down only itself."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from mooncake_transfer import TransferConfig, TransferEngine, _probing, drivers, plugins
from mooncake_transfer._probing import Question, probe_apart
from mooncake_transfer.hooks import Available, Unavailable

PLUGIN = """
import ctypes, os, time
from mooncake_transfer.hooks import Available, DriverInfo, hookimpl

def crash():
    ctypes.string_at(0)

def hang():
    time.sleep(3600)

def leave():
    os._exit(7)

def chat():
    os.write(1, b"a vendor's library says hello\\n")
    return Available(("dev0",))

def pid():
    return Available((str(os.getpid()),))

def nonsense():
    return 5

def rude():
    raise OSError("no card; buy one")

@hookimpl
def mooncake_transfer_drivers():
    dram = frozenset({"dram"})
    probes = [crash, hang, leave, chat, pid, nonsense, rude]
    foreign = [DriverInfo(probe.__name__, dram, 9, probe=probe, load=lambda: None) for probe in probes]
    return [*foreign, DriverInfo("trusted", dram, 9, probe=pid, load=lambda: None, trusted_probe=True)]
"""
NAMES = ("crash", "hang", "leave", "chat", "pid", "nonsense", "rude")
LIMIT_S = 15.0  # on a loaded machine, most of it is the start of Python


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "zoo_probes.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "zoo_probes"


@pytest.fixture
def installed(plugin: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = [EntryPoint(plugin, plugin, plugins.DRIVER_GROUP)]
    real = importlib.metadata.entry_points

    def entry_points(group: str) -> list[EntryPoint]:
        ours = found if group == plugins.DRIVER_GROUP else []
        return [*ours, *real(group=group)]

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    plugins.driver_plugins.cache_clear()
    monkeypatch.setattr(drivers, "probe_apart", functools.partial(probe_apart, limit_s=LIMIT_S))
    yield
    plugins.driver_plugins.cache_clear()


def test_each_driver_gets_its_own_verdict(plugin: str) -> None:
    verdicts = probe_apart([Question(name, plugin) for name in NAMES if name != "hang"], limit_s=30)
    verdicts |= probe_apart([Question("hang", plugin)], limit_s=1)
    reasons = {name: found.reason for name, found in verdicts.items() if isinstance(found, Unavailable)}
    assert reasons == {
        "crash": "its probe crashed: SIGSEGV",
        "hang": "its probe did not answer within 1 s",
        "leave": "its probe ended the process with status 7",
        "nonsense": "its probe returned 5, which is neither Available nor Unavailable",
        "rude": "its probe failed: OSError: no card; buy one",
    }
    assert verdicts["chat"] == Available(("dev0",))
    assert isinstance(verdicts["pid"], Available)
    assert verdicts["pid"].devices != (str(os.getpid()),)


def test_a_plugin_that_is_gone_is_a_reason(plugin: str) -> None:
    gone, renamed = Question("chat", "zoo_nowhere"), Question("other", plugin)
    verdicts = probe_apart([gone, renamed], limit_s=30)
    assert isinstance(verdicts["chat"], Unavailable)
    assert "zoo_nowhere" in verdicts["chat"].reason
    assert isinstance(verdicts["other"], Unavailable)
    assert "describes no driver 'other'" in verdicts["other"].reason


def test_a_probe_that_cannot_be_killed_holds_nobody_up(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    kill = subprocess.Popen.kill
    monkeypatch.setattr(subprocess.Popen, "kill", lambda child: started.append(child))
    monkeypatch.setattr(_probing, "END_S", 0.1)
    try:
        verdicts = probe_apart([Question("hang", plugin)], limit_s=0.5)
    finally:
        (child,) = started
        kill(child)
        child.wait(LIMIT_S * 10)
    found = verdicts["hang"]
    assert isinstance(found, Unavailable)
    assert "did not answer within 0.5 s; its probe cannot be killed" in found.reason
    assert str(child.pid) in found.reason


@pytest.mark.usefixtures("installed")
def test_an_engine_starts_beside_drivers_that_crash_and_hang() -> None:
    started = time.monotonic()
    with TransferEngine(TransferConfig(drivers=("tcp",))) as engine:
        assert set(engine.drivers) == {"tcp"}, "nobody asked for the others, so they are not probed"
    assert time.monotonic() - started < LIMIT_S
    with TransferEngine() as engine:
        assert engine.drivers["tcp"].usable
        assert "SIGSEGV" in engine.drivers["crash"].reason
        assert "did not answer" in engine.drivers["hang"].reason
    started = time.monotonic()
    assert {status.name for status in drivers.probe_drivers()} >= {*NAMES, "trusted", "tcp"}
    assert time.monotonic() - started < LIMIT_S, "the answers still hold"


@pytest.mark.usefixtures("installed")
def test_a_trusted_probe_runs_here() -> None:
    (status,) = [status for status in drivers.probe_drivers() if status.name == "trusted"]
    assert status.devices == (str(os.getpid()),)
