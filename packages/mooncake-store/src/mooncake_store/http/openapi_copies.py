"""What the OpenAPI document says of replicas and draining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mooncake_store.protocol import CopyOutcome, Drained
from mooncake_store.telemetry.attributes import attributes_of

__all__ = ["copies_paths", "copies_schemas"]

JSON = "application/json"
TEXT, WHOLE, NUMBER, FLAG = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
SEGMENT = {**TEXT, "description": "A segment's id in hexadecimal."}
WAIT = {**NUMBER, "description": "How long to wait for it, in seconds; at most 60."}
ENCODING = {"type": "string", "enum": ["text", "hex"], "default": "text"}


def copies_paths(problems: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The paths."""

    def post(name: str, summary: str, body: str, answer: str | None, *more: int) -> dict[str, Any]:
        done = {"204": {"description": "Done."}} if answer is None else {"200": _answer(answer)}
        return {
            "post": {
                "summary": summary,
                "operationId": name,
                "requestBody": {"required": True, "content": {JSON: {"schema": _ref(body)}}},
                "responses": {
                    "204" if answer is None else "200": done,
                    **problems(400, 401, 415, 503, *more),
                },
            }
        }

    return {
        "/v1/copy": post("copy_object", "Make a replica of a value in a segment", "Copy", None, 404, 409),
        "/v1/move": post("move_object", "As copy, in place of another replica", "Move", None, 404, 409),
        "/v1/replicate": post(
            "replicate_objects", "Have so many replicas of values", "Replicate", "Outcomes", 413
        ),
        "/v1/replicas": post("find_replicas", "Where replicas of values lie", "Keys", "Replicas", 413),
        "/v1/drain": post("drain_segment", "Let a segment become empty", "Drain", "Drained", 403),
    }


def copies_schemas() -> dict[str, Any]:
    """The schemas."""
    copy = {"key": TEXT, "encoding": ENCODING, "target": SEGMENT, "timeout_s": WAIT}
    keys = {"keys": {"type": "array", "items": TEXT}, "encoding": ENCODING}
    outcome = {"type": "string", "enum": [one.name.lower() for one in CopyOutcome]}
    lists = {"type": "array", "items": SEGMENT, "nullable": True, "description": "Null: not there."}
    kinds = {"segment": TEXT, "on": FLAG, "done": FLAG, "stuck": FLAG, "reasons": {"type": "object"}}
    shown = {
        name: {**kinds.get(name, WHOLE), "description": said} for name, said in attributes_of(Drained).items()
    }
    return {
        "Copy": _object(copy, "key", "target"),
        "Move": _object({**copy, "source": SEGMENT}, "key", "source", "target"),
        "Replicate": _object({**keys, "replicas": WHOLE, "timeout_s": WAIT}, "keys", "replicas"),
        "Outcomes": _object({"outcomes": {"type": "array", "items": outcome}}),
        "Replicas": _object({"replicas": {"type": "array", "items": lists}}),
        "Drain": _object({"segment": SEGMENT, "on": FLAG, "timeout_s": WAIT}, "segment"),
        "Drained": _object({"segment": SEGMENT, **shown}),
    }


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object", "properties": properties}
    return {**made, "required": list(required)} if required else made


def _ref(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _answer(schema: str) -> dict[str, Any]:
    return {"description": "As it is now.", "content": {JSON: {"schema": _ref(schema)}}}
