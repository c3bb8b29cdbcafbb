"""Rotary frequencies of a decoder."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specbuild.shape import ModelShape

Array = np.ndarray[Any, Any]
KINDS = ("linear", "llama3")  # scaled variants whose frequencies depend on nothing but the config


def make_frequencies(shape: ModelShape, local: bool = False) -> Array:
    """Return the radians per position of each pair of columns that rotates, (rotary_dim / 2,) float64; `local`: of windowed layers."""
    theta = shape.rope_theta_local if local and shape.rope_theta_local is not None else shape.rope_theta
    plain = theta ** (-np.arange(0, shape.rotary_dim, 2, dtype=np.float64) / shape.rotary_dim)
    if shape.rope_scaling is None or (local and shape.rope_theta_local is not None):
        return plain
    values = shape.rope_scaling.to_dict()
    slow: Array = plain / values["factor"]
    if shape.rope_scaling.kind == "linear":
        return slow
    return _llama3(plain, slow, values)


def _llama3(plain: Array, slow: Array, values: dict[str, Any]) -> Array:
    """Blend: wavelengths that fit the original context often stay, those that do not fit it are slowed down."""
    turns = values["original_max_position_embeddings"] * plain / (2 * math.pi)  # of each pair within the original context
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    blended: Array = share * plain + (1 - share) * slow
    return blended
