"""The asynchronous store: the same calls, their deadlines, and what cancelling them means."""

import asyncio
import inspect
import threading

import pytest

from mooncake_store import AsyncStore, Store, ValueBuffer
from mooncake_store.errors import ConfigError, KeyNotFound, StoreClosed
from mooncake_store.read_session import ReadSession
from mooncake_store.tiers.config import TierConfig, open_tier
from mooncake_store.value_reader import ValueReader
from mooncake_store.write_session import WriteSession

MIB = 1 << 20
# What is not a call: the twin has its own.
LIFE = {"close", "open"}


@pytest.fixture
def run(world):
    """Runs ``use(async store)`` in an event loop; the store lends memory and brings its master."""

    def ran(use, **options):
        async def main():
            engine = world.engine()
            async with await AsyncStore.open(
                engine, lend_bytes=MIB, config=options.pop("config", None), **options
            ) as store:
                return await use(store)

        return asyncio.run(asyncio.wait_for(main(), 30))

    return ran


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_call_of_the_store_has_a_twin_with_the_same_parameters():
    assert public(Store) - public(AsyncStore) == set(), "add the missing twin to mooncake_store/aio.py"
    for name in public(Store) - LIFE:
        there = inspect.getattr_static(Store, name)
        here = inspect.getattr_static(AsyncStore, name)
        if isinstance(there, property):
            assert isinstance(here, property), name
            continue
        assert inspect.iscoroutinefunction(here), name
        assert inspect.signature(here) == inspect.signature(there), name
        assert here.__doc__ == there.__doc__, name


def test_values_are_put_read_and_removed(run):
    async def use(store):
        await store.put("a", b"1", if_exists="keep")
        assert await store.get("a") == b"1"
        assert await store.batch_exist(["a", "b"]) == [True, False]
        assert store.segment.nbytes == MIB
        assert (await store.stats()).objects == 1
        await store.remove("a")
        with pytest.raises(KeyNotFound):
            await store.get("a")

    run(use)


def test_more_calls_than_threads_all_get_their_turn(run):
    async def use(store):
        await asyncio.gather(*(store.put(f"k{i}", bytes([i])) for i in range(64)))
        assert await asyncio.gather(*(store.get(f"k{i}") for i in range(64))) == [
            bytes([i]) for i in range(64)
        ]
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("mooncake-store-aio") for name in names) == 2

    run(use, threads=2)


def held_up(store):
    """Make the store's puts wait; returns what says that one has begun, and what lets them go on."""
    begun, go_on = threading.Event(), threading.Event()
    put = store.store._writer.put

    def wait(*args):
        begun.set()
        assert go_on.wait(20)
        return put(*args)

    store.store._writer.put = wait
    return begun, go_on


def test_a_cancelled_call_that_runs_is_waited_for_and_one_that_waits_never_happens(run):
    async def use(store):
        begun, go_on = held_up(store)
        running = asyncio.create_task(store.put("running", b"1"))
        await asyncio.to_thread(begun.wait, 20)
        waiting = asyncio.create_task(store.put("waiting", b"1"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=0.05)
        assert not done, "the cancellation was seen while the call was using the caller's memory"
        running.cancel()  # impatience changes nothing
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await store.batch_exist(["running", "waiting"]) == [True, False]

    run(use, threads=1)


def test_a_value_opened_for_a_cancelled_task_keeps_no_lease(run, eventually):
    async def use(store):
        await store.put("a", b"1")
        begun, go_on = threading.Event(), threading.Event()
        read = store.store._read

        def wait(*args):
            begun.set()
            assert go_on.wait(20)
            return read(*args)

        store.store._read = wait
        opening = asyncio.create_task(store.open_value("a"))
        await asyncio.to_thread(begun.wait, 20)
        opening.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await asyncio.to_thread(eventually, lambda: store.store.stats().leases == 0)

    run(use)


def test_a_deadline_of_the_caller_ends_a_call_that_waits_for_its_turn(run):
    async def use(store):
        begun, go_on = held_up(store)
        running = asyncio.create_task(store.put("running", b"1"))
        await asyncio.to_thread(begun.wait, 20)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(store.get("x"), 0.01)
        go_on.set()
        await running

    run(use, threads=1)


def test_calls_after_the_close_and_those_that_had_no_turn_are_told_so(run):
    async def use(store):
        begun, go_on = held_up(store)
        running = asyncio.create_task(store.put("running", b"1"))
        await asyncio.to_thread(begun.wait, 20)
        waiting = asyncio.create_task(store.put("waiting", b"1"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(store.close())
        with pytest.raises(StoreClosed, match="before this call had its turn"):
            await waiting
        go_on.set()
        await running
        await closing
        with pytest.raises(StoreClosed):
            await store.get("x")
        await store.close()

    run(use, threads=1)


def test_a_store_that_cannot_be_opened_leaves_nothing_behind(world):
    async def main():
        with pytest.raises(ConfigError, match="lend_bytes is -1"):
            await AsyncStore.open(world.engine(), lend_bytes=-1)

    asyncio.run(main())
    with pytest.raises(ConfigError, match="threads is 0"):
        AsyncStore(world.store(), threads=0)


def test_sessions_readers_and_buffers_are_awaited_and_never_run_in_the_loop(run, monkeypatch):
    loop_thread = threading.main_thread()
    for kind, names in (
        (ReadSession, ("__enter__", "read_parts", "__exit__")),
        (WriteSession, ("__enter__", "write_parts", "__exit__")),
        (ValueReader, ("read", "close", "give_up")),
        (ValueBuffer, ("close",)),
    ):
        for name in names:
            call = getattr(kind, name)

            def elsewhere(self, *args, _call=call):
                assert threading.current_thread() is not loop_thread
                return _call(self, *args)

            monkeypatch.setattr(kind, name, elsewhere)

    async def use(store):
        region = store.engine.allocate(1000)
        region.view()[:] = bytes(range(250)) * 4
        async with await store.write_session(["a", "b"], [1000, 5]) as writing:
            assert (writing.placed.tolist(), writing.sizes.tolist()) == ([True, True], [1000, 5])
            await writing.write_parts(region, [[0, 0, 0, 400], [0, 400, 400, 600], [1, 0, 0, 4]])
        assert writing.stored.tolist() == [True, False]
        region.view()[:] = bytes(1000)
        async with await store.read_session(["a", "b"]) as reading:
            assert (reading.found.tolist(), reading.sizes.tolist()) == ([True, False], [1000, 0])
            await reading.read_parts(region, [[0, 100, 0, 50]])
        assert (reading.good.tolist(), reading.expired.tolist()) == ([True, False], [False, False])
        assert bytes(region.view()[:50]) == bytes(range(100, 150))
        async with await store.open_value("a") as reader:
            assert (reader.nbytes, await reader.read(3, 4)) == (1000, bytes([3, 4, 5, 6]))
        async with await store.get_buffer("a") as buffer:
            assert bytes(memoryview(buffer)[:3]) == bytes([0, 1, 2])
        one, none = await store.batch_get_buffer(["a", "unknown"])
        assert none is None
        assert one.valid
        assert bytes(one.value[:2]) == bytes([0, 1])
        await one.close()
        assert not one.valid
        with pytest.raises(KeyNotFound):
            await store.get_buffer("unknown")

    run(use)


def test_a_session_that_was_cancelled_while_it_began_keeps_nothing(run, eventually):
    async def use(store):
        await store.put("a", b"1")
        begun, go_on = threading.Event(), threading.Event()
        ask = store.store._member.ask

        def slowly(*args):
            begun.set()
            go_on.wait(10)
            return ask(*args)

        store.store._member.ask = slowly
        for session in (await store.read_session(["a"]), await store.write_session(["b"], [10])):
            begun.clear(), go_on.clear()
            entering = asyncio.create_task(session.__aenter__())
            await asyncio.to_thread(begun.wait, 10)
            entering.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await entering
        store.store._member.ask = ask

        def nothing_is_left():
            stats = store.store.stats()
            return (stats.leases, stats.reservations) == (0, 0)

        await asyncio.to_thread(eventually, nothing_is_left)

    run(use)


def test_a_session_that_is_left_by_a_cancellation_ends_its_lease_though_it_had_to_wait(run, eventually):
    async def use(store):
        await store.put("a", b"1")
        session, entered = await store.read_session(["a"]), asyncio.Event()
        begun, go_on = threading.Event(), threading.Event()

        async def read():
            async with session:
                entered.set()
                await asyncio.to_thread(begun.wait, 20)

        reading = asyncio.create_task(read())
        await entered.wait()
        assert store.store.stats().leases == 1
        blocking = asyncio.create_task(store.run(lambda: (begun.set(), go_on.wait(20))))
        await asyncio.to_thread(begun.wait, 20)
        await asyncio.sleep(0)  # the exit waits for its turn now
        reading.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await blocking
        await asyncio.to_thread(eventually, lambda: store.store.stats().leases == 0)

    run(use, threads=1)


def test_an_asynchronous_store_opens_tiers(run, tmp_path):
    tier = open_tier(TierConfig(kind="directory", path=str(tmp_path / "tier"), capacity_bytes=1 << 20))

    async def use(store):
        assert store.tiers == [tier]

    run(use, tiers=[tier])


def test_tensors_are_awaited(run):
    torch = pytest.importorskip("torch")
    tensors = pytest.importorskip("mooncake_store.tensors")
    there = {name for name in dir(tensors.TensorStore) if not name.startswith("_")}
    for name in there:
        twin, call = (getattr(k, name) for k in (tensors.AsyncTensorStore, tensors.TensorStore))
        assert inspect.iscoroutinefunction(twin), name
        assert inspect.signature(twin) == inspect.signature(call), name

    async def use(store):
        awaited = tensors.AsyncTensorStore(store)
        whole = torch.arange(32.0).view(8, 4)
        for rank in range(4):
            await awaited.put_shard("w", whole[2 * rank : 2 * rank + 2], tensors.Shard(0, rank, 4))
        assert (await awaited.get("w")).equal(whole)
        assert (await awaited.get("w", tensors.Shard(0, 1, 2))).equal(whole[4:])
        await awaited.remove("w")
        assert await awaited.batch_get(["w"]) == [None]

    run(use)
