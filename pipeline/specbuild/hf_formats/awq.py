"""AWQ (AutoAWQ's gemm version): integers and zero points packed along the output, interleaved.

X.qweight int32 (in, out / 8): nibble i of column c is output 8 * c + ORDER[i]. X.qzeros int32 (groups, out / 8), likewise.
X.scales (groups, out). Source: AutoAWQ's WQLinear_GEMM (awq/modules/linear/gemm.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbuild.hf_formats.packing import Format, Packing, Parts, packed_width, read_whole, refuse, unpack_bits

if TYPE_CHECKING:
    import torch

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read_config(values: Mapping[str, Any]) -> Packing:
    """Read a quantization_config."""
    version = str(values.get("version") or values.get("checkpoint_format") or "gemm").lower()
    if version != "gemm":
        raise refuse("awq", "version", version, "gemm")
    bits, group = read_whole(values, "bits", "awq"), read_whole(values, "group_size", "awq")
    if bits != 4:
        raise refuse("awq", "bits", bits, "4")
    return Packing(FORMAT, bits, None if group == -1 else group)


def _shape(parts: Parts, packing: Packing) -> tuple[int, int]:
    rows, columns = parts["qweight"].shape
    return columns * 32 // packing.bits, rows


def _part_shapes(shape: tuple[int, int], packing: Packing) -> dict[str, tuple[int, ...]]:
    groups = packing.groups(shape[1])
    return {"qzeros": (groups, packed_width(shape[0], packing.bits)), "scales": (groups, shape[0])}


def _in_order(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack (rows, out / 8) to uint8 (out, rows), outputs in order."""
    nibbles = unpack_bits(packed, bits).reshape(packed.shape[0], -1, 8)
    return nibbles[:, :, [ORDER.index(i) for i in range(8)]].reshape(packed.shape[0], -1).t()


def _codes(parts: Parts, packing: Packing) -> torch.Tensor:
    return _in_order(parts["qweight"].load(), packing.bits)


def _zeros(parts: Parts, packing: Packing) -> torch.Tensor:
    return _in_order(parts["qzeros"].load(), packing.bits).short()


def _scales(parts: Parts) -> torch.Tensor:
    return parts["scales"].load().float().t()


FORMAT = Format("awq", ("qweight", "qzeros", "scales"), (), _shape, _part_shapes, _codes, _zeros, _scales)
