"""compressed-tensors in its format pack-quantized (llm-compressor's W4A16 and W8A16): integers packed along the input.

X.weight_packed int32 (out, ceil(in * bits / 32)), low bits first, plus 2^(bits-1). X.weight_shape: (out, in).
X.weight_scale (out, groups). X.weight_zero_point int32 (ceil(out * bits / 32), groups), packed along the output, where asymmetric.
X.weight_g_idx (in,): the group of each input column; -1 = not set. Source: compressed-tensors' PackedQuantizationCompressor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specbuild.errors import CheckpointError
from specbuild.hf_formats.packing import Format, Packing, Parts, packed_width, read_whole, refuse, unpack_bits

if TYPE_CHECKING:
    import torch

METHOD = "compressed-tensors"
_PACKED = "pack-quantized"


def read_config(values: Mapping[str, Any]) -> Packing:
    """Read a quantization_config; raise CheckpointError for anything in it but one way of packing weights."""
    for key in ("kv_cache_scheme", "transform_config"):
        if values.get(key):
            raise refuse(METHOD, key, values[key], "none")
    sparsity = values.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise refuse(METHOD, "sparsity", sparsity["format"], "dense")
    groups = values.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    if not schemes or not all(isinstance(scheme, dict) and isinstance(scheme.get("weights"), dict) for scheme in schemes):
        raise CheckpointError(f"Cannot read {METHOD} weights: config_groups is {groups!r}, expected groups with weights. Fetch it again.")
    packings = [_read_scheme(scheme, values.get("format")) for scheme in schemes]
    if any(packing != packings[0] for packing in packings):
        raise refuse(METHOD, "config_groups", ", ".join(map(str, packings)), "the same for all layers")
    return packings[0]


def _read_scheme(scheme: Mapping[str, Any], common: str | None) -> Packing:
    if (kind := scheme.get("format") or common) != _PACKED:
        raise refuse(METHOD, "format", kind, _PACKED)
    for key in ("input_activations", "output_activations"):
        if scheme.get(key):
            raise refuse(METHOD, key, scheme[key].get("num_bits"), "none: floating-point activations")
    weights = scheme["weights"]
    bits = read_whole(weights, "num_bits", METHOD)
    if bits not in (4, 8) or weights.get("type", "int") != "int":
        raise refuse(METHOD, "weights", f"{weights.get('type', 'int')}{bits}", "int4 or int8")
    strategy = weights.get("strategy") or ("channel" if weights.get("group_size") in (None, -1) else "group")
    if strategy not in ("group", "channel"):
        raise refuse(METHOD, "strategy", strategy, "group or channel")
    group_size = read_whole(weights, "group_size", METHOD) if strategy == "group" else None
    # "weight" and "static" only say in which order columns were rounded
    return Packing(FORMAT, bits, group_size, weights.get("actorder") in (True, "group", "dynamic"))


def _shape(parts: Parts, packing: Packing) -> tuple[int, int]:
    rows, columns = (int(size) for size in parts["weight_shape"].load())
    packed = parts["weight_packed"]
    if packed.shape != (rows, packed_width(columns, packing.bits)):
        raise CheckpointError(
            f"Cannot read {packed.name} ({packing}): it is {packed.shape}, its weight_shape {(rows, columns)}. Fetch the model again."
        )
    return rows, columns


def _part_shapes(shape: tuple[int, int], packing: Packing) -> dict[str, tuple[int, ...]]:
    groups = packing.groups(shape[1])
    return {"weight_scale": (shape[0], groups), "weight_zero_point": (packed_width(shape[0], packing.bits), groups)}


def _codes(parts: Parts, packing: Packing) -> torch.Tensor:
    columns = int(parts["weight_shape"].load()[1])
    return unpack_bits(parts["weight_packed"].load(), packing.bits)[:, :columns]


def _zeros(parts: Parts, packing: Packing) -> torch.Tensor | None:
    if "weight_zero_point" not in parts:
        return None
    rows = int(parts["weight_shape"].load()[0])
    return unpack_bits(parts["weight_zero_point"].load().t(), packing.bits)[:, :rows].t().short()


def _scales(parts: Parts) -> torch.Tensor:
    return parts["weight_scale"].load().float()


FORMAT = Format(
    METHOD, ("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point", "weight_g_idx"), _shape, _part_shapes, _codes, _zeros,
    _scales,
)  # fmt: skip
