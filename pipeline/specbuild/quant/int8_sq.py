"""int8_sq: SmoothQuant; one weight scale per output row, one activation scale per layer, a prequant scale per input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbuild.quant.rounding import fold_prequant, round_rows
from specbuild.quant.scales import LinearScales
from specbuild.quant.scheme import Levels, QuantScheme, Tensors
from specbuild.tensorfile import TensorSpec

if TYPE_CHECKING:
    import torch


def _plan(spec: TensorSpec, group_size: int) -> list[TensorSpec]:  # noqa: ARG001
    (rows, columns), prefix = spec.shape, spec.name.removesuffix("weight")
    return [
        TensorSpec(spec.name, "I8", (rows, columns)),
        TensorSpec(f"{prefix}weights_scaling_factor", "F32", (rows,)),
        TensorSpec(f"{prefix}activation_scaling_factor", "F32", (1,)),
        TensorSpec(f"{prefix}prequant_scaling_factor", spec.dtype, (columns,)),
    ]


def _quantize(weight: torch.Tensor, group_size: int, scales: LinearScales | None) -> dict[str, torch.Tensor]:  # noqa: ARG001
    if scales is None or scales.activation is None:
        raise ValueError("int8_sq needs an activation scale")
    q, scale = round_rows(fold_prequant(weight, scales.prequant), scales.row_amax)
    return {
        "weight": q,
        "weights_scaling_factor": scale,
        "activation_scaling_factor": scales.activation,
        "prequant_scaling_factor": scales.prequant.to(weight.dtype),
    }


def _levels(tensors: Tensors) -> Levels:
    prequant, activation = tensors["prequant_scaling_factor"].float(), tensors["activation_scaling_factor"]
    return Levels(tensors["weight"], tensors["weights_scaling_factor"][:, None], prequant, 8, activation)


def _settings(group_size: int, lm_head: bool) -> dict[str, Any]:  # noqa: ARG001  check_lm_head refuses it
    return {"exclude_modules": ["lm_head"]}


INT8_SQ = QuantScheme(
    "int8_sq", "W8A8_SQ_PER_CHANNEL", 8, False, _plan, _quantize, _levels, _settings, recipe="INT8_SMOOTHQUANT_CFG", needs_calibration=True,
    activation_bits=8,
)  # fmt: skip
