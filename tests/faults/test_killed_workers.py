"""A small store that runs full, then kill -9 of workers: clients are told, and the cluster recovers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_transformers.cluster.testing import Gateway, ServedCluster, stream_events, wait_until

pytestmark = pytest.mark.slow

ERROR_EVENT_S = 20.0
RECOVERY_S = 90.0
# A block of 16 tokens of the tiny model takes 12 KiB: each worker lends room for some 1,300 tokens.
SMALL_SEGMENT = "1MiB"


@pytest.fixture(scope="module")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    options = ("--threads", "1", "--segment", SMALL_SEGMENT)
    # Leaving the context checks that, after all that was killed, no process and no shared memory is left.
    with ServedCluster(model_folder, tmp_path_factory.mktemp("serve"), *options) as cluster:
        yield cluster


@pytest.fixture
def gateway(served: ServedCluster) -> Gateway:
    return Gateway(served.url, "tiny-chat")


def test_a_full_store_evicts_and_requests_go_on(gateway: Gateway) -> None:
    prompts = [f"Log of day {day}: " + "fog, then rain, then fog. " * 25 for day in range(12)]
    answers = [gateway.ask(prompt) for prompt in prompts]
    assert [answer.status for answer in answers] == [200] * len(prompts)

    # Twelve times 650 tokens were stored where 2,600 have room: the first must be gone, the last be there.
    oldest, newest = gateway.ask(prompts[0]), gateway.ask(prompts[-1])
    assert newest.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 600
    assert oldest.body["usage"]["prompt_tokens_details"]["cached_tokens"] < 100
    # Whether found or computed anew, the answer is the same.
    for before, again in ((answers[0], oldest), (answers[-1], newest)):
        assert again.body["choices"][0]["message"] == before.body["choices"][0]["message"]


def test_a_killed_decode_worker_ends_its_stream_with_an_error_and_comes_back(
    served: ServedCluster, gateway: Gateway
) -> None:
    expected = gateway.ask("What do you see?").body["choices"]
    with gateway.open("Tell a very long story.", 3500, stream=True) as response:
        assert response.status == 200
        stream = stream_events(response)
        for _ in range(5):
            assert "error" not in next(stream)
        served.child("--role", "decode").kill()
        killed_s = time.monotonic()
        error = next(event["error"] for event in stream if "error" in event)
        assert time.monotonic() - killed_s < ERROR_EVENT_S
        assert error["code"] == "decode_worker_lost", "not only after it was silent for long"
        assert list(stream) == []

    wait_until(gateway.works, "a request works after the restart", RECOVERY_S)
    assert gateway.ask("What do you see?").body["choices"][0]["message"] == expected[0]["message"]


def test_a_killed_prefill_worker_means_503_with_retry_after_until_it_is_back(
    served: ServedCluster, gateway: Gateway
) -> None:
    expected = gateway.ask("What do you hear?").body["choices"]
    served.child("--role", "prefill").kill()
    refusal = gateway.ask("What do you hear?")
    assert refusal.status == 503
    assert int(refusal.headers["retry-after"]) >= 1
    assert "prefill" in refusal.body["error"]["message"]

    wait_until(gateway.works, "a request works after the restart", RECOVERY_S)
    assert gateway.ask("What do you hear?").body["choices"][0]["message"] == expected[0]["message"]


def test_without_the_stores_master_requests_go_on_and_caching_comes_back(
    served: ServedCluster, gateway: Gateway
) -> None:
    def cached_tokens() -> int:
        answer = gateway.ask("What do you know by heart? " * 8)
        assert answer.status == 200, answer
        return int(answer.body["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached_tokens()
    assert cached_tokens() > 150
    served.child("store", "master").kill()
    # Each of these requests must succeed, whatever state the store is in.
    wait_until(lambda: cached_tokens() < 150, "what was stored is gone", RECOVERY_S)
    wait_until(lambda: cached_tokens() > 150, "it is stored again", RECOVERY_S)
