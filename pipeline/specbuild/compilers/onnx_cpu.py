"""onnx-cpu: a TensorRT-LLM checkpoint to an ONNX graph that ONNX Runtime runs on any machine.

Quantized layers multiply with the checkpoint's own integers and scales: MatMulNBits, or MatMulIntegerToFloat where the scheme
rounds activations too. The rest are standard operators of opset 23. Each layer's cache is an input and an output of the graph,
(batch, kv_heads, capacity, head_dim), written in place. Weights lie beside the graph in weights.bin.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild import __version__
from specbuild.artifacts import Engine, TllmCheckpoint
from specbuild.compilers.compiler import Limits, Runner
from specbuild.compilers.graph_interface import GRAPH
from specbuild.config import PairConfig, Role
from specbuild.errors import EngineError
from specbuild.progress import bar
from specbuild.provenance import find_version
from specbuild.quant import QuantScheme, scheme_of_algo
from specbuild.quant.scheme import includes_lm_head
from specbuild.rotary import KINDS
from specbuild.shape import ModelShape

if TYPE_CHECKING:
    from specbuild.compilers.onnx_graph import GraphBuilder

ENGINES = True
PACKAGES = ("onnx", "onnxruntime", "torch")
GROUPS = (256, 128, 64, 32)  # and any other multiple of 32
LIMITS = ("max_batch_size", "max_seq_len", "max_draft_len", "kernels")
BLOCK = 128  # columns whose activations are rounded together, where a whole row shares a scale: wider ones are faster
WIDEST = 256  # columns of a block where groups of columns share a scale: the largest power of two up to this that divides the group


def check(shape: ModelShape, scheme: QuantScheme, group_size: int, tp: int, pp: int) -> None:
    """Raise EngineError for what this compiler cannot build."""
    if tp * pp != 1:
        raise EngineError(f"Cannot build with onnx-cpu for {tp * pp} ranks: it runs in one process. Use tp: 1 and pp: 1.")
    if scheme.grouped and group_size % 32:
        raise EngineError(f"Cannot build with onnx-cpu at group_size {group_size}: expected a multiple of 32. Use 32, 64, 128 or 256.")
    if shape.rotary_dim % 2:
        raise EngineError(
            f"Cannot build with onnx-cpu: {shape.rotary_dim} rotary columns per head are odd, expected pairs. Use another model."
        )
    if shape.rope_scaling is not None and shape.rope_scaling.kind not in KINDS:
        raise EngineError(
            f"Cannot build {shape.architecture} with onnx-cpu: rotary scaling is {shape.rope_scaling.kind!r}, whose frequencies change "
            f"with the length of the sequence; expected none, {', '.join(KINDS)}. Use compiler tensorrt, or another model."
        )
    missing = [name for name in ("onnx", "onnxruntime") if find_version(name) == "absent"]
    if missing:
        raise EngineError(f"Cannot build with onnx-cpu: {' and '.join(missing)} not installed. Run `pip install 'specbuild[cpu]'`.")


def check_pair(config: PairConfig, shapes: Mapping[Role, ModelShape]) -> None:
    """Raise nothing: a draft may have a shorter context, and a vocabulary that is padded otherwise."""


def check_machine(scheme: QuantScheme) -> Mapping[str, str]:  # noqa: ARG001
    """Return the version of the graph: these engines run on any machine, with the runner that knows it."""
    return {"graph": str(GRAPH)}


def check_serving(engine: Engine) -> None:
    """Raise nothing: these engines run on any machine."""


def describe(checkpoint_dir: Path, limits: Limits, out: Path, world_size: int) -> list[str]:  # noqa: ARG001
    """Return the lines that say what `build` would write."""
    return [f"# reads {checkpoint_dir}", f"# writes {out}: model.onnx, weights.bin, config.json, specbuild.json"]


def build(checkpoint: TllmCheckpoint, limits: Limits, out: Path, label: str) -> None:
    """Write model.onnx, weights.bin and config.json."""
    from specbuild.compilers.onnx_graph import GraphBuilder

    shape = checkpoint.shape
    quantization = checkpoint.config["quantization"]
    scheme = scheme_of_algo(quantization["quant_algo"])
    block = math.gcd(WIDEST, quantization["group_size"]) if scheme.grouped else BLOCK
    with GraphBuilder(out, shape, checkpoint.entries(), scheme, block, limits) as builder:
        _add_decoder(builder, shape, includes_lm_head(quantization), label)
        builder.save()
    (out / "config.json").write_text(json.dumps(engine_config(checkpoint, limits, block), indent=2) + "\n")


def open_runner(engine_dir: Path, max_slots: int = 8, threads: int = 0, vocab_size: int = 0) -> Runner:
    """Open an engine for running in this process."""
    from specbuild.compilers.ort_runner import OrtRunner

    return OrtRunner(engine_dir, max_slots, threads, vocab_size)


def engine_config(checkpoint: TllmCheckpoint, limits: Limits, block: int) -> dict[str, object]:
    """Return config.json by the schema of a TensorRT-LLM engine, with our own section."""
    plugins = {"paged_kv_cache": False, "use_paged_context_fmha": False, "remove_input_padding": False}
    build_config = {
        "max_input_len": limits.max_seq_len - 1, "max_seq_len": limits.max_seq_len + limits.max_draft_len,
        "max_batch_size": limits.max_batch_size, "max_beam_width": 1, "max_num_tokens": limits.max_batch_size * limits.max_seq_len,
        "kv_cache_type": "CONTINUOUS", "gather_context_logits": False, "gather_generation_logits": True,
        "max_draft_len": limits.max_draft_len, "speculative_decoding_mode": 2 if limits.max_draft_len else 1, "plugin_config": plugins,
    }  # fmt: skip
    own = {"compiler": "onnx-cpu", "graph": GRAPH, "kernels": limits.kernels, "block_size": block, "accuracy_level": 4,
           "onnxruntime": find_version("onnxruntime"), "onnx": find_version("onnx")}  # fmt: skip
    return {"version": __version__, "pretrained_config": dict(checkpoint.config), "build_config": build_config, "specbuild": own}


def _add_decoder(builder: GraphBuilder, shape: ModelShape, lm_head: bool, label: str) -> None:
    """Embedding, layers, final norm, and lm_head on the rows asked for."""
    hidden = builder.embed()
    residual: str | None = None
    with bar(f"build {label}", shape.layers, "layer") as progress:
        for layer in range(shape.layers):
            hidden, residual = _add_layer(builder, layer, hidden, residual)
            progress.update(1)
    normed, _ = builder.norm("transformer.ln_f", hidden, residual)
    builder.head(normed, lm_head)


def _add_layer(builder: GraphBuilder, layer: int, hidden: str, residual: str | None) -> tuple[str, str]:
    """Add one pre-norm layer; return (output of its MLP, the residual it must still be added to)."""
    name, shape = f"transformer.layers.{layer}", builder.shape
    normed, residual = builder.norm(f"{name}.input_layernorm", hidden, residual)
    attended = builder.attention(layer, builder.linear(f"{name}.attention.qkv", normed))
    attended, before_mlp = builder.linear(f"{name}.attention.dense", attended), "post_layernorm"
    if shape.inter_norms:
        attended, before_mlp = builder.norm(f"{name}.post_layernorm", attended, None)[0], "pre_feedforward_layernorm"
    normed, residual = builder.norm(f"{name}.{before_mlp}", attended, residual)
    if shape.fused_mlp:
        up, gate = builder.split(builder.linear(f"{name}.mlp.fc", normed), (shape.intermediate, shape.intermediate))
    else:
        gate, up = builder.linears([f"{name}.mlp.fc", f"{name}.mlp.gate"], normed)
    out = builder.linear(f"{name}.mlp.proj", builder.gated(gate, up))
    return (builder.norm(f"{name}.post_feedforward_layernorm", out, None)[0] if shape.inter_norms else out), residual
