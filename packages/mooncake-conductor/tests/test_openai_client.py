"""The official ``openai`` client against the gateway."""

import openai
import pytest

QUESTION = [{"role": "user", "content": "Say hello"}]


@pytest.fixture
def client(pair):
    with openai.OpenAI(base_url=f"{pair.client.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_a_chat_answer_has_text_usage_and_placement(client, pair) -> None:
    answer = client.chat.completions.create(model="fake", messages=QUESTION)
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.usage.completion_tokens == 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model_extra["mooncake"]["placement"]["prefill"] == pair.prefill.url


def test_a_chat_stream_has_every_token_and_then_the_usage(client) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    tokens = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert tokens == ["Hello", ",", " world", "!"]
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].model_extra["mooncake"]["driver"] == "fake"


def test_text_completions_work_streamed_and_whole(client) -> None:
    whole = client.completions.create(model="fake", prompt="Once", max_tokens=2)
    assert whole.choices[0].text == "Hello,"
    streamed = client.completions.create(model="fake", prompt=[1, 2, 3], stream=True)
    assert [chunk.choices[0].text for chunk in streamed] == ["Hello", ",", " world", "!", ""]


def test_models_are_listed(client) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]


def test_errors_arrive_as_the_clients_own_exceptions(client, pair) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x" * 999)
    assert caught.value.code == "context_length_exceeded"
    pair.prefill.stop()
    with pytest.raises(openai.InternalServerError) as unavailable:
        client.completions.create(model="fake", prompt="x")
    assert (unavailable.value.status_code, unavailable.value.response.headers["retry-after"]) == (503, "2")


def test_a_stream_that_breaks_raises_in_the_client(client, pair) -> None:
    pair.decode.behaviour.die_after_tokens = 2
    stream = client.chat.completions.create(model="fake", messages=QUESTION, stream=True)
    received = []
    with pytest.raises(openai.APIError, match="The answer ends early"):
        received.extend(chunk.choices[0].delta.content for chunk in stream)
    assert "".join(received) == "Hello,"
