"""config.json is read as transformers reads it, or refused by name."""

import json
from dataclasses import replace

import pytest

from specbuild.errors import CheckpointError
from specbuild.families import FAMILIES, find_family
from specbuild.tllm_config import shape_from_tllm, shape_to_tllm

SIZES = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 24, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_theta": 5000.0, "sliding_window": 8,
    "model_type": None,
}  # fmt: skip
MODEL_TYPES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text", "Phi3ForCausalLM": "phi3",
}  # fmt: skip
GEMMA = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def sizes_of(architecture):
    """Return a config that the family takes, with every field it knows."""
    values = {"architectures": [architecture], **SIZES, "model_type": MODEL_TYPES[architecture]}
    if architecture in GEMMA:
        values |= {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if architecture in GEMMA[1:]:
        values |= {"query_pre_attn_scalar": 24}
    if architecture == "Gemma2ForCausalLM":
        values |= {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
    if architecture == "Gemma3ForCausalLM":
        values |= {"rope_local_base_freq": 300.0}
    if architecture == "Qwen3ForCausalLM":
        values |= {"attention_bias": False}
    if architecture == "Phi3ForCausalLM":
        values |= {"pad_token_id": None}
    return values


def transformers_config(values):
    import transformers

    values = {**values}
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


CASES = [
    (architecture, absent)
    for architecture in FAMILIES
    for absent in [None, *(key for key in sizes_of(architecture) if key not in ("architectures", "model_type", "pad_token_id"))]
]


@pytest.mark.parametrize(("architecture", "absent"), CASES)
def test_a_key_that_is_not_there_means_what_transformers_makes_of_it(architecture, absent):
    values = sizes_of(architecture)
    values.pop(absent, None)
    expected = transformers_config(values)
    try:
        shape = find_family(values).read_shape(values)
    except CheckpointError as error:
        assert f"config.json has no {absent}" in str(error)  # noqa: PT017
        return
    assert shape.layers == expected.num_hidden_layers
    assert (shape.hidden, shape.intermediate, shape.vocab) == (expected.hidden_size, expected.intermediate_size, expected.vocab_size)
    assert (shape.heads, shape.kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    head_dim = expected.hidden_size // expected.num_attention_heads
    without_own = ("Qwen2ForCausalLM", "Phi3ForCausalLM")  # transformers takes a head_dim that these do not name as it is
    assert shape.head_dim == (getattr(expected, "head_dim", None) or head_dim) or architecture in without_own
    assert (shape.max_positions, shape.norm_eps) == (expected.max_position_embeddings, expected.rms_norm_eps)
    rope = expected.rope_parameters
    assert shape.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    if "sliding_attention" in rope:
        assert shape.rope_theta_local == rope["sliding_attention"]["rope_theta"]
    assert shape.tied == expected.tie_word_embeddings
    assert_switches(shape, expected, architecture)


def assert_switches(shape, expected, architecture):
    """Compare what only some families have."""
    own_act = getattr(expected, "hidden_activation", None) or expected.hidden_act
    assert {"silu": "silu", "swiglu": "silu", "gelu": "gelu_pytorch_tanh"}[shape.hidden_act] == own_act
    windowed = [shape.windowed(layer) for layer in range(shape.layers)]
    types = getattr(expected, "layer_types", None) or [f"{'sliding' if shape.window else 'full'}_attention"] * shape.layers
    assert windowed == [kind == "sliding_attention" for kind in types]
    if any(windowed):
        assert shape.window == expected.sliding_window
    biases = {"Qwen2ForCausalLM": True, "MistralForCausalLM": False, "Phi3ForCausalLM": False}
    assert shape.attn_bias == biases.get(architecture, getattr(expected, "attention_bias", None))
    assert shape.mlp_bias == (architecture == "LlamaForCausalLM" and expected.mlp_bias)
    assert shape.qk_norm == (architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"))
    assert shape.embedding_scale == (8.0 if architecture in GEMMA else 1.0)
    assert shape.query_pre_attn_scalar == getattr(expected, "query_pre_attn_scalar", None)
    assert shape.final_softcap == getattr(expected, "final_logit_softcapping", None)
    assert shape.attn_softcap == getattr(expected, "attn_logit_softcapping", None)


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 500000.0}, 500000.0),
        ({"rope_theta": 500000.0, "rope_scaling": None}, 500000.0),
        ({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "default"}}, 500000.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4),
    ],
)
def test_plain_rotary_positions_are_read_in_both_spellings(changes, theta):
    values = {"architectures": ["LlamaForCausalLM"], **SIZES, **changes}
    assert find_family(values).read_shape(values).rope_theta == theta


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("architecture", LLAMA_LIKE)
@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", "factor": 8.0},
        {"type": "dynamic", "factor": 8.0},
    ],
)
def test_scaled_rotary_positions_are_carried_as_they_stand(architecture, scaling):
    values = {**sizes_of(architecture), "rope_scaling": scaling}
    shape = find_family(values).read_shape(values)
    assert shape.rope_scaling.to_dict() == scaling
    new = {**sizes_of(architecture), "rope_parameters": {**scaling, "rope_theta": 7e4}}
    del new["rope_theta"]
    assert find_family(new).read_shape(new) == replace(shape, rope_theta=7e4)


REFUSED = [
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' has no low_freq_factor", LLAMA_LIKE),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None}}, "has no original_max", LLAMA_LIKE),
    ({"rope_scaling": {"type": "linear"}}, "'linear' has no factor", LLAMA_LIKE),
    ({"rope_scaling": {"type": "longrope"}}, "longrope", LLAMA_LIKE),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "mrope", MODEL_TYPES),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear", ["Phi3ForCausalLM"]),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "yarn", ["Phi3ForCausalLM"]),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "has no long_factor", ["Phi3ForCausalLM"]),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "attention_factor": 2.0}},
        "attention_factor", ["Phi3ForCausalLM"],
    ),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "factor": 2.0}, "max_position_embeddings": 4096},
        "factor is 2.0, expected None", ["Phi3ForCausalLM"],
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", [name for name in MODEL_TYPES if name != "Phi3ForCausalLM"]),
    ({"hidden_act": "gelu"}, "hidden_act", (*LLAMA_LIKE, "Phi3ForCausalLM")),
    ({"hidden_act": "silu"}, "hidden_act", GEMMA),
    ({"hidden_activation": "gelu"}, "hidden_activation", GEMMA),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention", GEMMA),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", ["Gemma3ForCausalLM"]),
    ({"attention_bias": True}, "attention_bias", ["Qwen3ForCausalLM"]),
    ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"]),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", MODEL_TYPES),
    ({"num_attention_heads": 16, "num_key_value_heads": 3}, "3 key-value heads", MODEL_TYPES),
]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "changes", "named"), [(name, changes, named) for changes, named, names in REFUSED for name in names]
)
def test_a_field_that_would_change_the_maths_is_refused_by_name(architecture, changes, named):
    values = {**sizes_of(architecture), **changes}
    with pytest.raises(CheckpointError, match=named) as caught:
        find_family(values).read_shape(values)
    assert architecture in str(caught.value)


@pytest.mark.parametrize("architecture", MODEL_TYPES)
def test_a_shape_survives_the_way_through_a_tensorrt_llm_config(architecture):
    values = sizes_of(architecture)
    if architecture == "Phi3ForCausalLM":
        values["rope_scaling"] = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.5, 3.0]}
    elif architecture in LLAMA_LIKE:
        values["rope_scaling"] = {"rope_type": "llama3", **LLAMA3}
    shape = find_family(values).read_shape(values)
    assert shape_from_tllm(json.loads(json.dumps(shape_to_tllm(shape)))) == shape
    assert hash(shape) == hash(replace(shape))


COMMON = {"vocab_size": 101, "rms_norm_eps": 1e-6}
PUBLISHED = {  # the lines of published config.json files that matter here, and what must be read from them
    "Llama 3.1 8B": (
        {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0,
         "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                          "rope_type": "llama3"}, "pretraining_tp": 1, "mlp_bias": False, "hidden_act": "silu"},
        {"head_dim": 128, "window": None},
    ),
    "Qwen2.5 0.5B": (
        {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
         "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21, "tie_word_embeddings": True, "hidden_act": "silu"},
        {"head_dim": 64, "window": None, "attn_bias": True, "tied": True},
    ),
    "Qwen3 8B": (
        {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "attention_bias": False,
         "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36},
        {"qk_norm": True, "attn_bias": False, "window": None},
    ),
    "Gemma 3 1B": (
        {"architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
         "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768, "rope_theta": 1000000,
         "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6,
         "query_pre_attn_scalar": 256, "attn_logit_softcapping": None, "final_logit_softcapping": None,
         "hidden_activation": "gelu_pytorch_tanh"},
        {"full_every": 6, "window": 512, "rope_theta": 1e6, "rope_theta_local": 1e4, "tied": True},
    ),
    "Phi-3 mini 128k": (
        {"architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 131072, "attention_bias": False,
         "original_max_position_embeddings": 4096, "sliding_window": 262144, "rope_theta": 10000.0, "hidden_act": "silu",
         "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}},
        {"head_dim": 96, "original_positions": 4096, "hidden_act": "swiglu", "rotary_pct": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("values", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs_are_read(values, expected):
    shape = find_family(values).read_shape({**COMMON, **values})
    assert {key: getattr(shape, key) for key in expected} == expected


@pytest.mark.parametrize("architectures", [["FooForCausalLM"], [], None])
def test_another_architecture_is_refused_with_the_supported_list(architectures):
    with pytest.raises(CheckpointError, match="LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"):
        find_family({"architectures": architectures})


def test_a_saved_model_reads_back_with_its_sizes(make_model):
    values = json.loads((make_model("mistral", head_dim=24, sliding_window=8) / "config.json").read_text())
    shape = find_family(values).read_shape(values)
    assert (shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.window) == (64, 4, 2, 24, 8)
