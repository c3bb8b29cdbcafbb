"""Gemma 2: Gemma with norms after each part too, soft caps, its own query scale, and a window on every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbuild.families import gemma
from specbuild.families.family import TensorRule
from specbuild.families.window import read_full_every
from specbuild.shape import ModelShape

DEFAULTS = {"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a Gemma 2 config.json."""
    values = {**DEFAULTS, **CAPS, **config}
    return replace(
        gemma.read_shape(values), inter_norms=True, query_pre_attn_scalar=values["query_pre_attn_scalar"],
        attn_softcap=values["attn_logit_softcapping"], final_softcap=values["final_logit_softcapping"],
        **read_full_every(values, 2),
    )  # fmt: skip


def _norm(name: str) -> TensorRule:
    return TensorRule(f"transformer.layers.{{i}}.{name}.weight", (f"model.layers.{{i}}.{name}.weight",), offset=1.0)


RULES = (*gemma.RULES, _norm("pre_feedforward_layernorm"), _norm("post_feedforward_layernorm"))
FAMILY = replace(gemma.FAMILY, architecture="Gemma2ForCausalLM", read_shape=read_shape, rules=RULES)
