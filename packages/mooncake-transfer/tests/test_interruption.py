"""Ctrl-C or the interpreter's end ends what waits; a forked child is told that the engine is not its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

DEADLINE_S = 10.0
PROMPT_S = 5.0  # drivers are asked to stop every 2 s

PRELUDE = """
import asyncio, os, signal, socket, threading, warnings
from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import EngineClosed, EngineForked
from mooncake_transfer.testing.fake import FakeFabric

warnings.simplefilter("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts us in the background has it ignored
LONG_S = 60.0
MIB = 1 << 20
fabric = FakeFabric()
fabric.__enter__()
options = {"in_flight_ops": 2, "in_flight_bytes": 65536}
near = TransferEngine(fabric.config("near", options=options, call_timeout_s=LONG_S))
far = TransferEngine(fabric.config("far"))
local, owned = near.allocate(MIB), far.allocate(MIB)
remote = near.import_region(owned.descriptor())
peer = near.connect(far.address)
stuck = threading.Event()

def hold(descriptor):
    fabric.device("far").hold()
    transfer = near.write(local, near.import_region(descriptor), [[0, 0, 4096]])
    while fabric.device("far").held() == 0:
        pass
    return transfer

far.serve("stuck", lambda body, caller: stuck.wait() and b'')
"""

# What each prepares, and what is then to be interrupted.
WAITS = {
    "a call": ("", "peer.call('stuck')"),
    "a connection to who says nothing": (
        "mute = socket.create_server(('127.0.0.1', 0))\naddress = f'127.0.0.1:{mute.getsockname()[1]}'",
        "near.connect(address, timeout_s=LONG_S)",
    ),
    "notifications to who takes none": (
        "far.serve('stuffed', lambda body, caller: stuck.wait() and b'')",
        "while True: peer.notify('stuffed', bytes(MIB))",
    ),
    "the end of a region that this engine uses": (
        "fabric.device('near').freeze()\ntransfer = near.write(local, remote, [[0, 0, 4096]])",
        "local.close(LONG_S)",
    ),
    "connections that drivers begin slowly": (
        "slow = TransferEngine(fabric.config('slow', devices=48, options={'connect_ms': 200}))\n"
        "descriptor = owned.descriptor()",
        "slow.import_region(descriptor)",
    ),
    "the end of a region that a peer uses": (
        "transfer = hold(owned.descriptor())",
        "owned.close(LONG_S)",
    ),
    "the end of a key that a peer uses": (
        "lent = owned.grant('rw')\ntransfer = hold(lent)",
        "owned.revoke(lent, LONG_S)",
    ),
    "a transfer": (
        "fabric.device('near').freeze()\ntransfer = near.write(local, remote, [[0, 0, 4096]])",
        "transfer.wait(LONG_S)",
    ),
}
INTERRUPTED = """
{prepare}
print("ready", flush=True)
try:
    {wait}
except KeyboardInterrupt:
    print("interrupted", flush=True)
os._exit(0)
"""


def is_waiting(pid: int) -> bool:
    """Whether its main thread sleeps."""
    with open(f"/proc/{pid}/task/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"


def interrupt(process: subprocess.Popen[str]) -> float:
    """Press Ctrl-C once the child is ready and its main thread waits; when that was."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    by_s = time.monotonic() + DEADLINE_S
    asleep = 0
    while asleep < 5 and time.monotonic() < by_s:  # for a while, not only for a lock
        asleep = asleep + 1 if is_waiting(process.pid) else 0
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    return time.monotonic()


@pytest.mark.parametrize("what", WAITS)
def test_ctrl_c_ends_the_wait_for(what: str) -> None:
    prepare, wait = WAITS[what]
    script = PRELUDE + INTERRUPTED.format(prepare=prepare, wait=wait)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            began_s = interrupt(process)
            assert process.communicate(timeout=DEADLINE_S)[0] == "interrupted\n"
            assert time.monotonic() - began_s < PROMPT_S
        finally:
            process.kill()


def test_ctrl_c_while_an_engine_closes_leaves_nothing_of_it() -> None:
    script = PRELUDE + (
        "transfer = hold(owned.descriptor())\n"
        "begun = threading.active_count()\n"
        "arrived, noted = os.pipe()\n"
        "os.set_blocking(noted, False)\n"
        "signal.set_wakeup_fd(noted)\n"
        "def let_go():\n"  # the end waits for the peer, and the peer for the signal
        "    os.read(arrived, 1)\n"
        "    fabric.device('far').release()\n"
        "threading.Thread(target=let_go).start()\n"
        "print('ready', flush=True)\n"
        "try:\n"
        "    far.close()\n"
        "except KeyboardInterrupt:\n"
        "    print(far._finalizer.alive, owned._core, threading.active_count() < begun, flush=True)\n"
        "far.close()\n"
        "os._exit(0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            interrupt(process)
            assert process.communicate(timeout=DEADLINE_S)[0] == "False None True\n"
        finally:
            process.kill()


def test_other_threads_go_on_while_drivers_begin_connections() -> None:
    script = PRELUDE + (
        "slow = TransferEngine(fabric.config('slow', devices=8, options={'connect_ms': 500}))\n"
        "turns, over = [0], threading.Event()\n"
        "def turn():\n"
        "    while not over.wait(0.01): turns[0] += 1\n"
        "descriptor, thread = owned.descriptor(), threading.Thread(target=turn)\n"
        "thread.start()\n"
        "slow.import_region(descriptor)\n"
        "over.set()\n"
        "print(turns[0] > 10, flush=True)\n"
        "os._exit(0)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=3 * DEADLINE_S, check=False
    )
    assert (ended.stdout, ended.stderr) == ("True\n", "")


USES = {
    "wait": "transfer.wait()",
    "await": "asyncio.run(awaited())",
    "future": "transfer.future().result(LONG_S)",
    "done": "transfer.done()",
    "cancel": "transfer.cancel()",
    "post": "prepared.post()",
    "deadline": "prepared.post(deadline_s=0.5)",
    "checked post": "prepared.post(verify=True)",
    "read": "near.read(local, remote, [[0, 0, 4096]])",
    "call": "peer.call('stuck')",
    "notify": "peer.notify('stuck')",
    "connect again": "near.connect(far.address)",
    "connect anew": "near.connect('127.0.0.1:9')",
    "allocate": "near.allocate(4096)",
    "import": "near.import_region(descriptor)",
    "grant": "owned.grant('r')",
    "revoke": "owned.revoke(granted)",
    "rails": "near.rails()",
    "stats": "near.stats()",
}
FORKED = """
async def awaited():
    await transfer

descriptor, granted = owned.descriptor(), owned.grant("r")
prepared = near.prepare_write(local, remote, [[0, 0, 4096]])
fabric.device("near").freeze()
transfer = near.write(local, remote, [[0, 0, 4096]])
child = os.fork()
if child == 0:
    try:
        {use}
    except EngineForked as error:
        assert isinstance(error, EngineClosed)
        assert "make a new one in this process" in str(error)
        local.close(), peer.close(), near.close()  # the parent's, so nothing happens
        os._exit(0)
    os._exit(1)
status = os.waitpid(child, 0)[1]
fabric.device("near").thaw()
transfer.wait(20)
assert peer.alive
near.read(local, remote, [[0, 0, 4096]]).wait(20)
stuck.set()
peer.call("stuck")
print(os.waitstatus_to_exitcode(status), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("use", USES)
def test_a_forked_child_is_told_that_the_engine_is_its_parents(use: str) -> None:
    script = PRELUDE + textwrap.dedent(FORKED).format(use=USES[use])
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=3 * DEADLINE_S, check=False
    )
    assert (ended.stdout, ended.stderr) == ("0\n", "")


def test_a_forked_child_makes_an_engine_of_its_own() -> None:
    script = PRELUDE + (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    tcp = TransferConfig(drivers=('tcp',))\n"
        "    with TransferEngine(tcp) as a, TransferEngine(tcp) as b:\n"
        "        mine, other = a.allocate(4096), b.allocate(4096)\n"
        "        a.write(mine, a.import_region(other.descriptor()), [[0, 0, 4096]]).wait(10)\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\n"
        "os._exit(0)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=3 * DEADLINE_S, check=False
    )
    assert (ended.stdout, ended.stderr) == ("0\n", "")


# What daemon threads are in when the main one returns. Up to Python 3.13 they are unwound there.
AT_THE_END = {
    "waits that end again and again": """
channel = Channel()
def use():
    while True:
        begun.set()
        channel.next_event(1e-4)
""",
    "a driver's Python code": """
def make(mailbox, options):
    while True:
        begun.set()
capsule = python_driver("endless", make, False)
def use():
    Engine(Channel()).add_endpoint(capsule, "endless", "", -1, [])
""",
}


@pytest.mark.parametrize("use", AT_THE_END.values(), ids=list(AT_THE_END))
def test_an_interpreter_ends_whatever_its_daemon_threads_are_in(use: str) -> None:
    script = (
        "import threading\n"
        "from mooncake_transfer._core import Channel, Engine, python_driver\n"
        "begun = threading.Event()\n"
        f"{use}"
        "for _ in range(8):\n"
        "    threading.Thread(target=use, daemon=True).start()\n"
        "assert begun.wait(10)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=3 * DEADLINE_S, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
