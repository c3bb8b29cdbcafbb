"""The directories that stages read and write, opened and checked: Hugging Face checkpoint, TensorRT-LLM checkpoint, engine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbuild.config import ModelConfig
from specbuild.errors import CheckpointError, ConfigError, EngineError
from specbuild.shape import ModelShape
from specbuild.tensorfile import TensorEntry, read_header
from specbuild.tllm_config import check_tllm_config, shape_from_tllm

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SMALL_FILES = ("*.json", "tokenizer.model", "*.txt")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_json(path: Path, error: type[Exception] = CheckpointError) -> dict[str, Any]:
    """Read a JSON object; raise `error` with one line when it is absent or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"Cannot open {path.parent}: {path.name} is missing. Expected a model directory that has it.") from None
    except (OSError, ValueError) as reason:
        raise error(f"Cannot read {path}: {reason}.") from None
    if not isinstance(value, dict):
        raise error(f"Cannot read {path}: expected a JSON object, found {type(value).__name__}.")
    return value


def find_model_dir(model: ModelConfig, yaml_path: Path, *, weights: bool) -> Path:
    """Return the directory of a model: a local one relative to the YAML, else a hub snapshot (with weights only if asked)."""
    local = local_dir(model, yaml_path)
    if is_local(model, yaml_path):
        if model.revision is not None:
            raise ConfigError(f"Cannot use revision {model.revision!r} of {model.model}: it is a local directory. Remove `revision`.")
        check_no_adapter(local)
        return local
    if model.model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model.model):
        raise ConfigError(f"Cannot find model {model.model}: {local} is not a directory. Paths are relative to {yaml_path}.")
    return _fetch_from_hub(model, local, weights)


def local_dir(model: ModelConfig, yaml_path: Path) -> Path:
    """Return where a model would lie as a directory."""
    return yaml_path.parent / os.path.expanduser(model.model)  # noqa: PTH111  Path.expanduser raises for an unknown user


def is_local(model: ModelConfig, yaml_path: Path) -> bool:
    """Tell whether a model is a directory, relative to the YAML, and not a hub id."""
    return local_dir(model, yaml_path).is_dir()


def check_no_adapter(directory: Path) -> None:
    """Raise CheckpointError when a directory holds an adapter and no model of its own."""
    if (directory / "adapter_config.json").exists() and not any((directory / name).exists() for name in (INDEX, SINGLE)):
        kind = "a DoRA adapter" if load_json(directory / "adapter_config.json").get("use_dora") else "an adapter"
        raise CheckpointError(
            f"Cannot convert {directory}: it is {kind}, expected a whole model. Merge it into its base model (PEFT: merge_and_unload)."
        )


def _fetch_from_hub(model: ModelConfig, local: Path, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_SMALL_FILES, *(("*.safetensors",) if weights else ())]
    try:
        return Path(snapshot_download(model.model, revision=model.revision, allow_patterns=patterns))
    except LocalEntryNotFoundError:
        reason = "not in the local hub cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set)"
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
    raise ConfigError(
        f"Cannot find model {model.model}: {local} is not a directory, and as a hub id it is {reason}. Give a "
        "directory, or fetch it once online."
    )


@dataclass(frozen=True)
class HFCheckpoint:
    """A Hugging Face model directory: its config and where each tensor lies."""

    directory: Path
    config: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, directory: Path) -> HFCheckpoint:
        """Open a directory and read its safetensors headers; every missing or damaged file is an error before any weight is read."""
        config = load_json(directory / "config.json")
        entries: dict[str, TensorEntry] = {}
        headers = {file: read_header(directory / file) for file in find_weight_files(directory)}
        for header in headers.values():
            entries |= header
        if SINGLE not in headers:
            for name, file in load_json(directory / INDEX)["weight_map"].items():
                if name not in headers[file]:
                    raise CheckpointError(
                        f"Cannot open {directory}: {INDEX} promises tensor {name} in {file}, which does not hold it. Fetch the model again."
                    )
        return cls(directory, config, entries)

    @property
    def weight_files(self) -> list[Path]:
        return sorted({entry.path for entry in self.entries.values()})


def find_weight_files(directory: Path) -> list[str]:
    """List the safetensors files of a Hugging Face directory: the standard name, else its index's, as transformers does; all must exist."""
    if (directory / SINGLE).exists():
        files = [SINGLE]
    elif (directory / INDEX).exists():
        weight_map = load_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"Cannot read {directory / INDEX}: it has no weight_map.")
        files = sorted(set(weight_map.values()))
    else:
        others = sorted(path.name for ending in ("bin", "pt", "pth", "gguf") for path in directory.glob(f"*.{ending}"))
        found = f" found {', '.join(others[:3])}," if others else ""
        raise CheckpointError(f"Cannot find weights in {directory}:{found} expected {SINGLE} or {INDEX}. Save the model as safetensors.")
    missing = [file for file in files if not (directory / file).exists()]
    if missing:
        raise CheckpointError(f"Cannot open {directory}: missing {', '.join(missing)} of {len(files)} weight files. Fetch the model again.")
    return files


def find_end_ids(directory: Path) -> tuple[int, ...]:
    """Return the end token ids of a Hugging Face directory: generation_config.json's, else config.json's, else none."""
    for file in ("generation_config.json", "config.json"):
        if (directory / file).exists():
            value = load_json(directory / file).get("eos_token_id")
            if value is not None:
                ids = tuple(value) if isinstance(value, list) else (value,)
                if not all(type(token) is int and token >= 0 for token in ids):
                    raise CheckpointError(f"Cannot use eos_token_id {value!r} of {directory / file}: expected token ids. Mend it.")
                return ids
    return ()


@dataclass(frozen=True)
class TllmCheckpoint:
    """A TensorRT-LLM checkpoint: config.json and one safetensors file per rank."""

    directory: Path
    config: Mapping[str, Any]
    shape: ModelShape

    @classmethod
    def open(cls, directory: Path) -> TllmCheckpoint:
        config = load_json(directory / "config.json")
        check_tllm_config(config, directory / "config.json")
        checkpoint = cls(directory, config, shape_from_tllm(config))
        for path in checkpoint.rank_files:
            if not path.exists():
                raise CheckpointError(
                    f"Cannot open {directory}: {path.name} is missing for world size {len(checkpoint.rank_files)}. Convert again."
                )
        return checkpoint

    @property
    def rank_files(self) -> list[Path]:
        return [self.directory / f"rank{rank}.safetensors" for rank in range(self.config["mapping"]["world_size"])]

    def entries(self, rank: int = 0) -> dict[str, TensorEntry]:
        return read_header(self.rank_files[rank])


@dataclass(frozen=True)
class Engine:
    """A built engine: its directory and config.json (TensorRT-LLM's schema plus our own section)."""

    directory: Path
    config: Mapping[str, Any]

    @classmethod
    def open(cls, directory: Path) -> Engine:
        if not directory.is_dir():
            raise EngineError(f"Cannot open engine {directory}: it does not exist. Run `specbuild build` first.")
        return cls(directory, load_json(directory / "config.json", EngineError))

    @property
    def compiler(self) -> str:
        """The name of the compiler; trtllm-build's own config.json has no section of ours."""
        return str(self.config.get("specbuild", {"compiler": "tensorrt"})["compiler"])

    @property
    def shape(self) -> ModelShape:
        return shape_from_tllm(self.config["pretrained_config"])

    @property
    def max_batch_size(self) -> int:
        return int(self.config["build_config"]["max_batch_size"])

    @property
    def max_seq_len(self) -> int:
        return int(self.config["build_config"]["max_seq_len"]) - self.max_draft_len

    @property
    def max_draft_len(self) -> int:
        return int(self.config["build_config"]["max_draft_len"])
