"""Write the Triton model repository of a pair, and check one without starting a server.

Every path inside is relative, to its model's version directory or (in TensorRT-LLM's backend) to the repository: it can be moved.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tritonclient.grpc.model_config_pb2 import ModelConfig

from specbuild.errors import ServingError
from specbuild.triton import contract
from specbuild.triton.check_ensemble import check_batching, check_ensemble
from specbuild.triton.contract import DRAFT, ENGINE, ENSEMBLE, LOOP, MODELS, PREPROCESSING, TARGET
from specbuild.triton.llmapi_model import make_llmapi_config
from specbuild.triton.pbtxt import EnsembleStep, format_config, load_config, make_ensemble, make_model
from specbuild.triton.trtllm_model import ENGINE_DIR, Place, check_trtllm_model, is_trtllm, make_trtllm_model


@dataclass(frozen=True)
class PairServing:
    """What the repository of one pair holds. `draft_engine` is None where the drafter needs no model; `end_ids` may be empty."""

    name: str
    target_engine: Path
    draft_engine: Path | None
    tokenizer_dir: Path
    draft_len: int
    max_draft_len: int
    rule: str
    drafter: str
    max_batch_size: int
    context: int
    draft_context: int
    end_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    compiler: str = "onnx-cpu"  # of both engines; it chooses the row of BACKENDS
    places: Mapping[str, Place] = field(default_factory=dict)  # of each engine in TensorRT-LLM's backend, by role
    fast_logits: bool = False

    def loop_parameters(self) -> dict[str, str]:
        """The parameters of the loop's config.pbtxt; `LoopSettings.from_parameters` reads them back."""
        names = ("draft_len", "max_draft_len", "rule", "drafter", "context", "draft_context", "pad_id")
        values = {name: str(getattr(self, name)) for name in names}
        values["max_running"] = str(self.max_batch_size)
        switches = {"fast_logits": self.fast_logits, "seed_per_request": BACKENDS[self.compiler].seed_per_request}
        values |= {name: "true" if on else "false" for name, on in switches.items()}
        return {"pair": self.name, **values, "end_ids": ",".join(map(str, self.end_ids))}


def find_templates() -> Path:
    """Find model_repo, in the installed package or at the root of a source checkout; raises ServingError when absent."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "model_repo", package.parent.parent / "model_repo"):
        if (candidate / LOOP / "1" / "model.py").is_file():
            return candidate
    raise ServingError(f"Cannot find the model templates beside {package}: the installation is damaged. Install specbuild again.")


def write_repository(out_dir: Path, serving: PairServing) -> None:
    """Write every model of the pair under `out_dir` (made if absent): configs, model.py files, tokenizer, engines as hard links."""
    write_ensemble(out_dir)
    model = make_model(PREPROCESSING, MODELS[PREPROCESSING], max_batch_size=1)
    version_dir = write_python_model(out_dir, model, template=PREPROCESSING)
    link_file(serving.tokenizer_dir / "tokenizer.json", version_dir / "tokenizer.json")

    model = make_model(LOOP, MODELS[LOOP], max_batch_size=1, decoupled=True, parameters=serving.loop_parameters())
    version_dir = write_python_model(out_dir, model, template=LOOP)
    link_file(serving.tokenizer_dir / "tokenizer.json", version_dir / "tokenizer.json")

    write_engine_model(out_dir, TARGET, serving.target_engine, serving)
    if serving.draft_engine is not None:
        write_engine_model(out_dir, DRAFT, serving.draft_engine, serving)


def write_models(out_dir: Path, directories: Mapping[str, Path], model_yaml: Mapping[str, Any]) -> None:
    """Write the one model of TensorRT-LLM's LLM API, over links of the files of `target` and `draft`."""
    version_dir = write_python_model(out_dir, make_llmapi_config(), template="llmapi")
    (version_dir / "model.yaml").write_text(yaml.safe_dump(dict(model_yaml), sort_keys=False), encoding="utf-8")
    for role, directory in directories.items():
        (version_dir / role).mkdir()
        for path in sorted(directory.iterdir()):
            if path.is_file():
                link_file(path, version_dir / role / path.name)


def write_ensemble(out_dir: Path) -> None:
    """Write the public model: text to ids, then the loop. One prompt per request, since answers differ in length."""
    public = contract.PUBLIC
    steps = (
        EnsembleStep(PREPROCESSING, inputs=("text_input",), outputs=("input_ids",)),
        EnsembleStep(LOOP, tuple(t.name for t in MODELS[LOOP].inputs), tuple(t.name for t in public.outputs)),
    )
    write_config(out_dir, make_ensemble(ENSEMBLE, public, steps, max_batch_size=1))


def make_cpu_engine(role: str, serving: PairServing) -> ModelConfig:
    """Make the config of an engine that our own model.py runs."""
    parameters = {"role": role, "rule": serving.rule, "vocab_size": str(serving.vocab_size), "engine_dir": ENGINE_DIR}
    return make_model(role, ENGINE, max_batch_size=serving.max_batch_size, batching=True, parameters=parameters)


def make_trtllm_engine(role: str, serving: PairServing) -> ModelConfig:
    """Make the config of an engine that TensorRT-LLM's backend runs."""
    return make_trtllm_model(role, serving.places[role], serving.max_batch_size, fast_logits=serving.fast_logits)


@dataclass(frozen=True)
class Backend:
    """What runs the engines of a compiler in Triton: the config of one in its role, and the model.py beside it, if it runs one.

    seed_per_request: its random numbers start anew with each request, so that each round has to bring a seed of its own.
    """

    make_config: Callable[[str, PairServing], ModelConfig]
    template: str | None = None
    seed_per_request: bool = False


BACKENDS = {
    "onnx-cpu": Backend(make_cpu_engine, template="engine_cpu"),
    "tensorrt": Backend(make_trtllm_engine, seed_per_request=True),
}
"""By the name of the compiler."""


def write_engine_model(out_dir: Path, role: str, engine_dir: Path, serving: PairServing) -> None:
    """Write `target` or `draft`, over a link of the engine's files."""
    backend = BACKENDS[serving.compiler]
    config = backend.make_config(role, serving)
    if backend.template is None:
        version_dir = write_config(out_dir, config)
    else:
        version_dir = write_python_model(out_dir, config, template=backend.template)
    link_tree(engine_dir, version_dir / ENGINE_DIR)


def write_config(out_dir: Path, config: ModelConfig) -> Path:
    """Write one config.pbtxt and make the version directory, which Triton wants even if empty; returns that directory."""
    version_dir = out_dir / str(config.name) / "1"
    version_dir.mkdir(parents=True)
    (version_dir.parent / "config.pbtxt").write_text(format_config(config), encoding="utf-8")
    return version_dir


def write_python_model(out_dir: Path, config: ModelConfig, *, template: str) -> Path:
    """Write the config and the model.py of a Python model; returns its version directory."""
    version_dir = write_config(out_dir, config)
    shutil.copyfile(find_templates() / template / "1" / "model.py", version_dir / "model.py")
    return version_dir


def link_file(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where that is impossible (another file system)."""
    source = source.resolve()  # a link to a symbolic link would break when the repository moves
    try:
        os.link(source, target)
    except FileNotFoundError as error:
        raise ServingError(f"Cannot write {target}: {source} does not exist. Run the earlier stages, or `specbuild run CONFIG`.") from error
    except OSError:
        shutil.copyfile(source, target)


def link_tree(source: Path, target: Path) -> None:
    """Link every file of a directory, at any depth."""
    if not source.is_dir():
        raise ServingError(f"Cannot package {source}: no such engine directory. Run `specbuild build CONFIG`.")
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            link_file(path, place)


def check_repository(repository: Path) -> None:
    """Raise ServingError for the first thing that would keep Triton from loading this repository, or from serving it rightly."""
    directories = sorted(path for path in repository.iterdir() if path.is_dir()) if repository.is_dir() else []
    if not directories:
        raise ServingError(f"Cannot serve {repository}: no models in it. Make it with `specbuild package CONFIG`.")
    configs = {directory.name: _check_model(directory) for directory in directories}
    for config in configs.values():
        check_batching(config)
        if config.platform == "ensemble" or config.HasField("ensemble_scheduling"):
            check_ensemble(config, configs)
        if is_trtllm(config):
            check_trtllm_model(config, repository)
    _check_engines(configs)


def load_configs(repository: Path) -> dict[str, ModelConfig]:
    """Read the config.pbtxt of every model of a repository, by name."""
    return {path.parent.name: load_config(path) for path in sorted(repository.glob("*/config.pbtxt"))}


def _check_model(directory: Path) -> ModelConfig:
    """Check one model directory by itself; returns its config."""
    path = directory / "config.pbtxt"
    config = load_config(path)
    if "${" in path.read_text(encoding="utf-8"):
        raise ServingError(f"Cannot serve {path}: it holds an unfilled '${{...}}'. Run `specbuild package --force`.")
    if config.name != directory.name:
        raise ServingError(f"Cannot serve {path}: the model is named {config.name!r}, expected the directory's name {directory.name!r}.")
    if not (directory / "1").is_dir():
        raise ServingError(f"Cannot serve {directory}: no version directory '1'. Run `specbuild package --force`.")
    if config.backend == "python" and not (directory / "1" / "model.py").is_file():
        raise ServingError(f"Cannot serve {directory}: no 1/model.py. Run `specbuild package --force`.")
    engine_dir = config.parameters["engine_dir"].string_value if "engine_dir" in config.parameters else ""
    if engine_dir and not (directory / "1" / engine_dir).is_dir():
        raise ServingError(f"Cannot serve {directory}: no engine at 1/{engine_dir}. Run `specbuild package --force`.")
    check_engine_batch(config, directory / "1" / ENGINE_DIR / "config.json")
    return config


def check_engine_batch(config: ModelConfig, engine_config: Path) -> None:
    """Raise ServingError when a model takes larger batches than its engine was built for."""
    values = json.loads(engine_config.read_text(encoding="utf-8")) if engine_config.is_file() else {}
    built = values.get("build_config", {}).get("max_batch_size", config.max_batch_size)
    if config.max_batch_size > built:
        raise ServingError(
            f"Cannot serve {config.name}: max_batch_size is {config.max_batch_size}, but its engine was built for {built}. Run `specbuild "
            "package --force`."
        )


def _check_engines(configs: Mapping[str, ModelConfig]) -> None:
    """The engines must take the same batch, and must not be decoupled: the loop makes plain calls."""
    engines = [configs[name] for name in (TARGET, DRAFT) if name in configs]
    if LOOP in configs:
        for name in (TARGET, DRAFT)[: 2 if configs[LOOP].parameters["drafter"].string_value == "model" else 1]:
            if name not in configs:
                raise ServingError(f"Cannot serve {LOOP}: it calls {name}, no model of this repository. Run `specbuild package --force`.")
    sizes = {str(config.name): int(config.max_batch_size) for config in engines}
    if len(set(sizes.values())) > 1:
        raise ServingError(f"Cannot serve this pair: max_batch_size differs, {sizes}. Expected one number; build both engines alike.")
    if LOOP in configs and not configs[LOOP].model_transaction_policy.decoupled:
        raise ServingError(f"Cannot serve {LOOP}: it is not decoupled, but it answers in chunks. Set decoupled to true.")
    for config in engines:
        if config.model_transaction_policy.decoupled:
            raise ServingError(f"Cannot serve {config.name}: it is decoupled, but the loop makes plain calls. Set decoupled to false.")
