"""Rotary frequencies of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from specbuild.shape import ModelShape

Array = np.ndarray[Any, Any]
Values = dict[str, Any]
KINDS = ("linear", "llama3", "yarn")  # scaled variants whose frequencies depend on nothing but the config


def make_rotary(shape: ModelShape, local: bool = False, length: int = 0) -> tuple[Array, float]:
    """Return radians per position of each pair of columns that rotates, (rotary_dim / 2,) float64, and the factor on cos and sin.

    local: of the windowed layers. length: positions of the sequence at hand; 0 = within the original context.
    """
    theta = shape.rope_theta_local if local and shape.rope_theta_local is not None else shape.rope_theta
    plain = _plain(theta, shape.rotary_dim)
    if shape.rope_scaling is None or (local and shape.rope_theta_local is not None):
        return plain, 1.0
    return _VARIANTS[shape.rope_scaling.kind](shape, shape.rope_scaling.to_dict(), plain, length)


def _plain(theta: float, columns: int) -> Array:
    frequencies: Array = theta ** (-np.arange(0, columns, 2, dtype=np.float64) / columns)
    return frequencies


def _linear(shape: ModelShape, values: Values, plain: Array, length: int) -> tuple[Array, float]:  # noqa: ARG001
    return plain / values["factor"], 1.0


def _llama3(shape: ModelShape, values: Values, plain: Array, length: int) -> tuple[Array, float]:  # noqa: ARG001
    """Blend: wavelengths that fit the original context often stay, those that do not fit it are slowed down."""
    turns = values["original_max_position_embeddings"] * plain / (2 * math.pi)  # of each pair within the original context
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return share * plain + (1 - share) * plain / values["factor"], 1.0


def _yarn(shape: ModelShape, values: Values, plain: Array, length: int) -> tuple[Array, float]:  # noqa: ARG001
    """Blend by the pair's index: those before beta_fast turns of the original context stay, those after beta_slow are slowed down.

    Source: YaRN (Peng et al. 2023), sections 3.2 and 3.4, with the defaults of transformers.
    """
    columns, factor = shape.rotary_dim, values["factor"]
    original = values.get("original_max_position_embeddings") or shape.max_positions

    def pair_of(turns: float) -> float:
        return columns * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(shape.rope_theta))

    low, high = pair_of(values.get("beta_fast") or 32), pair_of(values.get("beta_slow") or 1)
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, columns - 1)
    slowed = np.clip((np.arange(columns // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    given = values.get("attention_factor")
    return (1 - slowed) * plain + slowed * plain / factor, _yarn_factor(values) if given is None else float(given)


def _yarn_factor(values: Values) -> float:
    """Return what keeps the entropy of attention over a context that is `factor` times as long."""

    def scale(weight: float) -> float:
        return 1.0 if values["factor"] <= 1 else 0.1 * weight * math.log(values["factor"]) + 1.0

    over, under = values.get("mscale"), values.get("mscale_all_dim")
    return scale(over) / scale(under) if over and under else scale(1.0)


def _longrope(shape: ModelShape, values: Values, plain: Array, length: int) -> tuple[Array, float]:
    """Divide by factors of each pair's own, others beyond the original context. Source: LongRoPE (Ding et al. 2024)."""
    original = shape.original_positions or values.get("original_max_position_embeddings") or shape.max_positions
    stretch = values.get("factor") or shape.max_positions / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    given = values.get("attention_factor")
    factors = values["long_factor" if length > original else "short_factor"]
    return plain / np.array(factors, np.float64), usual if given is None else float(given)


def _dynamic(shape: ModelShape, values: Values, plain: Array, length: int) -> tuple[Array, float]:
    """Raise the base so far that the slowest pair turns no further than it did within the context."""
    if length <= shape.max_positions:
        return plain, 1.0
    columns, factor = shape.rotary_dim, values["factor"]
    stretch = factor * length / shape.max_positions - (factor - 1)
    return _plain(shape.rope_theta * stretch ** (columns / (columns - 2)), columns), 1.0


_VARIANTS: dict[str, Callable[[ModelShape, Values, Array, int], tuple[Array, float]]] = {
    "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope, "su": _longrope, "dynamic": _dynamic,
}  # fmt: skip
