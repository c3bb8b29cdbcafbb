"""Llama: pre-norm decoder with rotary positions, grouped-query attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.errors import CheckpointError
from specbuild.families.family import Family, TensorRule, check_fields, read_flag, read_number
from specbuild.families.rope import read_rope
from specbuild.shape import ModelShape

FIELDS: dict[str, tuple[Any, ...]] = {  # fields that would change the maths, and the values that do not
    "hidden_act": ("silu",),
    "quantization_config": (None,),
}
ROPE_KINDS = ("linear", "llama3", "dynamic", "yarn")


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a Llama config.json; raise CheckpointError for a field that would change the maths and is not supported."""
    check_fields(config, FIELDS)
    return read_decoder(config)


def read_decoder(config: Mapping[str, Any], rope_kinds: tuple[str, ...] = ROPE_KINDS, partial: bool = False) -> ModelShape:
    """Read what all these families have in common; only `partial` ones may rotate a part of each head."""
    name = config["architectures"][0]
    theta, scaling, pct = read_rope(config, rope_kinds)
    if pct != 1 and not partial:
        raise CheckpointError(f"Cannot convert {name}: partial_rotary_factor is {pct!r}, expected 1. This version does not support it.")
    try:
        hidden, heads = (read_number(config, key, int) for key in ("hidden_size", "num_attention_heads"))
        shape = ModelShape(
            architecture=name, layers=read_number(config, "num_hidden_layers", int), hidden=hidden,
            intermediate=read_number(config, "intermediate_size", int),
            heads=heads, kv_heads=read_number(config, "num_key_value_heads", int, heads),
            head_dim=read_number(config, "head_dim", int, hidden // heads),
            vocab=read_number(config, "vocab_size", int), max_positions=read_number(config, "max_position_embeddings", int),
            rope_theta=theta,
            rope_scaling=scaling, rotary_pct=pct, norm_eps=read_number(config, "rms_norm_eps", float, 1e-6),
            tied=read_flag(config, "tie_word_embeddings"), attn_bias=read_flag(config, "attention_bias"),
            mlp_bias=read_flag(config, "mlp_bias"),
        )  # fmt: skip
    except KeyError as error:
        raise CheckpointError(f"Cannot convert {name}: config.json has no {error.args[0]}. Fetch the model's own config.json.") from None
    if shape.heads % shape.kv_heads:
        raise CheckpointError(
            f"Cannot convert {name}: {shape.heads} attention heads are not a multiple of {shape.kv_heads} key-value heads."
        )
    return shape


def _layer(part: str, *sources: str, **settings: Any) -> TensorRule:
    prefix, kind = "model.layers.{i}.", part.rsplit(".", 1)[1]
    return TensorRule("transformer.layers.{i}." + part, tuple(f"{prefix}{source}.{kind}" for source in sources), **settings)


_QKV = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
RULES = (
    TensorRule("transformer.vocab_embedding.weight", ("model.embed_tokens.weight",)),
    _layer("input_layernorm.weight", "input_layernorm"),
    _layer("attention.qkv.weight", *_QKV, split="qkv"),
    _layer("attention.qkv.bias", *_QKV, split="qkv", when=lambda s: s.attn_bias),
    _layer("attention.q_layernorm.weight", "self_attn.q_norm", when=lambda s: s.qk_norm),
    _layer("attention.k_layernorm.weight", "self_attn.k_norm", when=lambda s: s.qk_norm),
    _layer("attention.dense.weight", "self_attn.o_proj", split="columns"),
    _layer("attention.dense.bias", "self_attn.o_proj", when=lambda s: s.attn_bias),
    _layer("post_layernorm.weight", "post_attention_layernorm"),
    # TensorRT-LLM applies the activation to `fc`, so fc is the gate projection and gate the up projection.
    _layer("mlp.fc.weight", "mlp.gate_proj", split="rows"),
    _layer("mlp.fc.bias", "mlp.gate_proj", split="rows", when=lambda s: s.mlp_bias),
    _layer("mlp.gate.weight", "mlp.up_proj", split="rows"),
    _layer("mlp.gate.bias", "mlp.up_proj", split="rows", when=lambda s: s.mlp_bias),
    _layer("mlp.proj.weight", "mlp.down_proj", split="columns"),
    _layer("mlp.proj.bias", "mlp.down_proj", when=lambda s: s.mlp_bias),
    TensorRule("transformer.ln_f.weight", ("model.norm.weight",)),
    TensorRule("lm_head.weight", ("lm_head.weight",), "vocab", lambda s: not s.tied),
    TensorRule("lm_head.weight", ("model.embed_tokens.weight",), "vocab", lambda s: s.tied),
)

FAMILY = Family("LlamaForCausalLM", read_shape, RULES, ignored=("rotary_emb.inv_freq", "masked_bias"))
