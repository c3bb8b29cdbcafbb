"""The build stage: a quantized checkpoint to an engine."""

from __future__ import annotations

from specbuild.artifacts import TllmCheckpoint
from specbuild.check import check_context
from specbuild.compilers import Limits, find_compiler
from specbuild.config import PairConfig, Role
from specbuild.provenance import Record, digest_artifact, make_artifact
from specbuild.quant import scheme_of_algo
from specbuild.shape import ModelShape


def run_build(config: PairConfig, role: Role, force: bool = False) -> bool:
    """Write `<workdir>/<role>/engine`; return whether it was made anew."""
    compiler = find_compiler(config.build.compiler)
    source = TllmCheckpoint.open(config.dir_of(role, "quantized"))
    quantization, world_size = source.config["quantization"], source.config["mapping"]["world_size"]
    compiler.check(source.shape, scheme_of_algo(quantization["quant_algo"]), quantization.get("group_size", 0), world_size)
    check_context(config, role, source.shape)
    limits = make_limits(config, role, source.shape)
    parameters = {"compiler": config.build.compiler, **vars(limits)}
    record = Record("build", parameters, {"checkpoint": digest_artifact(source.directory)}, compiler.PACKAGES)
    return make_artifact(config.dir_of(role, "engine"), record, force, lambda out: compiler.build(source, limits, out, role))


def make_limits(config: PairConfig, role: Role, shape: ModelShape) -> Limits:
    """Return what an engine of this pair is built for: only the target takes drafted tokens, and a draft may have a shorter context."""
    max_seq_len = min(config.build.max_seq_len, shape.max_positions)
    return Limits(config.build.max_batch_size, max_seq_len, config.max_draft_len if role == "target" else 0, config.build.kernels)
