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
