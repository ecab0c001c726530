"""The OpenAPI document of the HTTP interface."""

from __future__ import annotations

from typing import Any

from mooncake_store._errors import StoreError
from mooncake_store.http.openapi_copies import copies_paths, copies_schemas
from mooncake_store.http.problems import MEDIA_TYPE, STATUS, type_of
from mooncake_store.protocol import StoreStats
from mooncake_store.telemetry.attributes import attributes_of

__all__ = ["document"]

JSON = "application/json"
OCTETS = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
KEY = {
    "name": "key",
    "in": "path",
    "required": True,
    "description": "The key, percent-encoded; a slash may stand as it is.",
    "schema": {"type": "string"},
}
KEY_ENCODING = {
    "name": "key_encoding",
    "in": "query",
    "description": "`hex`: the key is written in hexadecimal, for keys that are no text.",
    "schema": {"type": "string", "enum": ["text", "hex"], "default": "text"},
}
IF_EXISTS = {
    "name": "if_exists",
    "in": "query",
    "description": "A key that is taken: is an error, keeps what it has, or gets the new value.",
    "schema": {"type": "string", "enum": ["error", "keep", "replace"], "default": "error"},
}
KEPT = (
    ("replicas", "Copies, each with another owner.", "integer"),
    ("priority", "0 to 15; values of lower priority are evicted first.", "integer"),
    ("group", "Values of one group are evicted together.", "string"),
    ("session", "Values of a session go first once it has ended.", "string"),
    ("hard_pin", "Never evict it.", "boolean"),
    ("soft_pin_s", "For so many seconds, evict it only when nothing else is left.", "number"),
    ("same_node", "Prefer memory of the server's machine.", "boolean"),
    ("stripes", "1 to 4; large values are cut into so many pieces with different owners.", "integer"),
)
TEXT = {"text/plain": {"schema": {"type": "string"}}}
RANGE = {
    "name": "Range",
    "in": "header",
    "description": "One range: `bytes=0-99`, `bytes=100-`, `bytes=-100`.",
    "schema": {"type": "string"},
}
KEYS = {
    "required": True,
    "content": {JSON: {"schema": {"$ref": "#/components/schemas/Keys"}}},
}


def document(version: str, *, secret: bool) -> dict[str, Any]:
    """The document. ``secret``: a token is needed."""
    described: dict[str, Any] = {
        "openapi": "3.0.3",
        "info": {
            "title": "Mooncake store",
            "version": version,
            "description": "A distributed KV-cache store: whole values under keys of text or bytes.",
        },
        "paths": _paths(),
        "components": {"schemas": _schemas()},
    }
    if secret:
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"token": []}]
    return described


def _paths() -> dict[str, Any]:
    return {
        "/v1/objects/{key}": {"parameters": [KEY, KEY_ENCODING], **_object_calls()},
        "/v1/objects": _many_objects_calls(),
        "/v1/pins/{key}": {"parameters": [KEY, KEY_ENCODING], **_pin_calls()},
        "/v1/end-session": _end_session_call(),
        "/v1/exist": _post("exist", "Which of many keys have values", "Exist"),
        "/v1/remove": _post("remove", "Remove many values", "Removed"),
        **copies_paths(_problems),
        "/v1/stats": _get("stats", "Numbers of the whole store", "Stats"),
        "/v1/segments": _get("segments", "The memory lent, segment by segment", "Segments"),
        "/v1/report": _get("report", "Everything that the page shows", "Report"),
        "/health": _get("health", "Whether the store answers", "Health"),
        "/metrics": {
            "get": {
                "summary": "Metrics for Prometheus",
                "operationId": "get_metrics",
                "responses": {"200": {"description": "The text format.", "content": TEXT}, **_problems(401)},
            }
        },
    }


def _object_calls() -> dict[str, Any]:
    errors = (400, 401, 503)
    return {
        "put": {
            "summary": "Store a value",
            "operationId": "put_object",
            "parameters": [IF_EXISTS, *(_query(name, said, kind) for name, said, kind in KEPT)],
            "requestBody": {"required": True, "content": OCTETS},
            "responses": {
                "201": {"description": "Stored."},
                "204": {"description": "Stored, or with `if_exists=keep` there already."},
                **_problems(*errors, 409, 413, 429, 507),
            },
        },
        "get": {
            "summary": "Read a value, or a range of it",
            "operationId": "get_object",
            "description": "When the whole length of the answer has arrived, its bytes are right.",
            "parameters": [RANGE],
            "responses": {
                "200": {"description": "The value.", "content": OCTETS},
                "206": {"description": "The range.", "content": OCTETS},
                **_problems(*errors, 404, 416),
            },
        },
        "head": {
            "summary": "Size of a value",
            "operationId": "head_object",
            "responses": {"200": {"description": "`Content-Length` is its size."}, **_problems(401, 404)},
        },
        "delete": {
            "summary": "Remove a value",
            "operationId": "delete_object",
            "responses": {"204": {"description": "Removed."}, **_problems(*errors, 404)},
        },
    }


def _many_objects_calls() -> dict[str, Any]:
    pattern = _query("pattern", "A regular expression that is found in the key.", "string")
    prefix = _query("prefix", "What the key begins with.", "string")
    return {
        "get": {
            "summary": "Keys and sizes of values",
            "operationId": "list_objects",
            "parameters": [pattern, prefix, _query("limit", "Most keys in the answer.", "integer")],
            "responses": {"200": _json_answer("Objects"), **_problems(400, 401, 503)},
        },
        "delete": {
            "summary": "Remove the values whose keys match",
            "operationId": "delete_objects",
            "parameters": [pattern, prefix, _query("all", "`true`: every value of the tenant.", "boolean")],
            "responses": {"200": _json_answer("Count"), **_problems(400, 401, 503)},
        },
    }


def _pin_calls() -> dict[str, Any]:
    soft = _query("soft_s", "For so many seconds, while others can go; without it, for good.", "number")
    errors = _problems(400, 401, 404, 503)
    return {
        "put": {
            "summary": "Keep a value from being evicted",
            "operationId": "put_pin",
            "parameters": [soft],
            "responses": {"204": {"description": "Pinned."}, **errors},
        },
        "delete": {
            "summary": "End the pins of a value",
            "operationId": "delete_pin",
            "responses": {"204": {"description": "Not pinned any more."}, **errors},
        },
    }


def _end_session_call() -> dict[str, Any]:
    schema = {"type": "object", "required": ["session"], "properties": {"session": {"type": "string"}}}
    return {
        "post": {
            "summary": "Let the values of a session be the first to go",
            "operationId": "end_session",
            "requestBody": {"required": True, "content": {JSON: {"schema": schema}}},
            "responses": {"200": _json_answer("Ended"), **_problems(400, 401, 415, 503)},
        }
    }


def _query(name: str, said: str, kind: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": said, "schema": {"type": kind}}


def _get(name: str, summary: str, schema: str) -> dict[str, Any]:
    return {
        "get": {
            "summary": summary,
            "operationId": f"get_{name}",
            "responses": {"200": _json_answer(schema), **_problems(401, 403, 503)},
        }
    }


def _post(name: str, summary: str, schema: str) -> dict[str, Any]:
    return {
        "post": {
            "summary": summary,
            "operationId": f"{name}_objects",
            "requestBody": KEYS,
            "responses": {"200": _json_answer(schema), **_problems(400, 401, 413, 415, 503)},
        }
    }


def _json_answer(schema: str) -> dict[str, Any]:
    return {
        "description": "In the order of the keys." if schema in ("Exist", "Removed") else "The numbers now.",
        "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }


def _problems(*statuses: int) -> dict[str, Any]:
    kinds: dict[int, list[str]] = {}
    for error, status in STATUS.items():
        kinds.setdefault(int(status), []).append(f"`{type_of(error)}`")
    return {
        str(status): {
            "description": "Problem: " + ", ".join(kinds.get(status, ["see `type`"])) + ".",
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted(statuses)
    }


def _schemas() -> dict[str, Any]:
    whole, text, flags = (
        {"type": "integer"},
        {"type": "string"},
        {"type": "array", "items": {"type": "boolean"}},
    )
    return {
        "Keys": {
            "type": "object",
            "required": ["keys"],
            "properties": {
                "keys": {"type": "array", "items": text},
                "encoding": {"type": "string", "enum": ["text", "hex"], "default": "text"},
            },
        },
        "Exist": {"type": "object", "properties": {"exist": flags}},
        "Removed": {"type": "object", "properties": {"removed": flags}},
        "Objects": {
            "type": "object",
            "properties": {
                "objects": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "key": {"type": "string", "nullable": True, "description": "Null for no text."},
                            "key_hex": text,
                            "bytes": whole,
                        },
                    },
                },
                "more": {**whole, "description": "How many others there are."},
            },
        },
        **copies_schemas(),
        "Ended": {"type": "object", "properties": {"values": {**whole, "description": "How many it had."}}},
        "Count": {"type": "object", "properties": {"removed": whole}},
        "Health": {"type": "object", "properties": {"status": text}},
        "Stats": {
            "type": "object",
            "properties": {
                name: {**whole, "description": said} for name, said in attributes_of(StoreStats).items()
            },
        },
        "Segments": {
            "type": "object",
            "properties": {"segments": {"type": "array", "items": {"type": "object"}}},
        },
        "Report": {"type": "object", "additionalProperties": True},
        "Problem": {
            "type": "object",
            "description": "RFC 9457. `type` is `urn:mooncake-store:` and one of "
            + ", ".join(f"`{type_of(error)}`" for error in STATUS if error is not StoreError)
            + " or of the interface's own.",
            "properties": {
                "type": text,
                "title": text,
                "status": whole,
                "detail": text,
                "instance": text,
            },
        },
    }
