"""The directories that stages read and write, opened and checked: Hugging Face checkpoint, TensorRT-LLM checkpoint, engine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbuild.config import ModelConfig
from specbuild.errors import CheckpointError, ConfigError, EngineError
from specbuild.picklefile import read_pickle
from specbuild.shape import ModelShape
from specbuild.tensorfile import LoadableTensor, TensorEntry, read_header
from specbuild.tllm_config import check_tllm_config, shape_from_tllm

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there, whole or as an index of shards, is the model
SMALL_FILES = ("*.json", "tokenizer.model", "*.txt")
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
    names = (name for whole in WEIGHTS for name in (whole, index_of(whole)))
    if (directory / "adapter_config.json").exists() and not any((directory / name).exists() for name in names):
        dora = load_json(directory / "adapter_config.json").get("use_dora")
        cure = "" if dora else ", or give the base model, and this directory as its merge_lora"
        raise CheckpointError(
            f"Cannot convert {directory}: it is {'a DoRA adapter' if dora else 'an adapter'}, expected a whole model. Merge it into its "
            f"base model (PEFT: merge_and_unload){cure}."
        )


def index_of(whole: str) -> str:
    """Return the name of the index that stands for a weight file in shards."""
    return f"{whole}.index.json"


def _fetch_from_hub(model: ModelConfig, local: Path, weights: bool) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        directory = _fetch_files(model.model, model.revision, SMALL_FILES)
        if weights:
            _fetch_weights(model.model, directory)
        return directory
    except LocalEntryNotFoundError:
        reason = "not in the local hub cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set)"
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
    raise ConfigError(
        f"Cannot find model {model.model}: {local} is not a directory, and as a hub id it is {reason}. Give a "
        "directory, or fetch it once online."
    )


def _fetch_files(repository: str, revision: str | None, patterns: Iterable[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))


def _fetch_weights(repository: str, directory: Path) -> None:
    """Fetch the weight files of a snapshot that the model is loaded from, and no others; the small files are there, the indexes too."""
    for whole in WEIGHTS:
        _fetch_files(repository, directory.name, [whole])  # the snapshot's name is its commit
        if (directory / whole).exists():
            return
        if (directory / index_of(whole)).exists():
            _fetch_files(repository, directory.name, shards_of(directory / index_of(whole)))
            return


@dataclass(frozen=True)
class HFCheckpoint:
    """A Hugging Face model directory: its config, where each tensor lies, and the files they lie in."""

    directory: Path
    config: Mapping[str, Any]
    entries: Mapping[str, LoadableTensor]
    weight_files: tuple[Path, ...]

    @classmethod
    def open(cls, directory: Path) -> HFCheckpoint:
        """Open a directory and read its headers; every missing or damaged file is an error before any weight is read."""
        config = load_json(directory / "config.json")
        files, index = find_weight_files(directory)
        entries: dict[str, LoadableTensor] = {}
        headers = {file: read_weight_file(directory / file) for file in files}
        for header in headers.values():
            entries |= header
        if index is not None:
            for name, file in load_json(directory / index)["weight_map"].items():
                if name not in headers[file]:
                    raise CheckpointError(
                        f"Cannot open {directory}: {index} promises tensor {name} in {file}, which does not hold it. Fetch the model again."
                    )
        return cls(directory, config, entries, tuple(directory / file for file in files))

    @property
    def unused_files(self) -> list[str]:
        """Names of safetensors files beside those that are read."""
        return sorted(path.name for path in self.directory.glob("*.safetensors") if path not in self.weight_files)


def read_weight_file(path: Path) -> Mapping[str, LoadableTensor]:
    """Read what a safetensors or .bin file holds, without its data."""
    return read_header(path) if path.suffix == ".safetensors" else read_pickle(path)


def find_weight_files(directory: Path) -> tuple[list[str], str | None]:
    """List a Hugging Face directory's weight files, and their index: the first standard name, as in transformers; all must exist."""
    for whole in WEIGHTS:
        if (directory / whole).exists():
            return [whole], None
        if (directory / index_of(whole)).exists():
            files = shards_of(directory / index_of(whole))
            if missing := [file for file in files if not (directory / file).exists()]:
                raise CheckpointError(
                    f"Cannot open {directory}: missing {', '.join(missing)} of {len(files)} weight files. Fetch the model again."
                )
            return files, index_of(whole)
    others = sorted(path.name for ending in ("safetensors", "bin", "pt", "pth", "gguf") for path in directory.glob(f"*.{ending}"))
    found = f" found {', '.join(others[:3])}," if others else ""
    raise CheckpointError(
        f"Cannot find weights in {directory}:{found} expected {' or '.join(WEIGHTS)}, or an index of shards of one. Save the model as "
        "safetensors."
    )


def shards_of(index: Path) -> list[str]:
    """List the files that an index names."""
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"Cannot read {index}: it has no weight_map of file names. Fetch it again.")
    return sorted(set(weight_map.values()))


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
        config = load_json(directory / "config.json", EngineError)
        for key in ("pretrained_config", "build_config"):
            if not isinstance(config.get(key), dict):
                raise EngineError(f"Cannot open engine {directory}: its config.json has no {key}. Run `specbuild build`.")
        return cls(directory, config)

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
