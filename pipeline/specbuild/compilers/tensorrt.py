"""tensorrt: a TensorRT-LLM checkpoint to engines, by the trtllm-build of an NVIDIA machine.

Upstream's own config.json stays as it is; what the engine needs of a machine lies beside it in engine_card.json, and the builder's
log in build.log. Both engines have a paged cache with paged context attention, or the target could not take drafted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from specbuild.artifacts import Engine, TllmCheckpoint, load_json
from specbuild.compilers import engine_card
from specbuild.compilers.compiler import Limits, Runner
from specbuild.compilers.trtllm_command import check_engine_config, format_command, make_command, timing_cache
from specbuild.compilers.trtllm_machine import check_gpu, find_machine
from specbuild.compilers.trtllm_process import LOG, failed_log_kept, run_builder
from specbuild.config import ROLES, ModelConfig, PairConfig, Role, roles_needed
from specbuild.errors import EngineError
from specbuild.quant import QuantScheme, find_scheme
from specbuild.shape import ModelShape

ENGINES = True
PACKAGES = ()
GROUPS = (128, 64)
LIMITS = ("max_batch_size", "max_seq_len", "max_draft_len", "gather_logits")
# What the generation kernels are compiled for; upstream's build checks it (decoderMaskedMultiheadAttention.cu, mmha_supported).
HEAD_SIZES = (32, 48, 64, 80, 96, 104, 112, 128, 144, 160, 192, 224, 256)
_TILE = 64  # the quantized kernels' least columns and rows per rank; a shape that is no multiple would be padded, and not load


def check(shape: ModelShape, scheme: QuantScheme, group_size: int, tp: int, pp: int) -> None:
    """Raise EngineError for what upstream would compute otherwise, pad, or fail on long after the build."""
    check_support(shape, pp)
    if shape.head_dim not in HEAD_SIZES:
        raise EngineError(
            f"Cannot build {shape.architecture} with tensorrt: head size {shape.head_dim} has no attention kernels, expected one of "
            f"{', '.join(map(str, HEAD_SIZES))}. Use another model, or compiler: onnx-cpu."
        )
    if scheme.grouped and group_size not in GROUPS:
        raise EngineError(
            f"Cannot build with tensorrt at group_size {group_size}: its kernels have 64 and 128. Use one of them, or scheme int8_wo."
        )
    if scheme.bits == 16 or scheme.activation_bits != 16:
        return
    multiple = (max(_TILE, group_size) if scheme.grouped else _TILE) * tp
    for part, sizes in _padded_linears(shape, tp).items():
        for what, size in zip(("output rows", "input columns"), sizes, strict=True):
            if size % multiple:
                smaller = "group_size 64, " if scheme.grouped and group_size > _TILE and size % (_TILE * tp) == 0 else ""
                raise EngineError(
                    f"Cannot build layer 0 {part} as {scheme.name} with tensorrt for tp={tp}: {size} {what} are not a multiple of "
                    f"{multiple}, which its kernels need. Use {smaller}{'a smaller tp, ' if tp > 1 else ''}or scheme full_prec."
                )


def check_support(shape: ModelShape, pp: int) -> None:
    """Raise EngineError for a model that upstream's engines do not compute as it was trained, or not in that many parts."""
    kind = shape.rope_scaling.kind if shape.rope_scaling else "default"
    if kind in ("yarn", "dynamic") or (kind == "linear" and shape.rope_theta_local is not None):
        raise EngineError(
            f"Cannot build {shape.architecture} with tensorrt: nothing shows that its engines scale rotary positions by {kind!r} as the "
            "model was trained. Use a model with plain, linear (not Gemma 3), llama3 or longrope positions."
        )
    if shape.fused_mlp and pp > 1:
        raise EngineError(
            f"Cannot build {shape.architecture} with tensorrt for pp={pp}: upstream splits it among tp ranks only. Use pp: 1."
        )


def _padded_linears(shape: ModelShape, tp: int) -> dict[str, tuple[int, int]]:
    """Return (out, in) of a layer's linears, key-value heads repeated where there are fewer than ranks."""
    rows = shape.q_rows + 2 * max(shape.kv_heads, tp) * shape.head_dim
    return {**shape.linears(), "attention.qkv": (rows, shape.hidden)}


def check_pair(config: PairConfig, shapes: Mapping[Role, ModelShape]) -> None:
    """Raise EngineError for a pair whose engines would build, and then not decode together."""
    for role in ROLES:
        if config.model_of(role).dtype == "float32":
            raise EngineError(
                f"Cannot build the {role} as float32 with tensorrt: its paged context attention has 16 bit only. Use dtype bfloat16."
            )
        shape = shapes.get(role)
        if shape is not None and config.model_of(role).quantize.lm_head:
            _check_lm_head(role, shape, config.model_of(role))
        if shape is not None and config.build.max_seq_len > shape.context:
            raise EngineError(
                f"Cannot build with tensorrt for max_seq_len {config.build.max_seq_len}: the {role} has {shape.context} positions, "
                f"and both engines get every sequence. Use max_seq_len {shape.context} or less."
            )
    vocabularies = [shape.vocab for shape in shapes.values()]
    if len(set(vocabularies)) > 1:
        raise EngineError(
            f"Cannot build this pair with tensorrt: vocab_size is {' and '.join(map(str, vocabularies))} in the {' and '.join(shapes)}, "
            "expected the same, because the engines exchange whole rows of logits. Use a draft with the target's vocab_size (models of one "
            "family can be padded differently), or compiler: onnx-cpu."
        )
    check_logits(config, {role: shapes[role].vocab for role in roles_needed(config) if role in shapes})


def check_logits(config: PairConfig, vocabularies: Mapping[Role, int]) -> None:
    """Raise EngineError unless the engines' logits have one width, and no padding, where the draft's are handed on.

    They are as wide as the vocabulary in equal parts for all ranks (upstream's getVocabSizePadded). Columns of padding have a logit of 0
    that no engine draws by: a softmax on the way would give them mass. Fast logits never leave the backend.
    """
    ranks = {role: config.model_of(role).tp * config.model_of(role).pp for role in vocabularies}
    widths = {role: math.ceil(vocab / ranks[role]) * ranks[role] for role, vocab in vocabularies.items()}
    padded = widths != dict(vocabularies) and "draft" in vocabularies and not config.serving.fast_logits
    if config.speculation.acceptance == "rejection" and (padded or len(set(widths.values())) > 1):
        raise EngineError(
            f"Cannot decode with these engines by acceptance rejection: their logits are {widths} wide, since each rank has an equal part "
            "of the vocabulary. Expected its own size: use acceptance exact, or ranks (tp x pp) that divide the vocabulary."
        )


def _check_lm_head(role: Role, shape: ModelShape, model: ModelConfig) -> None:
    """Raise EngineError for a quantized lm_head that upstream's loader would pass over or pad."""
    if not find_scheme(model.quantize.scheme).grouped:
        raise EngineError(
            f"Cannot build the {role} with tensorrt: its loader makes no integers of an lm_head under {model.quantize.scheme}. Remove "
            "`lm_head`, or use int4_awq."
        )
    if shape.vocab % (_TILE * model.tp):
        raise EngineError(
            f"Cannot build the {role} with tensorrt: an lm_head of {shape.vocab} rows is no multiple of {_TILE * model.tp}, which the "
            "quantized kernels need. Remove `lm_head`."
        )


def check_machine(scheme: QuantScheme) -> Mapping[str, str]:
    """Return the machine's versions and GPU, on which an engine depends; raise EngineError when it cannot be built here."""
    machine = find_machine()
    check_gpu(machine, scheme)
    return {key: value for key, value in machine.to_dict().items() if key != "driver"}


def describe(checkpoint_dir: Path, limits: Limits, out: Path, world_size: int) -> list[str]:
    """Return the command of `build`, and the line that says what it would write."""
    ranks = "rank0.engine" if world_size == 1 else f"rank0.engine to rank{world_size - 1}.engine"
    return [
        format_command(make_command(checkpoint_dir, out, limits, world_size)),
        f"# writes {out}: {ranks}, config.json, {engine_card.FILE}, {LOG}, specbuild.json",
        f"# writes {timing_cache(out)}",
    ]


def build(checkpoint: TllmCheckpoint, limits: Limits, out: Path, label: str) -> None:
    """Run trtllm-build, check what it wrote, and add the engine's card."""
    machine = find_machine()
    world_size = checkpoint.config["mapping"]["world_size"]
    with failed_log_kept(out):
        run_builder(make_command(checkpoint.directory, out, limits, world_size), out, label, world_size)
        check_ranks(out, world_size, label)
        check_engine_config(load_json(out / "config.json", EngineError), checkpoint.config, limits, label)
    engine_card.write_card(out, machine, checkpoint.directory, checkpoint.shape.windows(limits.max_seq_len + limits.max_draft_len))


def check_ranks(out: Path, world_size: int, label: str) -> None:
    """Raise EngineError when a rank's engine is missing."""
    missing = [f"rank{rank}.engine" for rank in range(world_size) if not (out / f"rank{rank}.engine").is_file()]
    if missing:
        raise EngineError(
            f"Cannot use the engine that trtllm-build made of the {label}: {missing[0]} is missing, expected {world_size} ranks. Build "
            "again."
        )


def check_serving(engine: Engine) -> None:
    """Raise EngineError when the engine was made for another machine."""
    engine_card.check_card(engine.directory, find_machine())


def open_runner(engine_dir: Path, max_slots: int = 8, threads: int = 0, vocab_size: int = 0) -> Runner:  # noqa: ARG001
    """Raise EngineError: these engines run in Triton only."""
    raise EngineError(
        f"Cannot run {engine_dir} in this process: it is a TensorRT engine, expected one of compiler onnx-cpu. Set compiler: onnx-cpu "
        "and build again."
    )
