"""What a prefill, a decode step and a transfer cost."""

from __future__ import annotations

from typing import NamedTuple

from mooncake_conductor.simulator.compiling import compiled

__all__ = ["LLAMA_70B_A800", "CostModel", "kv_bytes", "prefill_s", "step_s", "transfer_s"]


class CostModel(NamedTuple):
    """Constants of a model on an instance of a few GPUs.

    Attributes:
        layers, hidden: of the model.
        attention, dense: FLOPs of one layer are ``attention n^2 hidden + dense n hidden^2`` for n tokens.
        kv_token_bytes: KV cache of a token, all layers.
        flops: peak of the instance, per second.
        utilisation: of that peak in prefill.
        network_bytes_s: of the NICs of an instance, one way.
        memory_bytes_s: of the instance's GPU memory, in decode.
        weight_bytes: read in each decode step.
        step_overhead_s: of a decode step, for what is no memory traffic.
        overhead_s: of a prefill, whatever its length.
    """

    layers: int
    hidden: int
    attention: float
    dense: float
    kv_token_bytes: float
    flops: float
    utilisation: float
    network_bytes_s: float
    memory_bytes_s: float
    weight_bytes: float
    step_overhead_s: float
    overhead_s: float


# Table 1 of the FAST'25 paper: a dummy LLaMA3-70B on 8 A800 (312 TFLOPS, 2 TB/s each) with 4 x 200 Gb/s;
# l = 80, d = 8192, gqa = 8, 2 bytes. a = 4 there counts what causal attention leaves out: 2. The utilisation
# is not published: it is set so that policies' mean TTFTs are to each other as in its Figure 5. What a decode
# step takes besides memory traffic is not calibrated: steps come to 30 ms, those of Figure 15 take 40 to 50.
LLAMA_70B_A800 = CostModel(
    layers=80,
    hidden=8192,
    attention=2.0,
    dense=22.0,
    kv_token_bytes=80 * 2 * 2 * 8192 / 8,
    flops=8 * 312e12,
    utilisation=0.45,
    network_bytes_s=100e9,
    memory_bytes_s=8 * 2.0e12,
    weight_bytes=140e9,
    step_overhead_s=0.02,
    overhead_s=0.0,
)


@compiled
def prefill_s(model: CostModel, prompt: int, prefix: int) -> float:
    """Seconds to compute a prompt of which a prefix is cached; the paper's flops(n) - flops(prefix)."""
    square = float(prompt) * prompt - float(prefix) * prefix
    per_layer = model.attention * square * model.hidden + model.dense * (prompt - prefix) * model.hidden**2
    return model.overhead_s + model.layers * per_layer / (model.flops * model.utilisation)


@compiled
def kv_bytes(model: CostModel, tokens: int) -> float:
    """Bytes of the KV cache of so many tokens."""
    return model.kv_token_bytes * tokens


@compiled
def transfer_s(model: CostModel, tokens: int) -> float:
    """Seconds to send the KV cache of so many tokens, with the NICs to itself."""
    return model.kv_token_bytes * tokens / model.network_bytes_s


@compiled
def step_s(model: CostModel, tokens: float) -> float:
    """Seconds of a decode step with so many tokens of KV cache in the batch."""
    return model.step_overhead_s + (model.weight_bytes + model.kv_token_bytes * tokens) / model.memory_bytes_s
