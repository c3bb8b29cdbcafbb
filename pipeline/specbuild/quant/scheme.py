"""What a quantization scheme is: what it stores on disk, and the integers and scales an engine multiplies with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbuild.quant.scales import LinearScales
from specbuild.tensorfile import TensorSpec

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
BY_ROW = ("weight", "weights_scaling_factor")  # stored tensors whose rows depend on the same rows of the weight, and on no others


@dataclass(frozen=True)
class Levels:
    """A linear layer as integers: W[o, i] = q[o, i] * scale[o, i // group] * prequant[i]; y = (x * prequant) @ (q * scale).T.

    With an activation scale a, x * prequant itself becomes integers: round half to even of x * prequant / a, within -128..127.
    """

    q: torch.Tensor  # int8 (out, in)
    scale: torch.Tensor  # float32 (out, groups); one group = one scale per output row
    prequant: torch.Tensor | None  # float32 (in,); None = ones
    bits: int
    activation: torch.Tensor | None = None  # float32 (1,); None = x stays as it is

    def weight(self) -> torch.Tensor:
        """Return q * scale, float32 (out, in): the weight that x * prequant meets."""
        rows, columns = self.q.shape
        return (self.q.reshape(rows, self.scale.shape[1], -1) * self.scale[:, :, None]).reshape(rows, columns)


@dataclass(frozen=True)
class QuantScheme:
    """A scheme, by its upstream qformat name. `suffixes` of a linear layer's tensors replace `weight`.

    plan(spec, group_size): the tensors stored for a linear weight. quantize(weight, group_size, scales): those tensors, of the
    whole weight or of an even number of its rows; without scales the prequant scales are ones.
    levels(tensors): the same as integers and scales, or None when the weight stays as it is.
    store(levels, dtype): the tensors that these integers and scales are stored as, in a checkpoint of that dtype; None: no such form.
    """

    name: str
    quant_algo: str | None
    bits: int
    grouped: bool
    plan: Callable[[TensorSpec, int], list[TensorSpec]]
    quantize: Callable[[torch.Tensor, int, LinearScales | None], dict[str, torch.Tensor]]
    levels: Callable[[Tensors], Levels | None]
    settings: Callable[[int, bool], dict[str, Any]]  # (group_size, is lm_head quantized): further keys of config.json's `quantization`
    store: Callable[[Levels, torch.dtype], dict[str, torch.Tensor]] | None = None
    recipe: str | None = None  # the config of modelopt.torch.quantization that finds its scales; None: it has none to find
    needs_calibration: bool = False  # nothing to fall back on when no scales are given
    activation_bits: int = 16


def keep_weight(weight: torch.Tensor, group_size: int, scales: LinearScales | None) -> dict[str, torch.Tensor]:  # noqa: ARG001
    """Store the weight as it is."""
    return {"weight": weight}


def keep_spec(spec: TensorSpec, group_size: int) -> list[TensorSpec]:  # noqa: ARG001
    """Plan the weight as it is."""
    return [spec]


def default_settings(group_size: int, lm_head: bool) -> dict[str, Any]:  # noqa: ARG001
    """Add nothing to `quantization`: upstream's defaults exclude lm_head and the embedding. With lm_head, only the embedding."""
    return {"exclude_modules": ["*vocab_embedding"]} if lm_head else {}


def includes_lm_head(quantization: Mapping[str, Any]) -> bool:
    """Tell whether a config.json's `quantization` covers lm_head: a list that does not name it stands in place of the defaults."""
    excluded = quantization.get("exclude_modules")
    return quantization.get("quant_algo") is not None and excluded is not None and "lm_head" not in excluded
