"""FORMATS: what Hugging Face checkpoints hold besides plain weights, by `quant_method`, one file and one row each; and LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specbuild.errors import CheckpointError
from specbuild.hf_formats import awq, compressed_tensors, gptq
from specbuild.hf_formats.lora import MergedWeight, find_adapter_files, merge_lora, read_adapter_config
from specbuild.hf_formats.packing import PackedCheckpoint, PackedWeight, Packing, open_packed, plain_config

FORMATS: dict[str, Callable[[Mapping[str, Any]], Packing]] = {
    module.FORMAT.method: module.read_config for module in (awq, gptq, compressed_tensors)
}

__all__ = [
    "FORMATS", "MergedWeight", "PackedCheckpoint", "PackedWeight", "Packing", "find_adapter_files", "find_packing", "merge_lora",
    "open_packed", "plain_config", "read_adapter_config",
]  # fmt: skip


def find_packing(config: Mapping[str, Any]) -> Packing | None:
    """Return how a config.json says its weights are packed, None where it says they are not; raise CheckpointError with the list."""
    values = config.get("quantization_config")
    if values is None:
        return None
    method = values.get("quant_method") if isinstance(values, dict) else values
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(
            f"Cannot convert quantization_config with quant_method {method!r}: expected one of {', '.join(FORMATS)}. Convert the "
            "unquantized model."
        )
    return FORMATS[method](values)
