"""The quantize stage: a TensorRT-LLM checkpoint to a quantized one, streamed tensor by tensor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.artifacts import TllmCheckpoint
from specbuild.config import PairConfig, QuantizeConfig, Role
from specbuild.convert import convert_parameters
from specbuild.errors import CheckpointError, ConfigError
from specbuild.progress import bar, log
from specbuild.provenance import Record, check_parameters, digest_artifact, make_artifact
from specbuild.quant import LinearScales, QuantScheme, Scales, check_scales, find_scheme
from specbuild.quant.rounding import row_amax
from specbuild.quant.scheme import BY_ROW
from specbuild.shape import ModelShape
from specbuild.tensorfile import TensorEntry, TensorSpec, TensorWriter, row_blocks, run_each
from specbuild.tllm_config import check_tllm_config

ROW_PARALLEL = ("attention.dense", "mlp.proj")  # their input columns are shared among tensor parallel ranks
LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")


def run_quantize(config: PairConfig, role: Role, force: bool = False) -> bool:
    """Write `<workdir>/<role>/quantized`; return whether it was made anew."""
    settings = config.model_of(role).quantize
    scheme = find_scheme(settings.scheme)
    source = TllmCheckpoint.open(config.dir_of(role, "checkpoint"))
    check_parameters(source.directory, convert_parameters(config.model_of(role)), config.path)
    record = Record("quantize", quantize_parameters(settings), {"checkpoint": digest_artifact(source.directory)}, ("torch",))
    made = make_artifact(config.dir_of(role, "quantized"), record, force, lambda out: write_quantized(source, scheme, settings, out, role))
    if made:
        log(describe(role, scheme, settings))
    return made


def quantize_parameters(settings: QuantizeConfig) -> dict[str, Any]:
    """Return the part of the YAML that a quantized checkpoint depends on."""
    grouped = {"group_size": settings.group_size} if find_scheme(settings.scheme).grouped else {}
    return {"scheme": settings.scheme, "calibration": settings.calibration, **grouped}


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
        if part in ROW_PARALLEL:
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
    return [columns // tp if part in ROW_PARALLEL else columns for part, (_, columns) in shape.linears().items()]


def check_calibrated(scheme: QuantScheme) -> None:
    """Raise ConfigError for a scheme that has nothing to fall back on without scales."""
    if scheme.needs_calibration:
        raise ConfigError(
            f"Cannot quantize with scheme {scheme.name!r}: it needs activation scales, and calibration is not available in this version. "
            "Use int8_wo, or int4_awq."
        )


def write_quantized(
    source: TllmCheckpoint, scheme: QuantScheme, settings: QuantizeConfig, out: Path, label: str, scales: Scales | None = None
) -> None:
    """Write config.json and every rank's file; linear weights go through the scheme, all else is copied.

    `scales` are the whole model's, by linear layer; None: prequant scales of one, where the scheme can do with that.
    """
    import torch

    check_groups(source.shape, scheme, settings.group_size, source.config["mapping"]["tp_size"])
    if scales is None:
        check_calibrated(scheme)
    elif not scheme.takes_scales:
        raise ConfigError(f"Cannot quantize with scheme {scheme.name!r} and scales: it uses none. Use int4_awq or int8_sq.")
    else:
        check_scales(scales, source.shape, getattr(torch, source.config["dtype"]), scheme.activation_bits < 16)
    quantization = {"quant_algo": scheme.quant_algo, "kv_cache_quant_algo": None, **scheme.settings(settings.group_size)}
    config = {**source.config, "quantization": quantization}
    check_tllm_config(config, out / "config.json")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for rank, path in enumerate(source.rank_files):
        _write_rank(source, rank, scheme, settings.group_size, scales, out / path.name, f"quantize {label} rank {rank}")


def _write_rank(
    source: TllmCheckpoint, rank: int, scheme: QuantScheme, group_size: int, scales: Scales | None, path: Path, label: str
) -> None:
    entries = source.entries(rank)
    plan: list[TensorSpec] = []
    for entry in entries.values():
        spec = TensorSpec(entry.name, entry.dtype, entry.shape)
        plan += scheme.plan(spec, group_size) if is_linear(entry.name) else [spec]
    writer = TensorWriter(path, plan)

    def write(entry: TensorEntry) -> int:
        if is_linear(entry.name):
            given = None if scales is None else scales_of_rank(source, rank, scheme, scales, entry.name)
            _write_linear(writer, entry, scheme, group_size, given)
        else:
            writer.write(entry.name, entry.load())
        return entry.nbytes

    try:
        with bar(label, sum(entry.nbytes for entry in entries.values()), "B") as progress:
            for nbytes in run_each(write, entries.values()):
                progress.update(nbytes)
        writer.close()
    finally:
        writer.abort()


def _write_linear(writer: TensorWriter, entry: TensorEntry, scheme: QuantScheme, group_size: int, given: LinearScales | None) -> None:
    """Quantize and write a linear weight, some rows at a time: no scheme looks at more than a row."""
    weight = entry.load()
    for rows in row_blocks(entry.shape):
        try:
            parts = scheme.quantize(weight[rows], group_size, None if given is None else given.of_rows(rows))
        except OverflowError as error:
            raise CheckpointError(f"Cannot quantize {entry.name}: {error}. Use dtype bfloat16, or calibrate again.") from None
        for suffix, part in parts.items():
            name = entry.name.removesuffix("weight") + suffix
            if suffix in BY_ROW:
                writer.write_rows(name, rows.start * part.shape[0] // (rows.stop - rows.start), part)
            elif rows.start == 0:
                writer.write(name, part)


def scales_of_rank(source: TllmCheckpoint, rank: int, scheme: QuantScheme, scales: Scales, name: str) -> LinearScales:
    """Return a linear weight's scales on one rank, which has some of the model's layers and, of ROW_PARALLEL parts, some columns.

    A scheme with one scale per row takes it from the whole row, so that all ranks have the same, as upstream's exporter does.
    """
    import torch

    tp, pp = source.config["mapping"]["tp_size"], source.config["mapping"]["pp_size"]
    pp_rank, tp_rank = divmod(rank, tp)
    layer, part = name.removeprefix("transformer.layers.").removesuffix(".weight").split(".", 1)
    found = scales[f"transformer.layers.{pp_rank * source.shape.layers // pp + int(layer)}.{part}"]
    if part not in ROW_PARALLEL or tp == 1:
        return found
    pieces = found.prequant.chunk(tp)
    if scheme.grouped:
        return replace(found, prequant=pieces[tp_rank])
    amax = [row_amax(source.entries(pp_rank * tp + other)[name].load(), pieces[other]) for other in range(tp)]
    return replace(found, prequant=pieces[tp_rank], row_amax=torch.stack(amax).amax(dim=0))
