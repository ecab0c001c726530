"""Requests that are served: the flow through prefill and decode, and what comes back."""

import json
import time

import pytest

from mooncake_conductor.testing import FakeWorker, wait_until

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = {"model": "fake", "prompt": "The quick brown fox"}  # 19 tokens: four full blocks of 4
MESSAGES = {"model": "fake", "messages": [{"role": "user", "content": "Say hello"}]}


def text_of(events) -> str:
    chunks = [choice for event in events if isinstance(event, dict) for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in chunks)


def test_a_text_completion_goes_through_prefill_and_decode(pair) -> None:
    answer = pair.client.post(TEXT, {**PROMPT, "temperature": 0.5, "a_field_of_the_engine": [1]}).json
    assert answer["choices"][0]["text"] == "Hello, world!"
    ((prefill_path, prefill),) = pair.prefill.requests
    ((decode_path, decode),) = pair.decode.requests
    assert prefill_path == decode_path == TEXT
    assert (prefill["max_tokens"], prefill["stream"], prefill["a_field_of_the_engine"]) == (1, False, [1])
    sent, handed = prefill["kv_transfer_params"], decode["kv_transfer_params"]
    assert (sent["do_remote_decode"], sent["do_remote_prefill"]) == (True, False)
    assert (handed["do_remote_decode"], handed["do_remote_prefill"]) == (False, True)
    assert len(bytes.fromhex(sent["transfer_id"])) == 16
    assert handed["transfer_id"] == sent["transfer_id"]
    assert handed["remote_engine_id"] == pair.prefill.engine_id
    assert {name: value for name, value in decode.items() if name != "kv_transfer_params"} == {
        **PROMPT,
        "temperature": 0.5,
        "a_field_of_the_engine": [1],
    }


def test_a_prefill_is_asked_for_one_token_whatever_the_client_wants(pair) -> None:
    wishes = {"max_completion_tokens": 3, "stream_options": {"include_usage": True}, "min_tokens": 2}
    pair.client.stream(CHAT, {**MESSAGES, **wishes})
    (_, prefill), (_, decode) = pair.prefill.requests + pair.decode.requests
    assert prefill["max_tokens"] == 1
    assert not set(wishes) & set(prefill)
    assert {name: decode[name] for name in wishes} == wishes


def test_a_prefill_worker_sees_the_fields_that_its_decode_worker_will_check(pair) -> None:
    checked = {"n": 1, "best_of": 1, "logprobs": 3, "top_k": 5, "stop": ["x"], "response_format": {"a": 1}}
    assert pair.client.post(TEXT, {**PROMPT, **checked}).status == 200
    (_, prefill), (_, decode) = pair.prefill.requests + pair.decode.requests
    for body in (prefill, decode):
        assert {name: body.get(name) for name in checked} == checked


def test_a_null_means_not_given_and_is_not_passed_on(pair) -> None:
    nulls = dict.fromkeys(("stream", "stream_options", "max_tokens", "temperature", "n", "best_of", "stop"))
    answer = pair.client.post(CHAT, {**MESSAGES, **nulls, "tools": None, "a_field_of_the_engine": None})
    assert answer.json["object"] == "chat.completion"
    (_, prefill), (_, decode) = pair.prefill.requests + pair.decode.requests
    assert set(prefill) == {*MESSAGES, "max_tokens", "stream", "kv_transfer_params", "a_field_of_the_engine"}
    assert set(decode) == {*MESSAGES, "kv_transfer_params", "a_field_of_the_engine"}
    pair.client.stream(CHAT, {**MESSAGES, "stream_options": {"include_usage": None}})
    assert pair.decode.requests[-1][1]["stream_options"] == {}


@pytest.mark.parametrize(("prompt", "one"), [(["Hi"], "Hi"), ([[1, 2, 3]], [1, 2, 3])], ids=["text", "ids"])
def test_a_list_of_one_prompt_is_that_prompt(pair, prompt, one) -> None:
    answer = pair.client.post(TEXT, {"model": "fake", "prompt": prompt}).json
    assert answer["usage"]["prompt_tokens"] == len(one)
    assert [body["prompt"] for _, body in pair.prefill.requests + pair.decode.requests] == [one, one]


@pytest.mark.parametrize(("path", "request_"), [(TEXT, PROMPT), (CHAT, MESSAGES)], ids=["text", "chat"])
def test_a_stream_has_all_tokens_usage_and_placement(pair, path: str, request_) -> None:
    events = pair.client.stream(path, {**request_, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    assert text_of(events) == "Hello, world!"
    usage = events[-2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["mooncake"]["driver"] == "fake"
    assert usage["mooncake"]["placement"] == {
        "prefill": pair.prefill.url,
        "decode": pair.decode.url,
        "matched_tokens": 0,
    }


def test_a_stream_without_usage_has_the_placement_in_its_last_chunk(pair) -> None:
    events = pair.client.stream(CHAT, MESSAGES)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "usage" not in events[-2]
    assert events[-2]["mooncake"]["placement"]["decode"] == pair.decode.url


def test_tokens_pass_through_while_the_worker_still_decodes(pair) -> None:
    pair.decode.behaviour.stall_after_tokens = 1
    with pair.client.opened(TEXT, {**PROMPT, "stream": True}) as response:
        assert json.loads(response.readline().removeprefix(b"data: "))["choices"][0]["text"] == "Hello"


def test_a_prompt_of_token_ids_needs_no_tokeniser(pair) -> None:
    answer = pair.client.post(TEXT, {"model": "fake", "prompt": [1, 2, 3, 4, 5]}).json
    assert answer["usage"]["prompt_tokens"] == 5


def test_the_matched_prefix_follows_the_events_of_the_worker(pair) -> None:
    def matched() -> int:
        query = pair.client.post(
            "/query", {"model": "fake", "token_ids": list(PROMPT["prompt"].encode())}
        ).json
        assert query["longest_matched"] == query["workers"][pair.prefill.url]["matched_tokens"]
        return query["longest_matched"]

    assert matched() == 0
    pair.client.post(TEXT, PROMPT)
    wait_until(lambda: matched() == 16, "the blocks of the first prefill are in the index")
    answer = pair.client.post(TEXT, {**PROMPT, "prompt": PROMPT["prompt"] + " jumps"}).json
    assert answer["mooncake"]["placement"]["matched_tokens"] == 16
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    pair.prefill.evict(list(PROMPT["prompt"].encode()))
    wait_until(lambda: matched() == 0, "the evicted blocks are out of it")
    assert pair.client.metric("matched_tokens_total") == 16


def test_requests_go_to_the_worker_that_holds_their_prefix(cluster) -> None:
    group = cluster("prefill", "prefill", "decode")
    holders = {}
    for prompt in ("first conversation", "second conversation"):
        answer = group.client.post(TEXT, {"model": "fake", "prompt": prompt}).json
        holders[prompt] = answer["mooncake"]["placement"]["prefill"]
    assert len(set(holders.values())) == 2, "two idle workers take turns"
    tokens = {prompt: list(prompt.encode()) for prompt in holders}
    for prompt, holder in holders.items():
        query = {"model": "fake", "token_ids": tokens[prompt]}
        wait_until(
            lambda query=query, holder=holder: (
                group.client.post("/query", query).json["workers"][holder]["matched_tokens"] >= 16
            ),
            "the prefix is in the index",
        )
    for prompt, holder in [*holders.items()] * 2:
        answer = group.client.post(TEXT, {"model": "fake", "prompt": prompt + ", next turn"}).json
        assert answer["mooncake"]["placement"]["prefill"] == holder
        assert answer["mooncake"]["placement"]["matched_tokens"] >= 16


def test_round_robin_takes_turns(cluster) -> None:
    group = cluster("prefill", "prefill", "decode", policy="round_robin")
    used = [group.client.post(TEXT, PROMPT).json["mooncake"]["placement"]["prefill"] for _ in range(4)]
    assert used[0] != used[1]
    assert used[:2] == used[2:]


def test_a_worker_of_both_roles_gets_the_request_as_it_is(cluster) -> None:
    group = cluster("both")
    answer = group.client.post(TEXT, PROMPT).json
    assert group.workers[0].requests == [(TEXT, PROMPT)]
    assert answer["mooncake"]["placement"]["prefill"] == answer["mooncake"]["placement"]["decode"]
    assert text_of(group.client.stream(CHAT, MESSAGES)) == "Hello, world!"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_prompt_or_chat_is_tokenised_by_a_worker(pair, path: str) -> None:
    answer = pair.client.post(path, {"model": "fake", "prompt": "Hi"}).json
    assert answer == {"tokens": [72, 105], "count": 2, "max_model_len": 256}
    assert pair.client.post(path, MESSAGES).json["count"] == len("<user>Say hello")


def test_models_are_listed_with_their_context(pair) -> None:
    listing = pair.client.get("/v1/models").json
    assert listing["object"] == "list"
    assert [(model["id"], model["object"], model["max_model_len"]) for model in listing["data"]] == [
        ("fake", "model", 256)
    ]


def test_a_model_is_shown_as_in_the_list_whatever_its_name(cluster) -> None:
    with FakeWorker("both", model="org/name") as worker:
        client = cluster().client
        client.post("/register", {"url": worker.url})
        (listed,) = client.get("/v1/models").json["data"]
        for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
            answer = client.get(path)
            assert (answer.status, answer.json) == (200, listed)


def test_a_model_that_nobody_serves_is_not_found(pair) -> None:
    answer = pair.client.get("/v1/models/org/gpt-9")
    assert answer.status == 404
    error = answer.error
    assert "'org/gpt-9'" in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert "gpt-9" not in pair.client.get("/metrics").raw.decode()


def test_health_says_whether_a_request_can_be_served(cluster) -> None:
    group = cluster("prefill")
    assert group.client.get("/health").status == 503
    assert group.client.get("/health").json["status"] == "unavailable"
    whole = cluster("prefill", "decode")
    assert whole.client.get("/health").status == 200


def test_metrics_count_requests_tokens_and_workers(pair) -> None:
    pair.client.stream(TEXT, PROMPT)
    pair.client.post(TEXT, PROMPT)
    pair.client.post(TEXT, {**PROMPT, "model": "other"})
    metric = pair.client.metric
    wait_until(lambda: metric("requests_total", endpoint=TEXT, status="200") == 2, "both answers are counted")
    assert metric("requests_total", endpoint=TEXT, status="404") == 1
    assert metric("rejected_total", reason="model_not_found") == 1
    assert metric("ttft_seconds_count") == 2
    assert metric("decision_seconds_count") == 2
    assert metric("prompt_tokens_total") == 38
    assert metric("worker_up", worker=pair.prefill.url, role="prefill") == 1
    wait_until(lambda: metric("index_blocks", worker=pair.prefill.url) == 4, "the index has the blocks")
    assert "event_gaps" in pair.client.get("/metrics").raw.decode()


def test_the_first_token_of_a_whole_answer_is_timed_by_its_prefill(pair) -> None:
    pair.prefill.behaviour.prefill_s = 0.2
    pair.decode.behaviour.fetch_s = 0.5
    started_s = time.monotonic()
    pair.client.post(TEXT, PROMPT)
    whole_s = time.monotonic() - started_s
    assert pair.client.metric("ttft_seconds_count") == 1
    assert 0.2 <= pair.client.metric("ttft_seconds_sum") <= whole_s - 0.5


def test_a_whole_answer_of_one_worker_has_no_known_first_token(cluster) -> None:
    client = cluster("both").client
    client.post(TEXT, PROMPT)
    assert client.metric("ttft_seconds_count") == 0
    client.stream(TEXT, PROMPT)
    assert client.metric("ttft_seconds_count") == 1


def test_a_worker_registers_and_leaves(cluster) -> None:
    group = cluster("prefill", "decode")
    newcomer = cluster("both").workers[0]
    shown = group.client.post("/register", {"url": newcomer.url + "/"}).json
    assert (shown["url"], shown["state"], shown["role"]) == (newcomer.url, "up", "both")
    for worker in (group.prefill, group.decode):
        assert group.client.post("/unregister", {"url": worker.url}).json["requests_left"] == 0
    answer = group.client.post(TEXT, PROMPT).json
    assert answer["mooncake"]["placement"]["prefill"] == newcomer.url
    assert [item["url"] for item in group.client.get("/workers").json["workers"]] == [newcomer.url]
    assert group.client.post("/unregister", {"url": group.prefill.url}).status == 404


def test_a_draining_worker_ends_what_it_has(cluster) -> None:
    pair = cluster("prefill", "decode", idle_timeout_s=20.0)
    pair.decode.behaviour.token_s = 2.0
    with pair.client.opened(TEXT, {**PROMPT, "stream": True}) as response:
        response.readline()
        assert pair.client.post("/unregister", {"url": pair.decode.url}).json["requests_left"] == 1
        assert pair.shown(pair.decode)["state"] == "draining"
        assert pair.client.post(TEXT, PROMPT).error["code"] == "no_decode_worker"
        pair.decode.behaviour.token_s = 0.0
        assert response.read().endswith(b"data: [DONE]\n\n")
    wait_until(
        lambda: len(pair.client.get("/workers").json["workers"]) == 1, "the drained worker is forgotten"
    )
