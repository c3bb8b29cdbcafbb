"""Mistral: Llama with an optional sliding window and no biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specbuild.families import llama
from specbuild.families.family import read_window
from specbuild.shape import ModelShape


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Read a Mistral config.json; a null sliding_window means full attention, an absent one the defaults of transformers."""
    values = {"sliding_window": 4096, "num_key_value_heads": 8, **config}
    return replace(llama.read_shape(values), window=read_window(values), attn_bias=False, mlp_bias=False)


FAMILY = replace(llama.FAMILY, architecture="MistralForCausalLM", read_shape=read_shape)
