"""What passes cost: a draft step (c) and a target pass over n new tokens (v), in units of a target pass over one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbuild.compilers import Runner
from specbuild.pair import Pair
from specbuild.planning.formula import expected_tokens, speedup
from specbuild.spec.stats import SpecStats

PAST = 80  # cached tokens behind which a pass is timed
REPEATS = 7  # turns of a run; a pass's time is that of its fastest, because whatever else runs on the machine only adds to it


@dataclass(frozen=True)
class Costs:
    """Costs of passes over `batch` sequences at once. c is 0 where the drafter needs no model."""

    batch: int
    target_seconds: float  # a pass of one token per sequence
    c: float
    v: dict[int, float]


def measure_costs(
    pair: Pair, ids: Sequence[int], batches: Sequence[int], draft_lens: Sequence[int], runs: int, clock: Callable[[], float]
) -> tuple[Costs, ...]:
    """Time every pass in turn, in the order in which decoding has them; ratios are medians over the runs behind an unreported one."""
    widths = [*range(1, max(draft_lens) + 2)]
    past = min(PAST, *(runner.max_seq_len - widths[-1] for runner in (pair.target, pair.draft) if runner))
    source = list(ids) * (1 + (past + widths[-1]) // len(ids))
    found = []
    for batch in batches:
        rows = [(source[i:] + source[:i])[: past + widths[-1]] for i in range(batch)]
        times = [time_passes(pair, rows, past, widths, clock) for _ in range(runs + 1)][1:]
        c = statistics.median(step / target[1] for step, target in times)
        v = {width: statistics.median(target[width] / target[1] for _, target in times) for width in widths}
        found.append(Costs(batch, statistics.median(target[1] for _, target in times), c, v))
    return tuple(found)


def time_passes(
    pair: Pair, rows: Sequence[Sequence[int]], past: int, widths: Sequence[int], clock: Callable[[], float]
) -> tuple[float, dict[int, float]]:
    """Return the seconds of a draft step, and of target passes by width: plain steps in a row, then each width behind its draft."""

    def run(runner: Runner, end: int, width: int) -> float:
        start = clock()
        runner.logits_batch([(row[:end], width) for row in rows])
        return clock() - start

    target: dict[int, list[float]] = {width: [] for width in widths}
    draft: dict[int, list[float]] = {width: [] for width in widths[1:]}
    for repeat in range(REPEATS + 1):
        run(pair.target, past + 1, 1)
        for width in widths:
            steps = [run(pair.draft, past + i, 1) for i in range(1, width)] if pair.draft else [0.0]
            taken = run(pair.target, past + width, width)
            if repeat:  # the first one fills the caches
                target[width].append(taken)
                if width > 1:
                    draft[width].append(statistics.fmean(steps))
    step = statistics.fmean(min(each) for each in draft.values()) if draft else 0.0
    return step, {width: min(taken) for width, taken in target.items()}


def find_acceptance(stats: SpecStats) -> list[float]:
    """Return a_1, a_2, ...: the share of rounds that accept token i, of those that drafted it and accepted all before it."""
    rates = []
    for position in range(max((drafted for drafted, _ in stats.histogram), default=0)):
        reached = {cell: n for cell, n in stats.histogram.items() if cell[0] > position and cell[1] >= position}
        if not reached:
            break
        rates.append(sum(n for (_, accepted), n in reached.items() if accepted > position) / sum(reached.values()))
    return rates


def predict(acceptance: Sequence[float], draft_len: int, costs: Costs) -> float | None:
    """Return S = tau / (k c + v(k+1)) (Leviathan et al., generalized); None where nothing was drafted."""
    if draft_len == 0:
        return 1.0
    if not acceptance:
        return None
    return speedup(expected_tokens(acceptance, draft_len), draft_len, costs.c, costs.v[draft_len + 1])
