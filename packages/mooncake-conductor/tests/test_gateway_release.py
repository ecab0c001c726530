"""KV blocks that a prefill worker holds are let go of when nobody will fetch them."""

import json
import time
import urllib.error
import urllib.request

import pytest

from mooncake_conductor import ConductorConfig
from mooncake_conductor.release import RELEASE_TIMEOUT_S
from mooncake_conductor.testing import RunningConductor, wait_until

TEXT = "/v1/completions"
PROMPT = {"model": "fake", "prompt": "The quick brown fox"}
REFUSAL = {"message": "no", "type": "invalid_request_error", "param": "logit_bias", "code": "unsupported"}
STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def prefilled(worker) -> list[str]:
    """The transfer ids of all prefills of a worker."""
    return [body["kv_transfer_params"]["transfer_id"] for _, body in worker.requests]


def wait_for_release(worker, count: int = 1) -> None:
    wait_until(lambda: len(worker.released) >= count, f"{count} releases were asked for")
    assert sorted(worker.released) == sorted(prefilled(worker)[:count])


@STREAM_OR_NOT
def test_a_request_that_the_decode_worker_refuses_is_released(pair, stream: bool) -> None:
    pair.decode.behaviour.refuse = (400, REFUSAL)
    answer = pair.client.post(TEXT, {**PROMPT, "stream": stream})
    assert (answer.status, answer.error) == (400, REFUSAL)
    wait_for_release(pair.prefill)


@STREAM_OR_NOT
def test_each_attempt_whose_decode_worker_breaks_is_released(pair, stream: bool) -> None:
    pair.decode.behaviour.die_after_tokens = 0
    assert pair.client.post(TEXT, {**PROMPT, "stream": stream}).status == 503
    wait_for_release(pair.prefill, len(pair.prefill.requests))


def test_an_attempt_whose_kv_cache_could_not_be_fetched_is_released_and_the_next_one_is_not(pair) -> None:
    pair.decode.behaviour.kv_transfer_failures = 1
    assert pair.client.post(TEXT, PROMPT).status == 200
    wait_for_release(pair.prefill)
    assert len(pair.prefill.requests) == 2


@STREAM_OR_NOT
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_that_goes_away_before_the_first_token_has_its_blocks_released(pair, phase, stream) -> None:
    worker = getattr(pair, phase)
    worker.behaviour.prefill_s = worker.behaviour.token_s = 30
    with pair.client.sent(TEXT, {**PROMPT, "stream": stream}):
        wait_until(lambda: worker.requests, "the worker has the request")
    wait_for_release(pair.prefill)


@STREAM_OR_NOT
def test_what_is_served_or_refused_by_the_prefill_worker_is_not_released(pair, stream: bool) -> None:
    request = {**PROMPT, "stream": stream}
    assert pair.client.post(TEXT, request).status == 200
    pair.prefill.behaviour.refuse = (400, REFUSAL)
    assert pair.client.post(TEXT, request).status == 400
    pair.prefill.behaviour.refuse = None
    pair.decode.behaviour.refuse = (400, REFUSAL)
    assert pair.client.post(TEXT, request).status == 400
    # Those of the first two requests would have been sent before it.
    wait_until(lambda: pair.prefill.released, "the last one is released")
    assert pair.prefill.released == prefilled(pair.prefill)[-1:]


@pytest.mark.parametrize("status", [404, 405, 500])
def test_a_prefill_worker_that_cannot_release_changes_nothing_for_the_client(pair, status: int) -> None:
    pair.prefill.behaviour.release_status = status
    pair.decode.behaviour.refuse = (400, REFUSAL)
    assert pair.client.post(TEXT, PROMPT).error == REFUSAL
    wait_for_release(pair.prefill)
    pair.decode.behaviour.refuse = None
    assert pair.client.post(TEXT, PROMPT).status == 200


def test_no_answer_and_no_shutdown_waits_for_a_slow_release(pair) -> None:
    pair.prefill.behaviour.release_s = 30
    pair.decode.behaviour.refuse = (400, REFUSAL)
    with RunningConductor(ConductorConfig(workers=(pair.prefill.url, pair.decode.url))) as other:
        started_s = time.monotonic()
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            urllib.request.urlopen(other.url + TEXT, json.dumps(PROMPT).encode(), timeout=20)
        refused.value.close()
        assert time.monotonic() - started_s < RELEASE_TIMEOUT_S
        wait_for_release(pair.prefill)
        ended_s = time.monotonic()
    assert time.monotonic() - ended_s < 15


def test_a_release_that_is_not_answered_is_given_up(pair) -> None:
    pair.prefill.behaviour.release_s = 30
    pair.decode.behaviour.refuse = (400, REFUSAL)
    assert pair.client.post(TEXT, PROMPT).error == REFUSAL
    wait_for_release(pair.prefill)
    wait_until(lambda: pair.prefill.releases_cut == 1, "the conductor hung up", RELEASE_TIMEOUT_S + 15)
