"""Gemma 3, text only: Gemma 2 with norms over each head of q and k, and rotary positions of their own in windowed layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbuild.families import gemma2
from specbuild.families.family import check_fields
from specbuild.families.rope import read_rope
from specbuild.families.window import read_full_every
from specbuild.shape import ModelShape

CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a Gemma 3 text config.json; its model ignores attn_logit_softcapping, so that one is refused."""
    check_fields(config, {"attn_logit_softcapping": (None,)})
    values = {**CAPS, "sliding_window": 4096, **config}
    # Transformers 5 nests rope_parameters by the kind of layer.
    nested = values.get("rope_parameters") or {}
    whole, local = nested.get("full_attention"), nested.get("sliding_attention")
    full_rope = {**values, "rope_theta": values.get("rope_theta") or 1e6, "rope_parameters": whole or {}}
    local_theta = values.get("rope_local_base_freq") or 1e4
    local_rope = {"architectures": values["architectures"], "rope_parameters": local or {}, "rope_theta": local_theta}
    return replace(gemma2.read_shape(full_rope), rope_theta_local=read_rope(local_rope, ())[0], qk_norm=True, **read_full_every(values, 6))


FAMILY = replace(gemma2.FAMILY, architecture="Gemma3ForCausalLM", read_shape=read_shape)
