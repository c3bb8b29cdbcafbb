"""Rounding rules, as TensorRT-LLM and its exporter apply them; pure functions over tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def fold_prequant(weight: torch.Tensor, prequant: torch.Tensor) -> torch.Tensor:
    """Return W / prequant, column by column, in the weight's dtype: times the float32 reciprocal, then cast.

    Source: modelopt 0.33 apply_pre_quant_scale_and_smooth. A result that is not finite raises OverflowError.
    """
    folded = (weight * (1.0 / prequant.float())).to(weight.dtype)
    if not bool(folded.isfinite().all()):
        raise OverflowError(f"{str(weight.dtype).removeprefix('torch.')} cannot hold the weight divided by its prequant scales")
    return folded


def row_amax(weight: torch.Tensor, prequant: torch.Tensor) -> torch.Tensor:
    """Return max|W / prequant| of every row, float32 (out,)."""
    return fold_prequant(weight, prequant).abs().amax(dim=1).float()


def round_rows(weight: torch.Tensor, row_amax: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to INT8 with one scale per output row: scale = amax / 127, half to even, range [-128, 127].

    weight (out, in) -> q int8 (out, in), scale float32 (out,). A row of zeros gets scale 1. `row_amax` stands for the rows' own
    where the weight has only some of their columns. Source: modelopt 0.33 get_scaling_factor, to_quantized_weight.
    """
    amax = weight.abs().amax(dim=1).float() if row_amax is None else row_amax
    scale = amax / 127
    scale.masked_fill_(scale == 0, 1.0)
    return (weight.float() / scale[:, None]).round_().clamp_(-128, 127).char(), scale


def round_groups(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to INT4 with one scale per `group_size` input columns: scale = amax / 7, half to even, range [-8, 7].

    weight (out, in) -> q int8 (out, in), scale float32 (out, in / group_size). A group of zeros gets scale 1.
    Source: modelopt 0.33 get_scaling_factor, pack_int4_in_uint8.
    """
    import torch

    rows, columns = weight.shape
    groups = weight.to(torch.float32, copy=True).reshape(rows, columns // group_size, group_size)
    scale = groups.abs().amax(dim=2) / 7
    scale.masked_fill_(scale == 0, 1.0)
    q = groups.div_(scale[:, :, None]).round_().char().clamp_(-8, 7)  # at most 11 before the clamp, where float32 runs out of small numbers
    return q.reshape(rows, columns), scale


def round_channels(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round with one scale per output row: scale = amax / 2^(bits-1), half away from zero, saturating.

    weight (out, in) -> q int8 (out, in), scale float32 (out, 1) after a cast to the weight's dtype; the rounding itself
    uses the uncast scale. Source: TensorRT-LLM symmetric_quantize (cutlass_preprocessors.cpp).
    """
    top = 2 ** (bits - 1)
    exact = weight.float()
    scale = exact.abs().amax(dim=1, keepdim=True) / top
    ratio = exact / scale.masked_fill(scale == 0, 1.0)
    whole = ratio.trunc()
    away = (ratio - whole).abs_() >= 0.5  # exact, where adding a half would round 0.49999997 up
    q = (whole + ratio.sign() * away).clamp_(-top, top - 1).char()
    return q, scale.to(weight.dtype).float()
