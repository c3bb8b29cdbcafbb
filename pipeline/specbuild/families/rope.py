"""Rotary positions of a Hugging Face config.json, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specbuild.errors import CheckpointError
from specbuild.families.family import read_number
from specbuild.shape import RopeScaling

# What each scaled variant cannot do without. TensorRT-LLM puts defaults of its own in place of what is absent.
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),  # longrope's first name
}


def read_rope(config: Mapping[str, Any], kinds: tuple[str, ...], theta: float = 1e4) -> tuple[float, RopeScaling | None, float]:
    """Return rotary base (`theta` if not given), scaling and rotating share of a head; refuse a scaling not among `kinds` by name."""
    name = config["architectures"][0]
    values = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(values, dict):
        raise CheckpointError(
            f"Cannot convert {name}: rope_parameters is {values!r}, expected a mapping. Fetch the model's own config.json."
        )
    values = dict(values)
    given = values.pop("rope_theta", None)
    base = float(read_number({**config, **({} if given is None else {"rope_theta": given})}, "rope_theta", float, theta))
    pct = values.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    kind = values.get("rope_type") or values.get("type") or "default"
    if type(pct) not in (int, float) or not 0 < pct <= 1:
        raise CheckpointError(f"Cannot convert {name}: partial_rotary_factor is {pct!r}, expected a number up to 1. Mend config.json.")
    if kind == "default":
        if unknown := sorted(set(values) - {"rope_type", "type"}):
            raise CheckpointError(
                f"Cannot convert {name}: rope_parameters has {unknown[0]!r}, which plain rotary positions do not. Mend config.json."
            )
        return base, None, pct
    if kind not in kinds:
        raise CheckpointError(
            f"Cannot convert {name}: rotary scaling is {kind!r}, expected {', '.join(('default', *kinds))}. Use another model."
        )
    missing = [key for key in NEEDED[kind] if values.get(key) is None]
    if missing:
        raise CheckpointError(
            f"Cannot convert {name}: rotary scaling {kind!r} has no {missing[0]}. Fetch the model's own config.json, or add it."
        )
    for key in NEEDED[kind]:
        check_positive(name, key, values[key])
    original, stated = (each.get("original_max_position_embeddings") for each in (values, config))
    if kind in ("llama3", "yarn") and stated not in (None, original):
        raise CheckpointError(
            f"Cannot convert {name}: original_max_position_embeddings is {stated!r} beside rotary scaling that has {original!r}, expected "
            "one. Put it into rope_scaling alone."
        )
    return base, RopeScaling.make(values), pct


def check_positive(name: str, key: str, value: Any) -> None:
    """Raise CheckpointError unless a rotary setting is a positive number, or a list of them where it names factors."""
    numbers = value if key in ("short_factor", "long_factor") else [value]
    if not (isinstance(numbers, list) and all(type(number) in (int, float) and 0 < number < math.inf for number in numbers)):
        raise CheckpointError(
            f"Cannot convert {name}: rotary {key} is {value!r}, expected positive numbers. Fetch the model's own config.json."
        )
