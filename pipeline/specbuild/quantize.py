"""The quantize stage: a TensorRT-LLM checkpoint to a quantized one, streamed tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from specbuild.artifacts import TllmCheckpoint
from specbuild.config import PairConfig, QuantizeConfig, Role
from specbuild.errors import CheckpointError
from specbuild.progress import bar, log
from specbuild.provenance import Record, digest_artifact, make_artifact
from specbuild.quant import QuantScheme, find_scheme
from specbuild.shape import ModelShape
from specbuild.tensorfile import TensorEntry, TensorSpec, TensorWriter

LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")


def run_quantize(config: PairConfig, role: Role, force: bool = False) -> bool:
    """Write `<workdir>/<role>/quantized`; return whether it was made anew."""
    settings = config.model_of(role).quantize
    scheme = find_scheme(settings.scheme)
    source = TllmCheckpoint.open(config.dir_of(role, "checkpoint"))
    parameters = {
        "scheme": scheme.name,
        "calibration": settings.calibration,
        **({"group_size": settings.group_size} if scheme.grouped else {}),
    }
    record = Record("quantize", parameters, {"checkpoint": digest_artifact(source.directory)}, ("torch",))
    made = make_artifact(config.dir_of(role, "quantized"), record, force, lambda out: write_quantized(source, scheme, settings, out, role))
    if made:
        log(describe(role, scheme, settings))
    return made


def describe(role: str, scheme: QuantScheme, settings: QuantizeConfig) -> str:
    """Return the line that says what was quantized, how, and what was left as it is."""
    if scheme.bits == 16:
        return f"{role}: full_prec, nothing quantized"
    how = (
        f"group {settings.group_size}, round to nearest (calibration: null, prequant scales of one)"
        if scheme.grouped
        else "one scale per output row, round to nearest"
    )
    return f"{role}: {scheme.name} ({scheme.quant_algo}), {how}; excluded: norms, vocab_embedding, lm_head"


def is_linear(name: str) -> bool:
    """Tell whether a tensor is a linear layer's weight that schemes apply to."""
    return name.endswith(".weight") and name.rsplit(".", 1)[0].endswith(LINEARS)


def check_groups(shape: ModelShape, scheme: QuantScheme, group_size: int, tp: int) -> None:
    """Raise CheckpointError for the first linear whose shape the scheme cannot hold."""
    for part, (rows, columns) in shape.linears().items():
        if part in ("attention.dense", "mlp.proj"):
            columns //= tp
        else:
            rows //= tp
        if scheme.grouped and columns % group_size:
            legal = [g for g in (128, 64, 32) if all(c % g == 0 for c in _rank_columns(shape, tp))]
            cure = f"Use group_size {' or '.join(map(str, legal))}" if legal else "Use scheme int8_wo"
            cure += ", or tp=1" if tp > 1 else ""
            raise CheckpointError(
                f"Cannot quantize layer 0 {part} for tp={tp}: {columns} input columns per rank are not a multiple of group_size "
                f"{group_size}. {cure}."
            )
        if scheme.grouped and rows % 2:
            raise CheckpointError(
                f"Cannot quantize layer 0 {part} for tp={tp}: {rows} output rows per rank cannot be packed in pairs. Use scheme int8_wo."
            )


def _rank_columns(shape: ModelShape, tp: int) -> list[int]:
    return [columns // tp if part in ("attention.dense", "mlp.proj") else columns for part, (_, columns) in shape.linears().items()]


def write_quantized(source: TllmCheckpoint, scheme: QuantScheme, settings: QuantizeConfig, out: Path, label: str) -> None:
    """Write config.json and every rank's file; linear weights go through the scheme, all else is copied."""
    check_groups(source.shape, scheme, settings.group_size, source.config["mapping"]["tp_size"])
    quantization = {"quant_algo": scheme.quant_algo, "kv_cache_quant_algo": None, **scheme.settings(settings.group_size)}
    (out / "config.json").write_text(json.dumps({**source.config, "quantization": quantization}, indent=2) + "\n")
    for rank, path in enumerate(source.rank_files):
        _write_rank(source.entries(rank), scheme, settings.group_size, out / path.name, f"quantize {label} rank {rank}")


def _write_rank(entries: Mapping[str, TensorEntry], scheme: QuantScheme, group_size: int, path: Path, label: str) -> None:
    plan: list[TensorSpec] = []
    for entry in entries.values():
        spec = TensorSpec(entry.name, entry.dtype, entry.shape)
        plan += scheme.plan(spec, group_size) if is_linear(entry.name) else [spec]
    writer = TensorWriter(path, plan)
    try:
        with bar(label, sum(entry.nbytes for entry in entries.values()), "B") as progress:
            for entry in entries.values():
                tensor = entry.load()
                if is_linear(entry.name):
                    for suffix, part in scheme.quantize(tensor, group_size).items():
                        writer.write(entry.name.removesuffix("weight") + suffix, part)
                else:
                    writer.write(entry.name, tensor)
                progress.update(entry.nbytes)
        writer.close()
    finally:
        writer.abort()
