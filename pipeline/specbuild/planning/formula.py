"""What speculation gains, as formulas of Leviathan et al., arXiv 2211.17192, with a verification pass that may cost more than one step.

A round drafts k tokens and verifies them in one pass of the target. Times are in units of a plain step of the target: c is a draft
step, v(n) a pass over n tokens (the paper has v = 1). acceptance[i] is the share of rounds that accept token i of those that
accepted all before it; beyond the last one it stays as it is there. One number is the paper's alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbuild.errors import ConfigError

MAX_DRAFT_LEN = 32
LONGEST = 1024  # drafts that a table can be asked for
_TIE = 1e-9  # relative; speedups closer than this are equal, and the shorter draft is taken


@dataclass(frozen=True)
class Row:
    """One draft length. tokens_per_round is tau; speedup is over plain decoding, which is draft_len 0."""

    draft_len: int
    tokens_per_round: float
    speedup: float


def constant_cost(tokens: int) -> float:  # noqa: ARG001
    """Return the cost of a pass that is as fast over n tokens as over one: 1."""
    return 1.0


def expected_tokens(acceptance: Sequence[float], draft_len: int) -> float:
    """Return tau, the tokens per round: 1 + a_1 + a_1 a_2 + ..."""
    total, product = 1.0, 1.0
    for index in range(draft_len):
        product *= acceptance[min(index, len(acceptance) - 1)]
        total += product
    return total


def speedup(tokens: float, draft_len: int, cost_ratio: float, verify_cost: float = 1.0) -> float:
    """Return S = tau / (k c + v(k+1))."""
    return tokens / (draft_len * cost_ratio + verify_cost)


def operations_factor(alpha: float, draft_len: int, operations_ratio: float = 0.0) -> float:
    """Return how many times the arithmetic of plain decoding a round takes per token (theorem 3.11 of the paper)."""
    return (draft_len * operations_ratio + draft_len + 1) / expected_tokens((alpha,), draft_len)


def make_table(
    acceptance: Sequence[float],
    cost_ratio: float,
    verify_cost: Callable[[int], float] = constant_cost,
    max_draft_len: int = MAX_DRAFT_LEN,
) -> tuple[Row, ...]:
    """Return a row for every draft length from 0, plain decoding, to `max_draft_len`."""
    rows = [Row(0, 1.0, 1.0)]
    for length in range(1, max_draft_len + 1):
        tokens = expected_tokens(acceptance, length)
        rows.append(Row(length, tokens, speedup(tokens, length, cost_ratio, verify_cost(length + 1))))
    return tuple(rows)


def find_best(table: Sequence[Row]) -> Row:
    """Return the fastest row, of equal ones the shortest draft."""
    fastest = max(row.speedup for row in table)
    return next(row for row in table if row.speedup >= fastest * (1 - _TIE))


def alpha_from_tau(tokens: float, draft_len: int) -> float:
    """Return the alpha at which a round of `draft_len` drafted tokens gives that many: the inverse of `expected_tokens`."""
    if draft_len < 1 or not 1 <= tokens <= draft_len + 1:
        raise ConfigError(f"Cannot find the acceptance of {tokens:g} tokens per round at draft length {draft_len}: expected 1 to k + 1.")
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens((middle,), draft_len) < tokens else (low, middle)
    return (low + high) / 2


def tokens_from_speedup(gain: float, draft_len: int, cost_ratio: float, verify_cost: float = 1.0) -> float:
    """Return the tau that a measured speedup implies."""
    return gain * (draft_len * cost_ratio + verify_cost)


def conditional_rates(position_rates: Sequence[float]) -> tuple[float, ...]:
    """Turn shares of all rounds that accepted position i (as vLLM and `SpecStats` count) into a_i, given all before it."""
    rates, before = [], 1.0
    for rate in position_rates:
        rates.append(min(1.0, rate / before) if before > 0 else 0.0)
        before = rate
    return tuple(rates)


def check_alpha(value: float, what: str = "alpha") -> float:
    """Raise ConfigError for an acceptance that is not a share."""
    if not 0 <= value <= 1:
        raise ConfigError(
            f"Cannot plan with {what} {value:g}: expected a share between 0 and 1. Measure it with `specbuild verify --json`."
        )
    return value


def check_cost_ratio(value: float, what: str = "cost ratio") -> float:
    """Raise ConfigError for a cost that is no positive number."""
    if not 0 < value < math.inf:
        raise ConfigError(f"Cannot plan with {what} {value:g}: expected time of a draft step over a target step, above 0 and finite.")
    return value


def check_draft_len(value: int) -> int:
    """Raise ConfigError for a draft length that no table has."""
    if not 0 <= value <= LONGEST:
        raise ConfigError(f"Cannot plan with max draft length {value}: expected 0 to {LONGEST}. Use {MAX_DRAFT_LEN}.")
    return value
