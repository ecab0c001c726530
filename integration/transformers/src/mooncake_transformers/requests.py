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
    "ReleaseRequest",
    "TokenizeRequest",
    "decode_request",
    "prompt_of",
    "template_messages",
]

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
MAX_STOP_STRINGS = 16
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


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
    tool_call_id: str | None = None
    # Known to the API and not served: a template would need the tools too.
    tool_calls: list[Any] | None = None
    function_call: Any = None
    audio: Any = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common; see _UNSUPPORTED for what is refused."""

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


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of ``/tokenize``: either a prompt or messages. What changes a chat's tokens is taken, or refused,
    as there.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class ReleaseRequest(msgspec.Struct):
    """Body of ``/kv/release``: the transfer that nobody will fetch."""

    transfer_id: Annotated[str, msgspec.Meta(min_length=1)]


# Fields that would change a prompt's tokens, and the values that ask for nothing; any other is refused.
_UNSUPPORTED_IN_PROMPTS: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
}
# The same for fields that would change the answer.
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
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json_object": (False,),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_UNSUPPORTED_PER_KIND: dict[type, dict[str, tuple[object, ...]]] = {
    CompletionRequest: _UNSUPPORTED_IN_PROMPTS | _UNSUPPORTED,
    ChatRequest: _UNSUPPORTED_IN_PROMPTS | _UNSUPPORTED,
    TokenizeRequest: _UNSUPPORTED_IN_PROMPTS,
    ReleaseRequest: {},
}

_RequestT = TypeVar("_RequestT", CompletionRequest, ChatRequest, TokenizeRequest, ReleaseRequest)


def decode_request(body: bytes, kind: type[_RequestT]) -> _RequestT:
    """Read a body; a field that is null counts as absent. Raises MalformedRequest or UnsupportedParameter,
    naming the field.
    """
    try:
        fields = _without_nulls(msgspec.json.decode(body))
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise MalformedRequest(
            f"the request body is not valid: {error}", param=_field_in(str(error))
        ) from error
    except msgspec.DecodeError as error:
        raise MalformedRequest(f"the request body is not JSON: {error}") from error
    for name, harmless in _UNSUPPORTED_PER_KIND[kind].items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise UnsupportedParameter(
                f"{name}={value!r} is not supported by this worker; leave it out", param=name
            )
    return request


def _without_nulls(body: Any) -> Any:
    """``body`` without the fields that are null, also in the objects of our own one level below."""
    if not isinstance(body, dict):
        return body
    fields = {name: value for name, value in body.items() if value is not None}
    for name in ("stream_options", "kv_transfer_params"):
        if isinstance(inner := fields.get(name), dict):
            fields[name] = {key: value for key, value in inner.items() if value is not None}
    return fields


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
    if message.role not in ROLES:
        raise MalformedRequest(
            f"message {number} has the role {message.role!r}; use one of {', '.join(ROLES)}",
            param=f"messages[{number}].role",
        )
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            raise UnsupportedParameter(
                f"message {number} has {name}, which is not supported by this worker; leave it out",
                param=f"messages[{number}].{name}",
            )
    content = message.content
    if content is None:
        raise MalformedRequest(
            f"message {number} has no content; give it a text", param=f"messages[{number}].content"
        )
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise UnsupportedParameter(
                    f"message {number} has a part of type {part.type!r}; only text is supported",
                    param=f"messages[{number}].content",
                )
        content = "".join(part.text or "" for part in content)
    made: dict[str, object] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    return made


def _field_in(message: str) -> str | None:
    """The field msgspec complains about: the path at the end of its message, or the missing field's name."""
    path = re.search(r"at `\$\.?([^`]*)`", message)
    missing = re.search(r"missing required field `([^`]*)`", message)
    names = [found[1] for found in (path, missing) if found is not None and found[1]]
    return ".".join(names) or None
