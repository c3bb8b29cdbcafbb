"""Qwen3, dense: Llama with norms over each head of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbuild.families import llama, qwen2
from specbuild.families.family import check_fields
from specbuild.shape import ModelShape


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a Qwen3 config.json; TensorRT-LLM's Qwen has no bias on the attention's output, so attention_bias is refused."""
    check_fields(config, {"attention_bias": (False, None)})
    values = {"num_key_value_heads": 32, "head_dim": 128, **config}
    return replace(qwen2.read_qwen(values), qk_norm=True, mlp_bias=False)


FAMILY = replace(
    llama.FAMILY, architecture="Qwen3ForCausalLM", read_shape=read_shape,
    tllm_keys={"qwen_type": "qwen3", "seq_length": 8192, "use_logn_attn": False},
)  # fmt: skip
