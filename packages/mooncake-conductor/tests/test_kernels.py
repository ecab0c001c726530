"""Policies on arrays: what each one looks at."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_conductor.policy import Candidate, Snapshot
from mooncake_conductor.policy.arrays import LIVE, KernelPolicy
from mooncake_conductor.policy.kernels import KERNELS, View, draw, fetch_of, kernel_of

COUNT = 4


def view(**changed):
    """Four idle instances that have nothing of a prompt of 1000 tokens, which take a second to compute."""
    matched = np.array(changed.pop("matched", [0] * COUNT), np.int64)
    values = {
        "prompt": 1000,
        "queue_s": np.zeros(COUNT),
        "queued": np.zeros(COUNT, np.int64),
        "requests": np.zeros(COUNT, np.int64),
        "matched": matched,
        "best": int(matched.max()),
        "compute_s": (1000 - matched) / 1000.0,
        "fetch_s": (matched.max() - matched) / 10_000.0,
        "busy_fetch_s": (matched.max() - matched) / 10_000.0,
        "fetched_compute_s": (1000 - int(matched.max())) / 1000.0,
        "turn": 0,
        "draws": (0, 0),
    }
    for name, given in changed.items():
        kind = values[name].dtype if isinstance(values[name], np.ndarray) else None
        values[name] = given if kind is None else np.array(given, kind)
    return View(**values)


@pytest.mark.parametrize("name", [name for name, _ in KERNELS])
def test_every_policy_names_an_instance_that_there_is(name):
    chance = np.random.default_rng(1)
    for turn in range(200):
        given = view(
            matched=chance.integers(0, 1000, COUNT),
            queued=chance.integers(0, 10_000, COUNT),
            requests=chance.integers(0, 200, COUNT),
            queue_s=chance.uniform(0, 30, COUNT),
            turn=turn,
            draws=(draw(turn, 0), draw(turn, 1)),
        )
        assert 0 <= kernel_of(name)(given) < COUNT
        assert kernel_of(name)(given) == kernel_of(name)(given)


def test_random_and_two_choices_reach_every_instance_about_as_often():
    for name in ("random", "power_of_two"):
        found = np.bincount(
            [kernel_of(name)(view(draws=(draw(turn, 0), draw(turn, 1)))) for turn in range(4000)],
            minlength=COUNT,
        )
        assert found.min() > 0.8 * found.max(), name


def test_two_choices_never_take_the_busiest():
    busy = view(requests=[9, 1, 1, 1])
    drawn = [busy._replace(draws=(draw(turn, 0), draw(turn, 1))) for turn in range(200)]
    assert 0 not in {kernel_of("power_of_two")(one) for one in drawn}


def test_algorithm_1_fetches_a_much_longer_prefix_and_computes_a_little_more_where_that_is_near():
    far = view(matched=[900, 0, 0, 0], queue_s=[5.0, 0.5, 0.6, 0.7])
    assert kernel_of("algorithm_1")(far) == 1
    assert fetch_of("algorithm_1")(far, 1)
    near = view(matched=[900, 800, 0, 0], queue_s=[5.0, 0.0, 0.6, 0.7])
    assert kernel_of("algorithm_1")(near) == 1
    assert not fetch_of("algorithm_1")(near, 1)


def test_local_cache_aware_waits_for_its_cache_only_as_long_as_it_pays():
    assert kernel_of("local_cache_aware")(view(matched=[900, 0, 0, 0], queue_s=[0.8, 0, 0, 0])) == 0
    assert kernel_of("local_cache_aware")(view(matched=[900, 0, 0, 0], queue_s=[1.0, 0, 0, 0])) == 1
    assert not fetch_of("local_cache_aware")(view(matched=[900, 0, 0, 0]), 1)


def test_ours_sees_the_senders_queue_and_what_a_fetch_hides_behind():
    # The fetch of one second runs while the request waits for two.
    waits = view(matched=[900, 0, 0, 0], queue_s=[9, 2, 9, 9], busy_fetch_s=[0, 1, 1, 1])
    assert kernel_of("overlapped")(waits) == 1
    assert fetch_of("overlapped")(waits, 1)
    busy = view(matched=[900, 0, 0, 0], queue_s=[0.5, 0, 9, 9], busy_fetch_s=[0, 3, 3, 3])
    assert kernel_of("overlapped")(busy) == 0


def test_sglang_s_balances_when_requests_are_spread_too_unevenly_and_else_looks_at_the_cache():
    assert kernel_of("sglang_cache_aware")(view(matched=[0, 0, 400, 0], requests=[1, 0, 60, 1])) == 2
    assert kernel_of("sglang_cache_aware")(view(matched=[0, 0, 400, 0], requests=[1, 0, 70, 1])) == 1
    assert kernel_of("sglang_cache_aware")(view(matched=[0, 0, 200, 0], requests=[1, 0, 1, 1])) == 1


def test_costs_of_published_routers():
    queued = view(matched=[0, 500, 0, 0], queued=[100, 700, 300, 400])
    assert kernel_of("dynamo_cost")(queued) == 0
    assert kernel_of("lmetric")(queued._replace(requests=np.array([5, 0, 2, 2]))) == 1
    assert kernel_of("preble_e2")(queued) == 1
    assert kernel_of("preble_e2")(view(matched=[0, 499, 0, 0], queued=[100, 700, 300, 400])) == 0
    assert kernel_of("load_aware")(view(matched=[0, 500, 0, 0], requests=[1, 3, 2, 2])) == 0
    assert kernel_of("load_aware")(view(matched=[0, 500, 0, 0], requests=[2, 2, 2, 2])) == 1


def test_live_placement_is_that_of_the_kernel():
    workers = (
        Candidate(url="a", role="prefill", queued_tokens=100, requests=3, last_used=1),
        Candidate(url="b", role="prefill", queued_tokens=50, requests=9, last_used=2),
        Candidate(url="c", role="prefill", queued_tokens=900, matched_tokens=990, requests=1, last_used=3),
    )
    decode = (Candidate(url="d", role="decode", queued_tokens=1), Candidate(url="e", role="decode"))
    snapshot = Snapshot(prompt_tokens=1000, prefill=workers, decode=decode)
    placed = {name: KernelPolicy(name).place(snapshot) for name in LIVE}
    assert placed["least_tokens"].prefill == "b"
    assert placed["least_requests"].prefill == "c"
    assert placed["dynamo_cost"].prefill == "c"
    assert placed["dynamo_cost"].matched_tokens == 990
    assert {placement.decode for placement in placed.values()} == {"e"}


def test_a_worker_that_does_both_decodes_what_it_prefills():
    both = Candidate(url="a", role="both")
    placed = KernelPolicy("least_tokens").place(Snapshot(prompt_tokens=10, prefill=(both,), decode=()))
    assert (placed.prefill, placed.decode) == ("a", "a")
