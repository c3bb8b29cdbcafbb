"""Models that come quantized: their own integers and scales are kept where a scheme can store them, and refused by name where not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.artifacts import HFCheckpoint, TllmCheckpoint
from specbuild.config import ModelConfig, QuantizeConfig
from specbuild.errors import CheckpointError, ConfigError
from specbuild.hf_formats import PackedCheckpoint, PackedWeight, Packing, find_packing, open_packed
from specbuild.progress import log
from specbuild.provenance import find_parameters
from specbuild.quant import Levels, QuantScheme, find_scheme

if TYPE_CHECKING:
    import torch

SCHEME_OF_BITS = {4: "int4_awq", 8: "int8_wo"}
DTYPES_OF_SCALE = {"F16": ("float16", "float32"), "BF16": ("bfloat16", "float32"), "F32": ("float32",)}


def offer(role: str) -> str:
    """Return the way that is always open."""
    return f"`dequantize: true` under {role}, which expands it and quantizes again"


def check_packing(packing: Packing | None, model: ModelConfig, role: str) -> None:
    """Raise ConfigError when the YAML asks for anything else than what a packed model is, and CheckpointError for what no scheme stores."""
    if packing is None:
        if model.dequantize:
            raise ConfigError(f"Cannot dequantize {model.model}: it is not quantized. Remove `dequantize` under {role}.")
        return
    if model.dequantize:
        return
    settings, scheme = model.quantize, SCHEME_OF_BITS[packing.bits]
    if model.merge_lora is not None:
        raise ConfigError(f"Cannot merge {model.merge_lora} into {model.model}: it is quantized ({packing}). {_sentence(role)}")
    if packing.act_order:
        raise CheckpointError(
            f"Cannot keep the integers of {model.model} ({packing}): its groups follow an activation order (desc_act, actorder), expected "
            f"groups of neighbours. {_sentence(role)}"
        )
    if packing.bits == 8 and packing.group_size is not None:
        raise CheckpointError(f"Cannot keep the integers of {model.model} ({packing}): int8_wo has one scale per row. {_sentence(role)}")
    if settings.scheme != scheme or packing.group_size not in (None, settings.group_size):
        group = f", group_size: {packing.group_size or settings.group_size}" if find_scheme(scheme).grouped else ""
        raise ConfigError(
            f"Cannot quantize {model.model} with scheme {settings.scheme!r}, group_size {settings.group_size}: it is already quantized "
            f"({packing}). Use quantize: {{scheme: {scheme}{group}}}, or {offer(role)}."
        )
    changes = (
        ("calibration", settings.calibration, None),
        ("rounding", settings.rounding, "nearest"),
        ("lm_head", settings.lm_head, False),
        ("quality.max_kl", settings.quality.max_kl, None),
        ("quality.min_top1", settings.quality.min_top1, None),
    )
    for key, value, unset in changes:
        if value != unset:
            raise ConfigError(
                f"Cannot use {key} for {model.model}: it is already quantized ({packing}), its integers are kept. Remove `{key}`, or use "
                f"{offer(role)}."
            )


def _sentence(role: str) -> str:
    return f"Use the unquantized model, or {offer(role)}."


def view_packed(source: HFCheckpoint, model: ModelConfig, role: str) -> HFCheckpoint:
    """Return a view of a packed checkpoint as one with plain weights; any other as it is."""
    packing = find_packing(source.config)
    check_packing(packing, model, role)
    return source if packing is None else open_packed(source, packing)


def check_kept(
    source: PackedCheckpoint, sources: Sequence[Sequence[str]], of_rank: Sequence[tuple[int, ...]], model: ModelConfig, role: str
) -> None:
    """Raise CheckpointError unless all linear layers, and nothing else, are packed with scales that the checkpoint's dtype can hold.

    sources, of_rank: each linear layer's sources, and the shape of one rank's piece. Reads headers only.
    """
    packed = source.packed
    linear = {name for names in sources for name in names}
    if plain := sorted(linear - packed.keys()):
        raise CheckpointError(
            f"Cannot keep the integers of {source.directory}: {plain[0]} is not quantized ({len(plain)} linear layers in all), expected "
            f"all of them. {_sentence(role)}"
        )
    if other := sorted(packed.keys() - linear):
        raise CheckpointError(
            f"Cannot keep the integers of {source.directory}: {other[0]} is quantized, and lm_head and the embedding stay as they are in "
            f"every scheme. {_sentence(role)}"
        )
    scheme, group_size = find_scheme(SCHEME_OF_BITS[source.packing.bits]), model.quantize.group_size
    for names, (rows, columns) in zip(sources, of_rank, strict=True):
        if scheme.grouped and (columns % group_size or rows % 2):
            raise ConfigError(
                f"Cannot keep the integers of {names[0]} for tp={model.tp}: {rows} rows and {columns} columns per rank, expected an even "
                f"number and a multiple of group_size {group_size}. Use tp: 1, or {offer(role)}."
            )
    for weight in packed.values():
        allowed = DTYPES_OF_SCALE[weight.scale_dtype]
        if model.dtype not in allowed and not (weight.scale_dtype == "F32" and scheme.grouped):  # which stores float32 scales
            raise ConfigError(
                f"Cannot keep the scales of {source.directory} as {model.dtype}: those of {weight.name} are {weight.scale_dtype}, which "
                f"{model.dtype} does not hold exactly. Use dtype: {allowed[0]}, or {offer(role)}."
            )


def check_zeros(source: PackedCheckpoint, role: str) -> None:
    """Raise CheckpointError for the first weight with zero points or an order of columns that no scheme stores; reads no integers."""
    for weight in source.packed.values():
        if (problem := weight.problem()) is not None:
            raise CheckpointError(
                f"Cannot keep the integers of {source.directory} ({source.packing}): {weight.name} has {problem}. {_sentence(role)}"
            )


@dataclass(frozen=True)
class Keeper:
    """How a packed model's integers are stored: its scheme, the group size of the result, and the checkpoint's dtype."""

    packing: Packing
    scheme: QuantScheme
    group_size: int
    dtype: torch.dtype
    role: str

    @classmethod
    def make(cls, packing: Packing, model: ModelConfig, role: str) -> Keeper:
        import torch

        return cls(packing, find_scheme(SCHEME_OF_BITS[packing.bits]), model.quantize.group_size, getattr(torch, model.dtype), role)

    def load(self, weights: Sequence[PackedWeight], swap: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the integers, int8 (out, in), and scales, float32 (out, groups), of some weights joined along the rows."""
        import torch

        parts = [weight.levels() for weight in weights]
        joined = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        if swap:
            joined = [torch.cat(list(reversed(tensor.chunk(2)))) for tensor in joined]
        q, scale = joined
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"Cannot convert {weights[0].name}: a scale is NaN or infinity. Fetch the model again.")
        if self.scheme.grouped and self.packing.group_size is None:
            scale = scale.repeat(1, q.shape[1] // self.group_size)
        return q, scale

    def store(self, name: str, q: torch.Tensor, scale: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        """Return what is stored of one rank's integers and scales, and the number of rows in which one integer moved by one step.

        Only int8_wo moves any: the engine builder makes the integers anew, so a row's largest must be at an end of the range.
        """
        if self.scheme.store is None:
            raise CheckpointError(f"Cannot store the integers of {name}: {self.scheme.name} has no form for given ones.")
        scale = scale * (q != 0).any(dim=1, keepdim=True) if scale.shape[1] == 1 else scale  # a row of zeros needs no scale, nor a largest
        tensors = self.scheme.store(Levels(q.contiguous(), scale.contiguous(), None, self.scheme.bits), self.dtype)
        if self.scheme.grouped:
            return tensors, 0
        back = self.scheme.levels(tensors)
        moved = (q.short() - (q if back is None else back.q)).abs()
        if back is None or int(moved.max()) > 1 or not bool((back.scale == scale).all()):
            row = int(((moved > 1).any(dim=1) | (back.scale != scale).any(dim=1)).nonzero()[0]) if back is not None else 0
            raise CheckpointError(
                f"Cannot keep the integers of {name}: those of row {row} reach {int(q[row].min())} to {int(q[row].max())}, and "
                f"{self.scheme.name} needs an end of -128 to 127 in every row of a rank. {_tp_cure(self.role)}"
            )
        return tensors, int((moved > 0).any(dim=1).sum())


def _tp_cure(role: str) -> str:
    return f"Use tp: 1 where ranks share its columns, or {offer(role)}."


def link_quantized(source: TllmCheckpoint, scheme: QuantScheme, settings: QuantizeConfig, out: Path, label: str) -> None:
    """Make a quantized checkpoint of one that was converted with its own integers: the same files, linked.

    Raise ConfigError when it has another scheme or group size than the YAML.
    """
    found = source.config["quantization"]
    group_size = found.get("group_size", settings.group_size)
    if found["quant_algo"] != scheme.quant_algo or (scheme.grouped and group_size != settings.group_size):
        raise ConfigError(
            f"Cannot quantize {source.directory} with scheme {scheme.name!r}, group_size {settings.group_size}: it is already "
            f"{found['quant_algo']}{f', group {group_size}' if 'group_size' in found else ''}. Run `specbuild run`."
        )
    (out / "config.json").write_text(json.dumps(source.config, indent=2) + "\n")
    for path in source.rank_files:
        try:
            os.link(path, out / path.name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, out / path.name)
    log(f"{label}: already quantized ({find_parameters(source.directory).get('packed', found['quant_algo'])}): kept")
