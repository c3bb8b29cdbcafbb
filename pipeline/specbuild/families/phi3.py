"""Phi-3: Llama with q, k, v and gate, up stored as one matrix each, long rope, and heads that may rotate in part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbuild.families import llama
from specbuild.families.family import TensorRule, check_fields, read_window
from specbuild.shape import ModelShape


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a Phi-3 config.json; a rotary factor of its own instead of the ratio of both contexts is refused."""
    check_fields(config, llama.FIELDS)
    values = {"rms_norm_eps": 1e-5, **config, "head_dim": None}
    shape = llama.read_decoder(values, rope_kinds=("longrope", "su"), partial=True)
    original = None
    if shape.rope_scaling is not None:
        original = values.get("original_max_position_embeddings", 4096)
        rope = {"architectures": config["architectures"], **shape.rope_scaling.to_dict()}
        check_fields(rope, {"attention_factor": (None,), "factor": (None, shape.max_positions / original)})
    return replace(shape, hidden_act="swiglu", window=read_window(values), original_positions=original, attn_bias=False, mlp_bias=False)


_FUSED = {"attention.qkv.weight": "self_attn.qkv_proj.weight", "mlp.fc.weight": "mlp.gate_up_proj.weight"}


def _adapt(rule: TensorRule) -> TensorRule:
    source = _FUSED.get(rule.name.removeprefix("transformer.layers.{i}."))
    if source is None:
        return rule
    rule = replace(rule, sources=("model.layers.{i}." + source,))
    return replace(rule, split="halves", swap=True) if "mlp.fc" in rule.name else rule  # stored gate above up, wanted up above gate


RULES = tuple(_adapt(rule) for rule in llama.RULES if "mlp.gate" not in rule.name)
FAMILY = replace(llama.FAMILY, architecture="Phi3ForCausalLM", read_shape=read_shape, rules=RULES)
