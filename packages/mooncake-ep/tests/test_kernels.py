"""Kernels equal plain torch to the bit, with every kind of vectors that the processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mooncake_ep import ShapeError, _core, fp8, reference_fp8


@pytest.fixture(params=["plain", "avx2", "avx512"])
def _vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _core.vectors()
    if not _core.use_vectors(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield
    assert _core.use_vectors(before)


def activations(tokens: int, hidden: int, seed: int = 0) -> torch.Tensor:
    """Tokens of very different magnitudes, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(4 * torch.randn(tokens, 1, generator=generator))
    x = torch.randn(tokens, hidden, generator=generator) * size
    return x.masked_fill(torch.rand(tokens, hidden, generator=generator) < 0.1, 0.0).bfloat16()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, which compare where NaN does not."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.usefixtures("_vectors")
@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("shape", [(64, 1024), (3, 128), (1, 640), (0, 256)])
def test_quantising_equals_torch_to_the_bit(shape: tuple[int, int], round_scale: bool) -> None:
    x = activations(*shape)
    values, scales = fp8.quantize(x, round_scale)
    expected, expected_scales = reference_fp8.quantize(x, round_scale)
    assert torch.equal(bits(values), bits(expected))
    assert torch.equal(scales, expected_scales)


@pytest.mark.usefixtures("_vectors")
def test_every_bf16_number_is_quantised_as_torch_does() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    # A group of one number and 448 has the scale 1, as long as the number is no larger.
    small = finite[finite.abs() <= 448]
    x = torch.zeros(len(small), 128, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = small, 448.0
    values, scales = fp8.quantize(x)
    assert torch.equal(bits(values), bits(reference_fp8.quantize(x)[0]))
    assert (scales == 1).all()


@pytest.mark.usefixtures("_vectors")
def test_every_e4m3_number_comes_back_as_torch_has_it() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    scales = torch.tensor([[1.0], [0.37]])
    ours, theirs = fp8.dequantize(every, scales), reference_fp8.dequantize(every, scales)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(bits(ours.nan_to_num(0)), bits(theirs.nan_to_num(0)))


def test_packed_exponents_are_the_scales() -> None:
    _, scales = fp8.quantize(activations(16, 1024), round_scale=True)
    packed = reference_fp8.pack_ue8m0(scales)
    assert packed.shape == (16, 2)
    assert torch.equal(reference_fp8.unpack_ue8m0(packed), scales)


@pytest.mark.usefixtures("_vectors")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [1, 100, 512, 1100])
def test_sums_are_taken_in_order_and_rounded_once(dtype: torch.dtype, weighted: bool, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(40, width, generator=generator).to(dtype)
    bias = torch.randn(9, width, generator=generator).to(dtype)
    chosen = torch.randint(-1, 40, (9, 4), generator=generator)
    weights = torch.rand(9, 4, generator=generator)
    addends = (rows.data_ptr() + chosen * width * rows.element_size()).masked_fill(chosen < 0, 0)
    expected = torch.zeros(9, width) + bias.float()
    for column in range(4):
        row = rows[chosen[:, column].clamp(min=0)].float()
        factor = weights[:, column, None] if weighted else 1.0
        expected = torch.where(chosen[:, column, None] < 0, expected, expected + row * factor)
    out = torch.empty(9, width, dtype=dtype)
    at = (addends.data_ptr(), weights.data_ptr() if weighted else 0, bias.data_ptr(), 0, out.data_ptr())
    _core.sum_rows(dtype == torch.bfloat16, 9, 4, width, *at)
    assert torch.equal(out, expected.to(dtype))


def test_widths_that_have_no_groups_are_refused() -> None:
    with pytest.raises(ShapeError, match="multiple of 128"):
        fp8.quantize(torch.ones(2, 100, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="one scale for 128 channels"):
        fp8.dequantize(torch.ones(2, 128).to(torch.float8_e4m3fn), torch.ones(2, 2))
    with pytest.raises(ValueError, match="plain, avx2 or avx512"):
        _core.use_vectors("sse9")
