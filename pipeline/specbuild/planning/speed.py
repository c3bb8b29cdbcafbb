"""How long a pass takes, by a roofline: reading or computing, whichever is longer, and a fixed cost per layer.

Linear layers and attention run one after the other, so each has its own roofline: reading long caches hides no multiplications.

One set of constants for every device and model; `scripts/plan_published.py` says how far they carry. Seconds everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specbuild.planning.hardware import Gpu
from specbuild.planning.memory import Part, head_bytes, layer_bytes, token_cache_bytes

# Estimates: shares of the datasheet's peaks that decoding reaches, and what a pass costs whatever its size.
MEMORY_EFFICIENCY = 0.75  # of the bandwidth, for reading weights (published decoding of large models reaches 0.7 to 0.8)
COMPUTE_EFFICIENCY = 0.5  # of the tensor peak, for the narrow matrices of decoding
LAYER_SECONDS = 10e-6  # launches and gaps of the eight or so kernels of a layer
PASS_SECONDS = 0.5e-3  # scheduling, sampling, and the call from the speculation loop
REDUCE_SECONDS = 8e-6  # one all-reduce of a small matrix; a layer has two where tp > 1
CONTEXT_SHARE = 0.5  # of max_seq_len: how long the average sequence is while it decodes


@dataclass(frozen=True)
class PassCost:
    """What a pass of one model reads and computes, per rank."""

    weights: float  # bytes read once, whatever the batch
    cache: float  # bytes read per sequence, at the average length
    operations: float  # per token
    attention: float  # further operations per token, at the average length
    fixed: float  # seconds
    peak: float  # operations per second of its linear layers' kernels
    attention_peak: float
    bandwidth: float

    def seconds(self, batch: int, tokens: int = 1) -> float:
        """Return the time of a pass over `tokens` tokens of each of `batch` sequences."""
        speed = self.bandwidth * MEMORY_EFFICIENCY
        linear = max(self.weights / speed, batch * tokens * self.operations / (self.peak * COMPUTE_EFFICIENCY))
        attention = max(batch * self.cache / speed, batch * tokens * self.attention / (self.attention_peak * COMPUTE_EFFICIENCY))
        return linear + attention + self.fixed


def pass_cost(part: Part, gpu: Gpu) -> PassCost:
    """Return what a pass costs. Pipeline ranks work one after another, tensor ranks together."""
    shape, tp = part.shape, part.model.tp
    length = int(part.limits.max_seq_len * CONTEXT_SHARE)
    seen = sum(shape.windows(length) or [length] * shape.layers)
    weights = shape.layers * layer_bytes(part) + head_bytes(part)
    numbers = shape.layers * sum(rows * columns for rows, columns in shape.linears().values()) + shape.vocab * shape.hidden
    fixed = shape.layers * LAYER_SECONDS + (2 * shape.layers * REDUCE_SECONDS if tp > 1 else 0) + PASS_SECONDS
    cache, attention = seen * token_cache_bytes(part), 4 * seen * shape.q_rows / tp
    return PassCost(weights, cache, 2 * numbers / tp, attention, fixed, peak_of(part, gpu), gpu.flops, gpu.bandwidth)


def peak_of(part: Part, gpu: Gpu) -> float:
    """Return the peak of the kernels that multiply: weight-only ones expand the weights and compute in 16 bits; the CPU's do not."""
    integers = part.scheme.activation_bits == 8 or (gpu.is_cpu and part.scheme.bits < 16)
    return gpu.int8_ops if integers else gpu.flops


def cost_ratio(target: PassCost, draft: PassCost | None, batch: int) -> float:
    """Return c, a draft step over a target step; 0 where nothing but a look-up drafts."""
    return 0.0 if draft is None else draft.seconds(batch) / target.seconds(batch)


def verify_cost(target: PassCost, batch: int) -> Callable[[int], float]:
    """Return v(n): a pass of the target over n tokens of each sequence, over a pass over one."""
    one = target.seconds(batch)
    return lambda tokens: target.seconds(batch, tokens) / one
