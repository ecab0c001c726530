"""What the demo found: one record a request, a summary, and both as a table and as JSON."""

from __future__ import annotations

import contextlib
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from mooncake_transformers.demo.client import Answer
from mooncake_transformers.demo.reference import Reference, first_difference

__all__ = ["Report", "RequestRecord", "Summary", "make_report", "print_report", "write_report"]

GB = 1e9
MB = 1e6
DISTRIBUTIONS = (
    "mooncake-transfer",
    "mooncake-store",
    "mooncake-conductor",
    "mooncake-driver-tcp",
    "mooncake-driver-shm",
    "mooncake-transformers",
    "torch",
    "transformers",
)


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the demo. Times in seconds, ``gb_per_s`` in 10^9 bytes a second."""

    visitor: str
    question: str
    answer: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    tbt_s: float
    kv_bytes: int
    kv_seconds: float
    gb_per_s: float
    driver: str
    prefill_seconds: float
    tokens_equal: bool


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's result.

    Attributes:
        cold_ttft_s: time to first token of the first request, whose prompt nobody had computed before.
        warm_ttft_s: median of the others, which share its system prompt.
        speed_up: the former divided by the latter.
        hit_ratio: cached tokens divided by prompt tokens, over all requests.
        kv_bytes: KV cache moved between workers, over all requests.
        tokens_equal: whether every token equals that of the model run whole in one process.
        first_difference: where they first differ, in words; None when they are equal.
    """

    cold_ttft_s: float
    warm_ttft_s: float
    speed_up: float
    hit_ratio: float
    prompt_tokens: int
    cached_tokens: int
    kv_bytes: int
    tokens_equal: bool
    first_difference: str | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, as ``--json`` writes it."""

    model: str
    dtype: str
    device: str
    requests: list[RequestRecord]
    summary: Summary
    versions: dict[str, str]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A question that was asked, and the answer that came back."""

    visitor: str
    question: str
    messages: list[dict[str, str]]
    answer: Answer


def make_report(
    asked: Sequence[Asked], references: Sequence[Reference], *, model: str, dtype: str, device: str
) -> Report:
    """Compare each answer with its reference and sum up. At least two requests, as many references."""
    assert len(asked) == len(references) >= 2
    differences = [
        first_difference(one.answer, reference) for one, reference in zip(asked, references, strict=True)
    ]
    records = [_record(one, difference is None) for one, difference in zip(asked, differences, strict=True)]
    warm_ttft_s = statistics.median(record.ttft_s for record in records[1:])
    prompt_tokens = sum(record.prompt_tokens for record in records)
    cached_tokens = sum(record.cached_tokens for record in records)
    found = [f"request {number}: {text}" for number, text in enumerate(differences, 1) if text is not None]
    summary = Summary(
        cold_ttft_s=records[0].ttft_s,
        warm_ttft_s=warm_ttft_s,
        speed_up=records[0].ttft_s / warm_ttft_s,
        hit_ratio=cached_tokens / prompt_tokens,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        kv_bytes=sum(record.kv_bytes for record in records),
        tokens_equal=not found,
        first_difference=found[0] if found else None,
    )
    return Report(
        model=model, dtype=dtype, device=device, requests=records, summary=summary, versions=_versions()
    )


def write_report(report: Report, path: Path) -> None:
    """Write the report as indented JSON. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def print_report(report: Report, console: Console) -> None:
    """Print the table, one row a request, and the summary."""
    table = Table()
    table.add_column("#", justify="right")
    table.add_column("who asks")
    for heading in ("prompt tokens", "cached tokens", "TTFT", "mean TBT", "KV moved", "GB/s"):
        table.add_column(heading, justify="right")
    table.add_column("driver")
    table.add_column("tokens equal")
    for number, record in enumerate(report.requests, 1):
        table.add_row(
            str(number),
            record.visitor,
            f"{record.prompt_tokens:,}",
            f"{record.cached_tokens:,}",
            f"{record.ttft_s:.3f} s",
            f"{record.tbt_s * 1000:.0f} ms",
            f"{record.kv_bytes / MB:.1f} MB",
            f"{record.gb_per_s:.2f}" if record.gb_per_s else "-",
            record.driver or "-",
            "[green]yes[/]" if record.tokens_equal else "[bold red]no[/]",
        )
    console.print(table)
    _print_summary(report.summary, console)


def _print_summary(summary: Summary, console: Console) -> None:
    cold_and_warm = f"{summary.cold_ttft_s:.3f} s cold, {summary.warm_ttft_s:.3f} s warm (median)"
    share = f"{summary.cached_tokens:,} of {summary.prompt_tokens:,} prompt tokens were not computed again"
    if summary.tokens_equal:
        verdict = "[green]equal[/] to those of the same model run whole in one process"
    else:
        verdict = "[bold red]different[/] from those of the same model run whole in one process: "
        verdict += summary.first_difference or ""
    lines = (
        ("time to first token", f"{cold_and_warm}: {summary.speed_up:.1f} times as fast"),
        ("hit ratio", f"{summary.hit_ratio:.2f}: {share}"),
        ("KV cache moved", f"{summary.kv_bytes / MB:,.1f} MB from prefill to decode"),
        ("greedy tokens", verdict),
    )
    for title, text in lines:
        console.print(f"[bold]{title:<20}[/] {text}", soft_wrap=True)


def _record(asked: Asked, is_equal: bool) -> RequestRecord:
    answer = asked.answer
    return RequestRecord(
        visitor=asked.visitor,
        question=asked.question,
        answer=answer.text,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=answer.completion_tokens,
        ttft_s=answer.ttft_s,
        tbt_s=answer.tbt_s,
        kv_bytes=answer.kv_bytes,
        kv_seconds=answer.kv_seconds,
        gb_per_s=answer.kv_bytes / answer.kv_seconds / GB if answer.kv_seconds > 0 else 0.0,
        driver=answer.driver,
        prefill_seconds=answer.prefill_seconds,
        tokens_equal=is_equal,
    )


def _versions() -> dict[str, str]:
    """Of what is installed; a cluster needs not every driver."""
    versions = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
