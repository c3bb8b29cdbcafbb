"""ModelShape: everything about a decoder that a converter, compiler or planner needs to know."""

from __future__ import annotations

from dataclasses import dataclass


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
    hidden_act: str = "silu"
    tied: bool = False
    attn_bias: bool = False
    mlp_bias: bool = False
    window: int | None = None  # attention sees this many positions, itself included; None = all

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (out_features, in_features) of a layer's linear parts, by their TensorRT-LLM name."""
        return {
            "attention.qkv": (self.q_rows + 2 * self.kv_rows, self.hidden),
            "attention.dense": (self.hidden, self.q_rows),
            "mlp.fc": (self.intermediate, self.hidden),
            "mlp.gate": (self.intermediate, self.hidden),
            "mlp.proj": (self.hidden, self.intermediate),
        }
