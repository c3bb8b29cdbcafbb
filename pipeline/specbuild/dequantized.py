"""A quantized checkpoint as a transformers model in float32: the stored integers times their scales, under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specbuild.artifacts import TllmCheckpoint, find_model_dir, load_json
from specbuild.config import PairConfig, Role
from specbuild.errors import CheckpointError
from specbuild.families import FAMILIES, TensorRule
from specbuild.hf_formats import find_packing, plain_config
from specbuild.quant import scheme_of_algo
from specbuild.quant.scheme import includes_lm_head
from specbuild.ranks import join_tensor
from specbuild.shape import ModelShape


def load_dequantized(config: PairConfig, role: Role) -> Any:
    """Return a model that generates; raise CheckpointError when tensors are left over or missing."""
    import transformers

    checkpoint = TllmCheckpoint.open(config.dir_of(role, "quantized"))
    values = load_json(find_model_dir(config.model_of(role), config.path, weights=False) / "config.json")
    values = values if find_packing(values) is None else plain_config(values)
    tensors = dict(dequantize(checkpoint))
    if "lm_head.weight" in tensors:
        values["tie_word_embeddings"] = False
    hf_config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").float().eval()
    found = model.load_state_dict(tensors, strict=False)
    missing = [name for name in found.missing_keys if name != "lm_head.weight"]
    if missing or found.unexpected_keys:
        raise CheckpointError(
            f"Cannot give the {role} to transformers: missing {missing[:3]}, unexpected {found.unexpected_keys[:3]}, expected the "
            "tensors of its config.json. Leave --against out."
        )
    model.generation_config = transformers.GenerationConfig()
    return model


def dequantize(checkpoint: TllmCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's tensors by their Hugging Face names, float32; a tied lm_head only where it has integers of its own."""
    shape, mapping = checkpoint.shape, checkpoint.config["mapping"]
    reader = _Reader(checkpoint)
    per_stage = shape.layers // mapping["pp_size"]
    for rule in FAMILIES[shape.architecture].rules:
        if not rule.when(shape):
            continue
        if "{i}" in rule.name:
            for layer in range(shape.layers):
                stage, local = divmod(layer, per_stage)
                whole = reader.read(rule, rule.name.format(i=local), stage)
                yield from _split_sources(rule, whole, shape, layer)
        elif rule.name != "lm_head.weight":
            stage = mapping["pp_size"] - 1 if "ln_f" in rule.name else 0
            yield from _split_sources(rule, reader.read(rule, rule.name, stage), shape, 0)
        elif not shape.tied or includes_lm_head(checkpoint.config["quantization"]):
            yield "lm_head.weight", reader.read(rule, rule.name, mapping["pp_size"] - 1)


class _Reader:
    """Reads whole tensors of a checkpoint from its ranks."""

    def __init__(self, checkpoint: TllmCheckpoint) -> None:
        self._shape, self._tp = checkpoint.shape, checkpoint.config["mapping"]["tp_size"]
        self._scheme = scheme_of_algo(checkpoint.config["quantization"]["quant_algo"])
        self._linears = {*self._shape.linears(), *(["lm_head"] if includes_lm_head(checkpoint.config["quantization"]) else [])}
        self._entries = [checkpoint.entries(rank) for rank in range(checkpoint.config["mapping"]["world_size"])]

    def read(self, rule: TensorRule, name: str, stage: int) -> torch.Tensor:
        """Return a tensor as float32, a quantized weight as integers times scales."""
        part = rule.name.removeprefix("transformer.layers.{i}.").removesuffix(".weight")
        pieces = [self._read_piece(name, rank, part in self._linears) for rank in range(stage * self._tp, (stage + 1) * self._tp)]
        return join_tensor(pieces, rule.split, self._shape)

    def _read_piece(self, name: str, rank: int, linear: bool) -> torch.Tensor:
        entries, prefix = self._entries[rank], name.removesuffix("weight")
        if not linear:
            return entries[name].load().float()
        stored = {key.removeprefix(prefix): entry.load() for key, entry in entries.items() if key.startswith(prefix)}
        levels = self._scheme.levels(stored)
        if levels is None:
            return stored["weight"].float()
        return levels.weight() if levels.prequant is None else levels.weight() * levels.prequant


def _split_sources(rule: TensorRule, whole: torch.Tensor, shape: ModelShape, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Undo what a rule does to its sources."""
    if rule.swap:
        whole = torch.cat(list(whole.chunk(2))[::-1])
    whole = whole - rule.offset if rule.offset else whole
    sizes = [shape.q_rows, shape.kv_rows, shape.kv_rows] if len(rule.sources) == 3 else [len(whole)]
    for source, part in zip(rule.sources, torch.split(whole, sizes), strict=True):
        yield source.format(i=layer), part.contiguous()
