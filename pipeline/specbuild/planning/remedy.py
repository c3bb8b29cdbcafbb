"""What would make a pair fit that does not: each single change that is enough, tried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from specbuild.planning.hardware import GPUS, Gpu
from specbuild.planning.memory import MemoryPlan, Part, plan_memory

SCHEMES_BY_BITS = ("int8_wo", "int4_awq")
RANKS = (2, 4, 8)
_GB = 1e9


def describe_misfit(plan: MemoryPlan, parts: Sequence[Part], gpu: Gpu, allowed: Callable[[Part, Gpu], bool]) -> str:
    """Return the refusal in one line: what is needed, of what, and every single change that is enough."""
    pieces = [
        f"{role} weights {model.weights / _GB:.1f}, cache {model.cache / _GB:.1f}, activations and runtime "
        f"{(model.activations + model.runtime) / _GB:.1f}"
        for role, model in plan.models.items()
    ]
    cures = list(find_cures(parts, gpu, allowed)) or ["smaller models, or several of these changes together"]
    return (
        f"Cannot fit this pair on {gpu.label}: it needs {plan.needed / _GB:.1f} GB ({'; '.join(pieces)}), {plan.usable / _GB:.1f} GB of "
        f"{plan.total / _GB:.0f} are usable. Use {', or '.join(cures)}."
    )


def find_cures(parts: Sequence[Part], gpu: Gpu, allowed: Callable[[Part, Gpu], bool]) -> Iterator[str]:
    """Yield the single changes after which the pair fits; `allowed` tells whether a part can be built for a device."""
    limits = parts[0].limits
    if batch := _largest(limits.max_batch_size - 1, lambda value: _fits(_limited(parts, batch=value), gpu)):
        yield f"max_batch_size {batch}"
    if length := _largest(limits.max_seq_len - 1, lambda value: _fits(_limited(parts, length=value), gpu)):
        yield f"max_seq_len {length // 256 * 256 or length}"
    for part in _with_fewer_bits(parts[0]):
        if allowed(part, gpu) and _fits([part, *parts[1:]], gpu):
            yield f"scheme {part.scheme.name} for the target"
            break
    for part in [] if gpu.is_cpu else _with_more_ranks(parts[0]):
        if _fits([part, *parts[1:]], gpu):
            yield f"tp {part.model.tp} for the target"
            break
    larger = sorted((other for other in GPUS.values() if not other.is_cpu and other.memory > gpu.memory), key=lambda other: other.memory)
    for other in [] if gpu.is_cpu else larger:
        if _fits(parts, other) and all(allowed(part, other) for part in parts):
            yield f"--gpu {other.name}"
            break


def _fits(parts: Sequence[Part], gpu: Gpu) -> bool:
    return plan_memory(parts, gpu).fits


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, 0 where none does; what fits at n fits below n."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _limited(parts: Sequence[Part], batch: int | None = None, length: int | None = None) -> list[Part]:
    """Return the parts with smaller limits."""
    changed = []
    for part in parts:
        limits = part.limits if batch is None else replace(part.limits, max_batch_size=batch)
        shorter = limits if length is None else replace(limits, max_seq_len=min(length, limits.max_seq_len))
        changed.append(replace(part, limits=shorter))
    return changed


def _with_fewer_bits(part: Part) -> Iterator[Part]:
    for name in SCHEMES_BY_BITS:
        model = part.model.model_copy(update={"quantize": part.model.quantize.model_copy(update={"scheme": name})})
        changed = replace(part, model=model)
        if changed.scheme.bits < part.scheme.bits:
            yield changed


def _with_more_ranks(part: Part) -> Iterator[Part]:
    shape = part.shape
    for tp in RANKS:
        heads = shape.heads % tp == 0 and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
        if tp > part.model.tp and heads and shape.intermediate % tp == 0:
            yield replace(part, model=part.model.model_copy(update={"tp": tp}))
