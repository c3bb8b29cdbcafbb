"""Building blocks of the onnx-cpu graph: each adds nodes and returns the name of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from specbuild.compilers.compiler import Limits
from specbuild.compilers.graph_interface import is_fused, mask_names
from specbuild.compilers.linear import Linear, join_outputs
from specbuild.compilers.nbits import ZERO_POINT, pack_blocks, shift_columns
from specbuild.quant import Levels, QuantScheme
from specbuild.rotary import make_rotary
from specbuild.shape import ModelShape
from specbuild.tensorfile import TensorEntry

OPSET = 23  # RMSNormalization, RotaryEmbedding and Attention; the last that ONNX Runtime for Python 3.10 (1.23) knows
CONTRIB = "com.microsoft"
Array = np.ndarray[Any, Any]


class GraphBuilder:
    """Adds a decoder's nodes and streams its weights to weights.bin.

    Shapes: B sequences, S new tokens each, T places in the cache, G query heads per key-value head.
    Inputs: input_ids (B, S) int64; positions (B, S) int64; cells (B, S, kv_heads, 3) int64, the (sequence, head, place) of each
    new token in the cache; mask (B, 1, S * G, T) float, 0 where a new token may attend and minus infinity elsewhere, once per query
    head of a group; local_mask, the same within the window (a model has one of them or both, by its layers); rows (B, R, 1) int64,
    the new tokens whose logits are wanted. Output: logits (B, R, vocab). A fused graph has, for positions, cells and masks, last (B,)
    int32, the place of each sequence's last new token, and total () int32, the longest sequence's length; S is 1 where B is more.
    """

    def __init__(
        self, out: Path, shape: ModelShape, entries: Mapping[str, TensorEntry], scheme: QuantScheme, block: int, limits: Limits
    ) -> None:
        self.out, self.shape, self.entries, self.scheme, self.block = out, shape, entries, scheme, block
        self.fused = is_fused(shape, limits.kernels)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, onnx.TensorProto] = {}
        self.inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["B", "S"]),
            *(self._fused_inputs() if self.fused else self._plain_inputs()),
            helper.make_tensor_value_info("rows", TensorProto.INT64, ["B", "R", 1]),
        ]
        self.outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "R", shape.vocab])]
        self._file = (out / "weights.bin").open("wb")
        self._counter = 0
        positions = limits.max_seq_len + limits.max_draft_len
        self._add_rotary_tables("rotary", *make_rotary(shape), positions)
        if shape.rope_theta_local is not None:
            self._add_rotary_tables("local_rotary", *make_rotary(shape, local=True), positions)

    def __enter__(self) -> GraphBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def embed(self) -> str:
        scaled = self._load("transformer.vocab_embedding.weight") * np.float32(self.shape.embedding_scale)
        table = self._weight("embedding", scaled)
        return self._node("Gather", [table, "input_ids"])

    def norm(self, prefix: str, x: str, residual: str | None) -> tuple[str, str]:
        """Return (normed, residual): the residual is x, or x added to the one given."""
        scale = self._weight(f"{prefix}.weight", self._load(f"{prefix}.weight"))
        epsilon = self.shape.norm_eps
        if residual is None:
            return self._node("RMSNormalization", [x, scale], axis=-1, epsilon=epsilon), x
        outputs = [f"{prefix}.normed", "", "", f"{prefix}.residual"]
        self.nodes.append(
            helper.make_node("SkipSimplifiedLayerNormalization", [x, residual, scale], outputs, domain=CONTRIB, epsilon=epsilon)
        )
        return outputs[0], outputs[3]

    def linear(self, prefix: str, x: str) -> str:
        """Add x @ W.T (+ bias): over the checkpoint's own integers, or MatMul where the scheme keeps the weight."""
        return self._product(prefix, x, self._load_linear(prefix))

    def linears(self, prefixes: Sequence[str], x: str) -> list[str]:
        """Add layers that read the same x; as one product, which costs less, where they treat x alike."""
        layers = [self._load_linear(prefix) for prefix in prefixes]
        joined = join_outputs(layers)
        if joined is None:
            return [self._product(prefix, x, layer) for prefix, layer in zip(prefixes, layers, strict=True)]
        return self.split(self._product("+".join(prefixes), x, joined), [layer.rows for layer in layers])

    def split(self, x: str, sizes: Sequence[int]) -> list[str]:
        """Add the parts of the last axis that have these sizes."""
        return self._nodes("Split", [x, self._shape("x".join(["sizes", *map(str, sizes)]), tuple(sizes))], len(sizes), axis=-1)

    def _load_linear(self, prefix: str) -> Linear:
        stem = f"{prefix}."
        tensors = {name.removeprefix(stem): entry.load() for name, entry in self.entries.items() if name.startswith(stem)}
        bias = tensors.pop("bias", None)
        levels = self.scheme.levels(tensors)
        return Linear(tensors["weight"].float() if levels is None else levels, None if bias is None else bias.float())

    def _product(self, prefix: str, x: str, layer: Linear) -> str:
        levels = layer.weight
        if not isinstance(levels, Levels):
            x = self._node("MatMul", [x, self._weight(f"{prefix}.weight", levels.T.contiguous().numpy())])
        else:
            if levels.prequant is not None:
                x = self._node("Mul", [x, self._weight(f"{prefix}.prequant", levels.prequant.numpy())])
            x = self._nbits_product(prefix, x, levels) if levels.activation is None else self._integer_product(prefix, x, levels)
        return x if layer.bias is None else self._node("Add", [x, self._weight(f"{prefix}.bias", layer.bias.numpy())])

    def _nbits_product(self, prefix: str, x: str, levels: Levels) -> str:
        """Add x @ (q * scale).T; accuracy_level 4 rounds each block of x to 8 bits with a scale of its own."""
        packed, scale = pack_blocks(levels.q.numpy(), levels.scale.numpy(), levels.bits, self.block)
        inputs = [x, self._weight(f"{prefix}.packed", packed), self._weight(f"{prefix}.scale", scale)]
        rows, columns = levels.q.shape
        return self._node(
            "MatMulNBits", inputs, domain=CONTRIB, K=columns, N=rows, bits=levels.bits, block_size=self.block, accuracy_level=4
        )

    def _integer_product(self, prefix: str, x: str, levels: Levels) -> str:
        """Add round(x / activation) @ q.T over integers, times activation * scale.

        Both sides are unsigned with a zero point of 128, which is exact on every x86. With signed weights ONNX Runtime's kernels for
        processors without VNNI add two products in 16 bits, which saturate; with two signed sides it has no fast kernel.
        """
        assert levels.activation is not None
        zero = self._weight("zero_point", np.array(ZERO_POINT, np.uint8))
        step = self._weight(f"{prefix}.activation", levels.activation.numpy().reshape(()))
        # The contrib form: ONNX Runtime 1.23 has the standard one up to opset 21.
        rounded = self._node("QuantizeLinear", [x, step, zero], domain=CONTRIB)
        weight = self._weight(f"{prefix}.integers", shift_columns(levels.q.numpy()))
        scale = self._weight(f"{prefix}.scale", levels.scale.numpy().reshape(-1))
        return self._node("MatMulIntegerToFloat", [rounded, weight, step, scale, zero, zero], domain=CONTRIB)

    def attention(self, layer: int, qkv: str) -> str:
        """Add rotary positions, the cache update in place, and attention: (B, S, rows) to (B, S, q_rows)."""
        shape = self.shape
        if self.fused and not shape.qk_norm:
            return self._fused_attention(layer, [qkv, "", ""])
        query, key, value = self.split(qkv, (shape.q_rows, shape.kv_rows, shape.kv_rows))
        if shape.qk_norm:
            prefix = f"transformer.layers.{layer}.attention"
            query, key = self._norm_heads(f"{prefix}.q_layernorm", query), self._norm_heads(f"{prefix}.k_layernorm", key)
        if self.fused:
            return self._fused_attention(layer, [query, key, value])
        query, key = self._rotate(layer, query, shape.heads), self._rotate(layer, key, shape.kv_heads)
        cached = [self._cache(f"{kind}_{layer}", new) for kind, new in (("key", key), ("value", value))]
        # Query heads that share a key-value head become rows of one product: S times G = heads / kv_heads.
        grouped = self._swap_heads(query, (0, 0, shape.kv_heads, -1), (0, 0, -1, shape.head_dim))
        attended = self._attend(grouped, cached[0], cached[1], "local_mask" if shape.windowed(layer) else "mask")
        return self._swap_heads(attended, (0, 0, -1, shape.q_rows // shape.kv_heads), (0, 0, shape.q_rows))

    def gated(self, gate: str, up: str) -> str:
        """Add activation(gate) * up."""
        if self.shape.hidden_act == "gelu":
            active = self._node("Gelu", [gate], approximate="tanh")
        else:
            active = self._node("QuickGelu", [gate], domain=CONTRIB, alpha=1.0)
        return self._node("Mul", [active, up])

    def head(self, hidden: str, quantized: bool) -> None:
        """Add lm_head on the wanted rows, in full precision unless the checkpoint has it quantized. A shared one is the embedding."""
        rows = self._node("GatherND", [hidden, "rows"], batch_dims=1)
        if quantized:
            logits = self.linear("lm_head", rows)
        else:
            name = "lm_head.weight" if "lm_head.weight" in self.entries else "transformer.vocab_embedding.weight"
            logits = self._node("MatMul", [rows, self._weight("lm_head.weight", self._load(name).T.copy())])
        if self.shape.final_softcap is not None:
            logits = self._softcap(logits, self.shape.final_softcap)
        self.nodes[-1].output[0] = "logits"

    def save(self) -> None:
        """Write model.onnx."""
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, initializer=list(self.weights.values()))
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11, producer_name="specbuild")
        onnx.save_model(model, self.out / "model.onnx")

    def _plain_inputs(self) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info("positions", TensorProto.INT64, ["B", "S"]),
            helper.make_tensor_value_info("cells", TensorProto.INT64, ["B", "S", self.shape.kv_heads, 3]),
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", 1, "SG", "T"]) for name in mask_names(self.shape)),
        ]

    def _fused_inputs(self) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info("last", TensorProto.INT32, ["B"]),
            helper.make_tensor_value_info("total", TensorProto.INT32, []),
        ]

    def _fused_attention(self, layer: int, projections: list[str]) -> str:
        """Add GroupQueryAttention over (B, S, rows): query, key and value, or all three side by side in the first."""
        shape, tables = self.shape, self._rotary_tables(layer)
        caches = [f"{kind}_{layer}" for kind in ("key", "value")]
        for name in caches:
            self._declare_cache(name)
        window = shape.window if shape.windowed(layer) and shape.window is not None else -1
        inputs = [*projections, *(f"past_{name}" for name in caches), "last", "total", f"{tables}.cos", f"{tables}.sin"]
        outputs = [f"attended_{layer}", *(f"present_{name}" for name in caches)]
        self.nodes.append(
            helper.make_node(
                "GroupQueryAttention", inputs, outputs, domain=CONTRIB, num_heads=shape.heads, kv_num_heads=shape.kv_heads,
                scale=shape.attention_scale, do_rotary=1, local_window_size=window,
            )
        )  # fmt: skip
        return outputs[0]

    def _norm_heads(self, prefix: str, x: str) -> str:
        normed, _ = self.norm(prefix, self._reshape(x, (0, 0, -1, self.shape.head_dim)), None)
        return self._reshape(normed, (0, 0, -1))

    def _rotate(self, layer: int, x: str, heads: int) -> str:
        """Add rotary positions to (B, S, heads * head_dim)."""
        shape = self.shape
        tables = self._rotary_tables(layer)
        part = {"rotary_embedding_dim": shape.rotary_dim} if shape.rotary_dim < shape.head_dim else {}
        return self._node("RotaryEmbedding", [x, f"{tables}.cos", f"{tables}.sin", "positions"], num_heads=heads, **part)

    def _rotary_tables(self, layer: int) -> str:
        return "local_rotary" if self.shape.windowed(layer) and self.shape.rope_theta_local is not None else "rotary"

    def _attend(self, query: str, key: str, value: str, mask: str) -> str:
        """Add attention, (B, kv_heads, S * G, head_dim) over (B, kv_heads, T, head_dim).

        Spelled out: ONNX Runtime's own operators for it either read whole caches again, or take one sequence alone.
        """
        scores = self._node("FusedMatMul", [query, key], domain=CONTRIB, transB=1, alpha=self.shape.attention_scale)
        if self.shape.attn_softcap is not None:
            scores = self._softcap(scores, self.shape.attn_softcap)
        weights = self._node("Softmax", [self._node("Add", [scores, mask])], axis=-1)
        return self._node("MatMul", [weights, value])

    def _softcap(self, x: str, cap: float) -> str:
        """Add cap * tanh(x / cap)."""
        constant = self._weight(f"cap_{cap}", np.array(cap, np.float32))
        return self._node("Mul", [self._node("Tanh", [self._node("Div", [x, constant])]), constant])

    def _swap_heads(self, x: str, before: tuple[int, ...], after: tuple[int, ...]) -> str:
        """Add a change of the two middle axes, of `x` in the shape `before`, and give it the shape `after` (0: as it was)."""
        return self._reshape(self._node("Transpose", [self._reshape(x, before)], perm=[0, 2, 1, 3]), after)

    def _reshape(self, x: str, dims: tuple[int, ...]) -> str:
        return self._node("Reshape", [x, self._shape("x".join(["shape", *map(str, dims)]), dims)])

    def _cache(self, name: str, new: str) -> str:
        """Add a cache input and output; the new rows (B, S, kv_rows) are written into their cells."""
        self._declare_cache(name)
        rows = self._reshape(new, (0, 0, self.shape.kv_heads, self.shape.head_dim))
        self.nodes.append(helper.make_node("ScatterND", [f"past_{name}", "cells", rows], [f"present_{name}"]))
        return f"present_{name}"

    def _declare_cache(self, name: str) -> None:
        dims = ["B", self.shape.kv_heads, "T", self.shape.head_dim]
        self.inputs.append(helper.make_tensor_value_info(f"past_{name}", TensorProto.FLOAT, dims))
        self.outputs.append(helper.make_tensor_value_info(f"present_{name}", TensorProto.FLOAT, dims))

    def _add_rotary_tables(self, name: str, frequencies: Array, factor: float, positions: int) -> None:
        angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
        self._weight(f"{name}.cos", (np.cos(angles) * factor).astype(np.float32))
        self._weight(f"{name}.sin", (np.sin(angles) * factor).astype(np.float32))

    def _shape(self, name: str, values: tuple[int, ...]) -> str:
        return self._weight(name, np.array(values, np.int64))

    def _load(self, name: str) -> Array:
        array: Array = self.entries[name].load().float().numpy()
        return array

    def _weight(self, name: str, array: Array) -> str:
        """Append an array to weights.bin, aligned, and name it as an initializer; small ones stay in the graph."""
        if name in self.weights:
            return name
        if array.nbytes < 1024:
            self.weights[name] = onnx.numpy_helper.from_array(np.ascontiguousarray(array), name)
            return name
        self._file.write(b"\0" * (-self._file.tell() % 4096))
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "weights.bin"), ("offset", self._file.tell()), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        np.ascontiguousarray(array).tofile(self._file)
        self.weights[name] = tensor
        return name

    def _node(self, op: str, inputs: list[str], **attributes: Any) -> str:
        """Add a node with one output; return its name."""
        return self._nodes(op, inputs, 1, **attributes)[0]

    def _nodes(self, op: str, inputs: list[str], outputs: int, **attributes: Any) -> list[str]:
        self._counter += 1
        names = [f"{op}_{self._counter}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names
