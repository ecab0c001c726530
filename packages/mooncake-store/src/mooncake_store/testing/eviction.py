"""The promises of an eviction policy as a test class."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_store.eviction import EvictionPolicy, Numbers

__all__ = ["EvictionContract"]


def _numbers(*values: int) -> Numbers:
    return np.array(values, dtype=np.uint64)


class EvictionContract:
    """Subclass it in a test file and give :meth:`make`; pytest runs every test that is here."""

    def make(self) -> EvictionPolicy:
        """An empty policy."""
        raise NotImplementedError

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        """Three ids: 1, 2 and 3."""
        policy = self.make()
        policy.insert(_numbers(1, 2, 3), _numbers(11, 12, 13), _numbers(4096, 4096, 4096))
        return policy

    def test_it_has_what_was_inserted_and_not_removed(self, policy: EvictionPolicy) -> None:
        """Length and membership follow insert and remove."""
        policy.remove(_numbers(2))
        assert len(policy) == 2
        assert [id in policy for id in (1, 2, 3)] == [True, False, True]

    def test_an_empty_one_has_no_victim(self) -> None:
        """Nothing to evict is no error, and an empty batch neither."""
        policy = self.make()
        none = _numbers()
        policy.insert(none, none, none)
        for step in (policy.touch, policy.pin, policy.unpin, policy.remove):
            step(none)
        assert policy.victim() is None
        assert len(policy) == 0

    def test_a_victim_stays_until_it_is_removed(self, policy: EvictionPolicy) -> None:
        """Asking does not evict."""
        victim = policy.victim()
        assert victim in (1, 2, 3)
        assert len(policy) == 3
        policy.remove(_numbers(victim))
        assert victim not in policy

    def test_each_id_leaves_once(self, policy: EvictionPolicy) -> None:
        """Whatever was used how often, all of them leave in the end."""
        policy.touch(_numbers(3, 3, 3, 3, 1))
        left = set()
        for _ in range(3):
            victim = policy.victim()
            assert victim is not None
            policy.remove(_numbers(victim))
            left.add(victim)
        assert left == {1, 2, 3}
        assert policy.victim() is None

    def test_a_pinned_id_is_no_victim_until_its_last_pin_is_gone(self, policy: EvictionPolicy) -> None:
        """Pins are counted."""
        policy.pin(_numbers(1, 2, 3, 2))
        assert policy.victim() is None
        policy.touch(_numbers(2))
        policy.unpin(_numbers(2))
        assert policy.victim() is None
        policy.unpin(_numbers(2))
        assert policy.victim() == 2
        policy.unpin(_numbers(1, 3))
        assert len(policy) == 3

    def test_a_pinned_id_can_be_removed(self, policy: EvictionPolicy) -> None:
        """A value that is replaced while it is read leaves the order at once."""
        policy.pin(_numbers(1, 2, 3))
        assert policy.victim() is None
        policy.remove(_numbers(1, 2))
        assert len(policy) == 1
        policy.unpin(_numbers(3))
        assert policy.victim() == 3

    def test_a_key_that_comes_back_has_a_new_id(self, policy: EvictionPolicy) -> None:
        """What was evicted is stored again, many times."""
        for id in range(4, 40):
            victim = policy.victim()
            assert victim is not None
            policy.remove(_numbers(victim))
            policy.insert(_numbers(id), _numbers(10 + victim % 7), _numbers(4096))
            assert len(policy) == 3
            assert id in policy
