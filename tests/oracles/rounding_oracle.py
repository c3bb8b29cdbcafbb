"""The rounding rules of TensorRT-LLM and its exporter, written again with NumPy in double precision where it matters."""

import numpy as np


def awq_groups(weight, group):
    """4.2: s = amax / 7 per group of input columns, 0 replaced by 1; half to even; -8..7. Returns q (out, in), s (out, in / group)."""
    rows, columns = weight.shape
    groups = weight.astype(np.float32).reshape(rows, columns // group, group)
    scale = (np.abs(groups).max(axis=2) / np.float32(7)).astype(np.float32)
    scale[scale == 0] = 1
    q = np.clip(np.rint(groups / scale[:, :, None]), -8, 7)
    return q.reshape(rows, columns).astype(np.int8), scale


def channels(weight, bits):
    """4.1: s = amax / 2^(bits - 1) per output row; C's round (half away from zero) with the uncast s; saturating. Returns q, uncast s."""
    top = 2 ** (bits - 1)
    weight = weight.astype(np.float32)
    scale = (np.abs(weight).max(axis=1, keepdims=True) / np.float32(top)).astype(np.float32)
    ratio = np.divide(weight, scale, out=np.zeros_like(weight), where=scale != 0).astype(np.float64)
    q = np.clip(np.sign(ratio) * np.floor(np.abs(ratio) + 0.5), -top, top - 1)
    return q.astype(np.int8), scale


def dequantized(weight, scheme, group, cast):
    """Return the float32 matrix that a scheme stands for; `cast` rounds to the checkpoint's dtype and back."""
    if scheme == "full_prec":
        return weight
    if scheme == "int4_awq":
        q, scale = awq_groups(weight, group)
        return q * np.repeat(scale, group, axis=1)
    q, scale = channels(weight, {"int8_wo": 8, "int4_wo": 4}[scheme])
    return q * cast(scale)
