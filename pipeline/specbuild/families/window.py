"""Which layers of a Hugging Face config.json have a sliding window, where not all of them do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.errors import CheckpointError
from specbuild.families.family import read_number, read_window


def read_full_every(config: Mapping[str, Any], default: int) -> dict[str, Any]:
    """Return `window` and `full_every` of a shape; refuse layer_types that no such pattern describes.

    Transformers 5 lists layer_types; before it sliding_window_pattern, or nothing, said that every n-th layer sees all positions.
    """
    layers, window = config["num_hidden_layers"], read_window(config)
    name = "sliding_window_pattern" if config.get("sliding_window_pattern") else "_sliding_window_pattern"
    stated = read_number(config, name, int, default)
    types = config.get("layer_types") or ["full_attention" if (i + 1) % stated == 0 else "sliding_attention" for i in range(layers)]
    if window is None:
        return {"window": None, "full_every": 0}
    first_full = types.index("full_attention") + 1 if "full_attention" in types else 0
    for every in (stated, first_full, 0):
        if types == ["full_attention" if every and (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]:
            return {"window": window, "full_every": every}
    raise CheckpointError(
        f"Cannot convert {config['architectures'][0]}: layer_types is {types}, expected every n-th layer to be full_attention. "
        "This version does not support it."
    )
