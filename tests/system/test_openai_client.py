"""The public ``openai`` client against a whole cluster."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from mooncake_transformers.cluster.testing.chat_model import CONTEXT_TOKENS
from mooncake_transformers.demo.reference import WholeModel

pytestmark = pytest.mark.slow

MODEL = "tiny-chat"
LONG_BEGINNING = "The lighthouse keeper counts ships and writes each one down. " * 8


def chat_of(*turns: str) -> list[Any]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]


def cached_tokens(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


def test_the_model_is_listed_with_its_context_length(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_dump()["max_model_len"] == CONTEXT_TOKENS


def test_a_chat_answer_has_the_tokens_of_the_model_run_whole(
    client: openai.OpenAI, whole_model: WholeModel
) -> None:
    chat = chat_of(LONG_BEGINNING + "How many today?")
    answer = client.chat.completions.create(
        model=MODEL, messages=chat, max_tokens=40, temperature=0, extra_body={"return_token_ids": True}
    )
    expected = whole_model.answer(chat, max_tokens=40)
    assert answer.choices[0].model_dump()["token_ids"] == expected.token_ids
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 40


def test_a_streamed_chat_says_the_same_as_one_that_is_not(client: openai.OpenAI) -> None:
    chat = chat_of("Tell me about foghorns.")
    whole = client.chat.completions.create(model=MODEL, messages=chat, max_tokens=30, temperature=0)
    with client.chat.completions.create(
        model=MODEL, messages=chat, max_tokens=30, temperature=0, stream=True
    ) as stream:
        chunks = list(stream)
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == whole.choices[0].message.content
    )
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_its_usage_when_asked(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL,
        messages=chat_of("Tell me about buoys."),
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        last = list(stream)[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_goes_on_with_the_prompt(
    client: openai.OpenAI, whole_model: WholeModel, stream: bool
) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=LONG_BEGINNING,
        max_tokens=24,
        temperature=0,
        stream=stream,
        extra_body={"return_token_ids": True},
    )
    if isinstance(answer, openai.Stream):
        with answer:
            choices = [chunk.choices[0].model_dump() for chunk in answer if chunk.choices]
    else:
        choices = [answer.choices[0].model_dump()]
    token_ids = [token for choice in choices for token in choice.get("token_ids") or []]
    assert token_ids == whole_model.answer(LONG_BEGINNING, max_tokens=24).token_ids


def test_a_prompt_may_be_token_ids(client: openai.OpenAI, whole_model: WholeModel) -> None:
    as_text = client.completions.create(model=MODEL, prompt="Harbour", max_tokens=8, temperature=0)
    ids = whole_model.answer("Harbour", max_tokens=1).prompt_token_ids
    as_ids = client.completions.create(model=MODEL, prompt=ids, max_tokens=8, temperature=0)
    assert as_ids.choices[0].text == as_text.choices[0].text


def test_cached_tokens_grow_turn_by_turn(client: openai.OpenAI) -> None:
    turns = ["A conversation nobody has had before. " * 10 + "Who goes first?"]
    found = []
    for question in ("And then?", "And after that?", "Is that all?"):
        answer = client.chat.completions.create(
            model=MODEL, messages=chat_of(*turns), max_tokens=16, temperature=0
        )
        found.append((cached_tokens(answer.usage), answer.usage.prompt_tokens if answer.usage else 0))
        turns += [answer.choices[0].message.content or "", question]
    (first, _), (second, _), (third, prompt_tokens) = found
    assert first < second < third < prompt_tokens
    assert second >= 300


def test_an_answer_tells_what_was_moved_and_by_whom(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=chat_of(LONG_BEGINNING + "What moved?"), max_tokens=4
    )
    told = answer.model_dump()["mooncake"]
    assert told["kv_bytes"] > 0
    assert told["kv_seconds"] > 0
    assert told["driver"] in ("shm", "tcp")
    assert told["prefill_engine"] != told["decode_engine"]
    assert told["placement"]["prefill"] != told["placement"]["decode"]


def test_requests_side_by_side_do_not_mix(client: openai.OpenAI, whole_model: WholeModel) -> None:
    chats = [chat_of(f"{word} " * 40 + "?") for word in ("Pier", "Mast", "Gull", "Rope")]
    streams = [
        client.chat.completions.create(
            model=MODEL,
            messages=chat,
            max_tokens=20,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        for chat in chats
    ]
    for chat, stream in zip(chats, streams, strict=True):
        with stream:
            choices = [chunk.choices[0].model_dump() for chunk in stream if chunk.choices]
        token_ids = [token for choice in choices for token in choice.get("token_ids") or []]
        assert token_ids == whole_model.answer(chat, max_tokens=20).token_ids
