"""What a pair takes of the GPU that both models share, from their shapes alone, and the cache fractions to write for Triton.

Rank 0 of the target and of the draft share one GPU (upstream: sharing one beats two); the plan is of that GPU. The target loads first:
`kv_cache_free_gpu_mem_fraction` is a fraction of what is free when a model has loaded, so the draft's is of what the target left.
Bytes everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specbuild.compilers import Limits
from specbuild.compilers.trtllm_command import max_num_tokens
from specbuild.config import ModelConfig, Role
from specbuild.planning.hardware import Gpu
from specbuild.quant import QuantScheme, find_scheme
from specbuild.shape import ModelShape

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE_BYTES = 4  # scales as a checkpoint stores them, float32; an engine may halve them
TOKENS_PER_BLOCK = 64  # of the paged cache: trtllm-build's largest default (1.0 has 32); a sequence's last block is not shared
LOGIT_BYTES = 4  # --logits_dtype float32
# Estimates, for want of a measurement: what an engine's process takes that no tensor of ours accounts for.
CONTEXT_BYTES = 0.6e9  # CUDA context, cuBLAS and module code of one process (0.3 to 0.6 GB is what nvidia-smi shows of empty ones)
WORKSPACE_BYTES = 0.5e9  # TensorRT's scratch, the runtime's decoding buffers and the gemm plugin's workspaces, per engine
REDUCE_BYTES = 0.4e9  # NCCL's and the custom all-reduce's buffers of a rank, where tp or pp is above 1
HEADROOM = 0.05  # of the GPU, left to fragmentation and to what else runs there


@dataclass(frozen=True)
class Part:
    """A model as it is planned: its shape, how it is stored, and what its engine is built for."""

    role: Role
    shape: ModelShape
    model: ModelConfig
    limits: Limits
    shared_embedding: bool = False  # the family keeps one table for embedding and lm_head, split among ranks
    on_cpu: bool = False

    @property
    def scheme(self) -> QuantScheme:
        return find_scheme(self.model.quantize.scheme)

    @property
    def element(self) -> int:
        """Bytes of an unquantized number; onnx-cpu computes in float32."""
        return 4 if self.on_cpu else BYTES[self.model.dtype]

    @property
    def positions(self) -> int:
        """Positions of a sequence that the cache must hold."""
        return self.limits.max_seq_len + self.limits.max_draft_len


@dataclass(frozen=True)
class ModelMemory:
    """One rank of a model on the shared GPU. fraction: kv_cache_free_gpu_mem_fraction; None without a GPU."""

    weights: float
    cache: float
    activations: float
    runtime: float
    cache_tokens: int  # max_tokens_in_paged_kv_cache: the same limit, whatever loads first
    fraction: float | None = None

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.activations + self.runtime


@dataclass(frozen=True)
class MemoryPlan:
    """The shared GPU: each model, what is left, and how many whole sequences it could hold at most."""

    total: float
    usable: float
    models: dict[Role, ModelMemory]
    max_concurrency: int

    @property
    def needed(self) -> float:
        return sum(model.total for model in self.models.values())

    @property
    def left(self) -> float:
        return self.total - self.needed

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "needed": self.needed, "left": self.left}


def linear_bytes(part: Part, rows: int, columns: int) -> float:
    """Return what a linear layer takes as its scheme stores it, with scales; group scales and prequant scales where there are any."""
    scheme, count = part.scheme, rows * columns
    if scheme.bits == 16:
        return count * part.element
    scales = count / part.model.quantize.group_size if scheme.grouped else rows
    prequant = columns * part.element if scheme.grouped or scheme.activation_bits != 16 else 0
    return count * scheme.bits / 8 + scales * SCALE_BYTES + prequant


def rank_linears(shape: ModelShape, tp: int) -> dict[str, tuple[int, int]]:
    """Return (out, in) of one rank's piece of each linear layer; key-value heads are repeated where there are fewer than ranks."""
    qkv = shape.q_rows // tp + 2 * max(1, shape.kv_heads // tp) * shape.head_dim
    pieces = {}
    for name, (rows, columns) in shape.linears().items():
        by_columns = name in ("attention.dense", "mlp.proj")
        pieces[name] = (rows, columns // tp) if by_columns else (qkv if name == "attention.qkv" else rows // tp, columns)
    return pieces


def layer_bytes(part: Part) -> float:
    """Return the weights of one layer on one rank: linear layers, and the two norms before them."""
    return (
        sum(linear_bytes(part, *size) for size in rank_linears(part.shape, part.model.tp).values()) + 2 * part.shape.hidden * part.element
    )


def head_bytes(part: Part) -> float:
    """Return lm_head on one rank: in the model's dtype unless it is quantized too."""
    rows = math.ceil(part.shape.vocab / part.model.tp)
    plain = rows * part.shape.hidden * part.element
    return linear_bytes(part, rows, part.shape.hidden) if part.model.quantize.lm_head else plain


def weight_bytes(part: Part) -> float:
    """Return the weights of the fullest rank. A tied lm_head is stored beside the embedding, except in families that share the table."""
    pp, layers = part.model.pp, math.ceil(part.shape.layers / part.model.pp)
    split = part.model.tp if part.shared_embedding else 1
    embedding, head = math.ceil(part.shape.vocab / split) * part.shape.hidden * part.element, head_bytes(part)
    once = pp > 1 or (part.shared_embedding and part.shape.tied)  # the first rank has the one, the last the other
    return layers * layer_bytes(part) + (max(embedding, head) if once else embedding + head)


def token_cache_bytes(part: Part) -> float:
    """Return what one position takes in one layer's cache on one rank: keys and values."""
    return 2 * max(1, part.shape.kv_heads // part.model.tp) * part.shape.head_dim * part.element


def cached_positions(shape: ModelShape, positions: int, pp: int = 1) -> int:
    """Return the positions that a sequence's cache holds, summed over the layers of the fullest pipeline rank, in whole blocks."""
    windows = shape.windows(positions) or [positions] * shape.layers
    blocks = [math.ceil(window / TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK for window in windows]
    size = math.ceil(len(blocks) / pp)
    return max(sum(blocks[start : start + size]) for start in range(0, len(blocks), size))


def sequence_cache_bytes(part: Part) -> float:
    """Return the cache of one whole sequence on one rank."""
    return cached_positions(part.shape, part.positions, part.model.pp) * token_cache_bytes(part)


def activation_bytes(part: Part) -> float:
    """Return an estimate of the activations of a pass over all the tokens it may have: TensorRT shares one layer's among all, and logits.

    Per token: the residual and three more rows of hidden, q, k and v, and the MLP's two rows; all ranks hold the hidden ones whole.
    """
    shape, tp = part.shape, part.model.tp
    row = 4 * shape.hidden + (shape.q_rows + 2 * shape.kv_rows + 2 * shape.intermediate) / tp
    logits = part.limits.max_batch_size * (part.limits.max_draft_len + 1) * shape.vocab * LOGIT_BYTES
    return max_num_tokens(part.limits) * row * part.element + logits


def runtime_bytes(part: Part) -> float:
    """Return an estimate of what the runtime takes beside tensors."""
    if part.on_cpu:
        return 0.2e9  # a Python process with ONNX Runtime
    return CONTEXT_BYTES + WORKSPACE_BYTES + (REDUCE_BYTES if part.model.tp * part.model.pp > 1 else 0)


def model_memory(part: Part) -> ModelMemory:
    """Return what one model takes of the shared GPU at its limits."""
    batch = part.limits.max_batch_size
    tokens = batch * math.ceil(part.positions / TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK
    return ModelMemory(weight_bytes(part), batch * sequence_cache_bytes(part), activation_bytes(part), runtime_bytes(part), tokens)


def plan_memory(parts: Sequence[Part], gpu: Gpu) -> MemoryPlan:
    """Plan the shared GPU, the parts in the order in which they load; fractions are rounded up to 0.001."""
    usable = gpu.memory * (1 - HEADROOM)
    models: dict[Role, ModelMemory] = {}
    free = gpu.memory
    for part in parts:
        model = model_memory(part)
        free -= model.total - model.cache
        fraction = None if gpu.is_cpu or free <= 0 else min(1.0, math.ceil(model.cache / free * 1000) / 1000)
        models[part.role] = ModelMemory(model.weights, model.cache, model.activations, model.runtime, model.cache_tokens, fraction)
        free -= model.cache if fraction is None else fraction * free
    spare = usable - sum(model.total - model.cache for model in models.values())
    per_sequence = sum(sequence_cache_bytes(part) for part in parts)
    return MemoryPlan(gpu.memory, usable, models, max(0, int(spare / per_sequence)))
