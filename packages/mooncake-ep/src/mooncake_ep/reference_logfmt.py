"""LogFMT-10 in plain torch: what the kernels must equal to the bit.

DeepEP's format of ten bits for the way back (`use_logfmt` of `low_latency_combine`): of each 128 channels, a
sign and one of 511 magnitudes, whose logarithms are evenly spaced between the least and the largest of the
group, or 2^-32 of the largest; code 0 is zero. A group with a magnitude of 1 or more, or with no two
different ones, stays bf16. A value changes by (r - 1) / (r + 1) of itself at most, where r is (largest /
least) ** (1 / 510): by 2.2 % where the least is 2^-32 of the largest, by 0.7 % where it is a thousandth.

Two things differ from DeepEP: whether to cast is decided for each group, not for several together, and
logarithms are exact to float32, where it takes a GPU's approximations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Encoded", "decode", "encode"]

GROUP, STEPS, WIDEST = 128, 510, 32.0
ZERO = -1e6  # the logarithm of zero, and of subnormal numbers
POWER = (0.0018775766, 0.0089893406, 0.055826318, 0.24015361, 0.69315308, 0.99999994)  # 2^f, f from 0 to 1


@dataclass(frozen=True, eq=False)
class Encoded:
    """Rows [..., hidden] in groups [..., groups, 128].

    `codes` int32 [..., groups, 128]; `negative` bool of that shape; `cast` bool [..., groups], and float32
    `least` and `step` of that shape, of logarithms to base 2; `kept` bf16 [..., groups, 128], what was.
    """

    codes: torch.Tensor
    negative: torch.Tensor
    cast: torch.Tensor
    least: torch.Tensor
    step: torch.Tensor
    kept: torch.Tensor


def encode(x: torch.Tensor) -> Encoded:
    """Turn bf16 [..., hidden], a multiple of 128, into codes."""
    groups = x.view(*x.shape[:-1], -1, GROUP)
    logs = _logarithm(groups.abs())
    high = logs.amax(-1)
    low = torch.maximum(logs.amin(-1), high - WIDEST)
    cast = (high > ZERO) & (high < 0) & (low < high)
    step = torch.where(cast, (high - low) / STEPS, 1.0)
    cubic = step * step * step * torch.tensor(0.0017344977)
    rounding = 2.0 - (0.5 + step * torch.tensor(0.086643398) - cubic)
    place = (logs - low[..., None]) * (1.0 / step)[..., None] + rounding[..., None]
    return Encoded(place.clamp(0.0, 511.0).int(), torch.signbit(groups), cast, low, step, groups)


def decode(encoded: Encoded) -> torch.Tensor:
    """Turn codes into float32 [..., hidden]."""
    logs = encoded.least[..., None] + (encoded.codes - 1).float() * encoded.step[..., None]
    values = _power(logs).masked_fill(encoded.codes == 0, 0.0)
    values = torch.where(encoded.negative, -values, values)
    return torch.where(encoded.cast[..., None], values, encoded.kept.float()).flatten(-2)


def _logarithm(magnitudes: torch.Tensor) -> torch.Tensor:
    bits = magnitudes.contiguous().view(torch.int16).int()
    mantissas = torch.log2(1.0 + torch.arange(128, dtype=torch.float64) / 128).float()
    logs = ((bits >> 7) - 127).float() + mantissas[bits & 0x7F]
    return logs.masked_fill(bits < 0x80, ZERO)


def _power(logs: torch.Tensor) -> torch.Tensor:
    whole = logs.floor()
    part = logs - whole
    value = torch.full_like(logs, POWER[0])
    for factor in POWER[1:]:
        value = value * part + torch.tensor(factor)
    exponents = (whole.clamp(min=-127).int() + 127) << 23
    return exponents.view(torch.float32) * value
