"""LoRA adapters as PEFT saves them, merged while the base model is read: W + scale * B @ A, in float32.

adapter_config.json: r, lora_alpha, and patterns of modules that have others.
Tensors: base_model.model.<module>.lora_A.weight (r, in), base_model.model.<module>.lora_B.weight (out, r).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbuild.artifacts import HFCheckpoint, load_json, read_weight_file
from specbuild.errors import CheckpointError
from specbuild.progress import log
from specbuild.tensorfile import FLOATS, LoadableTensor

if TYPE_CHECKING:
    import torch

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_PLAIN: dict[str, tuple[Any, ...]] = {  # settings under which W + scale * B @ A is not the whole truth, and the values that are fine
    "peft_type": ("LORA",), "use_dora": (False, None), "fan_in_fan_out": (False, None), "bias": ("none", None),
    "modules_to_save": (None, []), "layer_replication": (None, []), "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}), "alora_invocation_tokens": (None, []), "lora_bias": (False, None),
    "use_qalora": (False, None),
}  # fmt: skip
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that put other weights into the base model

_CURE = "Merge it with the library that made it (PEFT: merge_and_unload)."


@dataclass(frozen=True)
class MergedWeight:
    """A weight of the base model with an adapter's product added."""

    base: LoadableTensor
    a: LoadableTensor
    b: LoadableTensor
    scale: float
    dtype: str = "F32"

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def nbytes(self) -> int:
        return 4 * math.prod(self.shape)

    def load(self) -> torch.Tensor:
        """Return W + scale * B @ A, float32."""
        return self.base.load().float() + self.scale * (self.b.load().float() @ self.a.load().float())


def find_adapter_files(directory: Path) -> list[Path]:
    """List the files of an adapter: its config and its weights; raise CheckpointError unless both are there."""
    weights = next((directory / name for name in _FILES if (directory / name).exists()), None)
    if weights is None or not (directory / "adapter_config.json").exists():
        raise CheckpointError(
            f"Cannot merge adapter {directory}: expected adapter_config.json and {' or '.join(_FILES)} there. Give the directory of a LoRA "
            "adapter."
        )
    return [directory / "adapter_config.json", weights]


def merge_lora(source: HFCheckpoint, directory: Path) -> HFCheckpoint:
    """Return a view of a checkpoint with an adapter merged; raise CheckpointError for a part of it that would be lost."""
    config = read_adapter_config(directory)
    weights_path = find_adapter_files(directory)[1]
    tensors = dict(read_weight_file(weights_path))
    pairs: dict[str, dict[str, LoadableTensor]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix(_PREFIX).rpartition(".lora_")
        if not name.startswith(_PREFIX) or kind not in ("A.weight", "B.weight") or f"{module}.weight" not in source.entries:
            raise CheckpointError(f"Cannot merge adapter {directory}: tensor {name} matches no weight of {source.directory}. {_CURE}")
        if tensor.dtype not in FLOATS:
            raise CheckpointError(f"Cannot merge adapter {directory}: tensor {name} is {tensor.dtype}, expected floats. Save it again.")
        pairs.setdefault(module, {})[kind[0]] = tensor
    if not pairs:
        raise CheckpointError(f"Cannot merge adapter {directory}: {weights_path.name} holds no tensors. Train it first.")
    if (base := config.get("base_model_name_or_path")) is not None:
        log(f"merging adapter {directory}, trained on {base}, into {source.directory}")
    merged = {f"{module}.weight": _merge(source, directory, config, module, pair) for module, pair in pairs.items()}
    return replace(source, entries={**source.entries, **merged})


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """Read an adapter's config; raise CheckpointError for a setting that a sum of products does not cover."""
    config = load_json(find_adapter_files(directory)[0])
    for key, allowed in _PLAIN.items():
        if (value := config.get(key, allowed[0])) not in allowed:
            kind = "DoRA adapter" if key == "use_dora" else "adapter"
            raise CheckpointError(f"Cannot merge {kind} {directory}: {key} is {value!r}, expected {allowed[0]!r}. {_CURE}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise CheckpointError(
            f"Cannot merge adapter {directory}: init_lora_weights is {start!r}, which changes the base model too, expected true. {_CURE}"
        )
    return config


def _merge(
    source: HFCheckpoint, directory: Path, config: Mapping[str, Any], module: str, pair: Mapping[str, LoadableTensor]
) -> MergedWeight:
    base = source.entries[f"{module}.weight"]
    rank = _of_module(config, "rank_pattern", "r", module, directory)
    alpha = _of_module(config, "alpha_pattern", "lora_alpha", module, directory)
    if pair.keys() != {"A", "B"}:
        raise CheckpointError(f"Cannot merge adapter {directory}: {module} has only lora_{next(iter(pair))}. Save the adapter again.")
    a, b = pair["A"], pair["B"]
    if len(base.shape) != 2 or a.shape != (rank, base.shape[1]) or b.shape != (base.shape[0], rank):
        raise CheckpointError(
            f"Cannot merge adapter {directory}: {module} has lora_A {a.shape} and lora_B {b.shape}, expected rank {rank:g} for "
            f"{base.shape}. Use the adapter's own base model."
        )
    return MergedWeight(base, a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_module(config: Mapping[str, Any], patterns: str, key: str, module: str, directory: Path) -> float:
    """Return a module's own value where a pattern names it, by the end of its name as PEFT does, else the common one."""
    found = config.get(patterns) or {}
    values = [value for pattern, value in found.items() if re.match(rf"(.*\.)?({pattern})$", module)]
    value: Any = values[0] if values else config.get(key)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise CheckpointError(f"Cannot merge adapter {directory}: {key} of {module} is {value!r}, expected a number above 0. {_CURE}")
    return float(value)
