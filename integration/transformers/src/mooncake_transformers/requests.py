"""What clients send: bodies of OpenAI's API, read strictly. No field that matters is ignored in silence."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from mooncake_transformers._errors import MalformedRequest, UnsupportedParameter

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "GenerateRequest",
    "KVTransferParams",
    "Message",
    "TokenizeRequest",
    "decode_request",
    "prompt_of",
    "template_messages",
]

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
MAX_STOP_STRINGS = 16


class StreamOptions(msgspec.Struct):
    """How an answer is streamed. ``include_usage`` adds a last chunk with the usage."""

    include_usage: bool = False


class KVTransferParams(msgspec.Struct, kw_only=True):
    """A request's part in a prefill/decode pair, in vLLM's words.

    Attributes:
        do_remote_decode: prefill here, and hold the KV cache for a decode worker.
        do_remote_prefill: the prompt was prefilled elsewhere; fetch its KV cache.
        transfer_id: names the pair.
        remote_engine_id, remote_host, remote_port: the prefill worker and its transfer engine.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    transfer_id: str | None = None
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None


class ContentPart(msgspec.Struct):
    """A piece of a message. Only text can be served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    kv_transfer_params: KVTransferParams | None = None
    # Known to the API and not served: see _UNSUPPORTED.
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which the answer ends."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOP_STRINGS:
            raise MalformedRequest(
                f"{len(stop)} stop strings; at most {MAX_STOP_STRINGS} are allowed", param="stop"
            )
        return tuple(stop)

    @property
    def token_limit(self) -> int | None:
        """Most tokens the client wants, under either name."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(GenerateRequest, kw_only=True):
    """Body of ``/v1/completions``. ``prompt`` is a text, or token ids, or a list with one text."""

    prompt: str | list[str | TokenId]


class ChatRequest(GenerateRequest, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message]
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``/tokenize``: either a prompt or messages. What changes a chat's tokens is taken, or refused,
    as there.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    continue_final_message: bool | None = None
    tools: list[Any] | None = None


# Values that ask for nothing special, per field; any other is refused.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "continue_final_message": (False,),
}

_RequestT = TypeVar("_RequestT", CompletionRequest, ChatRequest, TokenizeRequest)


def decode_request(body: bytes, kind: type[_RequestT]) -> _RequestT:
    """Read a body. Raises MalformedRequest or UnsupportedParameter, naming the field."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise MalformedRequest(
            f"the request body is not valid: {error}", param=_field_in(str(error))
        ) from error
    except msgspec.DecodeError as error:
        raise MalformedRequest(f"the request body is not JSON: {error}") from error
    for name, harmless in _UNSUPPORTED.items():
        value = getattr(request, name, None)
        if value is not None and value not in harmless:
            raise UnsupportedParameter(
                f"{name}={value!r} is not supported by this worker; leave it out", param=name
            )
    return request


def prompt_of(request: CompletionRequest) -> str | list[int]:
    """The prompt, as text or token ids. Raises MalformedRequest for none, or more than one."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt
    texts = [entry for entry in prompt if isinstance(entry, str)]
    token_ids = [entry for entry in prompt if isinstance(entry, int)]
    if not texts:
        return token_ids
    if token_ids or len(texts) > 1:
        raise MalformedRequest(
            "prompt must be one text or one list of token ids; send one request each", param="prompt"
        )
    return texts[0]


def template_messages(messages: list[Message]) -> list[dict[str, object]]:
    """Messages as chat templates take them: content as one text. Raises MalformedRequest."""
    if not messages:
        raise MalformedRequest("messages is empty; send at least one", param="messages")
    return [_template_message(number, message) for number, message in enumerate(messages)]


def _template_message(number: int, message: Message) -> dict[str, object]:
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise UnsupportedParameter(
                    f"message {number} has a part of type {part.type!r}; only text is supported",
                    param=f"messages[{number}].content",
                )
        content = "".join(part.text or "" for part in content)
    made: dict[str, object] = {"role": message.role, "content": content or ""}
    if message.name is not None:
        made["name"] = message.name
    return made


def _field_in(message: str) -> str | None:
    """The field msgspec complains about: the path at the end of its message, or the missing field's name."""
    path = re.search(r"at `\$\.?([^`]*)`", message)
    missing = re.search(r"missing required field `([^`]*)`", message)
    names = [found[1] for found in (path, missing) if found is not None and found[1]]
    return ".".join(names) or None
