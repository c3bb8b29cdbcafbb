"""What a model family is: how its config is read and where each of its tensors goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specbuild.errors import CheckpointError
from specbuild.ranks import Split
from specbuild.shape import ModelShape


def always(_: ModelShape) -> bool:
    """Say that every model of the family has the tensor."""
    return True


@dataclass(frozen=True)
class TensorRule:
    """One TensorRT-LLM tensor: its Hugging Face sources, joined along the rows, and how ranks share it.

    `{i}` stands for the layer; names without it belong to the whole model.
    `split` is one of ranks.Split; `offset` is added to the weights; `swap` puts the lower half of the rows above the upper one.
    """

    name: str
    sources: tuple[str, ...]
    split: Split = "none"
    when: Callable[[ModelShape], bool] = always
    offset: float = 0.0
    swap: bool = False


@dataclass(frozen=True)
class Family:
    """A decoder family, keyed by its Hugging Face architecture."""

    architecture: str
    read_shape: Callable[[Mapping[str, Any]], ModelShape]
    rules: tuple[TensorRule, ...]
    ignored: tuple[str, ...] = ()  # endings of Hugging Face tensors that carry no weights
    atol: float = 1e-4  # float32 logits against transformers
    tllm_keys: Mapping[str, Any] = field(default_factory=dict)  # further keys of the TensorRT-LLM config.json
    # TensorRT-LLM shares one table between embedding and lm_head, split among ranks like lm_head: a tied lm_head is not written
    shares_embedding: bool = False


def read_number(config: Mapping[str, Any], key: str, kind: type[int] | type[float], default: float | None = None) -> Any:
    """Return a positive number of a config.json (`default` where it is absent or null); KeyError when it is absent and has none."""
    value: Any = config[key] if default is None else config.get(key)
    if value is None:
        value = default
    if type(value) not in (int, kind) or not 0 < value < math.inf:
        what = "a whole number" if kind is int else "a number"
        raise CheckpointError(
            f"Cannot convert {config['architectures'][0]}: {key} is {value!r}, expected {what} above 0. Fetch the model's own config.json."
        )
    return value


def read_window(config: Mapping[str, Any]) -> int | None:
    """Return sliding_window, None where it is null: full attention."""
    return None if config.get("sliding_window") is None else int(read_number(config, "sliding_window", int))


def read_flag(config: Mapping[str, Any], key: str) -> bool:
    """Return a switch of a config.json, false where it is absent or null."""
    value = config.get(key) or False
    if not isinstance(value, bool):
        raise CheckpointError(f"Cannot convert {config['architectures'][0]}: {key} is {value!r}, expected true or false. Mend config.json.")
    return value


def check_fields(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise CheckpointError for the first field whose value would change the maths; an absent field has its first value."""
    for key, values in allowed.items():
        if config.get(key, values[0]) not in values:
            raise CheckpointError(
                f"Cannot convert {config['architectures'][0]}: {key} is {config[key]!r}, expected {values[0]!r}. "
                "This version does not support it."
            )
