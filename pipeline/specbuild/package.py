"""The package stage: two engines to a Triton model repository."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbuild.artifacts import Engine, find_end_ids, find_model_dir, load_json
from specbuild.build import make_limits
from specbuild.built import check_built
from specbuild.check import check_vocabularies, load_shape, load_tokenizers
from specbuild.compilers import find_compiler
from specbuild.compilers.trtllm_command import max_num_tokens
from specbuild.config import ROLES, PairConfig, Role, roles_needed
from specbuild.errors import EngineError
from specbuild.placement import make_places
from specbuild.provenance import Record, digest_artifact, digest_files, make_artifact
from specbuild.tokenizer import count_ids
from specbuild.triton.llmapi_model import make_model_yaml, make_speculative_config
from specbuild.triton.repository import PairServing, check_repository, find_templates, write_models, write_repository


def run_package(config: PairConfig, force: bool = False) -> bool:
    """Write `<workdir>/model_repository`; return whether it was made anew."""
    tokenizers = load_tokenizers(config)
    check_vocabularies(tokenizers)
    if not find_compiler(config.build.compiler).ENGINES:
        return package_models(config, force)
    roles = roles_needed(config)
    check_built(config, roles)
    engines = {role: Engine.open(config.dir_of(role, "engine")) for role in roles}
    tokenizer_dir = find_model_dir(config.target, config.path, weights=False)
    serving = make_serving(config, engines, tokenizer_dir, count_ids(tokenizers["target"]))
    inputs: dict[str, str] = {role: digest_artifact(engine.directory) for role, engine in engines.items()}
    inputs["tokenizer"] = digest_files([tokenizer_dir / "tokenizer.json"])
    parameters = {name: value for name, value in asdict(serving).items() if not isinstance(value, Path)} | serving_parameters(config)
    return make_repository(config, parameters, inputs, force, lambda out: write_repository(out, serving))


def make_repository(
    config: PairConfig, parameters: Mapping[str, Any], inputs: Mapping[str, str], force: bool, write: Callable[[Path], None]
) -> bool:
    """Write and check the repository, unless it is up to date; return whether it was made anew."""
    record = Record("package", parameters, {**inputs, "templates": digest_files(find_templates().rglob("*.py"))}, ("tritonclient",))

    def make(out: Path) -> None:
        write(out)
        check_repository(out)

    return make_artifact(config.repository_dir, record, force, make)


def package_models(config: PairConfig, force: bool) -> bool:
    """Write a repository over the models' own files, for a runtime that loads them itself."""
    shapes = {role: load_shape(config, role)[2] for role in ROLES}
    find_compiler(config.build.compiler).check_pair(config, shapes)
    directories: dict[str, Path] = {role: find_model_dir(config.model_of(role), config.path, weights=True) for role in ROLES}
    limits = {role: make_limits(config, role, shapes[role]) for role in ROLES}
    model_yaml = make_model_yaml(
        dtype=config.target.dtype, tp=config.target.tp, pp=config.target.pp, max_batch_size=config.build.max_batch_size,
        max_seq_len=limits["target"].max_seq_len, max_num_tokens=max_num_tokens(limits["target"]), draft_len=config.speculation.draft_len,
    )  # fmt: skip
    inputs = {role: digest_files(path for path in directory.iterdir() if path.is_file()) for role, directory in directories.items()}
    parameters = {"compiler": config.build.compiler, **model_yaml}
    return make_repository(config, parameters, inputs, force, lambda out: write_models(out, directories, model_yaml))


def serving_parameters(config: PairConfig) -> dict[str, object]:
    """Return the part of the YAML that only a repository of TensorRT engines depends on."""
    return {"serving": config.serving.model_dump(mode="json")} if config.build.compiler == "tensorrt" else {}


def package_parameters(config: PairConfig) -> dict[str, object]:
    """Return what a repository's record has of the YAML itself, whatever engines or models lie in it."""
    speculation, model, compiler = config.speculation, config.target, {"compiler": config.build.compiler}
    if not find_compiler(config.build.compiler).ENGINES:
        sizes = {"dtype": model.dtype, "tensor_parallel_size": model.tp, "pipeline_parallel_size": model.pp}
        drafted = {"speculative_config": make_speculative_config(speculation.draft_len)}
        return {**compiler, **sizes, "max_batch_size": config.build.max_batch_size, **drafted}
    loop = {"draft_len": speculation.draft_len, "rule": speculation.acceptance, "drafter": speculation.drafter}
    return {**compiler, **loop, **serving_parameters(config)}


def make_serving(config: PairConfig, engines: Mapping[Role, Engine], tokenizer_dir: Path, vocab_size: int) -> PairServing:
    """Return what the repository holds; one batch size and one context for all its models, the smaller of the engines'."""
    target, draft = engines["target"], engines.get("draft")
    if config.speculation.draft_len > target.max_draft_len:
        raise EngineError(
            f"Cannot package draft_len {config.speculation.draft_len}: the target engine was built for at most "
            f"{target.max_draft_len}. Run `specbuild build` again."
        )
    on_gpus = find_common_compiler(engines) == "tensorrt"
    end_ids = find_end_ids(tokenizer_dir)
    pad_id = load_json(tokenizer_dir / "config.json").get("pad_token_id")
    return PairServing(
        name=config.name, target_engine=target.directory, draft_engine=draft.directory if draft else None, tokenizer_dir=tokenizer_dir,
        draft_len=config.speculation.draft_len, max_draft_len=target.max_draft_len, rule=config.speculation.acceptance,
        drafter=config.speculation.drafter, max_batch_size=min(engine.max_batch_size for engine in engines.values()),
        context=target.max_seq_len, draft_context=draft.max_seq_len if draft else target.max_seq_len, end_ids=end_ids,
        pad_id=pad_id if pad_id is not None else (end_ids or (0,))[0], vocab_size=vocab_size,
        compiler=target.compiler, places=make_places(config, engines) if on_gpus else {},
        fast_logits=on_gpus and config.serving.fast_logits,
    )  # fmt: skip


def find_common_compiler(engines: Mapping[Role, Engine]) -> str:
    """Return the compiler of all engines; raise EngineError when they have several."""
    compilers = sorted({engine.compiler for engine in engines.values()})
    if len(compilers) > 1:
        raise EngineError(f"Cannot package engines of compilers {' and '.join(compilers)} together. Run `specbuild build` for both.")
    return compilers[0]
