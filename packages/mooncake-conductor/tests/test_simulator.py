"""The simulator: what it charges, how it counts, and what its command says."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from mooncake_conductor.errors import TraceUnreadable
from mooncake_conductor.simulator.caches import make_caches, match, store
from mooncake_conductor.simulator.cluster import ClusterShape, simulate
from mooncake_conductor.simulator.figures import FIGURES
from mooncake_conductor.simulator.model import LLAMA_70B_A800, prefill_s, step_s, transfer_s
from mooncake_conductor.simulator.traces import read_mooncake, write_mooncake
from mooncake_transfer.cli import build_app

BLOCK = 512


def request(at_ms, blocks, output=10, tokens=None):
    length = len(blocks) * BLOCK if tokens is None else tokens
    return {"timestamp": at_ms, "input_length": length, "output_length": output, "hash_ids": list(blocks)}


@pytest.fixture
def traced(tmp_path):
    """A trace of these requests."""

    def make(*requests):
        path = tmp_path / "trace.jsonl"
        write_mooncake(path, requests)
        return read_mooncake(path)

    return make


@pytest.fixture
def sessions(traced):
    """20 sessions of 8 turns, each of which continues the one before."""
    turns = [
        request(10_000 * turn + 300 * session, [session, *range(1000 * session, 1000 * session + 6 * turn)])
        for turn in range(1, 9)
        for session in range(20)
    ]
    return traced(*turns)


def test_a_request_alone_takes_as_long_as_the_model_says(traced):
    alone = simulate(traced(request(0, range(8), output=11)), "least_tokens")
    assert alone.ttft_s[0] == pytest.approx(prefill_s(LLAMA_70B_A800, 8 * BLOCK, 0))
    assert alone.tbt_s[0] == pytest.approx(step_s(LLAMA_70B_A800, 8 * BLOCK + 5.0))
    assert (alone.reused[0], alone.instance[0]) == (0, 0)


def test_prefill_is_the_paper_s_flops_and_a_transfer_its_bytes():
    flops = 80 * (2 * 1000**2 * 8192 + 22 * 1000 * 8192**2)
    assert prefill_s(LLAMA_70B_A800, 1000, 0) == pytest.approx(flops / (8 * 312e12 * 0.45))
    whole, rest = prefill_s(LLAMA_70B_A800, 1000, 0), prefill_s(LLAMA_70B_A800, 1000, 600)
    assert rest == pytest.approx(whole - prefill_s(LLAMA_70B_A800, 600, 0))
    assert transfer_s(LLAMA_70B_A800, 1000) == pytest.approx(1000 * 327_680 / 100e9)


def test_requests_of_one_instance_wait_for_each_other(traced):
    trace = traced(request(0, range(8)), request(0, range(10, 18)))
    found = simulate(trace, "least_tokens", ClusterShape(prefill=1))
    assert found.ttft_s[1] == pytest.approx(2 * found.ttft_s[0])


def test_a_prefix_is_reused_but_for_the_last_token(traced):
    trace = traced(request(0, range(8)), request(60_000, range(8)), request(120_000, [*range(4), 90, 91]))
    found = simulate(trace, "local_cache_aware", ClusterShape(prefill=1))
    assert found.reused.tolist() == [0, 8 * BLOCK - 1, 4 * BLOCK]


def test_a_full_cache_loses_what_was_used_longest_ago_from_its_end():
    caches, held = make_caches(1, 100, 6), np.zeros(1, np.int64)
    store(caches, 0, np.arange(4))
    store(caches, 0, np.array([50, 51, 52]))
    match(caches, np.arange(4), held)
    assert held[0] == 3  # of the older prompt its last block went, not its first
    assert store(caches, 0, np.array([0, 1])) == 0
    store(caches, 0, np.array([60, 61]))
    match(caches, np.arange(4), held)
    assert held[0] == 2


def test_caches_agree_with_a_plain_model_of_them():
    chance = np.random.default_rng(3)
    caches, held = make_caches(3, 40, 12), np.zeros(3, np.int64)
    plain = [[], [], []]  # blocks, the oldest first
    for _ in range(2000):
        prompt = np.unique(chance.integers(0, 40, chance.integers(1, 8)))
        match(caches, prompt, held)
        for i, known in enumerate(plain):
            depth = next((at for at, block in enumerate(prompt) if block not in known), len(prompt))
            assert held[i] == depth
        i = int(chance.integers(0, 3))
        store(caches, i, prompt)
        mine = [block for block in plain[i] if block not in prompt] + prompt[::-1].tolist()
        plain[i] = mine[-12:]
        assert caches.used[i] == len(plain[i])


def test_fetching_beats_recomputing_where_the_network_is_fast_and_is_not_tried_where_it_is_slow(sessions):
    slow = ClusterShape(prefill=4, model=LLAMA_70B_A800._replace(network_bytes_s=1e6), decode=0)
    fast = ClusterShape(prefill=4, decode=0)
    local = simulate(sessions, "local_cache_aware", fast)
    assert simulate(sessions, "overlapped", fast).mean_ttft_s <= local.mean_ttft_s
    assert simulate(sessions, "overlapped", slow).mean_ttft_s == pytest.approx(local.mean_ttft_s)


def test_admission_rejects_what_would_come_too_late_and_nothing_else(sessions):
    shape = ClusterShape(prefill=1, decode=0, admits=True, ttft_slo_s=1.0)
    found = simulate(sessions.faster(20), "local_cache_aware", shape)
    rejected = np.isnan(found.ttft_s)
    assert 0 < rejected.sum() < len(sessions)
    assert (found.ttft_s[~rejected] <= 1.0).all()
    assert found.within(1.0, 1.0) == pytest.approx(1 - rejected.mean())


def test_all_tokens_come_and_a_larger_batch_takes_longer_steps(traced):
    trace = traced(*(request(0, [10 * n, 10 * n + 1], output=200) for n in range(30)))
    few, one = (simulate(trace, "least_tokens", ClusterShape(decode=n)) for n in (8, 1))
    assert not np.isnan(one.tbt_s).any()
    assert np.mean(one.tbt_s) > np.mean(few.tbt_s) > step_s(LLAMA_70B_A800, 2 * BLOCK)
    assert np.nanmax(one.worst_tbt_s) >= np.nanmax(one.tbt_s) - 1e-12


def test_the_same_seed_gives_the_same_run(sessions):
    first, again, other = (simulate(sessions, "random", seed=seed) for seed in (1, 1, 2))
    assert (first.instance == again.instance).all()
    assert (first.instance != other.instance).any()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "line 2: no request"),
        (b'{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "line 2: 513 tokens"),
        (b'{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}', "line 2: 0 tokens"),
    ],
)
def test_a_file_that_is_no_trace_is_told_by_its_line(tmp_path, line, says):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(request(0, [1])).encode() + b"\n" + line + b"\n")
    with pytest.raises(TraceUnreadable, match=says):
        read_mooncake(path)
    with pytest.raises(TraceUnreadable, match="cannot be read: No such file"):
        read_mooncake(tmp_path / "absent")
    path.write_bytes(b"\n")
    with pytest.raises(TraceUnreadable, match="has no requests"):
        read_mooncake(path)


def test_requests_are_in_the_order_they_came_also_when_jittered(traced):
    trace = traced(request(5000, [7, 8]), request(1000, [9], tokens=100), request(1000, [7], tokens=3))
    assert trace.arrival_s.tolist() == [0.0, 0.0, 4.0]
    assert trace.prompt.tolist() == [100, 3, 1024]
    moved = trace.jittered(5, 100.0)
    assert (np.diff(moved.arrival_s) >= 0).all()
    assert sorted(moved.prompt.tolist()) == [3, 100, 1024]
    for i, tokens in enumerate(moved.prompt):
        assert moved.first[i + 1] - moved.first[i] == math.ceil(tokens / BLOCK)


def test_the_command_compares_policies_and_writes_json(sessions, tmp_path):
    out = tmp_path / "found.json"
    options = ["--policy", "random", "--policy", "local_cache_aware", "--seeds", "2", "--prefill", "4"]
    done = CliRunner().invoke(
        build_app(), ["simulate", "--trace", str(tmp_path / "trace.jsonl"), *options, "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [row["policy"] for row in found] == ["random", "local_cache_aware"]
    assert found[1]["hit_rate"] > found[0]["hit_rate"]
    assert "local_cache_aware" in done.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--figure", "4"], "these can: 5, 9, 10, 13"),
        (["--policy", "best"], "there is no policy 'best'"),
        (["--prefill", "65"], "from 1 to 64"),
        (["--speed", "0"], "must be positive"),
        (["--seeds", "0"], "from 1 to"),
    ],
)
def test_the_command_says_what_it_cannot_simulate(tmp_path, options, says):
    write_mooncake(tmp_path / "trace.jsonl", [request(0, [1])])
    done = CliRunner().invoke(build_app(), ["simulate", "--trace", str(tmp_path / "trace.jsonl"), *options])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def test_figures_of_caches_have_what_their_reports_promise(sessions):
    nine = FIGURES[9](sessions, 1)
    rates = list(nine["hit_rate"].values())
    assert rates == sorted(rates)
    assert nine["ratios"]["50M"] == pytest.approx(1.0)
    ten = FIGURES[10](sessions, 1)
    for policy, ratio in ten["ratios"]["hit_rate_ratio"].items():
        assert ratio == pytest.approx(ten["hit_rate"]["global"] / ten["hit_rate"][policy])
        assert ratio >= 1
