"""Engines, stores and child processes for the tests, and a check that nothing of them is left."""

import json
import subprocess
import sys
import threading
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from mooncake_store import Store, StoreConfig
from mooncake_transfer import TransferConfig, TransferEngine

CHILD = Path(__file__).with_name("child.py")
# Short where a test waits for it, yet longer than a busy machine may let a thread or a process stand still.
FAST = StoreConfig(
    lease_ttl_s=5.0,
    reservation_ttl_s=5.0,
    heartbeat_s=0.1,
    reconnect_max_s=0.2,
    connect_timeout_s=10.0,
    call_timeout_s=5.0,
    put_wait_s=0.3,
)


def eventually(condition, timeout_s=30.0):
    """Wait until the condition holds; fails the test when it does not within the time."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"{condition} did not come true within {timeout_s} s"
        time.sleep(0.01)
    return value


def content(key, version, nbytes):
    """Bytes that tell which version of which key they are, in every part."""
    seed = [version, *key]
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


class Child:
    """A process with an engine and a store of its own that does what it is told; see child.py."""

    def __init__(self, **options):
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.info = self.answer()

    def tell(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command):
        self.tell(**command)
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, f"the child ended with status {self.process.wait(10)}"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer

    def kill(self):
        self.process.kill()
        self.close()

    def close(self):
        self.process.stdin.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait(10)
            self.process.stdout.close()


class World:
    """Makes engines, stores and children, and closes them in the right order."""

    def __init__(self, stack):
        self.stack = stack

    def engine(self, *drivers, **settings):
        config = TransferConfig(drivers=drivers or None, **settings)
        return self.stack.enter_context(TransferEngine(config))

    def store(self, engine=None, master=None, *, lend=0, config=FAST, drivers=()):
        engine = engine or self.engine(*drivers)
        return self.stack.enter_context(Store(engine, master, lend_bytes=lend, config=config))

    def child(self, **options):
        child = Child(**options)
        self.stack.callback(child.close)
        return child

    @staticmethod
    def region(engine, data):
        data = data if isinstance(data, bytes) else bytes(data)
        region = engine.allocate(len(data))
        region.view()[:] = data
        return region


def ours():
    return {thread for thread in threading.enumerate() if "mooncake" in thread.name}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = ours()
    yield
    eventually(lambda: not ours() - before)


@pytest.fixture
def world():
    with ExitStack() as stack:
        yield World(stack)


@pytest.fixture(name="eventually")
def eventually_fixture():
    return eventually


@pytest.fixture(name="content")
def content_fixture():
    return content


@pytest.fixture
def fast():
    return FAST


@pytest.fixture(scope="session")
def s3_server():
    """The address of a server of S3 in this process, with a bucket ``values``; credentials are set."""
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        url = "http://{}:{}".format(*server.get_host_and_port())
        client = boto3.client("s3", endpoint_url=url)
        client.create_bucket(Bucket="values")
        yield url
        client.close()
        server.stop()


@pytest.fixture
def s3_place(s3_server):
    """Where a tier of S3 may be that is empty: arguments of S3Tier."""
    return {"bucket": "values", "prefix": f"{uuid.uuid4()}/", "endpoint": s3_server}
