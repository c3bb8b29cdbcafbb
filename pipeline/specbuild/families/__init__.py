"""FAMILIES: the supported architectures, one file and one row each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbuild.errors import CheckpointError
from specbuild.families import llama, mistral
from specbuild.families.family import Family, TensorRule

FAMILIES: dict[str, Family] = {family.architecture: family for family in (llama.FAMILY, mistral.FAMILY)}

__all__ = ["FAMILIES", "Family", "TensorRule", "find_family"]


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a Hugging Face config.json; raise CheckpointError with the supported list."""
    names = config.get("architectures") or ["(none)"]
    if names[0] not in FAMILIES:
        raise CheckpointError(f"Cannot convert architecture {names[0]}: expected one of {', '.join(FAMILIES)}. Remote code is never run.")
    return FAMILIES[names[0]]
