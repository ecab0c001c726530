"""What the demo makes of its answers: comparison, figures, table, JSON."""

from __future__ import annotations

import io
import json
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

from mooncake_transformers.demo.client import Answer
from mooncake_transformers.demo.conversation import CONVERSATIONS, handbook
from mooncake_transformers.demo.reference import Reference, first_difference
from mooncake_transformers.demo.report import Asked, Report, make_report, print_report, write_report


def answer(*, ttft_s: float = 0.5, cached_tokens: int = 0, token_ids: tuple[int, ...] = (4, 5)) -> Answer:
    return Answer(
        text="Four five",
        prompt_token_ids=[1, 2, 3],
        token_ids=list(token_ids),
        prompt_tokens=3,
        cached_tokens=cached_tokens,
        completion_tokens=len(token_ids),
        ttft_s=ttft_s,
        tbt_s=0.05,
        kv_bytes=2_000_000_000,
        kv_seconds=0.5,
        driver="shm",
    )


def reference(*token_ids: int, prompt: tuple[int, ...] = (1, 2, 3)) -> Reference:
    return Reference(prompt_token_ids=list(prompt), token_ids=list(token_ids), end_token_ids=[99])


def report_of(*answers: Answer) -> Report:
    asked = [Asked(visitor="a visitor", question="When?", messages=[], answer=one) for one in answers]
    references = [reference(4, 5) for _ in answers]
    return make_report(asked, references, model="m", dtype="float32", device="cpu")


@pytest.mark.parametrize("served", [(4, 5), (4, 5, 99)])
@pytest.mark.parametrize("expected", [(4, 5), (4, 5, 99)])
def test_equal_tokens_have_no_difference_whether_or_not_the_end_is_told(
    served: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert first_difference(answer(token_ids=served), reference(*expected)) is None


@pytest.mark.parametrize(
    ("served", "expected", "prompt", "difference"),
    [
        ((4, 5), (4, 6), (1, 2, 3), "answer token 1 is 5, expected 6"),
        ((4,), (4, 5), (1, 2, 3), "the answer has 1 tokens, expected 2"),
        ((4, 5), (4, 5), (1, 7, 3), "prompt token 1 is 2, expected 7"),
        ((), (), (1, 2), "the prompt has 3 tokens, expected 2"),
    ],
)
def test_a_difference_is_told_with_its_position(
    served: tuple[int, ...], expected: tuple[int, ...], prompt: tuple[int, ...], difference: str
) -> None:
    assert first_difference(answer(token_ids=served), reference(*expected, prompt=prompt)) == difference


def test_the_summary_compares_the_first_request_with_the_median_of_the_others() -> None:
    summary = report_of(
        answer(ttft_s=2.0),
        answer(ttft_s=0.5, cached_tokens=3),
        answer(ttft_s=0.4, cached_tokens=3),
        answer(ttft_s=9.0, cached_tokens=2),
    ).summary
    assert summary.cold_ttft_s == 2.0
    assert summary.warm_ttft_s == 0.5
    assert summary.speed_up == 4.0
    assert summary.hit_ratio == 8 / 12
    assert summary.tokens_equal
    assert summary.first_difference is None


def test_one_different_token_makes_the_whole_report_unequal_and_is_named() -> None:
    report = report_of(answer(), answer(token_ids=(4, 7)))
    assert [record.tokens_equal for record in report.requests] == [True, False]
    assert not report.summary.tokens_equal
    assert report.summary.first_difference == "request 2: answer token 1 is 7, expected 5"


def test_the_json_has_a_record_for_each_request_and_the_versions(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    write_report(report_of(answer(), answer(cached_tokens=3)), file)
    found = json.loads(file.read_text())
    assert set(found["requests"][1]) >= {
        "prompt_tokens", "cached_tokens", "ttft_s", "tbt_s", "kv_bytes", "driver"
    }  # fmt: skip
    assert set(found["summary"]) >= {"cold_ttft_s", "warm_ttft_s", "hit_ratio", "tokens_equal"}
    assert found["requests"][1]["gb_per_s"] == 4.0
    assert found["versions"]["mooncake-transformers"]


def test_the_versions_leave_out_a_driver_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "mooncake-driver-shm":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    versions = report_of(answer(), answer()).versions
    assert "mooncake-driver-shm" not in versions
    assert versions["mooncake-transformers"]


def test_the_table_is_whole_in_a_log_that_is_no_terminal() -> None:
    log = io.StringIO()
    print_report(report_of(answer(), answer(cached_tokens=3)), Console(file=log, width=118))
    text = log.getvalue()
    assert "\x1b" not in text
    assert "…" not in text
    assert "4.00" in text
    assert "equal to those of the same model run whole in one process" in text


def test_the_conversations_grow_turn_by_turn_behind_one_system_prompt() -> None:
    assert sum(len(one.questions) for one in CONVERSATIONS) >= 8
    conversation = CONVERSATIONS[0]
    first = conversation.messages(handbook(), [])
    third = conversation.messages(handbook(), ["So.", "Thus."])
    assert [one["role"] for one in first] == ["system", "user"]
    assert third[: len(first)] == first
    assert [one["role"] for one in third[1:]] == ["user", "assistant", "user", "assistant", "user"]
    assert third[-1]["content"] == conversation.questions[2]
