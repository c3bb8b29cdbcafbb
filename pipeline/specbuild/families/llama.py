"""Llama: pre-norm decoder with rotary positions, grouped-query attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.errors import CheckpointError
from specbuild.families.family import Family, TensorRule
from specbuild.shape import ModelShape

_IGNORED_CONFIG_VALUES: dict[str, tuple[Any, ...]] = {  # fields that would change the maths, and the values that do not
    "hidden_act": ("silu",),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a Llama config.json; raise CheckpointError for a field that would change the maths and is not supported."""
    name = config["architectures"][0]
    for key, allowed in _IGNORED_CONFIG_VALUES.items():
        if config.get(key, allowed[0]) not in allowed:
            raise CheckpointError(
                f"Cannot convert {name}: {key} is {config[key]!r}, expected {allowed[0]!r}. This version does not support it."
            )
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        shape = ModelShape(
            architecture=name, layers=config["num_hidden_layers"], hidden=hidden, intermediate=config["intermediate_size"],
            heads=heads, kv_heads=config.get("num_key_value_heads") or heads, head_dim=config.get("head_dim") or hidden // heads,
            vocab=config["vocab_size"], max_positions=config["max_position_embeddings"], rope_theta=read_rope_theta(name, config),
            norm_eps=config.get("rms_norm_eps", 1e-6), tied=config.get("tie_word_embeddings", False),
            attn_bias=config.get("attention_bias", False), mlp_bias=config.get("mlp_bias", False),
        )  # fmt: skip
    except KeyError as error:
        raise CheckpointError(f"Cannot convert {name}: config.json has no {error.args[0]}. Fetch the model's own config.json.") from None
    if shape.heads % shape.kv_heads:
        raise CheckpointError(
            f"Cannot convert {name}: {shape.heads} attention heads are not a multiple of {shape.kv_heads} key-value heads."
        )
    return shape


def read_rope_theta(name: str, config: Mapping[str, Any]) -> float:
    """Return the rotary base; refuse every scaled rotary variant by name. Both spellings of transformers are read."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default" or rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise CheckpointError(
            f"Cannot convert {name}: rotary scaling {kind!r} ({dict(rope)}) is not supported in this version, only plain rotary positions."
        )
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)


def _attn(letter: str) -> str:
    return "model.layers.{i}.self_attn." + letter + "_proj"


FAMILY = Family(
    architecture="LlamaForCausalLM",
    read_shape=read_shape,
    rules=(
        TensorRule("transformer.vocab_embedding.weight", ("model.embed_tokens.weight",)),
        TensorRule("transformer.layers.{i}.input_layernorm.weight", ("model.layers.{i}.input_layernorm.weight",)),
        TensorRule("transformer.layers.{i}.attention.qkv.weight", tuple(_attn(x) + ".weight" for x in "qkv"), "qkv"),
        TensorRule("transformer.layers.{i}.attention.qkv.bias", tuple(_attn(x) + ".bias" for x in "qkv"), "qkv", lambda s: s.attn_bias),
        TensorRule("transformer.layers.{i}.attention.dense.weight", (_attn("o") + ".weight",), "columns"),
        TensorRule("transformer.layers.{i}.attention.dense.bias", (_attn("o") + ".bias",), "none", lambda s: s.attn_bias),
        TensorRule("transformer.layers.{i}.post_layernorm.weight", ("model.layers.{i}.post_attention_layernorm.weight",)),
        # TensorRT-LLM applies the activation to `fc`, so fc is the gate projection and gate the up projection.
        TensorRule("transformer.layers.{i}.mlp.fc.weight", ("model.layers.{i}.mlp.gate_proj.weight",), "rows"),
        TensorRule("transformer.layers.{i}.mlp.fc.bias", ("model.layers.{i}.mlp.gate_proj.bias",), "rows", lambda s: s.mlp_bias),
        TensorRule("transformer.layers.{i}.mlp.gate.weight", ("model.layers.{i}.mlp.up_proj.weight",), "rows"),
        TensorRule("transformer.layers.{i}.mlp.gate.bias", ("model.layers.{i}.mlp.up_proj.bias",), "rows", lambda s: s.mlp_bias),
        TensorRule("transformer.layers.{i}.mlp.proj.weight", ("model.layers.{i}.mlp.down_proj.weight",), "columns"),
        TensorRule("transformer.layers.{i}.mlp.proj.bias", ("model.layers.{i}.mlp.down_proj.bias",), "none", lambda s: s.mlp_bias),
        TensorRule("transformer.ln_f.weight", ("model.norm.weight",)),
        TensorRule("lm_head.weight", ("lm_head.weight",), "vocab", lambda s: not s.tied),
        TensorRule("lm_head.weight", ("model.embed_tokens.weight",), "vocab", lambda s: s.tied),
    ),
    ignored=("rotary_emb.inv_freq", "masked_bias"),
)
