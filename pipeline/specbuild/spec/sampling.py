"""From logits to a distribution to a token: the only place where temperature, top-k, top-p and randomness exist."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specbuild.errors import ConfigError, EngineError

Logits: TypeAlias = NDArray[np.floating[Any]]
Probs: TypeAlias = NDArray[np.float64]

ACCEPT, RECOVER, DRAW = 0, 1, 2
"""Columns of `uniforms`: to accept a drafted token, to draw in its place or behind the draft, and to draw a token as such."""


@dataclass(frozen=True)
class Sampling:
    """How a request wants its tokens drawn; `top_k` 0 and `top_p` 1 keep the whole vocabulary."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    end_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"Cannot sample with temperature {self.temperature}: expected a number >= 0. Use 0 for greedy.")
        if self.top_k < 0:
            raise ConfigError(f"Cannot sample with top_k {self.top_k}: expected a whole number >= 0. Use 0 for all tokens.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"Cannot sample with top_p {self.top_p}: expected 0 < top_p <= 1. Use 1 for all tokens.")
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"Cannot sample with seed {self.seed}: expected 0 <= seed < 2**64. Use another seed.")

    @property
    def greedy(self) -> bool:
        """Whether there is nothing to draw."""
        return self.temperature == 0 or self.top_k == 1


def argmax(logits: Logits) -> NDArray[np.intp]:
    """Best id of each row of `logits` (n, V), the lowest one on ties; raises EngineError where the maximum is not finite."""
    best: NDArray[np.intp] = logits.argmax(axis=1)
    # NumPy's argmax stops at the first NaN, so the maxima alone tell whether a row is sound.
    for row, top in enumerate(logits[np.arange(len(logits)), best]):
        if not np.isfinite(top):
            raise EngineError(
                f"Cannot choose a token from row {row} of {len(logits)}: its largest logit is {top}, "
                "expected a finite number. Check the engine's dtype and its weights."
            )
    return best


def probs(logits: Logits, sampling: Sampling) -> Probs:
    """Distributions (n, V) that `logits` (n, V) stand for: temperature, then top-k, then top-p; one-hot when greedy."""
    best = argmax(logits)
    result = np.zeros(logits.shape)
    if sampling.greedy:
        result[np.arange(len(logits)), best] = 1.0
        return result
    for row, top, out in zip(logits, best, result, strict=True):
        ids = _top_k(row, sampling.top_k)
        with np.errstate(over="ignore"):
            mass = np.exp((row[ids].astype(np.float64) - float(row[top])) / sampling.temperature)
        mass /= mass.sum()
        kept = _top_p(mass, sampling.top_p)
        out[ids[kept]] = mass[kept] / mass[kept].sum()
    return result


def _top_k(row: Logits, k: int) -> NDArray[np.intp]:
    """The ids of exactly k largest logits, ascending; lower ids win ties, so that k = 1 is argmax."""
    if not 0 < k < len(row):
        return np.arange(len(row))
    kth = np.partition(row, -k)[-k]
    above = np.flatnonzero(row > kth)
    return np.sort(np.concatenate([above, np.flatnonzero(row == kth)[: k - len(above)]]))


def _top_p(mass: Probs, top_p: float) -> NDArray[np.intp]:
    """Indices of the fewest entries whose mass reaches `top_p`, at least one; lower indices win ties."""
    if top_p == 1:
        return np.arange(len(mass))
    likely = np.flatnonzero(mass >= (1 - top_p) / len(mass))  # all others together have less than 1 - top_p: no need to sort them
    order = likely[np.argsort(-mass[likely], kind="stable")]
    return order[: np.searchsorted(np.cumsum(mass[order]), top_p) + 1]


def uniforms(seed: int, start: int, n: int) -> Probs:
    """Numbers in [0, 1) for n positions (n, 4), by the columns above: row i depends on (seed, start + i) alone.

    One Philox counter block is one position. Keying by position makes a draw independent of how the
    sequence was cut into rounds and requests.
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=[start, 0, 0, 0])).random((n, 4))


def draw(weights: Probs, u: float) -> int:
    """The id at `u` of the inverse CDF of `weights` (V,), which need not sum to 1; never an id of weight 0."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])  # u * total can round up to the total
