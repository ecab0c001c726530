"""The table of the in-process and the HTTP registry, against a plain model, on a clock of the test."""

from __future__ import annotations

import operator
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from mooncake_transfer.registry.table import ExpiringTable

KEYS = st.sampled_from(["a", "b", "ab", ""])
VALUES = st.sampled_from([b"1", b"2"])
TTLS = st.sampled_from([0.5, 1.0, 3.0, 10.0])
STEPS = st.one_of(
    st.tuples(st.just("put"), KEYS, VALUES, TTLS),
    st.tuples(st.just("renew"), KEYS, VALUES, TTLS),
    st.tuples(st.just("remove"), KEYS, VALUES, TTLS),
    st.tuples(st.just("wait"), KEYS, VALUES, TTLS),
)


@given(st.lists(STEPS, max_size=60))
def test_it_holds_what_a_plain_model_holds(steps: list[tuple[str, str, bytes, float]]) -> None:
    now_s = 0.0
    table = ExpiringTable(lambda: now_s)
    model: dict[str, tuple[bytes, float]] = {}
    for verb, key, value, ttl_s in steps:
        current = model.get(key, (None, 0.0))[0]
        if verb == "put":
            assert table.replace(key, partial(operator.eq, current), value, ttl_s)
            model[key] = (value, now_s + ttl_s)
        elif verb == "renew":
            lost = table.renew({key: value.__eq__}, ttl_s)
            assert lost == (set() if current == value else {key})
            if not lost:
                model[key] = (value, now_s + ttl_s)
        elif verb == "remove":
            table.remove({key: value.__eq__})
            if current == value:
                del model[key]
        else:
            now_s += ttl_s
            model = {key: entry for key, entry in model.items() if entry[1] > now_s}
        assert table.list("") == {key: entry[0] for key, entry in sorted(model.items())}
        assert list(table.list("a")) == sorted(key for key in model if key.startswith("a"))
        assert table.get(key) == model.get(key, (None,))[0]


def test_an_entry_that_comes_and_goes_leaves_nothing_behind() -> None:
    now_s = 0.0
    table = ExpiringTable(lambda: now_s)
    for _ in range(1000):
        assert table.replace("a", lambda value: value is None, b"1", 10.0)
        table.remove({"a": b"1".__eq__})
        now_s += 0.1
    assert len(table._due) <= 1
    now_s += 10.0
    assert len(table) == 0
    assert not table._due
    assert not table._queued
