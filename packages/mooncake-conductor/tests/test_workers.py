"""The registry of workers: health, incarnations, load, draining."""

import pytest

from mooncake_conductor.errors import ModelUnknown, NoWorker
from mooncake_conductor.workers import Worker, WorkerInfo, WorkerRegistry

P, D, B = "http://p:1", "http://d:1", "http://b:1"


@pytest.fixture
def registry() -> WorkerRegistry:
    return WorkerRegistry(silence_limit_s=10.0, retry_after_s=2.0)


def info(role: str = "prefill", *, epoch: int = 1, model: str = "m") -> WorkerInfo:
    return WorkerInfo(engine_id="e", epoch=epoch, role=role, model=model, block_tokens=4, max_model_len=64)


def up(registry: WorkerRegistry, url: str, role: str, **fields) -> Worker:
    worker = registry.add(url)
    registry.answered(worker, info(role, **fields), now_s=0.0)
    return worker


def urls(candidates) -> set[str]:
    return {candidate.url for candidate in candidates}


def test_only_the_first_answer_of_an_incarnation_starts_it_anew(registry) -> None:
    worker = registry.add(P)
    assert registry.answered(worker, info(epoch=1), 0.0) is True
    assert registry.answered(worker, info(epoch=1), 1.0) is False
    assert registry.answered(worker, info(epoch=2), 2.0) is True


def test_a_silent_worker_stays_up_until_the_limit(registry) -> None:
    worker = up(registry, P, "prefill")
    registry.failed(worker, "silent", 9.9, gone=False)
    assert worker.state == "up"
    registry.failed(worker, "silent", 10.0, gone=False)
    assert (worker.state, worker.reason) == ("down", "silent")


def test_a_worker_that_is_gone_is_down_at_once(registry) -> None:
    worker = up(registry, P, "prefill")
    registry.failed(worker, "refused", 0.1, gone=True)
    assert worker.state == "down"


def test_who_waits_for_a_worker_hears_that_it_is_lost_or_restarted(registry) -> None:
    worker = up(registry, P, "prefill", epoch=1)
    heard: list[str] = []
    with worker.watched(heard.append):
        registry.failed(worker, "refused", 0.1, gone=True)
    with worker.watched(heard.append):
        registry.answered(worker, info(epoch=2), 1.0)
    with worker.watched(heard.append):
        pass
    registry.failed(worker, "again", 2.0, gone=True)
    assert heard == ["refused", "it restarted"]


def test_load_is_counted_while_a_request_is_held(registry) -> None:
    worker = up(registry, P, "prefill")
    with registry.busy(worker, 30), registry.busy(worker, 5):
        assert (worker.requests, worker.queued_tokens) == (2, 35)
    assert (worker.requests, worker.queued_tokens, worker.last_used) == (0, 0, 2)


def test_the_snapshot_has_the_workers_of_the_model_by_what_they_can_do(registry) -> None:
    for url, role in ((P, "prefill"), (D, "decode"), (B, "both")):
        up(registry, url, role)
    up(registry, "http://other:1", "both", model="n")
    snapshot = registry.snapshot("m", 10, {P: 8}, set())
    assert urls(snapshot.prefill) == {P, B}
    assert urls(snapshot.decode) == {D, B}
    assert {worker.url: worker.matched_tokens for worker in snapshot.prefill} == {P: 8, B: 0}


def test_a_worker_to_avoid_is_taken_only_when_there_is_no_other(registry) -> None:
    up(registry, P, "prefill")
    up(registry, D, "decode")
    assert urls(registry.snapshot("m", 1, {}, {P}).prefill) == {P}
    up(registry, B, "both")
    assert urls(registry.snapshot("m", 1, {}, {P}).prefill) == {B}


@pytest.mark.parametrize(("role", "code"), [("prefill", "no_decode_worker"), ("decode", "no_prefill_worker")])
def test_half_a_cluster_serves_nothing_and_says_what_is_missing(registry, role: str, code: str) -> None:
    up(registry, P, role)
    assert not registry.serving()
    with pytest.raises(NoWorker) as caught:
        registry.snapshot("m", 1, {}, set())
    assert caught.value.code == code
    assert caught.value.headers() == {"Retry-After": "2"}


@pytest.mark.parametrize("roles", [("both",), ("prefill", "decode")])
def test_a_whole_cluster_serves(registry, roles) -> None:
    for number, role in enumerate(roles):
        up(registry, f"http://w{number}:1", role)
    assert registry.serving()


def test_prefill_and_decode_of_different_models_serve_nothing(registry) -> None:
    up(registry, P, "prefill", model="m")
    up(registry, D, "decode", model="n")
    assert not registry.serving()


def test_a_model_nobody_has_is_unknown_but_one_that_is_away_is_not(registry) -> None:
    with pytest.raises(NoWorker):
        registry.of_model("m")
    worker = up(registry, P, "prefill")
    with pytest.raises(ModelUnknown, match=r"'n' does not exist; served here are m\."):
        registry.of_model("n")
    registry.failed(worker, "refused", 1.0, gone=True)
    with pytest.raises(NoWorker, match=f"{P} is down: refused"):
        registry.of_model("m")


def test_a_drained_worker_is_forgotten_after_its_last_request(registry) -> None:
    forgotten: list[Worker] = []
    registry.on_forgotten = forgotten.append
    worker = up(registry, P, "prefill")
    with registry.busy(worker, 1):
        registry.remove(P)
        assert not worker.usable
        assert registry.get(P) is worker
    assert registry.get(P) is None
    assert forgotten == [worker]


def test_a_draining_worker_that_is_added_again_stays(registry) -> None:
    worker = up(registry, P, "prefill")
    with registry.busy(worker, 1):
        registry.remove(P)
        assert registry.add(P) is worker
    assert registry.get(P) is worker
    assert registry.remove("http://nobody:1") is None
