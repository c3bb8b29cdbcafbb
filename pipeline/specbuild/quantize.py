"""The quantize stage: a TensorRT-LLM checkpoint to a quantized one, streamed tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbuild.artifacts import TllmCheckpoint, find_model_dir
from specbuild.calibration import Text, calibrate, check_calibration, load_text, text_files
from specbuild.config import PairConfig, QuantizeConfig, Role
from specbuild.convert import convert_parameters
from specbuild.errors import CheckpointError, ConfigError
from specbuild.families import FAMILIES, splits_of
from specbuild.packed import link_quantized
from specbuild.progress import bar, log
from specbuild.provenance import Record, check_parameters, digest_artifact, digest_files, make_artifact
from specbuild.quality import check_limits, load_quality, summarize_quality, write_quality
from specbuild.quant import LinearScales, QuantScheme, Scales, check_scales, find_scheme
from specbuild.quant.rounding import row_amax
from specbuild.quant.scheme import BY_ROW
from specbuild.ranks import split_tensor
from specbuild.shape import ModelShape
from specbuild.tensorfile import TensorEntry, TensorSpec, TensorWriter, row_blocks, run_each
from specbuild.tllm_config import check_tllm_config
from specbuild.tokenizer import load_tokenizer

ROW_PARALLEL = ("attention.dense", "mlp.proj")  # their input columns are shared among tensor parallel ranks
SCRATCH = ".rounded.safetensors"  # GPTQ's integers of the whole model, until every rank has its own
GROUPS = (128, 64, 32)  # the usual sizes
LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")


def run_quantize(config: PairConfig, role: Role, force: bool = False) -> bool:
    """Write `<workdir>/<role>/quantized`; return whether it was made anew."""
    settings = config.model_of(role).quantize
    scheme = find_scheme(settings.scheme)
    check_calibration(settings, config.path)
    source = TllmCheckpoint.open(config.dir_of(role, "checkpoint"))
    check_parameters(source.directory, convert_parameters(config.model_of(role)), config.path)
    inputs = {"checkpoint": digest_artifact(source.directory)}
    inputs |= digest_text(config, role)
    check_shapes(source.shape, settings, source.config["mapping"]["tp_size"])
    packages = ("torch", "nvidia-modelopt") if settings.calibration is not None else ("torch",)
    record = Record("quantize", quantize_parameters(settings), inputs, packages)

    def make(out: Path) -> None:
        if source.config["quantization"]["quant_algo"] is not None:
            link_quantized(source, scheme, settings, out, role)
            return
        text = read_text(config, role, source.shape)
        scales = None
        if settings.calibration is not None:
            scales = calibrate(source, scheme, settings, text.calibration, out / SCRATCH, role)
        write_quantized(source, scheme, settings, out, role, scales)
        (out / SCRATCH).unlink(missing_ok=True)
        log(describe(role, scheme, settings, len(text.calibration)))
        if text.held_out:
            write_quality(source, TllmCheckpoint.open(out), settings, text.held_out, role)

    made = make_artifact(config.dir_of(role, "quantized"), record, force, make)
    if not made and (report := load_quality(config.dir_of(role, "quantized"))) is not None:
        check_limits(report, settings, role)  # they may have changed since
        log(summarize_quality(report, role))
    return made


def digest_text(config: PairConfig, role: Role) -> dict[str, str]:
    """Return the digests of the text that a model is calibrated and measured on, and of the tokenizer that reads it."""
    files = text_files(config.model_of(role).quantize, config.path)
    digests = {use: digest_files(paths) for use, paths in files.items()}
    if files:
        directory = find_model_dir(config.model_of(role), config.path, weights=False)
        digests["tokenizer"] = digest_files(path for path in directory.glob("tokenizer*.json"))
    return digests


def read_text(config: PairConfig, role: Role, shape: ModelShape) -> Text:
    """Return the sequences that a model is calibrated and measured on."""
    settings = config.model_of(role).quantize
    if not text_files(settings, config.path):
        return Text([], [])
    tokenizer = load_tokenizer(find_model_dir(config.model_of(role), config.path, weights=False))
    return load_text(settings, config.path, tokenizer, shape)


def quantize_parameters(settings: QuantizeConfig) -> dict[str, Any]:
    """Return the part of the YAML that a quantized checkpoint depends on."""
    grouped = {"group_size": settings.group_size} if find_scheme(settings.scheme).grouped else {}
    calibration = None if settings.calibration is None else settings.calibration.model_dump()
    return {"scheme": settings.scheme, "calibration": calibration, "rounding": settings.rounding,
            "lm_head": settings.lm_head, "quality": settings.quality.model_dump(include={"data", "samples"}), **grouped}  # fmt: skip


def describe(role: str, scheme: QuantScheme, settings: QuantizeConfig, sequences: int) -> str:
    """Return the line that says what was quantized, how, and what was left as it is."""
    if scheme.bits == 16:
        return f"{role}: full_prec, nothing quantized"
    scale = f"group {settings.group_size}" if scheme.grouped else "one scale per output row"
    excluded = "norms, vocab_embedding" + ("" if settings.lm_head else ", lm_head")
    calibration = settings.calibration
    if calibration is None:
        how = "round to nearest" + (" (calibration: null, prequant scales of one)" if scheme.grouped else "")
    else:
        method = "rounded by GPTQ" if settings.rounding == "gptq" else "scales"
        how = f"{method} calibrated on {sequences} sequences of {calibration.data}"
    return f"{role}: {scheme.name} ({scheme.quant_algo}), {scale}, {how}; excluded: {excluded}"


def is_linear(name: str, lm_head: bool = False) -> bool:
    """Tell whether a tensor is a linear weight that schemes apply to: those of the layers, and lm_head's where it is asked for."""
    return name.endswith(".weight") and (name.rsplit(".", 1)[0].endswith(LINEARS) or (lm_head and name == "lm_head.weight"))


def check_shapes(shape: ModelShape, settings: QuantizeConfig, tp: int, offered: Sequence[int] = GROUPS) -> None:
    """Raise SpecbuildError for the first weight whose shape the scheme cannot hold."""
    check_groups(shape, find_scheme(settings.scheme), settings.group_size, tp, offered)
    if settings.lm_head:
        check_lm_head(shape, settings, tp)


def check_lm_head(shape: ModelShape, settings: QuantizeConfig, tp: int) -> None:
    """Raise ConfigError when lm_head is to be quantized and the scheme or the model has no way to."""
    scheme, rows = find_scheme(settings.scheme), -(-shape.vocab // tp)
    if scheme.bits == 16 or scheme.activation_bits < 16:
        raise ConfigError(f"Cannot quantize lm_head with scheme {scheme.name!r}: expected int8_wo, int4_wo or int4_awq. Remove `lm_head`.")
    if scheme.grouped and rows % 2:
        raise ConfigError(f"Cannot quantize lm_head for tp={tp}: its {rows} rows per rank cannot be packed in pairs. Remove `lm_head`.")
    if shape.tied and FAMILIES[shape.architecture].shares_embedding:
        raise ConfigError(f"Cannot quantize lm_head of {shape.architecture}: it is the embedding, stored once. Remove `lm_head`.")


def check_groups(shape: ModelShape, scheme: QuantScheme, group_size: int, tp: int, offered: Sequence[int] = GROUPS) -> None:
    """Raise CheckpointError for the first linear whose shape the scheme cannot hold; of the group sizes `offered`, name those that fit."""
    for part, (rows, columns) in shape.linears().items():
        if part in ROW_PARALLEL:
            columns //= tp
        else:
            rows //= tp
        if scheme.grouped and columns % group_size:
            legal = legal_groups(shape, tp, offered)
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


def legal_groups(shape: ModelShape, tp: int, offered: Sequence[int] = GROUPS) -> list[int]:
    """Return the group sizes that divide every linear layer's columns on a rank, widest first."""
    widths = [columns // tp if part in ROW_PARALLEL else columns for part, (_, columns) in shape.linears().items()]
    return [group for group in offered if all(width % group == 0 for width in widths)]


def write_quantized(
    source: TllmCheckpoint, scheme: QuantScheme, settings: QuantizeConfig, out: Path, label: str, scales: Scales | None = None
) -> None:
    """Write config.json and every rank's file; linear weights go through the scheme, all else is copied.

    `scales` are the whole model's, by linear layer; None: prequant scales of one, where the scheme can do with that.
    """
    import torch

    check_shapes(source.shape, settings, source.config["mapping"]["tp_size"])
    if scales is None and scheme.needs_calibration:
        raise ConfigError(f"Cannot quantize with scheme {scheme.name!r} without scales. Add `calibration: {{data: builtin}}`.")
    if scales is not None and scheme.recipe is None:
        raise ConfigError(f"Cannot quantize with scheme {scheme.name!r} and scales: it uses none. Use int4_awq or int8_sq.")
    if scales is not None:
        check_scales(scales, source.shape, getattr(torch, source.config["dtype"]), scheme.activation_bits < 16)
    quantization = {"quant_algo": scheme.quant_algo, "kv_cache_quant_algo": None, **scheme.settings(settings.group_size, settings.lm_head)}
    config = {**source.config, "quantization": quantization}
    check_tllm_config(config, out / "config.json")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_ranks(source, scheme, settings, scales, out, f"quantize {label}")


def _write_ranks(
    source: TllmCheckpoint, scheme: QuantScheme, settings: QuantizeConfig, scales: Scales | None, out: Path, label: str
) -> None:
    """Write every rank's file, all of them at once: while one is flushed to the disk the others go on."""
    group_size, lm_head = settings.group_size, settings.lm_head
    entries = [source.entries(rank) for rank in range(len(source.rank_files))]
    total = sum(entry.nbytes for rank in entries for entry in rank.values())
    with ExitStack() as stack, bar(label, total, "B") as progress:
        writers = []
        for rank, path in enumerate(source.rank_files):
            specs = [TensorSpec(entry.name, entry.dtype, entry.shape) for entry in entries[rank].values()]
            plan = [each for spec in specs for each in (scheme.plan(spec, group_size) if is_linear(spec.name, lm_head) else [spec])]
            writers.append(TensorWriter(out / path.name, plan))
            stack.callback(writers[-1].abort)

        def write(item: tuple[int, TensorEntry]) -> int:
            rank, entry = item
            if is_linear(entry.name, lm_head):
                given = None
                if scales is not None and entry.name != "lm_head.weight":
                    given = scales_of_rank(source, rank, scheme, scales, entry.name)
                _write_linear(writers[rank], entry, scheme, group_size, given)
            else:
                writers[rank].write(entry.name, entry.load())
            return entry.nbytes

        items = [(rank, entry) for rank, found in enumerate(entries) for entry in found.values()]
        for nbytes in run_each(write, sorted(items, key=lambda item: -item[1].nbytes)):  # the largest first: the last keeps nobody waiting
            progress.update(nbytes)
        for _ in run_each(TensorWriter.close, writers):
            pass


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
    """Return a linear weight's scales on one rank, which has some of the model's layers and, of those, some rows or columns.

    A scheme with one scale per row takes it from the whole row, so that all ranks have the same, as upstream's exporter does.
    """
    import torch

    tp, pp = source.config["mapping"]["tp_size"], source.config["mapping"]["pp_size"]
    pp_rank, tp_rank = divmod(rank, tp)
    layer, part = name.removeprefix("transformer.layers.").removesuffix(".weight").split(".", 1)
    found = scales[f"transformer.layers.{pp_rank * source.shape.layers // pp + int(layer)}.{part}"]
    if found.rounded is not None:
        split = splits_of(source.shape.architecture)[f"{part}.weight"]
        q, scale = (split_tensor(each, split, source.shape, tp, tp_rank) for each in found.rounded)
        found = replace(found, rounded=(q, scale))
    if part not in ROW_PARALLEL or tp == 1:
        return found
    pieces = found.prequant.chunk(tp)
    if scheme.grouped:
        return replace(found, prequant=pieces[tp_rank])
    amax = [row_amax(source.entries(pp_rank * tp + other)[name].load(), pieces[other]) for other in range(tp)]
    return replace(found, prequant=pieces[tp_rank], row_amax=torch.stack(amax).amax(dim=0))
