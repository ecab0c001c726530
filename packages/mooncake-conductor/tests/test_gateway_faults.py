"""Workers that die, stall, restart, or lose KV caches; clients that go away."""

import json
import time

import pytest

from mooncake_conductor.testing import FakeWorker, wait_until

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = {"model": "fake", "prompt": "The quick brown fox"}
MESSAGES = {"model": "fake", "messages": [{"role": "user", "content": "Say hello"}]}
STREAMED = {**PROMPT, "stream": True}
STREAM_OR_NOT = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def texts(events) -> list[str]:
    chunks = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", [])]
    return [choice["text"] for choice in chunks if choice["text"]]


@STREAM_OR_NOT
def test_no_prefill_worker_is_503_with_retry_after_until_it_is_back(pair, stream: bool) -> None:
    pair.prefill.stop()
    request = {**PROMPT, "stream": stream}
    answer = pair.client.post(TEXT, request)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    assert answer.error["code"] == "no_prefill_worker"
    assert f"{pair.prefill.url} is down" in answer.error["message"]
    assert pair.client.metric("rejected_total", reason="no_prefill_worker") == 1
    pair.prefill.start()
    pair.wait_for_state(pair.prefill, "up")
    assert pair.client.post(TEXT, request).status == 200


def test_no_decode_worker_is_503_without_a_wasted_prefill(pair) -> None:
    pair.decode.stop()
    pair.wait_for_state(pair.decode, "down")
    assert pair.client.post(TEXT, PROMPT).error["code"] == "no_decode_worker"
    assert not pair.prefill.requests


def test_a_cluster_without_any_worker_is_503(cluster) -> None:
    answer = cluster().client.post(TEXT, PROMPT)
    assert (answer.status, answer.error["code"]) == (503, "no_worker")


@STREAM_OR_NOT
def test_a_prefill_that_breaks_is_done_by_another_worker(cluster, stream: bool) -> None:
    group = cluster("prefill", "prefill", "decode", policy="round_robin")
    broken, healthy, _ = group.workers
    broken.behaviour.die_after_tokens = 0
    for _ in range(2):  # whichever of the two has its turn first
        assert group.client.post(TEXT, {**PROMPT, "stream": stream}).status == 200
    assert len(broken.requests) >= 1
    assert len(healthy.requests) == 2
    assert group.client.metric("retries_total", phase="prefill") == len(broken.requests)


def test_a_prefill_that_breaks_twice_is_503(pair) -> None:
    pair.prefill.behaviour.die_after_tokens = 0
    answer = pair.client.post(TEXT, PROMPT)
    assert (answer.status, answer.error["code"]) == (503, "prefill_failed")
    assert "Retry-After" in answer.headers
    assert len(pair.prefill.requests) == 2


def test_a_decode_worker_killed_in_mid_stream_ends_the_stream_with_an_error_event(pair) -> None:
    pair.decode.behaviour.stall_after_tokens = 2
    with pair.client.opened(TEXT, STREAMED) as response:
        for expected in ("Hello", ","):
            assert json.loads(response.readline()[6:])["choices"][0]["text"] == expected
            response.readline()
        killed_at_s = time.monotonic()
        pair.decode.stop()
        rest = response.read()
    assert time.monotonic() - killed_at_s < 10
    error, done, nothing = rest.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    assert json.loads(error[6:])["error"]["code"] == "decode_worker_lost"
    assert pair.client.metric("broken_streams_total", reason="decode_worker_lost") == 1
    pair.decode.behaviour.stall_after_tokens = None
    pair.decode.start()
    pair.wait_for_state(pair.decode, "up")
    assert pair.client.post(TEXT, PROMPT).status == 200


def test_a_decode_worker_that_stalls_ends_the_stream_after_the_idle_limit(pair) -> None:
    pair.decode.behaviour.stall_after_tokens = 2
    started_s = time.monotonic()
    events = pair.client.stream(TEXT, PROMPT)
    assert 4.0 <= time.monotonic() - started_s < 15
    assert texts(events) == ["Hello", ","]
    assert events[-2]["error"]["code"] == "decode_worker_silent"
    assert "silent for 4 s" in events[-2]["error"]["message"]
    assert events[-1] == "[DONE]"
    wait_until(lambda: pair.decode.abandoned == 1, "the worker was told to stop")


def test_a_decode_worker_that_ends_without_done_is_an_error_event(pair) -> None:
    pair.decode.behaviour.die_after_tokens = 4
    events = pair.client.stream(TEXT, PROMPT)
    # A reset may take along what was sent and not yet read.
    assert texts(events)
    assert texts(events) == ["Hello", ",", " world", "!"][: len(texts(events))]
    assert events[-2]["error"]["code"] == "decode_worker_lost"


@STREAM_OR_NOT
@pytest.mark.parametrize("in_stream", [False, True], ids=["status", "event"])
def test_a_kv_cache_that_is_gone_is_prefilled_again(pair, stream: bool, in_stream: bool) -> None:
    pair.decode.behaviour.kv_transfer_failures = 1
    pair.decode.behaviour.fail_in_stream = in_stream
    answer = pair.client.post(TEXT, {**PROMPT, "stream": stream})
    assert answer.status == 200
    first, second = (body["kv_transfer_params"]["transfer_id"] for _, body in pair.prefill.requests)
    assert first != second
    assert pair.client.metric("retries_total", phase="decode") == 1


@STREAM_OR_NOT
def test_a_kv_cache_that_is_gone_twice_is_503(pair, stream: bool) -> None:
    pair.decode.behaviour.kv_transfer_failures = 2
    pair.decode.behaviour.fail_in_stream = True
    answer = pair.client.post(CHAT, {**MESSAGES, "stream": stream})
    assert (answer.status, answer.error["code"]) == (503, "kv_transfer_failed")
    assert "Retry-After" in answer.headers


@STREAM_OR_NOT
def test_a_decode_worker_that_dies_before_its_first_token_is_replaced(cluster, stream: bool) -> None:
    group = cluster("prefill", "decode", "decode")
    _, broken, healthy = group.workers
    broken.behaviour.die_after_tokens = 0
    for _ in range(2):
        assert group.client.post(CHAT, {**MESSAGES, "stream": stream}).status == 200
    assert len(broken.requests) >= 1
    assert len(healthy.requests) == 2


def test_a_first_token_that_never_comes_is_503(cluster) -> None:
    group = cluster("prefill", "decode", first_token_timeout_s=0.3)
    group.decode.behaviour.stall_after_tokens = 0
    answer = group.client.post(CHAT, {**MESSAGES, "stream": True})
    assert (answer.status, answer.error["code"]) == (503, "decode_failed")
    assert "silent for 0.3 s" in answer.error["message"]


def test_a_first_token_may_take_longer_than_the_idle_limit(cluster) -> None:
    group = cluster("prefill", "decode", idle_timeout_s=3.0)
    group.decode.behaviour.fetch_s = 4.0
    events = group.client.stream(CHAT, MESSAGES)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "mooncake" in events[-2]


def test_a_prefill_that_takes_too_long_is_503_and_is_stopped(cluster) -> None:
    group = cluster("prefill", "decode", prefill_timeout_s=0.3)
    group.prefill.behaviour.prefill_s = 30
    answer = group.client.post(TEXT, PROMPT)
    assert (answer.status, answer.error["code"]) == (503, "prefill_failed")
    wait_until(lambda: group.prefill.abandoned == 1, "the worker was told to stop")


@STREAM_OR_NOT
def test_a_frozen_worker_is_given_up_when_its_probes_find_it_silent(cluster, stream: bool) -> None:
    group = cluster("prefill", "decode", probe_timeout_s=1.0, silence_limit_s=3.0)
    group.decode.behaviour.token_s = 0.01
    group.prefill.behaviour.prefill_s = 0.0
    group.prefill.behaviour.frozen = True
    answer = group.client.post(TEXT, {**PROMPT, "prompt": [1, 2, 3], "stream": stream})
    assert (answer.status, answer.error["code"]) == (503, "no_prefill_worker")
    assert group.shown(group.prefill)["state"] == "down"
    group.prefill.behaviour.frozen = False
    group.wait_for_state(group.prefill, "up")
    assert group.client.post(TEXT, PROMPT).status == 200


def test_another_worker_tokenises_when_the_first_one_cannot(cluster) -> None:
    group = cluster("prefill", "decode", tokenize_timeout_s=0.3, silence_limit_s=30.0)
    group.decode.behaviour.frozen = True
    answer = group.client.post(TEXT, {**PROMPT, "prompt": "x" * 300})
    assert answer.error["code"] == "context_length_exceeded"


def test_a_worker_that_is_back_with_a_new_epoch_starts_with_an_empty_view(pair) -> None:
    query = {"model": "fake", "token_ids": list(PROMPT["prompt"].encode())}

    def matched() -> int:
        return pair.client.post("/query", query).json["longest_matched"]

    pair.client.post(TEXT, PROMPT)
    wait_until(lambda: matched() == 16, "the prefix is in the index")
    epoch = pair.prefill.epoch
    pair.prefill.restart()
    assert pair.prefill.epoch != epoch
    wait_until(lambda: pair.shown(pair.prefill).get("epoch") == pair.prefill.epoch, "the new one is seen")
    pair.wait_for_state(pair.prefill, "up")
    assert matched() == 0
    answer = pair.client.post(TEXT, PROMPT).json
    assert answer["mooncake"]["placement"]["matched_tokens"] == 0
    wait_until(lambda: matched() == 16, "the new one's events are followed")
    assert pair.client.metric("worker_starts_total", worker=pair.prefill.url) == 2


def test_a_worker_that_was_away_at_the_start_is_taken_when_it_comes(cluster) -> None:
    late = FakeWorker("both")
    late.start()
    late.stop()
    group = cluster("prefill")
    group.client.post("/register", {"url": late.url})
    assert group.client.get("/health").status == 503
    with late:
        wait_until(lambda: group.client.get("/health").status == 200, "it is up")
        assert group.client.post(TEXT, PROMPT).status == 200


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@STREAM_OR_NOT
def test_a_client_that_goes_away_before_the_answer_stops_the_worker(pair, phase: str, stream: bool) -> None:
    worker = getattr(pair, phase)
    worker.behaviour.prefill_s = worker.behaviour.token_s = 30
    with pair.client.sent(TEXT, {**PROMPT, "stream": stream}):
        wait_until(lambda: worker.requests, "the worker has the request")
    wait_until(lambda: worker.abandoned == 1, "the worker was told to stop")
    wait_until(lambda: pair.client.metric("clients_gone_total") == 1, "it is counted")
    assert pair.shown(worker)["requests"] == 0


def test_a_client_that_goes_away_in_mid_stream_stops_the_worker(pair) -> None:
    pair.decode.behaviour.stall_after_tokens = 1
    with pair.client.opened(TEXT, STREAMED) as response:
        assert b"Hello" in response.readline()
    wait_until(lambda: pair.decode.abandoned == 1, "the worker was told to stop")
    wait_until(lambda: pair.client.metric("clients_gone_total") == 1, "it is counted")
    assert pair.shown(pair.decode)["requests"] == 0
