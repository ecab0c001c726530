"""``mooncake demo`` with the real model, once, from beginning to end."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from mooncake_transformers.cluster.testing import run_mooncake
from mooncake_transformers.demo.conversation import handbook

# The model is converted first where that was never done, which takes a minute or two.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_demo_shows_what_it_promises(tmp_path: Path) -> None:
    # Not above: both import torch, and whoever only collects tests should not wait for it.
    from mooncake_transformers.default_model import ensure_default_model
    from mooncake_transformers.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(ensure_default_model())
    assert len(tokenizer.encode(handbook())) >= 800

    file = tmp_path / "report.json"
    before = set(psutil.Process().children(recursive=True))
    done = run_mooncake("demo", "--json", str(file), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(psutil.Process().children(recursive=True)) <= before

    report = json.loads(file.read_text())
    requests, summary = report["requests"], report["summary"]
    assert len(requests) >= 8
    assert all(request["prompt_tokens"] > 800 for request in requests)
    assert all(request["kv_bytes"] > 0 and request["driver"] == "shm" for request in requests)
    assert requests[0]["cached_tokens"] == 0
    assert all(request["cached_tokens"] >= 800 for request in requests[1:])
    assert summary["tokens_equal"] is True
    assert summary["hit_ratio"] > 0.5
    assert summary["warm_ttft_s"] < summary["cold_ttft_s"] / 2
    assert "equal to those of the same model run whole in one process" in done.stdout
