"""The package stage: two engines to a Triton model repository."""

from __future__ import annotations

from pathlib import Path

from specbuild.artifacts import Engine, find_end_ids, find_model_dir, load_json
from specbuild.built import check_built, roles_needed
from specbuild.check import check_vocabularies, load_tokenizers
from specbuild.compilers import find_compiler
from specbuild.config import PairConfig
from specbuild.errors import EngineError
from specbuild.provenance import Record, digest_artifact, digest_files, make_artifact
from specbuild.tokenizer import count_ids
from specbuild.triton.repository import PairServing, check_repository, find_templates, write_repository


def run_package(config: PairConfig, force: bool = False) -> bool:
    """Write `<workdir>/model_repository`; return whether it was made anew."""
    tokenizers = load_tokenizers(config)
    check_vocabularies(tokenizers)
    roles = roles_needed(config)
    check_built(config, roles)
    engines = {role: Engine.open(config.dir_of(role, "engine")) for role in roles}
    for engine in engines.values():
        find_compiler(engine.compiler).check_serving(engine)
    tokenizer_dir = find_model_dir(config.target, config.path, weights=False)
    serving = make_serving(config, engines["target"], engines.get("draft"), tokenizer_dir, count_ids(tokenizers["target"]))
    inputs: dict[str, str] = {role: digest_artifact(engine.directory) for role, engine in engines.items()}
    inputs["tokenizer"] = digest_files([tokenizer_dir / "tokenizer.json"])
    inputs["templates"] = digest_files(find_templates().rglob("*.py"))
    parameters = {name: value for name, value in vars(serving).items() if not isinstance(value, Path)}
    record = Record("package", parameters, inputs, ("tritonclient",))

    def make(out: Path) -> None:
        write_repository(out, serving)
        check_repository(out)

    return make_artifact(config.repository_dir, record, force, make)


def make_serving(config: PairConfig, target: Engine, draft: Engine | None, tokenizer_dir: Path, vocab_size: int) -> PairServing:
    """Return what the repository holds; one batch size and one context for all its models, the smaller of the engines'."""
    if config.speculation.draft_len > target.max_draft_len:
        raise EngineError(
            f"Cannot package draft_len {config.speculation.draft_len}: the target engine was built for at most "
            f"{target.max_draft_len}. Run `specbuild build` again."
        )
    end_ids = find_end_ids(tokenizer_dir)
    pad_id = load_json(tokenizer_dir / "config.json").get("pad_token_id")
    return PairServing(
        name=config.name, target_engine=target.directory, draft_engine=draft.directory if draft else None, tokenizer_dir=tokenizer_dir,
        draft_len=config.speculation.draft_len, max_draft_len=target.max_draft_len, rule=config.speculation.acceptance,
        drafter=config.speculation.drafter, max_batch_size=min(engine.max_batch_size for engine in (target, draft) if engine),
        context=target.max_seq_len, draft_context=draft.max_seq_len if draft else target.max_seq_len, end_ids=end_ids,
        pad_id=pad_id if pad_id is not None else (end_ids or (0,))[0], vocab_size=vocab_size,
    )  # fmt: skip
