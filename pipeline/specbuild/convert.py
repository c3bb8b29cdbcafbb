"""The convert stage: a Hugging Face checkpoint to a TensorRT-LLM checkpoint, streamed tensor by tensor into every rank's file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from specbuild.artifacts import HFCheckpoint, find_model_dir
from specbuild.config import ModelConfig, PairConfig, Role
from specbuild.errors import CheckpointError, ConfigError
from specbuild.families import Family, TensorRule, find_family
from specbuild.hf_formats import MergedWeight, PackedCheckpoint, PackedWeight, find_adapter_files, merge_lora
from specbuild.packed import Keeper, check_kept, check_zeros, view_packed
from specbuild.progress import bar, log
from specbuild.provenance import Record, digest_files, find_parameters, make_artifact
from specbuild.ranks import split_shape, split_tensor
from specbuild.shape import ModelShape
from specbuild.tensorfile import FLOATS, TensorSpec, TensorWriter, find_not_finite, run_each, torch_dtype
from specbuild.tllm_config import check_tllm_config, shape_to_tllm

if TYPE_CHECKING:
    import torch

Pieces: TypeAlias = "tuple[list[dict[str, torch.Tensor]], int]"
DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True)
class Placed:
    """A TensorRT-LLM tensor of one layer (or of the whole model), with the ranks that hold it."""

    name: str  # layers renumbered within their pipeline rank
    rule: TensorRule
    sources: tuple[str, ...]
    pp_rank: int


def run_convert(config: PairConfig, role: Role, force: bool = False) -> bool:
    """Write `<workdir>/<role>/checkpoint`; return whether it was made anew."""
    model, out_dir = config.model_of(role), config.dir_of(role, "checkpoint")
    if not force:
        check_merged(config, role, out_dir)
    found = HFCheckpoint.open(find_model_dir(model, config.path, weights=True))
    if found.unused_files:
        log(f"{role}: ignoring {', '.join(found.unused_files)}: the model is in {', '.join(path.name for path in found.weight_files[:2])}")
    source = open_source(found, config, role)
    inputs = {"model": digest_files([source.directory / "config.json", *source.weight_files])}
    if (adapter := adapter_dir(config, model)) is not None:
        inputs["adapter"] = digest_files(find_adapter_files(adapter))
    parameters = convert_parameters(model)
    if is_kept(source, model):
        parameters |= {"packed": source.packing.format.method, "group_size": model.quantize.group_size}
    record = Record("convert", parameters, inputs, ("torch",))
    return make_artifact(out_dir, record, force, lambda out: write_checkpoint(source, model, out, role))


def convert_parameters(model: ModelConfig) -> dict[str, Any]:
    """Return the part of the YAML that a checkpoint depends on."""
    always = {"model": model.model, "revision": model.revision, "dtype": model.dtype, "tp": model.tp, "pp": model.pp}
    # An adapter given on the command line is in no YAML: later stages take the checkpoint as it is, and `check_merged` minds it.
    return {**always, "dequantize": model.dequantize, **({} if model.merge_lora is None else {"merge_lora": model.merge_lora})}


def adapter_dir(config: PairConfig, model: ModelConfig) -> Path | None:
    """Return the directory of the adapter to merge, relative to the YAML."""
    if model.merge_lora is None:
        return None
    return config.path.parent / os.path.expanduser(model.merge_lora)  # noqa: PTH111  Path.expanduser raises for an unknown user


def check_merged(config: PairConfig, role: Role, directory: Path) -> None:
    """Raise ConfigError when the checkpoint there has an adapter in it, and the one to be made would not."""
    model, made = config.model_of(role), find_parameters(directory)
    if model.merge_lora is None and made.get("merge_lora") is not None and made.get("model") == model.model:
        raise ConfigError(
            f"Cannot convert {model.model} without its adapter: {directory} was made with one, and {config.path} names none. Add "
            f"merge_lora: {made['merge_lora']} under {role}, or use --force."
        )


def open_source(found: HFCheckpoint, config: PairConfig, role: Role) -> HFCheckpoint:
    """Return a checkpoint as it is to be converted: packed weights are seen as plain ones, and an adapter is merged."""
    model = config.model_of(role)
    source = view_packed(found, model, role)
    adapter = adapter_dir(config, model)
    return source if adapter is None else merge_lora(source, adapter)


def is_kept(source: HFCheckpoint, model: ModelConfig) -> TypeGuard[PackedCheckpoint]:
    """Tell whether a source's own integers and scales are to be stored."""
    return isinstance(source, PackedCheckpoint) and not model.dequantize


def check_source(source: HFCheckpoint, family: Family, shape: ModelShape, model: ModelConfig, role: str) -> list[Placed]:
    """Check all that a source's headers tell; return where its tensors go."""
    placed = list(place_tensors(family, shape, model.pp))
    check_tensors(source, family, placed, shape)
    used = {name for item in placed for name in item.sources}
    if lost := sorted(name for name, entry in source.entries.items() if isinstance(entry, MergedWeight) and name not in used):
        raise CheckpointError(
            f"Cannot merge {model.merge_lora} into {source.directory}: it changes {lost[0]}, which a tied model does not have. Untie "
            "lm_head from the embedding first (PEFT: merge_and_unload)."
        )
    if is_kept(source, model):
        linears = [item for item in placed if is_linear(item, shape)]
        of_rank = [split_shape(joined_shape(source, item), item.rule.split, shape, model.tp) for item in linears]
        check_kept(source, [item.sources for item in linears], of_rank, model, role)
    return placed


def is_linear(item: Placed, shape: ModelShape) -> bool:
    """Tell whether a tensor is the weight of a linear layer that schemes apply to."""
    return item.name.endswith(".weight") and part_of(item.name) in shape.linears()


def part_of(name: str) -> str:
    """Return the part of a layer that a TensorRT-LLM tensor belongs to."""
    return name.removeprefix("transformer.layers.").split(".", 1)[-1].rsplit(".", 1)[0]


def write_checkpoint(source: HFCheckpoint, model: ModelConfig, out: Path, label: str) -> None:
    """Write config.json and one safetensors file per rank. Memory holds a few joined tensors at a time."""
    family = find_family(source.config)
    shape = family.read_shape(source.config)
    check_parallel(shape, model)
    placed = check_source(source, family, shape, model, label)
    keeper = None
    if is_kept(source, model):
        check_zeros(source, label)
        keeper = Keeper.make(source.packing, model, label)
    config = make_tllm_config(family, shape, model)
    if keeper is not None:
        config["quantization"] |= {"quant_algo": keeper.scheme.quant_algo, **keeper.scheme.settings(keeper.group_size, False)}
    check_tllm_config(config, out / "config.json")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    plans: list[list[TensorSpec]] = [[] for _ in range(model.tp * model.pp)]
    for item in placed:
        spec = TensorSpec(item.name, DTYPE_NAMES[model.dtype], split_shape(joined_shape(source, item), item.rule.split, shape, model.tp))
        specs = keeper.scheme.plan(spec, keeper.group_size) if keeper is not None and is_linear(item, shape) else [spec]
        for tp_rank in range(model.tp):
            plans[item.pp_rank * model.tp + tp_rank] += specs
    rows = _write_ranks(plans, placed, lambda item: load_pieces(source, item, shape, model, keeper), model.tp, out, label)
    if rows:
        log(f"{label}: in {rows} rows the largest integer moved by one step, to the end of its range")


def _write_ranks(
    plans: list[list[TensorSpec]], placed: list[Placed], load: Callable[[Placed], Pieces], tp: int, out: Path, label: str
) -> int:
    """Write every rank's file; return the sum of what `load` counts."""
    counted = 0
    with ExitStack() as stack, bar(f"convert {label}", sum(s.nbytes for plan in plans for s in plan), "B") as progress:
        writers = [TensorWriter(out / f"rank{rank}.safetensors", plan) for rank, plan in enumerate(plans)]
        for writer in writers:
            stack.callback(writer.abort)

        def write(item: Placed) -> tuple[int, int]:
            pieces, count = load(item)
            for writer, tensors in zip(writers[item.pp_rank * tp :], pieces, strict=False):
                for name, piece in tensors.items():
                    writer.write(name, piece)
            return sum(piece.nbytes for tensors in pieces for piece in tensors.values()), count

        largest_first = sorted(placed, key=lambda item: item.name.startswith("transformer.layers."))  # the last keeps nobody waiting
        for nbytes, count in run_each(write, largest_first):
            progress.update(nbytes)
            counted += count
        for _ in run_each(TensorWriter.close, writers):
            pass
    return counted


def make_tllm_config(family: Family, shape: ModelShape, model: ModelConfig) -> dict[str, Any]:
    """Return the config.json of an unquantized TensorRT-LLM checkpoint."""
    return {
        **shape_to_tllm(shape), **family.tllm_keys, "dtype": model.dtype, "logits_dtype": "float32",
        "use_parallel_embedding": family.shares_embedding and model.tp > 1, "embedding_sharding_dim": 0,
        "mapping": {"world_size": model.tp * model.pp, "tp_size": model.tp, "pp_size": model.pp},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }  # fmt: skip


def check_parallel(shape: ModelShape, model: ModelConfig) -> None:
    """Raise CheckpointError when the ranks cannot share the heads, the MLP or the layers."""
    tp, pp = model.tp, model.pp
    for what, size in (("attention heads", shape.heads), ("MLP columns", shape.intermediate)):
        if size % tp:
            raise CheckpointError(
                f"Cannot split {model.model} for tp={tp}: {size} {what} are not a multiple of {tp}. Use a tp that divides {size}."
            )
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise CheckpointError(
            f"Cannot split {model.model} for tp={tp}: {shape.kv_heads} key-value heads neither divide nor are divided by {tp}. "
            f"Use a tp that is a divisor or a multiple of {shape.kv_heads}."
        )
    if shape.layers % pp:
        raise CheckpointError(
            f"Cannot split {model.model} for pp={pp}: {shape.layers} layers are not a multiple of {pp}. Use a pp that "
            f"divides {shape.layers}."
        )


def place_tensors(family: Family, shape: ModelShape, pp: int) -> Iterator[Placed]:
    """Yield every tensor with its pipeline rank: the embedding on the first, the final norm and lm_head on the last."""
    per_rank = shape.layers // pp
    rules = [rule for rule in family.rules if rule.when(shape)]
    whole = [rule for rule in rules if "{i}" not in rule.name]
    for rule in whole[:1]:
        yield Placed(rule.name, rule, rule.sources, 0)
    for layer in range(shape.layers):
        for rule in rules:
            if "{i}" in rule.name:
                sources = tuple(source.format(i=layer) for source in rule.sources)
                yield Placed(rule.name.format(i=layer % per_rank), rule, sources, layer // per_rank)
    for rule in whole[1:]:
        if rule.name == "lm_head.weight" and family.shares_embedding and shape.tied and pp == 1:
            continue  # the last rank of several has no embedding to share
        yield Placed(rule.name, rule, rule.sources, pp - 1)


def check_tensors(source: HFCheckpoint, family: Family, placed: list[Placed], shape: ModelShape) -> None:
    """Raise CheckpointError for a missing, unexpected, misshapen or non-float tensor."""
    wanted = {name for item in placed for name in item.sources}
    if missing := sorted(wanted - source.entries.keys()):
        raise CheckpointError(
            f"Cannot convert {source.directory}: {len(missing)} tensors are missing, first {missing[0]}. Fetch the model again."
        )
    ignored = ("lm_head.weight", *family.ignored) if shape.tied else family.ignored
    extra = sorted(name for name in source.entries.keys() - wanted if not name.endswith(ignored) and not is_zero_bias(source, name))
    if extra:
        raise CheckpointError(
            f"Cannot convert {source.directory}: unexpected tensor {extra[0]} ({len(extra)} in all) for {family.architecture}. "
            "Its maths would be lost; remove it or fix config.json."
        )
    for item in placed:
        expected = expected_shape(item.name, shape)
        found = joined_shape(source, item)
        if found != expected:
            raise CheckpointError(
                f"Cannot convert {source.directory}: {' + '.join(item.sources)} is {found}, expected {expected} by config.json."
            )
        if item.rule.split == "qkv" and len(item.sources) == 3:
            check_rows(source, item, (shape.q_rows, shape.kv_rows, shape.kv_rows))
        for name in item.sources:
            if source.entries[name].dtype not in FLOATS:
                raise CheckpointError(
                    f"Cannot convert {source.directory}: {name} is {source.entries[name].dtype}, expected one of {', '.join(FLOATS)}."
                )


def is_zero_bias(source: HFCheckpoint, name: str) -> bool:
    """Tell whether a tensor is a bias that adds nothing: some GPTQ tools write one for every layer."""
    return name.endswith(".bias") and not source.entries[name].load().any()


def check_rows(source: HFCheckpoint, item: Placed, rows: tuple[int, ...]) -> None:
    """Raise CheckpointError unless each source has its own number of rows and all have the same columns."""
    columns = source.entries[item.sources[0]].shape[1:]
    for name, count in zip(item.sources, rows, strict=True):
        if source.entries[name].shape != (count, *columns):
            found = source.entries[name].shape
            raise CheckpointError(f"Cannot convert {source.directory}: {name} is {found}, expected {(count, *columns)} by config.json.")


def expected_shape(name: str, shape: ModelShape) -> tuple[int, ...]:
    """Return the unsplit shape of a TensorRT-LLM tensor."""
    if name in ("transformer.vocab_embedding.weight", "lm_head.weight"):
        return (shape.vocab, shape.hidden)
    part, kind = part_of(name), name.rsplit(".", 1)[-1]
    linear = shape.linears().get(part)
    if linear is None:
        return (shape.head_dim,) if part in ("attention.q_layernorm", "attention.k_layernorm") else (shape.hidden,)
    return linear if kind == "weight" else linear[:1]


def joined_shape(source: HFCheckpoint, item: Placed) -> tuple[int, ...]:
    """Return the shape of an item's sources joined along the rows."""
    shapes = [source.entries[name].shape for name in item.sources]
    return (sum(s[0] if s else 0 for s in shapes), *shapes[0][1:])


def load_pieces(source: HFCheckpoint, item: Placed, shape: ModelShape, model: ModelConfig, keeper: Keeper | None) -> Pieces:
    """Return what each tensor parallel rank stores of an item, and the number of its rows in which an integer moved."""
    split, tp = item.rule.split, model.tp
    if keeper is None or not is_linear(item, shape):
        whole = load_whole(source, item, model.dtype)
        return [{item.name: split_tensor(whole, split, shape, tp, rank)} for rank in range(tp)], 0
    weights = [entry for entry in map(source.entries.__getitem__, item.sources) if isinstance(entry, PackedWeight)]
    q, scale = keeper.load(weights, item.rule.swap)
    pieces, moved = [], 0
    for rank in range(tp):
        own = scale if split == "columns" and not keeper.scheme.grouped else split_tensor(scale, split, shape, tp, rank)
        tensors, rows = keeper.store(item.name, split_tensor(q, split, shape, tp, rank), own)
        pieces.append({item.name.removesuffix("weight") + suffix: tensor for suffix, tensor in tensors.items()})
        moved += rows
    return pieces, moved


def load_whole(source: HFCheckpoint, item: Placed, dtype: str) -> torch.Tensor:
    """Read an item's sources, cast and joined; raise CheckpointError for a value that is not finite, before or after the cast."""
    import torch

    parts = []
    for name in item.sources:
        part = source.entries[name].load()
        if item.rule.offset:
            part = part.float() + item.rule.offset  # in float32, before the cast
        part = part.to(torch_dtype(DTYPE_NAMES[dtype]))
        if (row := find_not_finite(part)) is not None:
            raise CheckpointError(
                f"Cannot convert {name}: row {row} holds NaN or infinity as {dtype}. Fetch the model again, or use dtype float32."
            )
        parts.append(part)
    if item.rule.swap:
        parts = list(reversed(parts[0].chunk(2)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
