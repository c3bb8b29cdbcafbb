"""FAMILIES: the supported architectures, one file and one row each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.errors import CheckpointError
from specbuild.families import gemma, gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3
from specbuild.families.family import Family, TensorRule
from specbuild.ranks import Split

FAMILIES: dict[str, Family] = {
    module.FAMILY.architecture: module.FAMILY for module in (llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3, phi3)
}

__all__ = ["FAMILIES", "Family", "TensorRule", "find_family", "splits_of"]


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a Hugging Face config.json; raise CheckpointError with the supported list."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or name not in FAMILIES or not isinstance(names, list):
        raise CheckpointError(f"Cannot convert architecture {name}: expected one of {', '.join(FAMILIES)}. Remote code is never run.")
    return FAMILIES[name]


def splits_of(architecture: str) -> dict[str, Split]:
    """Return how ranks share each tensor of a layer, by its TensorRT-LLM name within the layer."""
    return {rule.name.removeprefix("transformer.layers.{i}."): rule.split for rule in FAMILIES[architecture].rules}
