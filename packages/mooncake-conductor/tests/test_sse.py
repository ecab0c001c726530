"""Cutting and reading server-sent events."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_conductor import sse
from mooncake_conductor.sse import EventSplitter, as_event, is_preamble, json_event, read_event


@given(
    st.lists(
        st.binary(max_size=20).map(lambda data: data.replace(b"\r", b"").replace(b"\n", b"")), max_size=6
    ),
    st.data(),
)
def test_events_come_out_whole_however_the_bytes_are_cut(events: list[bytes], data) -> None:
    newline = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    stream = b": comment\n\n".join(map(as_event, events)).replace(b"\n", newline)
    splitter, received = EventSplitter(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        received += splitter.feed(stream[:cut])
        stream = stream[cut:]
    assert received == events


def test_several_data_lines_are_one_event() -> None:
    assert list(EventSplitter().feed(b"event: x\ndata: a\ndata: b\nid: 1\n\n")) == [b"a\nb"]
    assert list(EventSplitter().feed(as_event(b"a\nb"))) == [b"a\nb"]


def test_an_event_without_end_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(sse, "EVENT_LIMIT_BYTES", 10)
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        list(EventSplitter().feed(b"data: 0123456789"))


def test_json_goes_through_an_event() -> None:
    (data,) = EventSplitter().feed(json_event({"text": "a\n\nb"}))
    assert read_event(data) == {"text": "a\n\nb"}


@pytest.mark.parametrize("data", [b"[DONE]", b"", b"[1]", b"{"])
def test_what_is_no_json_object_reads_as_empty(data: bytes) -> None:
    assert read_event(data) == {}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"delta": {"role": "assistant", "content": ""}}, True),
        ({"delta": {"role": "assistant"}}, True),
        ({"delta": {"role": "assistant", "content": "Hi"}}, False),
        ({"delta": {"content": ""}}, False),
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": "stop"}, False),
        ({"text": ""}, False),
    ],
)
def test_only_a_role_without_content_is_a_preamble(choice, expected: bool) -> None:
    assert is_preamble(json.loads(json.dumps({"choices": [choice]}))) is expected


def test_a_usage_chunk_is_no_preamble() -> None:
    assert not is_preamble({"choices": [], "usage": {}})
