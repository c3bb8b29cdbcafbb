"""Every family: a forward pass over our checkpoint, by TensorRT-LLM's rules, and the CPU engine give transformers' logits."""

import json

import numpy as np
import pytest
import tllm_forward
import torch
from safetensors.torch import load_file

from specbuild.artifacts import TllmCheckpoint
from specbuild.build import run_build
from specbuild.compilers.ort_runner import OrtRunner
from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.errors import CheckpointError, EngineError
from specbuild.families import FAMILIES
from specbuild.quantize import run_quantize
from specbuild.tllm_config import shape_from_tllm

VOCAB, LENGTH = 101, 100  # tokens of a prompt: past every original context and every window below
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
SMALL = {"head_dim": 16, "pad_token_id": None}
WINDOWED = {**SMALL, "num_hidden_layers": 3, "sliding_window": 8, "query_pre_attn_scalar": 24}
PHI3 = {"pad_token_id": None, "partial_rotary_factor": 0.75, "sliding_window": 8}
LONGROPE = {
    "pad_token_id": None, "max_position_embeddings": 512, "original_max_position_embeddings": 64, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)],
    },
}  # fmt: skip
CASES = {
    "llama": ("llama", {}),
    "llama with head_dim": ("llama", {"head_dim": 24, "rope_theta": 500.0}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500.0}),
    "linear rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "linear rope, old spelling": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, window never used": ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "gemma": ("gemma", {**SMALL}),
    "gemma with biases": ("gemma", {**SMALL, "attention_bias": True}),
    "gemma2": ("gemma2", {**WINDOWED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2 with biases": ("gemma2", {**WINDOWED, "attention_bias": True, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3", {**WINDOWED, "sliding_window_pattern": 2, "rope_theta": 4e4, "rope_local_base_freq": 300.0}),
    "gemma3 with linear rope": (
        "gemma3",
        {**WINDOWED, "sliding_window_pattern": 3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gemma3 with biases": ("gemma3", {**WINDOWED, "attention_bias": True, "final_logit_softcapping": 3.0}),
    "phi3": ("phi3", {"pad_token_id": None}),
    "phi3, a part rotates, window": ("phi3", {**PHI3}),
    "phi3 with longrope": ("phi3", {**LONGROPE}),
}
HEADS = {"GQA": {"num_key_value_heads": 2}, "MHA": {"num_key_value_heads": 4}}
TIES = {"untied": {"tie_word_embeddings": False}, "tied": {"tie_word_embeddings": True}}
ON_CPU = [name for name in CASES if "longrope" not in name]


def all_cases(names):
    names = list(names)
    ids = [f"{name}, {heads}, {tied}" for name in names for heads in HEADS for tied in TIES]
    values = [(CASES[name][0], {**CASES[name][1], **HEADS[h], **TIES[t]}) for name in names for h in HEADS for t in TIES]
    return pytest.mark.parametrize(("kind", "changes"), values, ids=ids)


def random_tokens(count, seed=0):
    return [int(token) for token in np.random.default_rng(seed).integers(1, VOCAB, count)]


@pytest.fixture(scope="module")
def hf_logits(make_model):
    """Return run(kind, changes, tokens): transformers' float32 logits."""
    import transformers

    def run(kind, changes, tokens):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            make_model(kind, **changes), dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0]

    return run


@pytest.fixture(scope="module")
def make_config(make_model, write_pair_yaml, tmp_path_factory):
    """Return make(kind, changes, **target): the configuration of a converted model; the same arguments give the same one."""
    made = {}

    def make(kind, changes, **target):
        key = json.dumps([kind, changes, target], sort_keys=True)
        if key not in made:
            values = {"dtype": "float32", "quantize": {"scheme": "full_prec"}, **target, "model": str(make_model(kind, **changes))}
            config = load_config(write_pair_yaml(tmp_path_factory.mktemp("forward"), target=values, build={"max_seq_len": 400}))
            run_convert(config, "target")
            made[key] = config
        return made[key]

    return make


@pytest.fixture(scope="module")
def make_engine(make_config):
    """Return make(kind, changes, scheme): the directory of a built engine."""

    def make(kind, changes, scheme="full_prec"):
        config = make_config(kind, changes, quantize={"scheme": scheme, "group_size": 32})
        run_quantize(config, "target")
        run_build(config, "target")
        return config.dir_of("target", "engine")

    return make


@all_cases(CASES)
def test_a_forward_pass_over_the_checkpoint_gives_the_logits_of_transformers(make_config, hf_logits, kind, changes):
    checkpoint = make_config(kind, changes).dir_of("target", "checkpoint")
    tokens = random_tokens(LENGTH)
    expected = hf_logits(kind, changes, tokens)
    assert expected.std() > 0.5  # flat logits would prove nothing
    family = FAMILIES[json.loads((checkpoint / "config.json").read_text())["architecture"]]
    torch.testing.assert_close(tllm_forward.logits(checkpoint, tokens), expected, atol=family.atol, rtol=0)


@all_cases(ON_CPU)
def test_the_cpu_engine_gives_the_logits_of_transformers(make_engine, hf_logits, kind, changes):
    engine = make_engine(kind, changes)
    tokens = random_tokens(LENGTH)
    found = torch.from_numpy(OrtRunner(engine).logits(tokens, LENGTH))
    shape = shape_from_tllm(json.loads((engine / "config.json").read_text())["pretrained_config"])
    torch.testing.assert_close(found, hf_logits(kind, changes, tokens), atol=FAMILIES[shape.architecture].atol, rtol=0)


BIT_CASES = ("qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "phi3, a part rotates, window", "llama3 rope")


@pytest.mark.parametrize("scheme", ["full_prec", "int8_wo", "int4_awq"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", BIT_CASES)
def test_any_split_of_a_sequence_into_passes_gives_the_same_bits(make_engine, name, heads, scheme):
    kind, changes = CASES[name]
    engine = make_engine(kind, {**changes, **HEADS[heads]}, scheme)
    tokens = random_tokens(140)  # over the first growth of the cache, at 128
    expected = OrtRunner(engine, max_slots=1).logits(tokens, 140)
    for widths in ([1] * 140, [2] * 70, [5] * 28, [3, 1, 64, 9, 1, 1, 50, 2, 9], [127, 1, 1, 11]):
        runner, end = OrtRunner(engine, max_slots=1), 0
        for width in widths:
            end += width
            assert np.array_equal(runner.logits(tokens[:end], width), expected[end - width : end]), widths
    requests = [(tokens[:length], n) for length, n in ((7, 2), (1, 1), (30, 5), (140, 3))]
    for found, (sequence, n) in zip(OrtRunner(engine, max_slots=4).logits_batch(requests), requests, strict=True):
        assert np.array_equal(found, expected[len(sequence) - n : len(sequence)])


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama3 rope", "rotary_scaling", None),
        ("linear rope", "rotary_scaling", None),
        ("mistral", "sliding_window", None),
        ("qwen3", "qk_layernorm", False),
        ("gemma", "hidden_act", "silu"),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", None),
        ("gemma2", "query_pre_attn_scalar", None),
        ("gemma2", "_sliding_window_pattern", None),
        ("gemma2", "sliding_window", None),
        ("gemma2", "inter_layernorms", False),
        ("gemma3", "rope_local_base_freq", 4e4),
        ("gemma3", "rotary_base", 300.0),
        ("gemma3 with linear rope", "rotary_scaling", None),
        ("phi3, a part rotates, window", "rotary_pct", 1.0),
        ("phi3 with longrope", "position_embedding_type", "rope_gpt_neox"),
    ],
)
def test_the_comparison_sees_each_key_of_the_config(make_config, tmp_path, name, key, value):
    """A key that could be dropped unseen would prove nothing."""
    kind, changes = CASES[name]
    checkpoint = make_config(kind, {**changes, **HEADS["GQA"]}).dir_of("target", "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    assert config[key] != value
    (tmp_path / "rank0.safetensors").symlink_to((checkpoint / "rank0.safetensors").resolve())
    scaling = {} if name == "phi3 with longrope" else {"rotary_scaling": config["rotary_scaling"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rotary_scaling": None, **scaling, key: value}))
    tokens = random_tokens(LENGTH)
    difference = (tllm_forward.logits(tmp_path, tokens) - tllm_forward.logits(checkpoint, tokens)).abs().max()
    assert difference > 100 * FAMILIES[config["architecture"]].atol


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 4.0}, {"type": "dynamic", "factor": 4.0}])
def test_rotary_positions_that_change_with_the_length_are_refused_by_the_cpu_compiler_by_name(make_engine, rope):
    kind = rope.get("rope_type") or rope["type"]
    with pytest.raises(EngineError, match=f"Cannot build LlamaForCausalLM with onnx-cpu: rotary scaling is '{kind}'"):
        make_engine("llama", {"rope_scaling": rope})
    with pytest.raises(EngineError, match="Cannot build Phi3ForCausalLM with onnx-cpu: rotary scaling is 'longrope'"):
        make_engine(*CASES["phi3 with longrope"])


# --- ranks


@all_cases(name for name in CASES if name in ("llama with biases", "qwen2", "qwen3", "gemma2 with biases", "gemma3", "phi3"))
def test_two_tensor_parallel_ranks_joined_give_back_the_whole(make_config, kind, changes):
    whole = load_file(make_config(kind, changes).dir_of("target", "checkpoint") / "rank0.safetensors")
    split = make_config(kind, changes, tp=2).dir_of("target", "checkpoint")
    ranks = [load_file(split / f"rank{rank}.safetensors") for rank in (0, 1)]
    config = json.loads((split / "config.json").read_text())
    assert config["use_parallel_embedding"] == kind.startswith("gemma")
    assert ranks[0].keys() == ranks[1].keys() == whole.keys()
    for name, tensor in whole.items():
        joined = join_ranks(name, [rank[name] for rank in ranks], config)
        assert torch.equal(joined[: len(tensor)], tensor), name
        assert not joined[len(tensor) :].any(), name  # rows that pad the vocabulary


def join_ranks(name, parts, config):
    """Undo the split, as TensorRT-LLM's loader shares each tensor."""
    size = config["head_size"]
    if "attention.qkv" in name:
        q, kv = config["num_attention_heads"] // 2 * size, config["num_key_value_heads"] // 2 * size
        return torch.cat([torch.cat(pieces) for pieces in zip(*(part.split([q, kv, kv]) for part in parts), strict=True)])
    if "mlp.fc" in name and config["hidden_act"] == "swiglu":
        return torch.cat([torch.cat(pieces) for pieces in zip(*(part.chunk(2) for part in parts), strict=True)])
    if name.endswith(("attention.dense.weight", "mlp.proj.weight")):
        return torch.cat(parts, dim=1)
    if "mlp.fc" in name or "mlp.gate" in name or name == "lm_head.weight" or ("embedding" in name and config["use_parallel_embedding"]):
        return torch.cat(parts)
    assert torch.equal(*parts), name
    return parts[0]


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "phi3"])
def test_pipeline_ranks_hold_the_layers_in_order(make_config, name):
    kind, changes = CASES[name]
    changes = {**changes, "num_hidden_layers": 4, "tie_word_embeddings": True}
    whole = load_file(make_config(kind, changes).dir_of("target", "checkpoint") / "rank0.safetensors")
    split = make_config(kind, changes, pp=2).dir_of("target", "checkpoint")
    joined = {}
    for rank in (0, 1):
        for key, tensor in load_file(split / f"rank{rank}.safetensors").items():
            head, _, rest = key.removeprefix("transformer.layers.").partition(".")
            joined[f"transformer.layers.{int(head) + 2 * rank}.{rest}" if head.isdigit() else key] = tensor
    # Alone, Gemma's lm_head is the embedding; the last of several ranks has none to share.
    whole.setdefault("lm_head.weight", whole["transformer.vocab_embedding.weight"])
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[key], whole[key]) for key in whole)


# --- config.json


def test_config_json_of_each_family_has_its_own_keys(make_config):
    def config_of(name):
        kind, changes = CASES[name]
        return json.loads((make_config(kind, {**changes, **HEADS["GQA"]}).dir_of("target", "checkpoint") / "config.json").read_text())

    expected = {
        "qwen2": {"qwen_type": "qwen2", "attn_bias": True, "mlp_bias": False},
        "qwen3": {"qwen_type": "qwen3", "attn_bias": False, "head_size": 24, "qk_layernorm": True},
        "gemma2": {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
                   "inter_layernorms": True, "sliding_window": 8, "hidden_act": "gelu"},
        "gemma3": {"sliding_window_pattern": 2, "_sliding_window_pattern": 2, "rope_local_base_freq": 300.0, "rotary_base": 4e4},
        "phi3": {"hidden_act": "swiglu", "rotary_pct": 1.0, "position_embedding_type": "rope_gpt_neox"},
        "phi3 with longrope": {"position_embedding_type": "long_rope", "original_max_position_embeddings": 64,
                               "longrope_scaling_long_factors": LONGROPE["rope_scaling"]["long_factor"],
                               "longrope_scaling_short_factors": LONGROPE["rope_scaling"]["short_factor"]},
        "llama3 rope": {"rotary_scaling": LLAMA3, "rotary_base": 500.0},
    }  # fmt: skip
    for name, keys in expected.items():
        config = config_of(name)
        assert {key: config.get(key, "absent") for key in keys} == keys


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization": {"quant_algo": None, "groupsize": 64}}, r"key quantization\.groupsize is not one of TensorRT-LLM's"),
        ({"qwen_tpye": "qwen2"}, "key qwen_tpye is not one of"),
        ({"mapping": {"world_size": 3, "tp_size": 2, "pp_size": 1}}, "world_size 3 is not tp_size 2 times pp_size 1"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"vocab_size": "101"}, "vocab_size is '101'"),
        ({"dtype": None}, "dtype is None"),
    ],
)
def test_a_checkpoint_whose_config_json_tensorrt_llm_would_not_take_is_refused(make_config, tmp_path, change, message):
    config = json.loads((make_config("llama", {}).dir_of("target", "checkpoint") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        TllmCheckpoint.open(tmp_path)


def test_a_missing_key_of_config_json_is_named(make_config, tmp_path):
    config = json.loads((make_config("llama", {}).dir_of("target", "checkpoint") / "config.json").read_text())
    del config["rotary_base"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="key rotary_base is missing"):
        TllmCheckpoint.open(tmp_path)
