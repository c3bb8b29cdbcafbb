"""int8_wo and int4_wo: one scale per output row.

The checkpoint keeps plain weights and only names the algorithm: the engine builder makes the integers (their final layout
depends on the GPU). `levels` applies the same rule, so a CPU engine multiplies with the same integers.
"""

from __future__ import annotations

from specbuild.quant.rounding import round_channels
from specbuild.quant.scheme import Levels, QuantScheme, Tensors, keep_spec, keep_weight, no_settings


def _levels(tensors: Tensors, bits: int) -> Levels:
    q, scale = round_channels(tensors["weight"], bits)
    return Levels(q, scale, None, bits)


INT8_WO = QuantScheme("int8_wo", "W8A16", 8, False, keep_spec, keep_weight, lambda t: _levels(t, 8), no_settings)
INT4_WO = QuantScheme("int4_wo", "W4A16", 4, False, keep_spec, keep_weight, lambda t: _levels(t, 4), no_settings)
