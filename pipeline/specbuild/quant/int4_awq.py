"""int4_awq: 4-bit groups along the input, with a per-input prequant scale (ones: round to nearest)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbuild.quant.packing import pack_rows, unpack_rows
from specbuild.quant.rounding import fold_prequant, round_groups
from specbuild.quant.scales import LinearScales
from specbuild.quant.scheme import Levels, QuantScheme, Tensors
from specbuild.tensorfile import TensorSpec

if TYPE_CHECKING:
    import torch


def _plan(spec: TensorSpec, group_size: int) -> list[TensorSpec]:
    (rows, columns), prefix = spec.shape, spec.name.removesuffix("weight")
    return [
        TensorSpec(spec.name, "I8", (rows // 2, columns)),
        TensorSpec(f"{prefix}weights_scaling_factor", "F32", (rows, columns // group_size)),
        TensorSpec(f"{prefix}prequant_scaling_factor", spec.dtype, (columns,)),
    ]


def _quantize(weight: torch.Tensor, group_size: int, scales: LinearScales | None) -> dict[str, torch.Tensor]:
    prequant = None if scales is None else scales.prequant
    if scales is not None and scales.rounded is not None:
        q, scale = scales.rounded
    else:
        q, scale = round_groups(weight if prequant is None else fold_prequant(weight, prequant), group_size)
    return _store(Levels(q, scale, prequant, 4), weight.dtype)


def _store(levels: Levels, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    prequant = levels.scale.new_ones(levels.q.shape[1]) if levels.prequant is None else levels.prequant
    return {"weight": pack_rows(levels.q), "weights_scaling_factor": levels.scale, "prequant_scaling_factor": prequant.to(dtype)}


def _levels(tensors: Tensors) -> Levels:
    prequant = tensors["prequant_scaling_factor"].float()
    return Levels(unpack_rows(tensors["weight"]), tensors["weights_scaling_factor"], None if bool((prequant == 1).all()) else prequant, 4)


def _settings(group_size: int, lm_head: bool) -> dict[str, Any]:
    return {"group_size": group_size, "has_zero_point": False, "pre_quant_scale": True, "exclude_modules": [] if lm_head else ["lm_head"]}


INT4_AWQ = QuantScheme("int4_awq", "W4A16_AWQ", 4, True, _plan, _quantize, _levels, _settings, _store, recipe="INT4_AWQ_CFG")
