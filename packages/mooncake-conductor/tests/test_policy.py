"""Placement policies: what they choose, that they are pure, and how they are found."""

from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_conductor import plugins
from mooncake_conductor.errors import ConfigError
from mooncake_conductor.policy import CacheAware, Candidate, RoundRobin, Snapshot

BOTH_POLICIES = pytest.mark.parametrize(
    "policy", [CacheAware(), RoundRobin()], ids=lambda policy: policy.name
)


def prefill(url: str, **fields: int) -> Candidate:
    return Candidate(url=url, role="prefill", **fields)


def decode(url: str, **fields: int) -> Candidate:
    return Candidate(url=url, role="decode", **fields)


def snapshot(
    *prefills: Candidate, decodes: tuple[Candidate, ...] = (decode("d"),), prompt: int = 100
) -> Snapshot:
    return Snapshot(prompt_tokens=prompt, prefill=prefills, decode=decodes)


def test_the_longest_cached_prefix_wins_among_equal_queues() -> None:
    placement = CacheAware().place(snapshot(prefill("a", matched_tokens=32), prefill("b", matched_tokens=64)))
    assert (placement.prefill, placement.matched_tokens) == ("b", 64)


def test_a_queue_longer_than_the_cached_prefix_sends_the_request_elsewhere() -> None:
    holder = prefill("a", matched_tokens=64, queued_tokens=65)
    assert CacheAware().place(snapshot(holder, prefill("b"))).prefill == "b"


def test_a_queue_shorter_than_the_cached_prefix_does_not() -> None:
    holder = prefill("a", matched_tokens=64, queued_tokens=63)
    assert CacheAware().place(snapshot(holder, prefill("b"))).prefill == "a"


def test_a_tie_goes_to_the_worker_used_least_recently() -> None:
    placement = CacheAware().place(
        snapshot(
            prefill("a", last_used=9),
            prefill("b", last_used=4),
            decodes=(decode("x", last_used=3), decode("y", last_used=2)),
        )
    )
    assert (placement.prefill, placement.decode) == ("b", "y")


def test_decode_goes_where_least_is_queued() -> None:
    decodes = (decode("x", queued_tokens=10), decode("y", queued_tokens=9, last_used=99))
    assert CacheAware().place(snapshot(prefill("a"), decodes=decodes)).decode == "y"


def test_round_robin_takes_turns_whatever_is_cached() -> None:
    holder = prefill("a", matched_tokens=100, last_used=2)
    placement = RoundRobin().place(snapshot(holder, prefill("b", last_used=1)))
    assert (placement.prefill, placement.matched_tokens) == ("b", 0)


@BOTH_POLICIES
def test_a_worker_of_both_roles_serves_the_whole_request(policy) -> None:
    whole = Candidate(url="w", role="both", matched_tokens=8)
    placement = policy.place(snapshot(whole, decodes=(whole, decode("d"))))
    assert placement.prefill == placement.decode == "w"


candidates = st.lists(
    st.builds(
        Candidate,
        url=st.sampled_from(["a", "b", "c", "d"]),
        role=st.sampled_from(["prefill", "both"]),
        matched_tokens=st.integers(0, 200),
        queued_tokens=st.integers(0, 200),
        last_used=st.integers(0, 5),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda worker: worker.url,
)


@BOTH_POLICIES
@given(candidates, st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_candidates(policy, workers, random) -> None:
    first = policy.place(snapshot(*workers))
    random.shuffle(workers)
    assert policy.place(snapshot(*workers)) == first
    assert first.prefill in {worker.url for worker in workers}


def test_the_installed_policies_are_found_by_name() -> None:
    assert {"cache_aware", "round_robin"} <= set(plugins.find_policies())
    assert plugins.find_policy("round_robin").name == "round_robin"


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no placement policy 'fastest'.*cache_aware, .*round_robin"):
        plugins.find_policy("fastest")


class Nearest:
    name = "nearest"

    def place(self, snapshot: Snapshot):
        raise AssertionError("never called here")


class GoodPlugin:
    @staticmethod
    def mooncake_conductor_policies():
        return [Nearest(), "no policy"]


class BrokenPlugin:
    @staticmethod
    def mooncake_conductor_policies():
        raise RuntimeError("broken on purpose")


def test_a_broken_plugin_does_not_stop_the_others(monkeypatch, caplog) -> None:
    points = [
        EntryPoint("broken", "x:BrokenPlugin", "g"),
        EntryPoint("good", "x:GoodPlugin", "g"),
        EntryPoint("missing", "x:Missing", "g"),
    ]
    found = {"x:BrokenPlugin": BrokenPlugin, "x:GoodPlugin": GoodPlugin}
    monkeypatch.setattr(EntryPoint, "load", lambda self: found[self.value])
    monkeypatch.setattr("mooncake_transfer.plugins.entry_points", lambda group: points)
    assert set(plugins.find_policies("g")) == {"nearest"}
    assert "broken on purpose" in caplog.text
    assert "'no policy', which is no policy" in caplog.text
