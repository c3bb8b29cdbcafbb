"""Rounding rules, as TensorRT-LLM and its exporter apply them; pure functions over tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def round_groups(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to INT4 with one scale per `group_size` input columns: scale = amax / 7, half to even, range [-8, 7].

    weight (out, in) -> q int8 (out, in), scale float32 (out, in / group_size). A group of zeros gets scale 1.
    Source: modelopt 0.33 get_scaling_factor, pack_int4_in_uint8.
    """
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // group_size, group_size)
    scale = groups.abs().amax(dim=2) / 7
    scale[scale == 0] = 1.0
    q = (groups / scale[:, :, None]).round_().clamp_(-8, 7).char()
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
