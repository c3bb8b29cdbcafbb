"""The layouts in which ONNX Runtime multiplies with integers: unsigned, with a zero point in the middle of their range."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ZERO_POINT = 128  # of 8 bit integers


def pack_blocks(q: Array, scale: Array, bits: int, block: int) -> tuple[Array, Array]:
    """Pack signed q (out, in) and scale (out, groups) to MatMulNBits' B (out, blocks, block * bits / 8) uint8 and scales (out, blocks).

    Blocks lie along the input, low nibble first.
    The operator's default zero point (8 or 128) is the offset added here. A group's scale is repeated over its blocks;
    columns that do not fill the last block are padded with zeros.
    """
    rows, columns = q.shape
    blocks = -(-columns // block)
    offset = np.full((rows, blocks * block), 1 << (bits - 1), np.uint8)
    offset[:, :columns] += q.view(np.uint8)  # wraps around, which is the two's complement sum wanted
    packed: Array = offset if bits == 8 else offset[:, 0::2] | (offset[:, 1::2] << 4)
    per_group = -(-blocks // scale.shape[1])
    scales = np.repeat(scale, per_group, axis=1)[:, :blocks]
    return packed.reshape(rows, blocks, -1), np.ascontiguousarray(scales, np.float32)


def shift_columns(q: Array) -> Array:
    """Return int8 q (out, in) as MatMulInteger's B (in, out) uint8 with zero point 128."""
    return np.ascontiguousarray(q.T).view(np.uint8) ^ np.uint8(ZERO_POINT)  # a flipped sign bit is the sum wanted
