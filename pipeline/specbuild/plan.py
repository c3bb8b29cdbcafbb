"""The plan stage: does a pair fit, how many tokens should a round draft, and does that pay; from each config.json alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specbuild.build import make_limits
from specbuild.check import check_names, load_shape
from specbuild.compilers import find_compiler
from specbuild.compilers.trtllm_machine import Machine, check_gpu
from specbuild.config import PairConfig, roles_needed
from specbuild.errors import ConfigError, EngineError
from specbuild.planning.formula import Row, find_best, make_table
from specbuild.planning.hardware import Gpu
from specbuild.planning.measured import Measured
from specbuild.planning.memory import MemoryPlan, Part, plan_memory
from specbuild.planning.remedy import describe_misfit
from specbuild.planning.speed import CONTEXT_SHARE, PassCost, cost_ratio, pass_cost, verify_cost

BATCHES = (1, 4, 16, 32)
ALPHA = 0.7  # assumed where nothing was measured: the middle of what is published for draft models of a target's family


@dataclass(frozen=True)
class BatchPlan:
    """What speculation does at one batch. Seconds are of one pass over one token of each sequence."""

    batch: int
    target_seconds: float
    draft_seconds: float
    cost_ratio: float
    verify_costs: tuple[float, ...]  # v(1), v(2), ...
    table: tuple[Row, ...]

    @property
    def best(self) -> Row:
        return find_best(self.table)

    def to_dict(self) -> dict[str, Any]:
        best = self.best
        return {**asdict(self), "best_draft_len": best.draft_len, "speedup": best.speedup}


@dataclass(frozen=True)
class Plan:
    """A pair on a device: memory, speed per batch, and what its user should know."""

    gpu: str
    acceptance: tuple[float, ...]
    memory: MemoryPlan
    batches: tuple[BatchPlan, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        batches = [each.to_dict() for each in self.batches]
        return {**asdict(self), "memory": self.memory.to_dict(), "batches": batches}


def run_plan(config: PairConfig, gpu: Gpu, batches: Sequence[int] = BATCHES, measured: Measured | None = None) -> Plan:
    """Plan a pair for a device; raise SpecbuildError when it cannot be built for it, or does not fit. Without `measured`, ALPHA."""
    parts = load_parts(config, gpu)
    memory = plan_memory(parts, gpu)
    if not memory.fits:
        raise ConfigError(describe_misfit(memory, parts, gpu, is_allowed))
    known = measured or Measured((ALPHA,))
    target, *rest = (pass_cost(part, gpu) for part in parts)
    draft = rest[0] if rest else None
    plans = tuple(plan_batch(target, draft, batch, known, config.max_draft_len) for batch in batches)
    return Plan(gpu.label, known.acceptance, memory, plans, tuple(make_notes(config, gpu, plans, known)))


def load_parts(config: PairConfig, gpu: Gpu) -> list[Part]:
    """Read both models' config.json, in loading order, and check them by the compiler that builds for the device."""
    compiler = "onnx-cpu" if gpu.is_cpu else "tensorrt"
    config = config.model_copy(update={"build": config.build.model_copy(update={"compiler": compiler})})
    check_names(config)
    parts, shapes = [], {}
    for role in roles_needed(config):
        _, family, shapes[role] = load_shape(config, role)
        limits = make_limits(config, role, shapes[role])
        parts.append(Part(role, shapes[role], config.model_of(role), limits, family.shares_embedding, gpu.is_cpu))
    find_compiler(compiler).check_pair(config, shapes)
    for part in parts:
        check_device(part, gpu)
    return parts


def check_device(part: Part, gpu: Gpu) -> None:
    """Raise EngineError for a GPU whose generation cannot run a model's scheme: the tensorrt compiler's own rule."""
    if gpu.capability is not None:
        check_gpu(Machine("", "", "", "", gpu.label, gpu.capability), part.scheme)


def is_allowed(part: Part, gpu: Gpu) -> bool:
    """Tell whether a model can be built for a device."""
    try:
        check_device(part, gpu)
    except EngineError:
        return False
    return True


def plan_batch(target: PassCost, draft: PassCost | None, batch: int, known: Measured, max_draft_len: int) -> BatchPlan:
    """Return the table of one batch; c and v as measured where they were, at that batch, else by the roofline."""
    here = known.batch == batch
    ratio = known.cost_ratio if here and known.cost_ratio is not None else cost_ratio(target, draft, batch)
    verify = known.verify_cost if here and known.verify_costs else verify_cost(target, batch)
    table = make_table(known.acceptance, ratio, verify, max_draft_len)
    costs = tuple(verify(tokens) for tokens in range(1, max_draft_len + 2))
    return BatchPlan(batch, target.seconds(batch), draft.seconds(batch) if draft else 0.0, ratio, costs, table)


def make_notes(config: PairConfig, gpu: Gpu, plans: Sequence[BatchPlan], known: Measured) -> list[str]:
    """Return what the tables do not say: where nothing is gained, and what was assumed."""
    notes = [f"speculation does not pay at batch {plan.batch}: plain decoding is faster" for plan in plans if plan.best.draft_len == 0]
    most = config.build.max_batch_size
    if beyond := [str(plan.batch) for plan in plans if plan.batch > most]:
        notes.append(f"batch {', '.join(beyond)} is more than max_batch_size {most} admits")
    length = int(config.build.max_seq_len * CONTEXT_SHARE)
    notes.append(f"times are estimates, of sequences {length} tokens long (half of max_seq_len)")
    if gpu.is_cpu:
        notes.append("the CPU's memory and speed are assumptions: give --measured with c and v of your machine")
    else:
        notes.append("load the target first, then the draft: each fraction is of what is free then (max_tokens_in_paged_kv_cache is not)")
    if len(known.acceptance) == 1:
        notes.append(f"alpha {known.acceptance[0]:g} is taken for every position: `specbuild verify --json` measures it, for --measured")
    if (known.cost_ratio is not None or known.verify_costs) and any(plan.batch != known.batch for plan in plans):
        notes.append(f"measured c and v hold at batch {known.batch}; other batches are by the roofline")
    return notes
