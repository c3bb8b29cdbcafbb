"""ModelShape: everything about a decoder that a converter, compiler or planner needs to know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """A scaled rotary variant: the entries of Hugging Face's rope_scaling, frozen, in their order and spelling."""

    entries: tuple[tuple[str, Any], ...]

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> RopeScaling:
        return cls(tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in values.items()))

    @property
    def kind(self) -> str:
        values = self.to_dict()
        return str(values.get("rope_type") or values.get("type"))

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.entries}


@dataclass(frozen=True)
class ModelShape:
    """A decoder's dimensions and the few switches that change its maths."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    # TensorRT-LLM's name; its gelu is the tanh form, and swiglu is silu with mlp.fc holding the up rows and then the gate rows
    hidden_act: str = "silu"
    tied: bool = False
    attn_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norms over each head of q and k, before rotary positions
    inter_norms: bool = False  # also norms after attention and after the MLP, before each is added to the residual
    window: int | None = None  # attention sees this many positions, itself included; None = all
    full_every: int = 0  # with a window: every n-th layer sees all positions nevertheless; 0 = none does
    rope_scaling: RopeScaling | None = None  # of the layers that see all positions, where the others have a base of their own
    rope_theta_local: float | None = None  # rotary base of windowed layers, unscaled; None = as in all layers
    rotary_pct: float = 1.0  # the share of a head's columns that rotate, from the first on
    original_positions: int | None = None  # longrope: beyond this length its long factors hold
    embedding_scale: float = 1.0
    query_pre_attn_scalar: float | None = None  # attention scores are divided by its root; None = head_dim
    attn_softcap: float | None = None  # scores become cap * tanh(score / cap)
    final_softcap: float | None = None  # the same for logits

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_pct)

    @property
    def attention_scale(self) -> float:
        return 1 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    @property
    def fused_mlp(self) -> bool:
        """Whether mlp.fc holds both the up and the gate rows."""
        return self.hidden_act == "swiglu"

    @property
    def context(self) -> int:
        """Positions a sequence may have: linear scaling stretches max_positions, as TensorRT-LLM deduces it too."""
        linear = self.rope_scaling is not None and self.rope_scaling.kind == "linear" and self.rope_theta_local is None
        return int(self.max_positions * self.rope_scaling.to_dict()["factor"]) if linear and self.rope_scaling else self.max_positions

    def windowed(self, layer: int) -> bool:
        """Tell whether a layer's attention is bound to the window."""
        return self.window is not None and not (self.full_every and (layer + 1) % self.full_every == 0)

    def windows(self, positions: int) -> list[int] | None:
        """Return how many of `positions` each layer's attention sees; None where all see all."""
        if self.window is None:
            return None
        return [min(self.window, positions) if self.windowed(layer) else positions for layer in range(self.layers)]

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (out_features, in_features) of a layer's linear parts, by their TensorRT-LLM name."""
        gate = {} if self.fused_mlp else {"mlp.gate": (self.intermediate, self.hidden)}
        return {
            "attention.qkv": (self.q_rows + 2 * self.kv_rows, self.hidden),
            "attention.dense": (self.hidden, self.q_rows),
            "mlp.fc": (self.intermediate * (2 if self.fused_mlp else 1), self.hidden),
            **gate,
            "mlp.proj": (self.hidden, self.intermediate),
        }
