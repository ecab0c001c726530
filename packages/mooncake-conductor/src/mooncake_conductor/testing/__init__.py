"""Test doubles for users of the conductor: a worker without a model, and a conductor in a thread."""

from mooncake_conductor.testing.fake_worker import Behaviour, FakeWorker
from mooncake_conductor.testing.running import RunningConductor
from mooncake_conductor.testing.waiting import wait_until

__all__ = ["Behaviour", "FakeWorker", "RunningConductor", "wait_until"]
