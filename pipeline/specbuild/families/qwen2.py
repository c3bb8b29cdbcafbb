"""Qwen2 and Qwen2.5: Llama with biases on q, k and v alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbuild.families import llama
from specbuild.families.family import check_fields
from specbuild.shape import ModelShape


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a Qwen2 config.json; a sliding window on some of its layers is refused."""
    return replace(read_qwen({"num_key_value_heads": 32, **config}), attn_bias=True, mlp_bias=False)


def read_qwen(config: Mapping[str, Any]) -> ModelShape:
    """Read what Qwen2 and Qwen3 share: `sliding_window` stands in their configs but counts only with use_sliding_window."""
    shape = llama.read_shape(config)
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    check_fields({**config, "layer_types": sorted(kinds)}, {"layer_types": ([],)})
    if config.get("sliding_window", 4096) and (config.get("max_window_layers") or 28) < shape.layers and not config.get("layer_types"):
        check_fields(config, {"use_sliding_window": (False, None)})
    return shape


FAMILY = replace(
    llama.FAMILY, architecture="Qwen2ForCausalLM", read_shape=read_shape,
    rules=tuple(rule for rule in llama.RULES if not rule.name.endswith("attention.dense.bias")),
    tllm_keys={"qwen_type": "qwen2", "seq_length": 8192, "use_logn_attn": False},
)  # fmt: skip
