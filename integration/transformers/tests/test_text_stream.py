from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_transformers.testing import save_tiny_model
from mooncake_transformers.text_stream import TextStream
from mooncake_transformers.tokenizer import Tokenizer


class Bytes:
    """A token is a byte."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def stream(text: bytes, stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    pieces = []
    answer = TextStream(Bytes(), stop)
    for token in text:
        pieces.append(answer.push(token))
        if answer.stopped:
            return pieces, True
    return [*pieces, answer.finish()], answer.stopped


@given(st.text(max_size=40))
def test_pieces_join_to_the_text_and_never_hold_half_a_character(text: str) -> None:
    pieces, stopped = stream(text.encode())
    assert "".join(pieces) == text
    assert not stopped
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string_and_no_part_of_one_gets_out(
    text: str, stop: list[str]
) -> None:
    pieces, stopped = stream(text.encode(), stop)
    found = [at for at in (text.find(one) for one in stop) if at >= 0]
    # A stop string is seen when it is complete, so the earliest to end wins; cut where that one begins.
    ends = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    assert stopped == bool(found)
    joined = "".join(pieces)
    assert joined == (text[: min(at for end, at in ends if end == min(ends)[0])] if ends else text)


def test_bytes_that_never_become_a_character_come_out_in_the_end() -> None:
    pieces, _ = stream(b"ab\xff\xfe")
    assert "".join(pieces) == "ab\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_invalid_bytes_do_not_hold_back_what_follows_for_good() -> None:
    answer = TextStream(Bytes())
    assert "".join(answer.push(0xFF) for _ in range(40)).count("\N{REPLACEMENT CHARACTER}") >= 30


def test_nothing_follows_a_stop_string() -> None:
    answer = TextStream(Bytes(), ["b"])
    assert [answer.push(token) for token in b"abc"] == ["a", "", ""]
    assert answer.stopped
    assert answer.finish() == ""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_tiny_model(Path(tmp_path_factory.mktemp("model"))))


def test_a_real_tokenizer_streams_its_own_text(tokenizer: Tokenizer) -> None:
    text = "Zażółć gęślą jaźń 🦆 done"
    answer = TextStream(tokenizer)
    pieces = [answer.push(token) for token in tokenizer.encode(text)]
    assert "".join([*pieces, answer.finish()]) == text
    assert "🦆" in pieces
