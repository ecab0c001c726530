"""A host that vanishes without a word is noticed in bounded time; a short silence is not mistaken for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a process a network of its own")

# Both ends in a network of their own whose only link goes down: neither hears from the other any more.
LINK_GOES_DOWN = """
import json, subprocess, sys, threading, time
from mooncake_transfer._core import Channel
from mooncake_transfer.errors import PeerUnreachable

def link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

def channel():
    made = Channel(silence_s=SILENCE_S)
    made.listen("127.0.0.1", 0)
    made.start(b"")
    return made

link("up")
here, there = channel(), channel()
connection, _ = here.connect("127.0.0.1", there.port, 5.0)
assert there.next_event(5.0)[0] == "hello"
out = {}
SCENARIO
print(json.dumps(out))
here.close()
there.close()
"""

IDLE = """
link("down")
started = time.monotonic()
event = there.next_event(20.0)
out["lost"], out["reason"] = event[0], event[4].decode()
out["noticed_s"] = time.monotonic() - started
while here.alive(connection) and time.monotonic() - started < 20:
    time.sleep(0.05)
out["alive"] = here.alive(connection)
out["both_s"] = time.monotonic() - started
"""

ASKING = """
link("down")
started = time.monotonic()
try:
    here.call(connection, "anything", bytes(100_000), 30.0)
except PeerUnreachable as error:
    out["reason"] = str(error)
out["noticed_s"] = time.monotonic() - started
link("up")
again, _ = here.connect("127.0.0.1", there.port, 5.0)
here.notify(again, "back", b"", 5.0)
seen = [there.next_event(10.0)[0] for _ in range(3)]
out["seen"] = sorted(seen)
"""

SHORT_CUT = """
link("down")
ask = lambda: out.update(answer=here.call(connection, "x", b"ask", 30.0)[1].decode())
caller = threading.Thread(target=ask)
caller.start()
threading.Event().wait(0.8)
link("up")
_, back, request, _, body = there.next_request(20.0)
there.reply(back, request, False, body[::-1])
caller.join(20)
"""


def run(scenario: str, silence_s: float = 2.0) -> dict[str, Any]:
    script = LINK_GOES_DOWN.replace("SILENCE_S", str(silence_s)).replace("SCENARIO", scenario)
    command = ["unshare", "--net", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_both_ends_of_an_idle_connection_notice_that_the_other_host_is_gone() -> None:
    out = run(IDLE)
    assert out["lost"] == "lost"
    assert out["reason"]
    assert 1 < out["noticed_s"] < 8
    assert not out["alive"]
    assert out["both_s"] < 8


def test_a_call_to_a_host_that_is_gone_ends_long_before_its_deadline_and_the_link_can_come_back() -> None:
    out = run(ASKING)
    assert "127.0.0.1" in out["reason"]
    assert 1 < out["noticed_s"] < 8
    assert out["seen"] == ["hello", "lost", "notify"]


def test_a_link_that_is_down_for_less_than_the_limit_costs_no_connection() -> None:
    assert run(SHORT_CUT, silence_s=6.0)["answer"] == "ksa"
