"""Does a sample have a distribution, and do two samples have the same one: likelihood-ratio (G) tests over pooled cells.

G and not Pearson's statistic: far out in the tail, where a false-alarm rate of 1e-5 lies, Pearson's is too large for cells of few
expected counts (5 expected and 15 found is 1 in 4000, not 1 in 130,000). Williams' correction is applied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from specbuild.spec.sampling import Probs

LEAST = 5.0  # expected counts of a cell of its own; all other tokens are one cell together
IMPOSSIBLE = 1e-6  # probability that is granted to all tokens of probability 0 together: rounding may move the edge of a nucleus


@dataclass(frozen=True)
class Fit:
    """A test's outcome: under the hypothesis `statistic` is chi-squared with `degrees`; 0 degrees say nothing."""

    draws: int
    statistic: float
    degrees: int

    @property
    def p_value(self) -> float:
        """The probability of a statistic this large or larger."""
        return chi_squared_tail(self.statistic, self.degrees)


def fit_distribution(counts: Mapping[int, int], expected: Probs) -> Fit:
    """Test whether tokens that were drawn `counts` times come from `expected` (V,)."""
    draws = sum(counts.values())
    mean = expected * draws
    observed = np.zeros(max(len(expected), max(counts, default=0) + 1))
    observed[list(counts)] = list(counts.values())
    kept = np.flatnonzero(mean >= LEAST)
    impossible = float(draws - observed[: len(expected)][expected > 0].sum())
    floor = IMPOSSIBLE * draws
    cells = [*zip(observed[kept].tolist(), mean[kept].tolist(), strict=True)]
    cells.append((float(draws - observed[kept].sum() - impossible), max(float(draws - mean[kept].sum()), floor)))
    if impossible:
        cells.append((impossible, floor))
    return _make_fit(draws, cells, len(cells) - 1, mean[kept])


def fit_samples(first: Mapping[int, int], second: Mapping[int, int]) -> Fit:
    """Test whether two samples of tokens come from one distribution, whatever it is."""
    sizes = (sum(first.values()), sum(second.values()))
    share = min(sizes) / max(1, sum(sizes))
    kept = [token for token in sorted({*first, *second}) if (first.get(token, 0) + second.get(token, 0)) * share >= LEAST]
    rows = [(first.get(token, 0), second.get(token, 0)) for token in kept]
    rest = (sizes[0] - sum(row[0] for row in rows), sizes[1] - sum(row[1] for row in rows))
    rows += [rest] if any(rest) else []
    table = [(float(found), sum(row) * size / sum(sizes)) for row in rows for found, size in zip(row, sizes, strict=True)]
    return _make_fit(sum(sizes), table, max(0, len(rows) - 1), np.array([mean for _, mean in table if mean >= LEAST]))


def combine(fits: Iterable[Fit]) -> Fit:
    """Return independent tests as one."""
    parts = list(fits)
    return Fit(sum(each.draws for each in parts), sum(each.statistic for each in parts), sum(each.degrees for each in parts))


def _make_fit(draws: int, cells: list[tuple[float, float]], degrees: int, kept: Probs) -> Fit:
    """Make the outcome of cells (found, expected); `kept` are the expected counts that Williams' correction knows."""
    total = sum(2 * (found * math.log(found / mean) - found + mean if found else mean) for found, mean in cells)
    correction = 1 + float((1 / kept).sum()) / (6 * degrees) if degrees else 1.0
    return Fit(draws, max(0.0, total) / correction if degrees else 0.0, degrees)


def chi_squared_tail(x: float, degrees: int) -> float:
    """Return the probability that chi-squared exceeds x: the upper regularized gamma function, by series or continued fraction."""
    a, x = degrees / 2, x / 2
    if x <= 0 or degrees == 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        for n in range(1, 10_000):
            term *= x / (a + n)
            total += term
            if term < total * 1e-16:
                break
        return max(0.0, 1 - scale * total)
    b = x + 1 - a  # Lentz's method
    c, d = 1e300, 1 / b
    value = d
    for n in range(1, 10_000):
        b += 2
        factor = n * (a - n)
        d = 1 / (factor * d + b)
        c = b + factor / c
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return scale * value
