from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import pytest
import torch

from mooncake_transformers._errors import ModelFailed, WorkerStopping
from mooncake_transformers.answer import Answer, TokenStep
from mooncake_transformers.kv_cache import SequenceCache
from mooncake_transformers.kv_pool import KVPool
from mooncake_transformers.model import CausalModel
from mooncake_transformers.runner import DecodeJob, ModelRunner, PrefillJob
from mooncake_transformers.sampling import Sampling
from mooncake_transformers.text_stream import TextStream

WAIT_S = 30.0


class Recorder:
    """The tiny model, with a record of every call and a gate that holds the next one back."""

    def __init__(self, model: CausalModel) -> None:
        self.calls: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self._module = model.module

    def __call__(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self.calls.append(input_ids.shape[1])
        if int(input_ids[0, -1]) == 200:
            raise ValueError("token 200 is poison")
        return self._module(input_ids=input_ids, **arguments)


class Setup:
    def __init__(self, model: CausalModel) -> None:
        self.recorder = Recorder(model)
        self.model = replace(model, module=self.recorder)
        layout = model.layout(16)
        self.pool = KVPool(layout, memoryview(bytearray(layout.block_bytes * 8)))
        self.runner = ModelRunner(self.model, self.pool, chunk_tokens=10, threads=1)

    def answer(self, tokens: int) -> Answer:
        return Answer(Sampling(temperature=0), TextStream(self.model.tokenizer), frozenset(), tokens)

    def prefill(self, token_ids: list[int], tokens: int = 4) -> PrefillJob:
        job = PrefillJob(token_ids, self.model.new_cache(8), self.answer(tokens))
        self.runner.prefill(job)
        return job

    def decode(self, job: PrefillJob, steps: list[TokenStep]) -> DecodeJob:
        job.saved.result(WAIT_S)
        decoding = DecodeJob(job.cache, job.answer, steps.append)
        self.runner.decode(decoding)
        return decoding


@pytest.fixture
def setup(tiny: CausalModel) -> Iterator[Setup]:
    made = Setup(tiny)
    made.runner.start()
    made.prefill([1]).saved.result(WAIT_S)  # warmed up
    made.recorder.calls.clear()
    yield made
    made.recorder.gate.set()
    made.runner.close()
    assert not made.runner.alive


def test_an_answer_gets_all_its_tokens_and_its_last_step_says_why_it_ends(setup: Setup) -> None:
    prefill = setup.prefill([5] * 12, tokens=6)
    assert prefill.first.result(WAIT_S).step.finish is None
    steps: list[TokenStep] = []
    setup.decode(prefill, steps).done.result(WAIT_S)
    assert len(steps) == 5
    assert [step.finish for step in steps] == [None, None, None, None, "length"]
    assert prefill.cache.length == 12 + 5


def test_answers_take_turns_and_a_long_prompt_delays_them_by_a_chunk_at_most(setup: Setup) -> None:
    first, second = setup.prefill([5] * 3, tokens=6), setup.prefill([6] * 3, tokens=6)
    second.saved.result(WAIT_S)
    setup.recorder.gate.clear()
    setup.recorder.entered.clear()
    order: list[str] = []
    jobs = [
        DecodeJob(job.cache, job.answer, lambda step, name=name: order.append(name))  # type: ignore[misc]
        for name, job in (("first", first), ("second", second))
    ]
    long = setup.prefill([7] * 45)
    assert setup.recorder.entered.wait(WAIT_S)
    setup.recorder.calls.clear()
    for job in jobs:
        setup.runner.decode(job)
    setup.recorder.gate.set()
    for job in jobs:
        job.done.result(WAIT_S)
    long.saved.result(WAIT_S)
    assert order == ["first", "second"] * 5
    # One chunk of the prompt, one token for each answer, and so on.
    assert setup.recorder.calls == [10, 1, 1, 10, 1, 1, 10, 1, 1, 10, 1, 1, 5, 1, 1]


def test_a_prompt_that_makes_the_model_fail_takes_no_other_with_it(setup: Setup) -> None:
    poisoned, healthy = setup.prefill([200]), setup.prefill([5])
    with pytest.raises(ModelFailed, match="token 200 is poison"):
        poisoned.first.result(WAIT_S)
    with pytest.raises(ModelFailed):
        poisoned.saved.result(WAIT_S)
    assert healthy.first.result(WAIT_S).step.token >= 0


def test_a_cancelled_prompt_ends_between_two_chunks(setup: Setup) -> None:
    setup.recorder.gate.clear()
    setup.recorder.entered.clear()
    job, queued = setup.prefill([5] * 100), setup.prefill([6] * 30)
    assert setup.recorder.entered.wait(WAIT_S)
    setup.runner.cancel(job)
    setup.runner.cancel(queued)
    setup.recorder.gate.set()
    for cancelled in (job, queued):
        with pytest.raises(CancelledError):
            cancelled.saved.result(WAIT_S)
    assert setup.recorder.calls == [10]


def test_a_cancelled_answer_gives_its_cache_back_before_its_end(setup: Setup) -> None:
    prefill = setup.prefill([5] * 3, tokens=400)
    prefill.saved.result(WAIT_S)
    some = threading.Event()
    job = DecodeJob(prefill.cache, prefill.answer, lambda step: some.set())
    setup.runner.decode(job)
    assert some.wait(WAIT_S)
    setup.runner.cancel(job)
    with pytest.raises(CancelledError):
        job.done.result(WAIT_S)
    assert len(prefill.answer.tokens) < 400


def test_stopping_fails_what_is_under_way_and_what_comes_later(setup: Setup) -> None:
    setup.recorder.gate.clear()
    setup.recorder.entered.clear()
    running, queued = setup.prefill([5] * 100), setup.prefill([6])
    assert setup.recorder.entered.wait(WAIT_S)
    setup.runner.stop()
    setup.recorder.gate.set()
    late = setup.prefill([7])
    for job in (running, queued, late):
        with pytest.raises(WorkerStopping):
            job.first.result(WAIT_S)


def test_reused_blocks_are_loaded_and_new_ones_written_while_the_first_token_is_out(setup: Setup) -> None:
    token_ids = [int(token) for token in range(40)]
    blocks = setup.pool.try_allocate(3)
    assert blocks is not None
    whole = PrefillJob(token_ids, setup.model.new_cache(40), setup.answer(4), new_blocks=blocks)
    setup.runner.prefill(whole)
    whole.saved.result(WAIT_S)
    setup.recorder.calls.clear()
    reused = PrefillJob(token_ids, setup.model.new_cache(40), setup.answer(4), reused_blocks=blocks[:2])
    setup.runner.prefill(reused)
    assert reused.first.result(WAIT_S).step.token == whole.first.result(WAIT_S).step.token
    assert setup.recorder.calls == [8]
    fetched = DecodeJob(
        SequenceCache(setup.model.new_cache(8).layers), whole.answer, lambda step: None, blocks, 40
    )
    setup.runner.decode(fetched)
    fetched.done.result(WAIT_S)
    assert fetched.cache.length == 43
