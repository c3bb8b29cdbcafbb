"""int8_wo and int4_wo: one scale per output row.

The checkpoint keeps plain weights and only names the algorithm: the engine builder makes the integers (their final layout
depends on the GPU). `levels` applies the same rule, so a CPU engine multiplies with the same integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbuild.quant.rounding import round_channels
from specbuild.quant.scheme import Levels, QuantScheme, Tensors, default_settings, keep_spec, keep_weight

if TYPE_CHECKING:
    import torch


def _levels(tensors: Tensors, bits: int) -> Levels:
    q, scale = round_channels(tensors["weight"], bits)
    return Levels(q, scale, None, bits)


def _store(levels: Levels, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a weight that the rule turns back into these integers: a row's largest is written as the 2^(bits-1) that it saturates.

    A row whose integers reach neither end of their range, -2^(bits-1) and 2^(bits-1) - 1, has its largest changed to the nearer one.
    """
    top = 2 ** (levels.bits - 1)
    q = levels.q.float()
    values, places = q.max(dim=1)
    lowest = q.min(dim=1)
    negative = (lowest.values == -top) | ((values < top - 1) & (-lowest.values > values))
    places = places.where(~negative, lowest.indices)
    q.scatter_(1, places[:, None], ((1 - 2 * negative.float()) * top)[:, None])
    return {"weight": (q * levels.scale).to(dtype)}


INT8_WO = QuantScheme("int8_wo", "W8A16", 8, False, keep_spec, keep_weight, lambda t: _levels(t, 8), default_settings, _store)
INT4_WO = QuantScheme("int4_wo", "W4A16", 4, False, keep_spec, keep_weight, lambda t: _levels(t, 4), default_settings, _store)
