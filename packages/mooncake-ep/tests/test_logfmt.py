"""Ten bits for a channel: equal to plain torch to the bit, and as near as the steps allow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake_ep import Buffer, ShapeError, _core, reference_logfmt

HIDDEN, ROWS = 512, 40


@pytest.fixture(params=["plain", "avx2", "avx512"])
def vectors(request: pytest.FixtureRequest) -> Any:
    before = _core.vectors()
    if not _core.use_vectors(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    assert _core.use_vectors(before)


def telling_rows() -> torch.Tensor:
    """Narrow and wide groups, zeros, signs, groups that are not cast, numbers of all sizes."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, HIDDEN, generator=generator)
    x[:10] *= 1e-2
    x[10:20] *= 2.0 ** torch.randint(-60, 0, (10, HIDDEN), generator=generator)
    x[20] *= 0.1
    x[20, ::3] = 0.0
    x[21] = -0.0
    x[22] = 0.5
    x[23] = torch.linspace(0.5, 0.5039, HIDDEN)
    x[24, 7] = float("inf")
    x[25] *= 1e-38
    x[26:] *= 0.2
    return x.bfloat16()


def through_kernels(x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Encode rows, and sum all of them into one row."""
    encoded = torch.zeros(len(x), _core.logfmt_bytes(HIDDEN), dtype=torch.uint8)
    counts = torch.tensor([len(x)])
    _core.encode_logfmt(x.data_ptr(), encoded.data_ptr(), 1, len(x), counts.data_ptr(), HIDDEN)
    shape = (len(x), 1) if weights is None else (1, len(x))
    addends = (encoded.data_ptr() + torch.arange(len(x)) * encoded.shape[1]).view(shape)
    out = torch.empty(shape[0], HIDDEN, dtype=torch.bfloat16)
    at = 0 if weights is None else weights.data_ptr()
    _core.sum_logfmt(shape[0], shape[1], HIDDEN, addends.data_ptr(), at, out.data_ptr())
    return out


def test_kernels_equal_plain_torch_to_the_bit(vectors: str) -> None:
    x = telling_rows()
    expected = reference_logfmt.decode(reference_logfmt.encode(x)).bfloat16()
    found = through_kernels(x)
    # Adding to zero makes the zeros of both signs one.
    assert torch.equal((found + 0.0).view(torch.int16), (expected + 0.0).view(torch.int16))


def test_sums_are_taken_in_order_in_float32(vectors: str) -> None:
    x, weights = telling_rows()[:20], torch.rand(20)
    decoded = reference_logfmt.decode(reference_logfmt.encode(x))
    total = torch.zeros(HIDDEN)
    for row, weight in zip(decoded, weights, strict=True):
        total += row * weight
    assert torch.equal(through_kernels(x, weights)[0], total.bfloat16())


def test_a_value_changes_by_half_a_step_at_most() -> None:
    x = telling_rows()
    encoded = reference_logfmt.encode(x)
    decoded = reference_logfmt.decode(encoded).view(ROWS, -1, 128)
    groups = x.float().view(ROWS, -1, 128)
    ratio = 2.0 ** encoded.step[..., None].double()
    limit = (ratio - 1) / (ratio + 1) + 2e-5
    changed = (decoded - groups).double().abs()
    # Subnormal numbers, and those beside them, are taken for zero.
    inside = encoded.cast[..., None] & (groups.abs() >= 2.0 ** encoded.least[..., None].clamp(min=-125))
    assert inside.sum() > 10_000
    assert bool((changed[inside] <= (limit * groups.abs())[inside]).all())
    assert float(limit[encoded.cast].max()) < 0.022, "where the least is 2^-32 of the largest"
    below = encoded.cast[..., None] & ~inside
    least = 2.0 ** encoded.least[..., None].clamp(min=-125).expand_as(groups)
    assert bool((decoded[below].abs() <= least[below] * (1 + 1e-5)).all())
    kept = ~encoded.cast
    assert torch.equal(decoded[kept], groups[kept])
    assert kept.sum() > 0


def test_groups_with_ones_and_groups_of_one_magnitude_stay_as_they_are() -> None:
    encoded = reference_logfmt.encode(telling_rows())
    assert not encoded.cast[22].any(), "one magnitude"
    assert not encoded.cast[24, 0], "infinity"
    assert not encoded.cast[21].any(), "zeros"
    assert encoded.cast[0].all()
    assert encoded.cast[20].any(), "zeros among others are codes of zero"


@pytest.mark.parametrize("scale", [0.05, 30.0])
def test_a_combine_in_ten_bits_is_within_deepeps_limit(ranks: Any, scale: float) -> None:
    """1 - cosine of values moved by 1, as DeepEP measures; some groups are cast, of the second scale none."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        buffer = Buffer(group)
        generator = torch.Generator().manual_seed(rank)
        x = (torch.randn(8, HIDDEN, generator=generator) * scale).bfloat16()
        topk_idx = torch.rand(8, 6, generator=generator).argsort(1)[:, :3].contiguous()
        weights = torch.rand(8, 3, generator=generator)
        received, _, handle, _, _ = buffer.low_latency_dispatch(x, topk_idx, 8, 6, use_fp8=False)
        combined, _, _ = buffer.low_latency_combine(received, topk_idx, weights, handle, use_logfmt=True)
        decoded = reference_logfmt.decode(reference_logfmt.encode(x))
        expected = torch.zeros(8, HIDDEN)
        for choice in range(3):
            expected += decoded * weights[:, choice, None]
        assert torch.equal(combined, expected.bfloat16())
        exact = x.double() * weights.double().sum(1, keepdim=True) + 1
        moved = combined.double() + 1
        apart = 1 - 2 * (moved * exact).sum() / (moved * moved + exact * exact).sum()
        assert float(apart) < 1e-5
        target = buffer.get_next_low_latency_combine_buffer(handle)
        with pytest.raises(ShapeError, match="goes without"):
            buffer.low_latency_combine(target, topk_idx, weights, handle, use_logfmt=True, zero_copy=True)
        dist.barrier(group)

    ranks(2, work)
