"""Everything about a pair that can be known without reading weights; the first wrong thing is one error."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from specbuild.artifacts import HFCheckpoint, find_end_ids, find_model_dir, is_local, load_json
from specbuild.calibration import check_calibration
from specbuild.compilers import COMPILERS, find_compiler
from specbuild.config import ROLES, PairConfig, Role
from specbuild.convert import adapter_dir, check_parallel, check_source, open_source
from specbuild.errors import ConfigError
from specbuild.families import Family, find_family
from specbuild.hf_formats import find_packing, plain_config, read_adapter_config
from specbuild.packed import check_packing
from specbuild.pair_check import (
    Difference,
    Sizes,
    check_vocabularies,
    find_differences,
    find_notes,
    find_size_warnings,
    find_target_trouble,
)
from specbuild.quant import find_scheme
from specbuild.quantize import check_shapes
from specbuild.shape import ModelShape
from specbuild.spec.accept import RULES
from specbuild.spec.drafters import DRAFTERS
from specbuild.tokenizer import count_ids, load_tokenizer

__all__ = ["ModelReport", "PairReport", "check_names", "check_pair", "check_vocabularies", "load_tokenizers"]


@dataclass(frozen=True)
class ModelReport:
    """What is known of one model."""

    directory: str
    architecture: str
    parameters: int
    dtype: str
    scheme: str
    ranks: str
    context: int
    vocab: int
    tied: bool  # lm_head is the embedding
    tokenizer_vocab: int
    end_ids: tuple[int, ...]
    weights_seen: bool  # the headers of its weight files were read and fit the config


@dataclass(frozen=True)
class PairReport:
    """What is known of a pair, and what its user should know."""

    target: ModelReport
    draft: ModelReport
    warnings: tuple[str, ...] = field(default=())
    differences: tuple[Difference, ...] = field(default=())  # of the tokenizers; none of them is an error
    notes: tuple[str, ...] = field(default=())  # what looks odd and is fine

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_pair(config: PairConfig) -> PairReport:
    """Check both models, then how they fit together; raise SpecbuildError at the first thing that cannot work."""
    check_names(config)
    loaded = {role: load_shape(config, role) for role in ROLES}
    find_compiler(config.build.compiler).check_pair(config, {role: shape for role, (_, _, shape) in loaded.items()})
    reports, tokenizers = {}, {}
    for role, (directory, family, shape) in loaded.items():
        seen = check_weights(config, role, directory, family, shape)
        tokenizers[role] = load_tokenizer(directory)
        reports[role] = make_report(config, role, directory, shape, tokenizers[role], seen)
    check_vocabularies(tokenizers, loaded["draft"][2].vocab)
    directories = {role: directory for role, (directory, _, _) in loaded.items()}
    target, draft = (Sizes(each.parameters, each.context, each.vocab, each.end_ids) for each in (reports["target"], reports["draft"]))
    warnings = (
        *find_size_warnings(target, draft, config.build.max_seq_len, tokenizers["draft"]),
        *find_target_trouble(directories["target"], tokenizers["target"]),
    )
    notes = tuple(find_notes(target, draft, count_ids(tokenizers["target"])))
    return PairReport(reports["target"], reports["draft"], warnings, find_differences(directories, tokenizers), notes)


def check_names(config: PairConfig) -> None:
    """Raise ConfigError for a rule, drafter, compiler or scheme that no table has."""
    tables = (
        ("acceptance", config.speculation.acceptance, RULES),
        ("drafter", config.speculation.drafter, DRAFTERS),
        ("compiler", config.build.compiler, COMPILERS),
    )
    for what, name, table in tables:
        if name not in table:
            raise ConfigError(f"Cannot use {what} {name!r}: expected one of {', '.join(table)}.")
    for role in ROLES:
        settings = config.model_of(role).quantize
        check_calibration(settings, config.path)
        if settings.kv_cache is not None:
            raise ConfigError(
                f"Cannot build the {role} with kv_cache {settings.kv_cache!r} for drafted tokens: TensorRT-LLM turns paged context "
                "attention off with it, which they need, and onnx-cpu has float32 only. Use kv_cache: null."
            )
    if config.speculation.draft_len > config.max_draft_len:
        raise ConfigError(
            f"Cannot draft {config.speculation.draft_len} tokens with max_draft_len {config.max_draft_len}. Raise build.max_draft_len."
        )
    if config.build.max_beam_width != 1:
        raise ConfigError(
            f"Cannot build for max_beam_width {config.build.max_beam_width}: drafted tokens are verified along one beam only, expected 1. "
            "Remove build.max_beam_width."
        )


def check_weights(config: PairConfig, role: Role, directory: Path, family: Family, shape: ModelShape) -> bool:
    """Check the headers of a local model's weight files against its shape; return whether there were any to see."""
    model = config.model_of(role)
    if not is_local(model, config.path):
        return False
    check_source(open_source(HFCheckpoint.open(directory), config, role), family, shape, model, role)
    return True


def make_report(config: PairConfig, role: Role, directory: Path, shape: ModelShape, tokenizer: Tokenizer, seen: bool) -> ModelReport:
    """Return what is known of one model; raise ConfigError when its tokenizer has more tokens than it has rows."""
    model = config.model_of(role)
    entries = count_ids(tokenizer)
    if entries > shape.vocab:
        raise ConfigError(
            f"Cannot use {model.model}: its tokenizer has {entries} tokens, its model only {shape.vocab} rows. Use the "
            "tokenizer it was trained with."
        )
    return ModelReport(
        str(directory), shape.architecture, count_parameters(shape), model.dtype, model.quantize.scheme, f"tp {model.tp}, pp {model.pp}",
        shape.context, shape.vocab, shape.tied, entries, find_end_ids(directory), seen,
    )  # fmt: skip


def load_shape(config: PairConfig, role: Role) -> tuple[Path, Family, ModelShape]:
    """Read a model's config.json and check all that it alone tells; return the model's directory, family and shape."""
    model = config.model_of(role)
    directory = find_model_dir(model, config.path, weights=False)
    values = load_json(directory / "config.json")
    packing = find_packing(values)
    check_packing(packing, model, role)
    if (adapter := adapter_dir(config, model)) is not None:
        read_adapter_config(adapter)
    values = values if packing is None else plain_config(values)
    family = find_family(values)
    shape = family.read_shape(values)
    check_parallel(shape, model)
    scheme, group_size = find_scheme(model.quantize.scheme), model.quantize.group_size
    check_shapes(shape, model.quantize, model.tp, find_compiler(config.build.compiler).GROUPS)
    find_compiler(config.build.compiler).check(shape, scheme, group_size, model.tp, model.pp)
    check_context(config, role, shape)
    return directory, family, shape


def check_context(config: PairConfig, role: Role, shape: ModelShape) -> None:
    """Raise ConfigError when the target cannot hold max_seq_len; a draft that cannot is only a warning."""
    if role == "target" and config.build.max_seq_len > shape.context:
        raise ConfigError(
            f"Cannot build for max_seq_len {config.build.max_seq_len}: the target has {shape.context} positions. Use "
            f"max_seq_len {shape.context} or less."
        )


def load_tokenizers(config: PairConfig) -> dict[Role, Tokenizer]:
    """Load the tokenizers of both models."""
    return {role: load_tokenizer(find_model_dir(config.model_of(role), config.path, weights=False)) for role in ROLES}


def count_parameters(shape: ModelShape) -> int:
    """Return the number of weights, without norms and biases."""
    per_layer = sum(rows * columns for rows, columns in shape.linears().values())
    return shape.layers * per_layer + shape.vocab * shape.hidden * (1 if shape.tied else 2)
