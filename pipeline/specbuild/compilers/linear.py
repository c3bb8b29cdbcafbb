"""A linear layer as the onnx-cpu graph needs it, and several that read the same input as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specbuild.quant import Levels

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Linear:
    """y = x @ W.T + bias, with W (out, in) as integers or, where the scheme keeps it, as it is."""

    weight: torch.Tensor | Levels
    bias: torch.Tensor | None

    @property
    def rows(self) -> int:
        """How many outputs it has."""
        return len(self.weight.q if isinstance(self.weight, Levels) else self.weight)


def join_outputs(layers: Sequence[Linear]) -> Linear | None:
    """Return one layer whose outputs are those of all side by side; None where they do not treat their input alike."""
    import torch

    first, biases = layers[0], [layer.bias for layer in layers if layer.bias is not None]
    if len(biases) not in (0, len(layers)):
        return None
    bias = torch.cat(biases) if biases else None
    if not isinstance(first.weight, Levels):
        return Linear(torch.cat([layer.weight for layer in layers if not isinstance(layer.weight, Levels)]), bias)
    levels = [layer.weight for layer in layers if isinstance(layer.weight, Levels)]
    if not all(_same(first.weight.prequant, each.prequant) and _same(first.weight.activation, each.activation) for each in levels):
        return None
    return Linear(replace(levels[0], q=torch.cat([each.q for each in levels]), scale=torch.cat([each.scale for each in levels])), bias)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else bool((a == b).all())
