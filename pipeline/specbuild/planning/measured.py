"""Measurements that replace assumptions: the reports of `specbuild verify --json` and `specbuild bench --json`, or a file like them.

The acceptance is the first of these keys that is there:
  acceptance_by_draft_len  {"1": 0.83, "2": 0.75, ...}: accepted over drafted tokens at that draft length (`verify`)
  acceptance_by_position   [a_1, a_2, ...]: share of the rounds that accept token i, of those that accepted all before it (`bench`)
  position_rates           [r_1, r_2, ...]: share of all rounds that accept token i (vLLM's and `SpecStats`' way of counting)
  acceptance               alpha, one number
Optional, and used at one batch in place of the roofline:
  c                        time of a draft step over a target step; 0 where a look-up drafts
  v                        {"1": 1.0, "2": 1.1, ...}: time of a target pass over n tokens, over one token
  batch                    the batch that c and v were measured at; default 1
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbuild.errors import ConfigError
from specbuild.planning.formula import check_alpha, check_cost_ratio, conditional_rates

KEYS = ("acceptance_by_draft_len", "acceptance_by_position", "position_rates", "acceptance")


@dataclass(frozen=True)
class Measured:
    """What a report says; c and v are None where it does not."""

    acceptance: tuple[float, ...]
    cost_ratio: float | None = None
    verify_costs: tuple[tuple[int, float], ...] = ()
    batch: int = 1

    def verify_cost(self, tokens: int) -> float:
        """Return v(n): on the line between the measured ones, beyond the last on the line through the last two."""
        points = self.verify_costs
        if len(points) == 1 or tokens <= points[0][0]:
            return points[0][1]
        following = next((i for i, (width, _) in enumerate(points) if width >= tokens), len(points) - 1)
        (low, low_cost), (high, high_cost) = points[following - 1], points[following]
        cost = low_cost + (high_cost - low_cost) * (tokens - low) / (high - low)
        return cost if tokens <= high else max(cost, high_cost)


def load_measured(path: Path) -> Measured:
    """Read a report; raise ConfigError with one line for anything that is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read measurements {path}: {error}. Give what `specbuild verify --json` writes.") from None
    key = next((key for key in KEYS if isinstance(values, dict) and values.get(key) is not None), None)
    if key is None:
        raise ConfigError(
            f"Cannot use measurements {path}: none of {', '.join(KEYS)} is there. Give what `specbuild verify --json` writes."
        )
    try:
        acceptance = read_acceptance(key, values[key])
        costs = read_costs(values.get("v") or {})
        ratio = None if values.get("c") is None else number(values["c"])
        if ratio is not None and ratio < 0:
            raise ValueError(f"c is {ratio:g}, expected 0 or more")
        batch = values.get("batch", 1)
        if type(batch) is not int or batch < 1:
            raise ValueError(f"batch is {batch!r}, expected a whole number from 1")
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"Cannot use measurements {path}: {error}. See `specbuild plan --help` for what it may hold.") from None
    return Measured(acceptance, ratio, costs, batch)


def read_acceptance(key: str, value: Any) -> tuple[float, ...]:
    """Return a_1, a_2, ... of one of KEYS; ValueError for a value of another kind."""
    if key == "acceptance":
        return (check_alpha(number(value), key),)
    if key == "acceptance_by_draft_len":
        rates = sorted((int(length), check_alpha(number(rate), f"{key} {length}")) for length, rate in value.items())
        if not rates or rates[0][0] < 1:
            raise ValueError(f"{key} is {value!r}, expected rates by draft length from 1")
        return rates_by_position(rates)
    rates_in_order = tuple(check_alpha(number(rate), key) for rate in value)
    if not rates_in_order or isinstance(value, str | Mapping):
        raise ValueError(f"{key} is {value!r}, expected a list of rates")
    return conditional_rates(rates_in_order) if key == "position_rates" else rates_in_order


def rates_by_position(rates: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    """Return a_1, a_2, ... from accepted / drafted at several draft lengths k, where k * rate = a_1 + a_1 a_2 + ... up to k.

    Between two lengths a is constant: the share g whose powers make up the difference, bisected.
    """
    found: list[float] = []
    reached, before = 1.0, 0.0  # a_1 ... a_k, and their sum up to the last length
    for length, rate in rates:
        steps = length - len(found)
        wanted = (length * rate - before) / reached if reached > 0 else 0.0
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(middle**i for i in range(1, steps + 1)) < wanted else (low, middle)
        found += [high] * steps
        reached, before = reached * high**steps, length * rate
    return tuple(found)


def read_costs(value: Any) -> tuple[tuple[int, float], ...]:
    """Return (tokens, cost) in order, relative to a pass over one token."""
    costs = sorted((int(tokens), check_cost_ratio(number(cost), "measured v")) for tokens, cost in value.items())
    if costs and costs[0][0] != 1:
        raise ValueError(f"v is {value!r}, expected costs by number of tokens, with that of one token")
    return tuple((tokens, cost / costs[0][1]) for tokens, cost in costs)


def number(value: Any) -> float:
    """Return a finite number; ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)
