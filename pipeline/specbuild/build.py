"""The build stage: a quantized checkpoint to an engine."""

from __future__ import annotations

from typing import Any

from specbuild.artifacts import TllmCheckpoint
from specbuild.check import check_context, load_shape
from specbuild.compilers import Limits, find_compiler
from specbuild.config import ROLES, PairConfig, Role
from specbuild.convert import convert_parameters
from specbuild.errors import CheckpointError, EngineError
from specbuild.provenance import Record, check_parameters, digest_artifact, make_artifact
from specbuild.quality import check_missed, load_quality
from specbuild.quant import QuantScheme, find_scheme, scheme_of_algo
from specbuild.quant.scheme import includes_lm_head
from specbuild.quantize import quantize_parameters
from specbuild.shape import ModelShape


def run_build(config: PairConfig, role: Role, force: bool = False) -> bool:
    """Write `<workdir>/<role>/engine`; return whether it was made anew."""
    check_engines_built(config, role)
    record = check_build(config, role)
    source = TllmCheckpoint.open(config.dir_of(role, "quantized"))
    limits = make_limits(config, role, source.shape)
    compiler = find_compiler(config.build.compiler)
    return make_artifact(config.dir_of(role, "engine"), record, force, lambda out: compiler.build(source, limits, out, role))


def check_build(config: PairConfig, role: Role) -> Record:
    """Check the checkpoint, the pair (as far as it is quantized) and this machine; return what the engine depends on."""
    compiler = find_compiler(config.build.compiler)
    sources = {
        each: TllmCheckpoint.open(config.dir_of(each, "quantized"))
        for each in ROLES
        if each == role or config.dir_of(each, "quantized").is_dir()
    }
    source = sources[role]
    quantization, mapping = source.config["quantization"], source.config["mapping"]
    scheme = scheme_of_algo(quantization["quant_algo"])
    check_quantization(source, scheme)
    compiler.check(source.shape, scheme, quantization.get("group_size", 0), mapping["tp_size"], mapping["pp_size"])
    check_context(config, role, source.shape)
    compiler.check_pair(config, {each: checkpoint.shape for each, checkpoint in sources.items()})
    check_sources(config, role)
    parameters = {**build_parameters(config, role, source.shape), **compiler.check_machine(scheme)}
    return Record("build", parameters, {"checkpoint": digest_artifact(source.directory)}, compiler.PACKAGES)


def check_engines_built(config: PairConfig, role: Role) -> None:
    """Raise EngineError when the compiler builds nothing."""
    if not find_compiler(config.build.compiler).ENGINES:
        raise EngineError(
            f"Cannot build the {role} with {config.build.compiler}: it has no engines, its runtime loads the Hugging Face checkpoint. Run "
            "`specbuild package`, or use another compiler."
        )


def check_sources(config: PairConfig, role: Role) -> None:
    """Raise ConfigError when a checkpoint that the engine comes from was made from other values than those of the YAML."""
    model = config.model_of(role)
    check_parameters(config.dir_of(role, "checkpoint"), convert_parameters(model), config.path)
    check_parameters(config.dir_of(role, "quantized"), quantize_parameters(model.quantize), config.path)
    if (report := load_quality(config.dir_of(role, "quantized"))) is not None:
        check_missed(report, model.quantize, role)


def check_quantization(source: TllmCheckpoint, scheme: QuantScheme) -> None:
    """Raise CheckpointError unless a checkpoint's `quantization` is what its scheme writes: anything else is another format."""
    found = source.config["quantization"]
    wanted = {
        "quant_algo": scheme.quant_algo,
        "kv_cache_quant_algo": None,
        **scheme.settings(found.get("group_size", 0), includes_lm_head(found)),
    }
    if includes_lm_head(found) and scheme.grouped and "lm_head.weights_scaling_factor" not in source.entries(len(source.rank_files) - 1):
        wanted |= scheme.settings(found.get("group_size", 0), False)  # its lm_head came as it was
    for key in (*wanted, *found):
        if found.get(key) != wanted.get(key):
            raise CheckpointError(
                f"Cannot build from {source.directory}: quantization.{key} is {found.get(key)!r}, expected {wanted.get(key)!r} for "
                f"{scheme.name}. Run `specbuild quantize --force`."
            )


def build_parameters(config: PairConfig, role: Role, shape: ModelShape) -> dict[str, Any]:
    """Return the part of the YAML that an engine depends on."""
    limits = make_limits(config, role, shape)
    return {"compiler": config.build.compiler, **{name: getattr(limits, name) for name in find_compiler(config.build.compiler).LIMITS}}


def check_machine(config: PairConfig) -> None:
    """Raise EngineError when this machine cannot build one of the models."""
    for role in ROLES:
        find_compiler(config.build.compiler).check_machine(find_scheme(config.model_of(role).quantize.scheme))


def describe_build(config: PairConfig, roles: tuple[Role, ...]) -> str:
    """Return what a build would run and write, from each model's config.json alone."""
    compiler = find_compiler(config.build.compiler)
    shapes = {role: load_shape(config, role)[2] for role in ROLES}
    compiler.check_pair(config, shapes)
    blocks = []
    for role in roles:
        model, settings, shape = config.model_of(role), config.model_of(role).quantize, shapes[role]
        group = f" group {settings.group_size}" if find_scheme(settings.scheme).grouped else ""
        head = f"# {role}: {shape.architecture}, {model.dtype}, {settings.scheme}{group}, tp {model.tp}, pp {model.pp}"
        limits = make_limits(config, role, shape)
        checkpoint_dir, engine_dir = config.dir_of(role, "quantized"), config.dir_of(role, "engine")
        blocks.append("\n".join([head, *compiler.describe(checkpoint_dir, limits, engine_dir, model.tp * model.pp)]))
    return "\n\n".join(blocks)


def make_limits(config: PairConfig, role: Role, shape: ModelShape) -> Limits:
    """Return what an engine of this pair is built for: only the target takes drafted tokens, and a draft may have a shorter context."""
    max_seq_len = min(config.build.max_seq_len, shape.context)
    max_draft_len = config.max_draft_len if role == "target" else 0
    gather_logits = config.speculation.acceptance == "rejection"
    return Limits(config.build.max_batch_size, max_seq_len, max_draft_len, config.build.kernels, gather_logits)
