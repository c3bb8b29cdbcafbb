"""config.json is read as transformers reads it, or refused by name."""

import json

import pytest

from specbuild.errors import CheckpointError
from specbuild.families import FAMILIES, find_family

SIZES = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 24, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_theta": 5000.0, "sliding_window": 8,
    "model_type": None,
}  # fmt: skip
MODEL_TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}


def transformers_config(values):
    import transformers

    values = {**values}
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("absent", [None, *SIZES])
def test_a_key_that_is_not_there_means_what_transformers_makes_of_it(architecture, absent):
    values = {"architectures": [architecture], **SIZES, "model_type": MODEL_TYPES[architecture]}
    if absent != "model_type":
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
    assert shape.head_dim == (getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads)
    assert (shape.max_positions, shape.norm_eps) == (expected.max_position_embeddings, expected.rms_norm_eps)
    assert shape.rope_theta == expected.rope_parameters["rope_theta"]
    assert (shape.tied, shape.hidden_act) == (expected.tie_word_embeddings, expected.hidden_act)
    if architecture == "MistralForCausalLM":
        assert shape.window == expected.sliding_window
        assert not shape.attn_bias
        assert not shape.mlp_bias
    else:
        assert shape.window is None
        assert (shape.attn_bias, shape.mlp_bias) == (expected.attention_bias, expected.mlp_bias)


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


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 8.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_attention_heads": 16, "num_key_value_heads": 3}, "3 key-value heads"),
    ],
)
def test_a_field_that_would_change_the_maths_is_refused_by_name(architecture, changes, named):
    values = {"architectures": [architecture], **SIZES, **changes}
    with pytest.raises(CheckpointError, match=named) as caught:
        find_family(values).read_shape(values)
    assert architecture in str(caught.value)


@pytest.mark.parametrize("architectures", [["FooForCausalLM"], [], None])
def test_another_architecture_is_refused_with_the_supported_list(architectures):
    with pytest.raises(CheckpointError, match="LlamaForCausalLM, MistralForCausalLM"):
        find_family({"architectures": architectures})


def test_a_saved_model_reads_back_with_its_sizes(make_model):
    values = json.loads((make_model("mistral", head_dim=24, sliding_window=8) / "config.json").read_text())
    shape = find_family(values).read_shape(values)
    assert (shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.window) == (64, 4, 2, 24, 8)
