"""GPTQ (AutoGPTQ, GPTQModel): integers packed along the input, zero points along the output.

X.qweight int32 (in * bits / 32, out): input row 32 / bits * r + i in bits i * bits and up of row r.
X.qzeros int32 (groups, out * bits / 32), low bits first; "gptq" stores them minus one, "gptq_v2" as they are.
X.scales (groups, out). X.g_idx int32 (in,): the group of each input column.
Source: AutoGPTQ's QuantLinear (qlinear_cuda.py), GPTQModel's conversion between the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbuild.hf_formats.packing import Format, Packing, Parts, packed_width, read_whole, refuse, unpack_bits

if TYPE_CHECKING:
    import torch

_STORED_LESS = {"gptq": 1, "gptq_v2": 0}


def read_config(values: Mapping[str, Any]) -> Packing:
    """Read a quantization_config."""
    kind = values.get("checkpoint_format") or values.get("format") or "gptq"
    if kind not in _STORED_LESS or values.get("is_marlin_format"):
        raise refuse("gptq", "checkpoint_format", kind, " or ".join(_STORED_LESS))
    bits, group = read_whole(values, "bits", "gptq"), read_whole(values, "group_size", "gptq")
    if bits not in (4, 8):
        raise refuse("gptq", "bits", bits, "4 or 8")
    return Packing(FORMAT, bits, None if group == -1 else group, bool(values.get("desc_act")) and group != -1, _STORED_LESS[kind])


def _shape(parts: Parts, packing: Packing) -> tuple[int, int]:
    rows, columns = parts["qweight"].shape
    return columns, rows * 32 // packing.bits


def _part_shapes(shape: tuple[int, int], packing: Packing) -> dict[str, tuple[int, ...]]:
    groups = packing.groups(shape[1])
    return {"qzeros": (groups, packed_width(shape[0], packing.bits)), "scales": (groups, shape[0])}


def _codes(parts: Parts, packing: Packing) -> torch.Tensor:
    return unpack_bits(parts["qweight"].load().t(), packing.bits)


def _zeros(parts: Parts, packing: Packing) -> torch.Tensor:
    stored = unpack_bits(parts["qzeros"].load(), packing.bits).t().short()
    zeros: torch.Tensor = (stored + packing.stored_less) & (2**packing.bits - 1)  # zero less one is stored as all ones
    return zeros


def _scales(parts: Parts) -> torch.Tensor:
    return parts["scales"].load().float().t()


FORMAT = Format("gptq", ("qweight", "qzeros", "scales"), ("g_idx",), _shape, _part_shapes, _codes, _zeros, _scales)
