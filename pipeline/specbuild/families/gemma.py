"""Gemma: Llama with scaled embeddings, a tanh-form GELU and norms that multiply by one plus their weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbuild.families import llama
from specbuild.families.family import TensorRule, check_fields
from specbuild.shape import ModelShape

DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256}
FIELDS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # "gelu" in early releases, meant as the tanh form
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
}


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a Gemma config.json."""
    values = {**DEFAULTS, "num_key_value_heads": 16, **config}
    check_fields(values, FIELDS)
    shape = llama.read_decoder(values)
    return replace(shape, hidden_act="gelu", embedding_scale=shape.hidden**0.5, mlp_bias=False)


def _adapt(rule: TensorRule) -> TensorRule:
    """Norm weights are stored plus one; the embedding is split as lm_head is."""
    norm = "norm" in rule.name or "ln_f" in rule.name
    return replace(rule, offset=1.0 if norm else 0.0, split="vocab" if "embedding" in rule.name else rule.split)


RULES = tuple(_adapt(rule) for rule in llama.RULES)
FAMILY = replace(llama.FAMILY, architecture="GemmaForCausalLM", read_shape=read_shape, rules=RULES, shares_embedding=True)
