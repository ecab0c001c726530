"""The benchmarks run and say honestly what they know; how fast anything is, no test decides."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
KEYS = ["bench", "what", "unit", "ours", "peer", "peer_value", "ratio", "target", "met"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HERE))
    import rows

    return rows


def test_without_peers_a_row_has_our_value_and_no_verdict(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = bench(
        "transfer", "--quick", "--without-peers", "--only", "shm 64 B", "--only", "tcp posting",
        "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert [list(row)[: len(KEYS)] for row in found] == [KEYS] * len(found)
    against_nixl = [row for row in found if row["peer"].startswith("nixl")]
    assert len(against_nixl) == 2
    for row in against_nixl:
        assert row["ours"] > 0
        assert (row["peer_value"], row["ratio"], row["met"]) == (None, None, None)
        assert "--without-peers" in row["absent"]
        assert 0 < row["ours_p50_us"] <= row["ours_p99_us"]
        assert row["ours_core_wait_us"] >= 0
    (posting,) = [row for row in found if "posting" in row["what"]]
    assert posting["ours"] > 0
    assert posting["met"] == (posting["ours"] <= 2.0)
    assert "could not be judged" in done.stdout


def test_a_name_that_matches_no_row_is_an_error() -> None:
    done = bench("transfer", "--without-peers", "--only", "no such row")
    assert done.returncode == 2
    assert "nothing matches" in done.stdout


def test_rows_that_take_long_are_not_in_quick() -> None:
    done = bench("transfer", "--without-peers", "--quick", "--only", "shm 64 MiB", "--only", "shm 1 MiB read")
    assert done.returncode == 2
    assert "nothing matches" in done.stdout


def test_without_a_name_the_benchmarks_are_listed() -> None:
    done = bench()
    assert done.returncode == 0
    assert "transfer" in done.stdout


def test_a_target_is_judged_by_what_it_is_on(rows: Any) -> None:
    faster = rows.Row("b", "w", "us", 1.0, "p", 2.0, rows.Target(rows.RATIO, at_most=0.5))
    assert (faster.ratio, faster.met) == (0.5, True)
    slower = rows.Row("b", "w", "GB/s", 1.0, "p", 2.0, rows.Target(rows.RATIO, at_least=0.51))
    assert slower.met is False
    alone = rows.Row("b", "w", "ms", 3.0, target=rows.Target(rows.VALUE, at_most=2.0))
    assert (alone.ratio, alone.met) == (None, False)
    noisy = rows.Row("b", "w", "ms", 3.0, details={"ours_others_cores": 1.5, "peer_others_cores": 0.1})
    assert rows.noise([alone, noisy]) == 1.5
    absent = rows.Row("b", "w", "ms", 3.0, "p", None, rows.Target(rows.RATIO, at_most=2.0))
    assert absent.met is None
    assert rows.conclusion([faster, slower, alone, absent]) == (
        "1 of 3 targets met; 1 could not be judged, because a peer is absent"
    )


def test_a_table_for_a_readme_has_a_part_for_each_condition_and_the_slowest_hundredth(
    rows: Any, tmp_path: Path
) -> None:
    target = rows.Target(rows.RATIO, at_least=2.0)
    idle = {"condition": "idle", "ours_p99_us": 12.5, "peer_p99_us": 1e4}
    found = [
        rows.Row("b", "w, idle", "GB/s", 4.0, "p", 2.0, target, idle),
        rows.Row("b", "w, all cores busy", "GB/s", 3.0, "p", 2.0, target, {"condition": "busy"}),
        rows.Row("b", "alone, idle", "ms", 3.0, details={"condition": "idle"}),
    ]
    file = tmp_path / "new" / "table.md"
    rows.write_markdown(found, file)
    first, second = file.read_text().split("busy:\n")
    assert "| w, idle | GB/s | 4 | p | 2 | 2 | >= 2x | yes | 12.5 | 10,000 |" in first
    assert "| alone, idle | ms | 3 |  |  |  |  |  |  |  |" in first
    assert first.count("p99 us") == 2
    assert first.endswith("1 of 1 targets met.\n\n")
    assert "| w, all cores busy | GB/s | 3 | p | 2 | 1.5 | >= 2x | **no** |\n" in second
    assert "p99" not in second


def test_the_store_is_filled_and_traces_are_replayed_where_they_are(tmp_path: Path) -> None:
    requests = [[1, 2, 3], [1, 2, 4], [5, 6, 7], [1, 2, 3]]
    lines = "".join(json.dumps({"timestamp": 0, "hash_ids": blocks}) + "\n" for blocks in requests)
    (tmp_path / "conversation_trace.jsonl").write_text(lines)
    file = tmp_path / "rows.json"
    done = bench(
        "store", "--quick", "--without-peers", "--traces", str(tmp_path), "--json", str(file),
        "--only", "DSA", "--only", "conversation", "--only", "synthetic",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fill, *hits, absent = json.loads(file.read_text())
    assert fill["what"].startswith("fill, DSA pair")
    assert 50 < fill["least"] < fill["ours"] < 100
    assert fill["met"] == (fill["ours"] >= 99)
    # All seven blocks fit: of twelve that are asked for, those that came before are hits, whoever evicts.
    assert [(row["ours"], row["peer_value"]) for row in hits] == [(41.67, 41.67)] * 6
    assert [row["peer"] for row in hits[:3]] == ["exact LRU", "90 % watermark, evict 5 %", "Belady"]
    assert absent["ours"] is None
    assert "synthetic_trace.jsonl; it comes from https://" in absent["absent"]


def test_a_replay_counts_prefixes_and_knows_what_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    from store import replay

    from mooncake_store.eviction import find_eviction

    requests = [[1, 2, 3], [1, 2, 4], [5, 6, 7], [1, 2, 3]]
    for rule, room in replay.RULES.items():
        assert replay.replay_rule(requests, 4, room) == pytest.approx(100 * 2 / 12), rule
    assert replay.replay_policy(requests, 4, find_eviction("lru").make()) == pytest.approx(100 * 2 / 12)
    assert replay.replay_belady(requests, 4) == pytest.approx(100 * 5 / 12)
    # 2 and 3 are there, but not what they continue.
    assert replay.replay_rule([[1, 2, 3], [9, 2, 3]], 10, replay.RULES["exact LRU"]) == 0.0


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed (Debian: apt-get install fio)")
def test_files_are_measured_beside_fio(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = bench("nvmeof", "--quick", "--only", "reads of 4 KiB, depth 1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_text())
    assert (row["peer"], row["unit"], row["target"]) == ("fio", "MB/s", ">= 0.95x")
    assert row["ours"] > 0
    assert row["ratio"] == pytest.approx(row["ours"] / row["peer_value"], rel=0.01)
    assert row["met"] == (row["ratio"] >= 0.95)
