"""Checks what clients send, and keeps what the conductor itself needs of it. Pure.

Fields that are not listed here are the worker's business: they are passed on as they came.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from mooncake_conductor._errors import InvalidRequest
from mooncake_store.kv_events.wire import TokenId

__all__ = [
    "GenerationRequest",
    "PrefixQuery",
    "TokenizeRequest",
    "WorkerReference",
    "parse_chat",
    "parse_completion",
    "parse_struct",
]

# What may change how a chat becomes tokens.
CHAT_TEMPLATE_FIELDS = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
# The roles of OpenAI's API.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_Count = Annotated[int, msgspec.Meta(ge=1)]
_T = TypeVar("_T")


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Common(msgspec.Struct):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    n: _Count | None = None
    best_of: _Count | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class _Chat(_Common, kw_only=True):
    messages: list[_Message]


class _Completion(_Common, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]


class TokenizeRequest(msgspec.Struct):
    """Body of ``POST /tokenize``; the rest of it is for the worker."""

    model: str


class PrefixQuery(msgspec.Struct):
    """Body of ``POST /query``."""

    model: str
    token_ids: list[TokenId]


class WorkerReference(msgspec.Struct):
    """Body of ``POST /register`` and ``POST /unregister``."""

    url: str


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request.

    Attributes:
        path: of the worker API.
        body: the client's JSON object; without the nulls of fields that are read here, which all mean "not
            given", and with the one prompt of a list in its place.
        model: name of the model.
        stream: whether the answer is sent as events.
        max_tokens: how many tokens the client wants at most, if it says so.
        token_ids: the prompt, when it came as token ids.
    """

    path: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]
    model: str
    stream: bool
    max_tokens: int | None
    token_ids: list[int] | None = None

    def tokenize_body(self) -> dict[str, Any]:
        """Body of the ``POST /tokenize`` that turns the prompt into tokens."""
        fields = ("prompt",) if "prompt" in self.body else ("messages", *CHAT_TEMPLATE_FIELDS)
        return {"model": self.model, **{name: self.body[name] for name in fields if name in self.body}}


def parse_chat(raw: bytes) -> GenerationRequest:
    """Check the body of a chat completion. Raises InvalidRequest, which names the field."""
    checked = parse_struct(raw, _Chat)
    if not checked.messages:
        raise InvalidRequest(
            "messages is empty; send at least one message.", code="empty_messages", param="messages"
        )
    for number, message in enumerate(checked.messages):
        if message.role not in ROLES:
            raise InvalidRequest(
                f"messages[{number}] has the role {message.role!r}; known roles are {', '.join(ROLES)}.",
                code="invalid_request",
                param=f"messages[{number}].role",
            )
        # An assistant's message may consist of tool calls alone.
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(
                f"messages[{number}] has no content, which role {message.role!r} needs.",
                code="invalid_request",
                param=f"messages[{number}].content",
            )
    return _request("/v1/chat/completions", raw, checked)


def parse_completion(raw: bytes) -> GenerationRequest:
    """Check the body of a text completion. Raises InvalidRequest, which names the field."""
    checked = parse_struct(raw, _Completion)
    prompt = _one_prompt(checked.prompt)
    if not prompt:
        raise InvalidRequest("prompt is empty; send text or token ids.", code="empty_prompt", param="prompt")
    return _request("/v1/completions", raw, checked, prompt)


def parse_struct(raw: bytes, kind: type[_T]) -> _T:
    """Read a JSON body as ``kind``. Raises InvalidRequest, which names the field that is wrong."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        param = _wrong_field(str(error))
        raise InvalidRequest(
            f"The request is not valid: {error}.", code="invalid_request", param=param
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not JSON: {error}.", code="invalid_json") from error


def _wrong_field(message: str) -> str | None:
    missing = re.search(r"missing required field `(\w+)`", message)
    within = re.search(r"at `\$\.?([^`]*)`$", message)
    parts = [match.group(1) for match in (within, missing) if match]
    return ".".join(parts) or None


def _one_prompt(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    """The prompt as text or token ids. Raises InvalidRequest for more than one."""
    if isinstance(prompt, str):
        return prompt
    token_ids = [entry for entry in prompt if isinstance(entry, int)]
    prompts = [entry for entry in prompt if not isinstance(entry, int)]
    if not prompts:
        return token_ids
    if token_ids:
        message = "prompt mixes token ids with whole prompts; send one text or one list of token ids."
    elif len(prompts) > 1:
        message = (
            f"prompt is a list of {len(prompts)} prompts; one can be served per request: send each alone."
        )
    else:
        return prompts[0]
    raise InvalidRequest(message, code="invalid_request", param="prompt")


def _request(
    path: Literal["/v1/completions", "/v1/chat/completions"],
    raw: bytes,
    checked: _Common,
    prompt: str | list[int] | None = None,
) -> GenerationRequest:
    _refuse_what_decode_would(checked)
    read_here = {*checked.__struct_fields__, *CHAT_TEMPLATE_FIELDS}
    fields = msgspec.json.decode(raw, type=dict[str, Any])
    body = {name: value for name, value in fields.items() if value is not None or name not in read_here}
    if prompt is not None:
        body["prompt"] = prompt
    if checked.stream_options is not None and checked.stream_options.include_usage is None:
        body["stream_options"].pop("include_usage", None)
    return GenerationRequest(
        path=path,
        body=body,
        model=checked.model,
        stream=bool(checked.stream),
        max_tokens=checked.max_completion_tokens or checked.max_tokens,
        token_ids=prompt if isinstance(prompt, list) else None,
    )


def _refuse_what_decode_would(checked: _Common) -> None:
    """Refuse what a prefill worker, which is asked for one token, would let pass and compute in vain."""
    for name, value in (("n", checked.n), ("best_of", checked.best_of)):
        if value is not None and value > 1:
            raise InvalidRequest(
                f"{name} is {value}; one answer is given per request: leave it out and send more requests.",
                code="unsupported_parameter",
                param=name,
            )
    if checked.stream_options is not None and not checked.stream:
        raise InvalidRequest(
            "stream_options is for streams only; leave it out or set stream to true.",
            code="invalid_request",
            param="stream_options",
        )
    limit = checked.max_completion_tokens or checked.max_tokens
    if limit is not None and checked.min_tokens is not None and checked.min_tokens > limit:
        raise InvalidRequest(
            f"min_tokens is {checked.min_tokens}, more than the {limit} tokens allowed at most.",
            code="invalid_request",
            param="min_tokens",
        )
