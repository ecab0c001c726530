from __future__ import annotations

import json
from typing import Any

import pytest

from mooncake_transformers._errors import (
    ContextLengthExceeded,
    MalformedRequest,
    ModelNotServed,
    RequestError,
    UnsupportedParameter,
    WrongRole,
)
from mooncake_transformers.config import Role
from mooncake_transformers.generation import RemotePrefill
from mooncake_transformers.model import CausalModel
from mooncake_transformers.planning import Planner
from mooncake_transformers.requests import (
    ChatRequest,
    CompletionRequest,
    KVTransferParams,
    TokenizeRequest,
    decode_request,
)

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hello"}
REMOTE = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "::1", "remote_port": 7}


def chat(**fields: object) -> ChatRequest:
    return decode_request(json.dumps({**CHAT, **fields}).encode(), ChatRequest)


def text(**fields: object) -> CompletionRequest:
    return decode_request(json.dumps({**TEXT, **fields}).encode(), CompletionRequest)


def planner(tiny: CausalModel, role: Role = "both", max_model_len: int = 100) -> Planner:
    return Planner(tiny, role, max_model_len)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b'{"model": "tiny"}', "messages"),
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": [{"content": "hi"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 7}]}', "messages[0].content"),
        (b'{"messages": [], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [], "temperature": -1}', "temperature"),
        (b'{"messages": [], "top_p": 0}', "top_p"),
        (b'{"messages": [], "stream": "yes"}', "stream"),
        (b'{"messages": [], "kv_transfer_params": {"remote_port": 70000}}', "kv_transfer_params.remote_port"),
    ],
)
def test_a_malformed_body_is_refused_with_the_field_at_fault(body: bytes, param: str | None) -> None:
    with pytest.raises(MalformedRequest) as refused:
        decode_request(body, ChatRequest)
    assert refused.value.param == param
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("n", 2, 1),
        ("logprobs", True, False),
        ("logprobs", 1, 0),
        ("tools", [{"type": "function"}], []),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("presence_penalty", 0.5, 0),
        ("logit_bias", {"5": 1}, {}),
        ("top_k", 40, -1),
        ("best_of", 2, 1),
        ("tool_choice", "required", "auto"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}, "none"),
        ("functions", [{"name": "f"}], []),
        ("function_call", {"name": "f"}, "auto"),
        ("top_logprobs", 3, 0),
        ("reasoning_effort", "high", "none"),
        ("audio", {"voice": "a"}, None),
        ("modalities", ["text", "audio"], ["text"]),
        ("min_tokens", 5, 0),
        ("stop_token_ids", [7], []),
        ("guided_json", {"type": "object"}, None),
        ("guided_regex", "a+", None),
        ("guided_choice", ["a", "b"], None),
        ("guided_grammar", "root ::= x", None),
        ("frequency_penalty", -1, 0.0),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_refused_unless_it_asks_for_nothing(
    field: str, value: object, harmless: object
) -> None:
    chat(**{field: harmless})
    chat(**{field: None})
    with pytest.raises(UnsupportedParameter) as refused:
        chat(**{field: value})
    assert refused.value.param == field


OPTIONAL = (
    "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop", "ignore_eos",
    "return_token_ids", "kv_transfer_params", "add_generation_prompt", "chat_template_kwargs", "model",
)  # fmt: skip


def test_null_in_any_optional_field_is_as_if_it_were_absent() -> None:
    assert chat(**dict.fromkeys(OPTIONAL)) == chat(model=None)
    assert (
        chat(stream_options={"include_usage": None}).stream_options == chat(stream_options={}).stream_options
    )
    params = dict.fromkeys(
        ("do_remote_decode", "do_remote_prefill", "transfer_id", "remote_host", "remote_port")
    )
    assert chat(kv_transfer_params=params).kv_transfer_params == KVTransferParams()


@pytest.mark.parametrize("field", ["tool_calls", "function_call", "audio"])
def test_a_message_that_calls_a_tool_is_refused(tiny: CausalModel, field: str) -> None:
    message = {"role": "assistant", "content": "I call."}
    assert planner(tiny).tokens(chat(messages=[{**message, field: None}]))
    with pytest.raises(UnsupportedParameter) as refused:
        planner(tiny).tokens(chat(messages=[{**message, field: [{"id": "1"}]}]))
    assert refused.value.param == f"messages[0].{field}"


def test_only_the_roles_of_the_api_are_taken(tiny: CausalModel) -> None:
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        assert planner(tiny).tokens(chat(messages=[{"role": role, "content": "hi"}]))
    with pytest.raises(MalformedRequest, match=r"role 'wizard'.*developer") as refused:
        planner(tiny).tokens(chat(messages=[{"role": "wizard", "content": "hi"}]))
    assert refused.value.param == "messages[0].role"


def test_a_message_without_content_is_malformed(tiny: CausalModel) -> None:
    with pytest.raises(MalformedRequest, match="no content"):
        planner(tiny).tokens(chat(messages=[{"role": "user"}]))


def test_unknown_fields_of_clients_are_let_through() -> None:
    assert chat(user="somebody", metadata={"a": 1}).messages[0].content == "hi"


@pytest.mark.parametrize("prompt", ["hello", ["hello"], [71, 68, 75, 75, 78]])
def test_a_prompt_is_text_or_one_text_or_token_ids(tiny: CausalModel, prompt: object) -> None:
    assert planner(tiny).plan(text(prompt=prompt)).token_ids == [71, 68, 75, 75, 78]


@pytest.mark.parametrize("prompt", [["a", "b"], ["a", 5], [1, 2**40], [[1], [2]], [999], [], ""])
def test_several_prompts_in_one_or_none_or_foreign_token_ids_are_refused(
    tiny: CausalModel, prompt: object
) -> None:
    with pytest.raises(MalformedRequest) as refused:
        planner(tiny).plan(text(prompt=prompt))
    assert str(refused.value.param).startswith("prompt")


def test_text_parts_of_a_message_are_joined_and_other_parts_refused(tiny: CausalModel) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    joined = chat(messages=[{"role": "user", "content": parts}])
    assert planner(tiny).tokens(joined) == planner(tiny).tokens(chat())
    with pytest.raises(UnsupportedParameter, match="image_url"):
        planner(tiny).tokens(chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]))


def test_no_messages_and_messages_that_the_template_refuses_are_malformed(
    tiny: CausalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MalformedRequest, match="empty") as refused:
        planner(tiny).plan(chat(messages=[]))
    assert refused.value.param == "messages"
    monkeypatch.setattr(tiny.tokenizer._tokenizer, "chat_template", "{{ raise_exception('not like this') }}")
    with pytest.raises(MalformedRequest, match="not like this") as refused:
        planner(tiny).plan(chat())
    assert refused.value.param == "messages"


def test_tokenize_gives_what_a_chat_is_prefilled_with(tiny: CausalModel) -> None:
    body = decode_request(json.dumps({"messages": CHAT["messages"]}).encode(), TokenizeRequest)
    assert planner(tiny).tokens(body) == list(planner(tiny).plan(chat()).token_ids)
    with pytest.raises(MalformedRequest, match="not both"):
        planner(tiny).tokens(TokenizeRequest(prompt="a", messages=body.messages))
    with pytest.raises(MalformedRequest, match="needed"):
        planner(tiny).tokens(TokenizeRequest())


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_and_a_longer_answer_is_cut(
    tiny: CausalModel,
) -> None:
    fits = planner(tiny).plan(text(prompt=[1] * 99, max_tokens=50))
    assert fits.max_tokens == 1
    with pytest.raises(ContextLengthExceeded, match="100 tokens"):
        planner(tiny).plan(text(prompt=[1] * 100))


def test_the_answer_has_16_tokens_by_default_and_a_chat_the_rest_of_the_context(tiny: CausalModel) -> None:
    assert planner(tiny).plan(text()).max_tokens == 16
    talk = planner(tiny).plan(chat())
    assert talk.max_tokens == 100 - len(talk.token_ids)
    assert planner(tiny).plan(chat(max_tokens=5, max_completion_tokens=7)).max_tokens == 7


def test_only_the_served_model_is_served(tiny: CausalModel) -> None:
    assert planner(tiny).plan(text(model=None)).token_ids
    with pytest.raises(ModelNotServed) as refused:
        planner(tiny).plan(text(model="gpt-17"))
    assert refused.value.status == 404


def test_a_decode_request_says_where_its_prompt_was_prefilled(tiny: CausalModel) -> None:
    planned = planner(tiny, "decode").plan(chat(kv_transfer_params=REMOTE))
    assert planned.remote == RemotePrefill("[::1]:7", "t")
    for missing in ("transfer_id", "remote_host", "remote_port"):
        with pytest.raises(MalformedRequest) as refused:
            planner(tiny).plan(chat(kv_transfer_params={**REMOTE, missing: None}))
        assert refused.value.param == f"kv_transfer_params.{missing}"


def test_a_worker_refuses_the_part_of_a_request_that_is_not_its_role(tiny: CausalModel) -> None:
    wanted = KVTransferParams(do_remote_decode=True, transfer_id="t")
    assert planner(tiny, "prefill").transfer_id(wanted) == "t"
    assert planner(tiny, "decode").transfer_id(KVTransferParams()) is None
    with pytest.raises(WrongRole):
        planner(tiny, "decode").transfer_id(wanted)
    with pytest.raises(WrongRole):
        planner(tiny, "prefill").plan(chat(kv_transfer_params=REMOTE))


def test_too_many_stop_strings_are_refused(tiny: CausalModel) -> None:
    assert planner(tiny).plan(text(stop="x")).stop == ("x",)
    with pytest.raises(RequestError, match="17 stop strings"):
        planner(tiny).plan(text(stop=["x"] * 17))
