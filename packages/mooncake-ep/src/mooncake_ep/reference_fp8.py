"""What eight-bit activations are, in plain torch: what the kernels must equal to the bit.

Recipe of DeepSeek-V3: float8_e4m3fn with one scale for 128 channels of a token; a scale is the largest
magnitude over 448, magnitudes below 1e-4 count as that.
"""

from __future__ import annotations

import torch

__all__ = ["dequantize", "pack_ue8m0", "quantize", "unpack_ue8m0"]

GROUP = 128
LARGEST = 448.0
SMALLEST_AMAX = 1e-4


def quantize(x: torch.Tensor, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn bf16 [tokens, hidden] into e4m3 of that shape and float32 scales [tokens, hidden / 128].

    `round_scale`: scales are the next power of two, so that multiplying by one is exact.
    """
    tokens, hidden = x.shape
    groups = x.view(tokens, hidden // GROUP, GROUP)
    amax = groups.abs().float().amax(dim=2).clamp(min=SMALLEST_AMAX)
    scales, factor = amax / LARGEST, LARGEST / amax
    if round_scale:
        bits = scales.view(torch.int32)
        scales = (((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()) << 23).view(torch.float32)
        factor = 1.0 / scales
    return (groups * factor[..., None]).to(torch.float8_e4m3fn).view(tokens, hidden), scales


def dequantize(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Turn e4m3 [..., hidden] and scales [..., hidden / 128] into bf16 [..., hidden]."""
    groups = x.float().view(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    return (groups * scales[..., None]).to(torch.bfloat16).view(x.shape)


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Turn float32 powers of two [..., groups] into their exponents, four in an int32: [..., groups / 4]."""
    exponents = scales.contiguous().view(torch.int32) >> 23
    first, second, third, fourth = (exponents[..., place::4] for place in range(4))
    return first | second << 8 | third << 16 | fourth << 24


def unpack_ue8m0(packed: torch.Tensor) -> torch.Tensor:
    """Turn packed exponents int32 [..., groups / 4] into float32 scales [..., groups]."""
    exponents = packed.contiguous().view(torch.uint8).to(torch.int32)
    return (exponents << 23).view(torch.float32)
