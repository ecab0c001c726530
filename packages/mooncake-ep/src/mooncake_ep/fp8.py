"""Eight-bit activations by compiled kernels; `reference_fp8` says what they are."""

from __future__ import annotations

import torch

from mooncake_ep import _core
from mooncake_ep._errors import ShapeError

__all__ = ["dequantize", "quantize"]

GROUP = 128


def quantize(x: torch.Tensor, round_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn bf16 [tokens, hidden] into e4m3 of that shape and float32 scales [tokens, hidden / 128].

    Equal to the bit to `reference_fp8.quantize`. Raises ShapeError unless hidden is a multiple of 128.
    """
    if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] % GROUP or x.device.type != "cpu":
        raise ShapeError(
            f"x must be bfloat16 [tokens, hidden] in CPU memory, hidden a multiple of {GROUP}, "
            f"not {x.dtype} {tuple(x.shape)} on {x.device}"
        )
    tokens, hidden = x.shape
    values = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn)
    scales = torch.empty(tokens, hidden // GROUP)
    source = x.contiguous()
    _core.quantize(source.data_ptr(), tokens, hidden, round_scale, values.data_ptr(), scales.data_ptr())
    return values, scales


def dequantize(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Turn e4m3 [..., hidden] and float32 scales [..., hidden / 128] into bf16 [..., hidden].

    Scales may be strided, as dispatches give them. Raises ShapeError when the two do not fit together.
    """
    expected = (*x.shape[:-1], x.shape[-1] // GROUP)
    if x.dtype != torch.float8_e4m3fn or x.shape[-1] % GROUP or tuple(scales.shape) != expected:
        raise ShapeError(
            f"x must be float8_e4m3fn [..., hidden], not {x.dtype} {tuple(x.shape)}, with one scale for "
            f"{GROUP} channels: {expected}, not {tuple(scales.shape)}"
        )
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    values, factors = x.contiguous(), scales.float().contiguous()
    rows = values.numel() // max(x.shape[-1], 1)
    _core.dequantize(values.data_ptr(), factors.data_ptr(), rows, x.shape[-1], out.data_ptr())
    return out
