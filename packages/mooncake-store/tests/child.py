"""A process with a store, told what to do by one line of JSON at a time; ends with its standard input."""

import json
import sys
import threading
from contextlib import ExitStack, nullcontext, suppress

import msgspec
import numpy as np

from mooncake_store import Master, Store, StoreConfig, errors
from mooncake_store.cluster.master import ClusterMaster
from mooncake_transfer import TransferConfig, TransferEngine


def content(key, version, nbytes):
    return np.random.default_rng([version, *key]).integers(0, 256, nbytes, dtype=np.uint8).tobytes()


class Actor:
    """One method per command; what it returns is the answer."""

    def __init__(self, engine, store, steps):
        self.engine, self.store, self.steps = engine, store, steps

    def put(self, key, version, nbytes, if_exists="error"):
        self.store.put(key, content(key.encode(), version, nbytes), if_exists=if_exists)

    def put_ones(self, key, nbytes):
        """Put a value of ones, or be refused."""
        try:
            self.store.put(key, b"\1" * nbytes)
        except errors.StoreError:
            return "refused"
        return "put"

    def get(self, key, version):
        value = self.store.get(key)
        return value == content(key.encode(), version, len(value))

    def put_and_hang_before_commit(self, key, nbytes):
        """Reserve and write as a put does, then answer, and never commit."""

        def hang(*args):
            answer({"result": "written"})
            threading.Event().wait()

        self.store._quick = None  # its steps are compiled
        self.store._member.conclude = hang
        self.store.put(key, content(key.encode(), 1, nbytes))

    def read_and_hang_before_release(self, key):
        """Locate as a get does, then answer, and hold the lease for ever (renewing it)."""
        with self.store._read([key]):
            answer({"result": "reading"})
            threading.Event().wait()

    def wait_before(self, step, putting, key, nbytes):
        """Put or get, but wait for a line of input before a step; then what came of it."""

        def wait():
            answer({"result": step, "compiled": self.steps.compiled})
            sys.stdin.readline()

        for number in range(4):  # what knows no segment yet is not compiled
            with suppress(errors.StoreError):
                self.store.put(f"warm-{number}", bytes(nbytes), if_exists="replace")
        try:
            with self.steps.before(self.store, step, wait):
                if putting:
                    self.store.put(key, content(key.encode(), 1, nbytes), if_exists="replace")
                    return "put"
                value = self.store.get(key)
            known = [version for version in (1, 2) if value == content(key.encode(), version, len(value))]
            return known[0] if known else "wrong"
        except (errors.KeyNotFound, errors.LeaseExpired):
            return "missed"
        except (errors.MasterUnreachable, errors.PutFailed, errors.StoreFull):
            return "refused"

    def tier_records(self):
        """How many values the master took as being in this process's tier."""
        return self.store._tiers.entered

    def overwrite_for_ever(self, keys, nbytes):
        """Replace the keys' values, version after version."""

        def run():
            for version in range(1, 1 << 30):
                for key in keys:
                    self.put(key, version, nbytes, if_exists="replace")

        threading.Thread(target=run, daemon=True).start()


def answer(message):
    print(json.dumps(message), flush=True)  # noqa: T201 - the answer to the test


def steps_to_watch():
    from mooncake_store.testing.steps import Steps  # with pytest, which takes its time

    return Steps()


def main():
    options = json.loads(sys.argv[1])
    config = msgspec.convert(options.get("config", {}), StoreConfig)
    drivers = tuple(options["drivers"]) if options.get("drivers") else None
    with ExitStack() as stack:
        engine = stack.enter_context(
            TransferEngine(TransferConfig(drivers=drivers, port=options.get("port", 0)))
        )
        if options.get("role") == "master":
            stack.enter_context(Master(engine, config))
            actor = None
        elif options.get("role") == "cluster-master":
            stack.enter_context(ClusterMaster(engine, options["cluster"], config))
            actor = None
        else:
            steps = steps_to_watch() if options.get("watched") else None
            with nullcontext() if steps is None else steps.watch(engine):
                store = Store(engine, options.get("master"), lend_bytes=options.get("lend", 0), config=config)
            actor = Actor(engine, stack.enter_context(store), steps)
        answer({"address": engine.address})
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer({"result": getattr(actor, command.pop("do"))(**command)})
            except Exception as error:  # the test shall see it, whatever it is
                answer({"error": type(error).__name__, "message": str(error)})


main()
