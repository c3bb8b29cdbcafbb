"""config.json of a TensorRT-LLM checkpoint: its keys as a strict model, and the way from and to a ModelShape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from specbuild.errors import CheckpointError
from specbuild.shape import ModelShape, RopeScaling

Dtype = Literal["float16", "bfloat16", "float32"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TllmMapping(_Section):
    """How the ranks share the model; rank = pp_rank * tp_size + tp_rank."""

    world_size: PositiveInt
    tp_size: PositiveInt
    pp_size: PositiveInt = 1

    @model_validator(mode="after")
    def _check_world(self) -> TllmMapping:
        if self.world_size != self.tp_size * self.pp_size:
            raise ValueError(f"world_size {self.world_size} is not tp_size {self.tp_size} times pp_size {self.pp_size}")
        return self


class TllmQuantization(_Section):
    """The arguments of TensorRT-LLM's QuantConfig: any other key is a TypeError there."""

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    group_size: PositiveInt | None = 128
    smoothquant_val: float = 0.5
    clamp_val: list[float] | None = None
    use_meta_recipe: bool = False
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: list[str] | None = None


class TllmConfig(_Section):
    """The keys that a checkpoint's config.json may have; what a family does not use is absent."""

    architecture: str
    dtype: Dtype
    logits_dtype: Dtype = "float32"
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_size: PositiveInt
    intermediate_size: PositiveInt
    hidden_act: Literal["silu", "gelu", "swiglu"]
    norm_epsilon: float
    max_position_embeddings: PositiveInt
    position_embedding_type: Literal["rope_gpt_neox", "long_rope"]
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    rotary_pct: float = 1.0
    mapping: TllmMapping
    quantization: TllmQuantization
    use_parallel_embedding: bool = False
    embedding_sharding_dim: Literal[0, 1] = 0
    tie_word_embeddings: bool
    attn_bias: bool
    mlp_bias: bool
    qk_layernorm: bool = False
    qwen_type: Literal["qwen2", "qwen3"] | None = None
    seq_length: PositiveInt | None = None
    use_logn_attn: bool = False
    inter_layernorms: bool = False
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    # Upstream also reads runtime_defaults.max_attention_window, but cannot copy what it makes of it: trtllm-build would fail. A window
    # reaches its runtime as max_attention_window_size, a parameter of the Triton model.
    sliding_window: PositiveInt | None = None
    sliding_window_pattern: PositiveInt | None = None
    underscored_pattern: PositiveInt | None = Field(default=None, alias="_sliding_window_pattern")  # its name in later versions
    rope_local_base_freq: float | None = None
    original_max_position_embeddings: PositiveInt | None = None
    longrope_scaling_short_factors: list[float] | None = None
    longrope_scaling_long_factors: list[float] | None = None
    embedding_scale: float = 1.0  # ours: TensorRT-LLM knows it from the architecture and only warns of the key


def check_tllm_config(values: Mapping[str, Any], where: Path) -> None:
    """Raise CheckpointError at the first key of a config.json that is unknown, missing or of another type."""
    try:
        TllmConfig.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "missing":
            raise CheckpointError(f"Cannot use {where}: key {key} is missing, expected by TensorRT-LLM. Convert again.") from None
        if problem["type"] == "extra_forbidden":
            raise CheckpointError(
                f"Cannot use {where}: key {key} is not one of TensorRT-LLM's for this checkpoint. Remove it, or convert again."
            ) from None
        raise CheckpointError(f"Cannot use {where}: {key} is {problem['input']!r}. {problem['msg']}. Convert again.") from None


def shape_from_tllm(config: Mapping[str, Any]) -> ModelShape:
    """Read a TensorRT-LLM config.json back into a shape."""
    scaling = config.get("rotary_scaling")
    return ModelShape(
        architecture=config["architecture"], layers=config["num_hidden_layers"], hidden=config["hidden_size"],
        intermediate=config["intermediate_size"], heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"],
        head_dim=config["head_size"], vocab=config["vocab_size"], max_positions=config["max_position_embeddings"],
        rope_theta=config["rotary_base"], norm_eps=config["norm_epsilon"], hidden_act=config["hidden_act"],
        tied=config["tie_word_embeddings"], attn_bias=config["attn_bias"], mlp_bias=config["mlp_bias"],
        qk_norm=config.get("qk_layernorm") or False, inter_norms=config.get("inter_layernorms") or False,
        window=config.get("sliding_window"), full_every=config.get("sliding_window_pattern") or 0,
        rope_scaling=None if scaling is None else RopeScaling.make(scaling), rope_theta_local=config.get("rope_local_base_freq"),
        rotary_pct=config.get("rotary_pct") or 1.0, original_positions=config.get("original_max_position_embeddings"),
        embedding_scale=config.get("embedding_scale") or 1.0, query_pre_attn_scalar=config.get("query_pre_attn_scalar"),
        attn_softcap=config.get("attn_logit_softcapping"), final_softcap=config.get("final_logit_softcapping"),
    )  # fmt: skip


def shape_to_tllm(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a TensorRT-LLM config.json that describe a shape."""
    scaling = None if shape.rope_scaling is None else shape.rope_scaling.to_dict()
    always = {
        "architecture": shape.architecture, "num_hidden_layers": shape.layers, "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_size": shape.head_dim, "vocab_size": shape.vocab, "max_position_embeddings": shape.max_positions,
        "position_embedding_type": "rope_gpt_neox", "rotary_base": shape.rope_theta, "rotary_scaling": scaling,
        "norm_epsilon": shape.norm_eps, "hidden_act": shape.hidden_act, "tie_word_embeddings": shape.tied,
        "attn_bias": shape.attn_bias, "mlp_bias": shape.mlp_bias,
    }  # fmt: skip
    pattern = shape.full_every or None
    optional = {
        "sliding_window": shape.window, "sliding_window_pattern": pattern, "_sliding_window_pattern": pattern,
        "rope_local_base_freq": shape.rope_theta_local, "qk_layernorm": shape.qk_norm or None,
        "inter_layernorms": shape.inter_norms or None, "query_pre_attn_scalar": shape.query_pre_attn_scalar,
        "attn_logit_softcapping": shape.attn_softcap, "final_logit_softcapping": shape.final_softcap,
        "embedding_scale": None if shape.embedding_scale == 1.0 else shape.embedding_scale,
        "rotary_pct": shape.rotary_pct if shape.fused_mlp or shape.rotary_pct != 1.0 else None,  # Phi-3's model reads it always
    }  # fmt: skip
    return {**always, **{key: value for key, value in optional.items() if value is not None}, **_longrope_keys(shape)}


def _longrope_keys(shape: ModelShape) -> dict[str, Any]:
    if shape.original_positions is None or shape.rope_scaling is None:
        return {}
    scaling = shape.rope_scaling.to_dict()
    return {
        "position_embedding_type": "long_rope", "original_max_position_embeddings": shape.original_positions,
        "longrope_scaling_short_factors": scaling["short_factor"], "longrope_scaling_long_factors": scaling["long_factor"],
    }  # fmt: skip
