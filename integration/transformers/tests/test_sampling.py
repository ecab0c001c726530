from __future__ import annotations

from collections import Counter

import pytest
import torch

from mooncake_transformers.answer import Answer
from mooncake_transformers.sampling import Sampling, choose_token
from mooncake_transformers.text_stream import TextStream

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0])


class Letters:
    def decode(self, token_ids: object) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)  # type: ignore[attr-defined]


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert {choose_token(LOGITS, Sampling(temperature=0.0, seed=seed), seed) for seed in range(20)} == {1}


def test_the_same_seed_and_place_draw_the_same_token_whatever_was_drawn_before() -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    there_and_back = [choose_token(LOGITS, sampling, place) for place in (0, 1, 2, 3, 2, 1, 0)]
    assert there_and_back[:4] == there_and_back[:2:-1]
    assert len({choose_token(LOGITS, sampling, place) for place in range(50)}) > 1


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    drawn = Counter(choose_token(LOGITS, Sampling(temperature=0.7, seed=3), place) for place in range(4000))
    expected = torch.softmax(LOGITS / 0.7, dim=0)
    for token in range(4):
        assert drawn[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {1}), (0.8, {1, 2}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_fewest_tokens_that_hold_it(top_p: float, kept: set[int]) -> None:
    sampling = Sampling(temperature=1.0, top_p=top_p, seed=1)
    assert {choose_token(LOGITS, sampling, place) for place in range(800)} == kept


def answer(max_tokens: int, stop: tuple[str, ...] = ()) -> Answer:
    return Answer(Sampling(temperature=0.0), TextStream(Letters(), stop), frozenset({25}), max_tokens)


def test_an_answer_ends_at_its_token_limit_with_all_its_text() -> None:
    made = answer(2)
    assert [(step.text, step.finish) for step in (made.accept(0), made.accept(1))] == [
        ("a", None),
        ("b", "length"),
    ]


def test_an_answer_ends_at_the_end_token_which_is_no_text() -> None:
    made = answer(5)
    made.accept(0)
    step = made.accept(25)
    assert (step.token, step.text, step.finish) == (25, "", "stop")


def test_an_answer_ends_at_a_stop_string_and_text_held_back_for_one_comes_out_otherwise() -> None:
    stopped, not_stopped = answer(5, ("bc",)), answer(3, ("bx",))
    assert [stopped.accept(token).text for token in (0, 1, 2)] == ["a", "", ""]
    assert stopped.accept(2).finish == "stop"
    assert [not_stopped.accept(token).text for token in (0, 1, 2)] == ["a", "", "bc"]
    cut_off = answer(2, ("bx",))
    assert [cut_off.accept(token).text for token in (0, 1)] == ["a", "b"]
