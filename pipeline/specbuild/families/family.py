"""What a model family is: how its config is read and where each of its tensors goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specbuild.shape import ModelShape

Split = Literal["none", "rows", "columns", "qkv", "vocab"]


def always(_: ModelShape) -> bool:
    """Say that every model of the family has the tensor."""
    return True


@dataclass(frozen=True)
class TensorRule:
    """One TensorRT-LLM tensor: its Hugging Face sources, joined along the rows, and how ranks share it.

    `{i}` stands for the layer; names without it belong to the whole model.
    Split: none = on every rank; rows, columns = cut along that axis; qkv = q, k and v rows cut apart, then joined again;
    vocab = rows, zero-padded to a multiple of the ranks.
    """

    name: str
    sources: tuple[str, ...]
    split: Split = "none"
    when: Callable[[ModelShape], bool] = always


@dataclass(frozen=True)
class Family:
    """A decoder family, keyed by its Hugging Face architecture."""

    architecture: str
    read_shape: Callable[[Mapping[str, Any]], ModelShape]
    rules: tuple[TensorRule, ...]
    ignored: tuple[str, ...] = ()  # endings of Hugging Face tensors that carry no weights
    atol: float = 1e-4  # float32 logits against transformers
