"""Every family: a forward pass over our checkpoint, by TensorRT-LLM's rules, and the CPU engine give transformers' logits."""

import copy
import json

import numpy as np
import pytest
import tllm_forward
import torch
from safetensors.torch import load_file
from same_bits import assert_same_bits

from specbuild.artifacts import TllmCheckpoint
from specbuild.build import run_build
from specbuild.compilers import Limits, onnx_cpu
from specbuild.compilers.ort_runner import OrtRunner
from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.decoder import Decoder
from specbuild.errors import CheckpointError, EngineError
from specbuild.families import FAMILIES
from specbuild.quantize import run_quantize
from specbuild.rotary import make_rotary
from specbuild.shape import ModelShape, RopeScaling

VOCAB, LENGTH = 101, 100  # tokens of a prompt: past every original context and every window below
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
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
    "yarn rope": ("llama", {"rope_scaling": YARN, "rope_theta": 500.0}),
    "yarn rope with all its settings": (
        "llama",
        {"rope_theta": 500.0, "rope_scaling": {**YARN, "beta_fast": 12, "beta_slow": 2, "attention_factor": 0.8, "truncate": False}},
    ),
    "qwen2 with yarn rope": ("qwen2", {"rope_scaling": YARN, "rope_theta": 500.0}),
    "qwen3 with yarn rope": ("qwen3", {"head_dim": 24, "rope_scaling": {**YARN, "type": "yarn"}, "rope_theta": 500.0}),
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
# Of each architecture: a case above, and its switches for biases; other families have theirs always (Qwen 2) or never.
SWEEP = {
    "LlamaForCausalLM": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "MistralForCausalLM": ("mistral", None),
    "Qwen2ForCausalLM": ("qwen2", None),
    "Qwen3ForCausalLM": ("qwen3", None),
    "GemmaForCausalLM": ("gemma", {"attention_bias": True}),
    "Gemma2ForCausalLM": ("gemma2", {"attention_bias": True}),
    "Gemma3ForCausalLM": ("gemma3", {"attention_bias": True}),
    "Phi3ForCausalLM": ("phi3", None),
}


def sweep():
    """Parametrize kind and changes: every family, tied and untied, with as many and with fewer key-value heads, with and without biases."""
    cases = {}
    for architecture in FAMILIES:
        name, switches = SWEEP[architecture]
        kind, changes = CASES[name]
        for bias in ({}, switches) if switches else ({},):
            for heads in HEADS:
                for tied in TIES:
                    label = f"{name}, {heads}, {tied}{', biases' if bias else ''}"
                    cases[label] = kind, {**changes, **bias, **HEADS[heads], **TIES[tied]}
    return pytest.mark.parametrize(("kind", "changes"), cases.values(), ids=cases)


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
            values["quantize"] = {**values["quantize"], "quality": {"samples": 0}}  # measured elsewhere
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


@sweep()
def test_every_family_gives_the_logits_of_transformers(make_engine, make_config, hf_logits, kind, changes):
    check_parity(make_engine, make_config, hf_logits, kind, changes)


@pytest.mark.parametrize("name", [name for name in CASES if name not in {case for case, _ in SWEEP.values()}])
def test_every_variant_gives_the_logits_of_transformers(make_engine, make_config, hf_logits, name):
    kind, changes = CASES[name]
    check_parity(make_engine, make_config, hf_logits, kind, {**changes, **HEADS["GQA"]}, on_cpu="longrope" not in name)


def check_parity(make_engine, make_config, hf_logits, kind, changes, on_cpu=True):
    """Compare with transformers: a forward pass over the checkpoint by TensorRT-LLM's rules, and the CPU engine."""
    checkpoint = make_config(kind, changes, quantize={"scheme": "full_prec", "group_size": 32}).dir_of("target", "checkpoint")
    tokens = random_tokens(LENGTH)
    expected = hf_logits(kind, changes, tokens)
    assert expected.std() > 0.5  # flat logits would prove nothing
    atol = FAMILIES[json.loads((checkpoint / "config.json").read_text())["architecture"]].atol
    torch.testing.assert_close(tllm_forward.logits(checkpoint, tokens), expected, atol=atol, rtol=0)
    if on_cpu:
        found = OrtRunner(make_engine(kind, changes)).logits(tokens, LENGTH)
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", [name for name in CASES if "longrope" not in name])
def test_fast_kernels_give_the_logits_of_transformers_in_any_passes_and_batch(make_config, hf_logits, tmp_path, name, heads):
    kind, changes = CASES[name][0], {**CASES[name][1], **HEADS[heads]}
    checkpoint = TllmCheckpoint.open(make_config(kind, changes).dir_of("target", "checkpoint"))
    onnx_cpu.build(checkpoint, Limits(4, 400, 8, "fast"), tmp_path, "test")
    atol, tokens = FAMILIES[checkpoint.shape.architecture].atol, random_tokens(LENGTH)
    expected = hf_logits(kind, changes, tokens).numpy()
    np.testing.assert_allclose(OrtRunner(tmp_path).logits(tokens, LENGTH), expected, atol=atol, rtol=0)
    runner = OrtRunner(tmp_path, max_slots=4)
    for end, n in ((40, 2), (41, 1), (46, 5), (43, 3), (44, 1), (LENGTH, 7)):
        np.testing.assert_allclose(runner.logits(tokens[:end], n), expected[end - n : end], atol=atol, rtol=0)
    for steps in ((1, 1, 1), (1, 3, 1), (2, 2, 1)):  # new tokens of three sequences of different lengths, side by side
        runner.reset()
        for grown in (0, 1):
            ends = [20 + 9 * i + grown * step for i, step in enumerate(steps)]
            found = runner.logits_batch([(tokens[:end], step) for end, step in zip(ends, steps, strict=True)])
            for end, step, logits in zip(ends, steps, found, strict=True):
                np.testing.assert_allclose(logits, expected[end - step : end], atol=atol, rtol=0)


@pytest.mark.parametrize(("kind", "changes"), CASES.values(), ids=CASES)
def test_the_decoder_that_calibrates_gives_the_logits_of_transformers(make_config, hf_logits, kind, changes):
    """Sequences of any lengths side by side; those past an original context use the rotary positions of their own length."""
    checkpoint = TllmCheckpoint.open(make_config(kind, changes).dir_of("target", "checkpoint"))
    sequences = [random_tokens(length, seed=length) for length in (LENGTH, 1, 30)]
    for ranks in ({}, {"tp": 2, "pp": 3 if checkpoint.shape.layers == 3 else 2}):
        split = make_config(kind, changes, **ranks) if ranks else None
        decoder = Decoder(checkpoint if split is None else TllmCheckpoint.open(split.dir_of("target", "checkpoint")))
        with torch.no_grad():
            chunks = decoder.embed(sequences)
            for index in range(checkpoint.shape.layers):
                chunks = [decoder.layer(index)(chunk) for chunk in chunks]
            found = decoder.logits(torch.cat([chunk.hidden for chunk in chunks]))
        expected = torch.cat([hf_logits(kind, changes, sequence) for sequence in sequences])
        torch.testing.assert_close(found, expected, atol=FAMILIES[checkpoint.shape.architecture].atol, rtol=0)


BIT_CASES = ("qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "phi3, a part rotates, window", "llama3 rope")


@pytest.mark.parametrize("scheme", ["full_prec", "int8_wo", "int4_awq"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", BIT_CASES)
def test_any_split_of_a_sequence_into_passes_gives_the_same_bits(make_engine, name, heads, scheme):
    kind, changes = CASES[name]
    engine = make_engine(kind, {**changes, **HEADS[heads]}, scheme)
    tokens = random_tokens(140)  # over the first growth of the cache, at 128
    assert_same_bits(lambda slots: OrtRunner(engine, max_slots=slots), tokens)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama3 rope", "rotary_scaling", None),
        ("linear rope", "rotary_scaling", None),
        ("yarn rope", "rotary_scaling", None),
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


def test_rotary_positions_that_change_with_the_length_are_refused_by_the_cpu_compiler_by_name(make_engine):
    with pytest.raises(EngineError, match="Cannot build LlamaForCausalLM with onnx-cpu: rotary scaling is 'dynamic', whose frequencies"):
        make_engine("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    with pytest.raises(EngineError, match="Cannot build Phi3ForCausalLM with onnx-cpu: rotary scaling is 'longrope'"):
        make_engine(*CASES["phi3 with longrope"])


VARIANTS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {key: value for key, value in LLAMA3.items() if key != "rope_type"},
    "yarn": {"factor": 8.0},
    "yarn, original context": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn, other bounds": {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 12, "beta_slow": 2, "truncate": False},
    "yarn, two weights": {"factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, factor given": {"factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 0.8},
    "longrope": {**LONGROPE["rope_scaling"], "original_max_position_embeddings": 64},
    "longrope, factor given": {**LONGROPE["rope_scaling"], "original_max_position_embeddings": 64, "attention_factor": 0.8},
    "longrope, not stretched": {**LONGROPE["rope_scaling"], "original_max_position_embeddings": 512},
    "dynamic": {"factor": 4.0},
}


@pytest.mark.parametrize("length", [0, 64, 65, 512, 513, 2000])
@pytest.mark.parametrize("name", VARIANTS)
def test_rotary_frequencies_and_factor_are_those_of_transformers_at_any_length(name, length):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind, values = name.split(",")[0], {key: value for key, value in VARIANTS[name].items() if key != "type"}
    original = values.get("original_max_position_embeddings") if kind == "longrope" else None
    rope = {"rope_type": kind, "rope_theta": 500.0, **copy.deepcopy(values)}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope)
    make = ROPE_INIT_FUNCTIONS.get(kind) or (lambda config, device, seq_len: LlamaRotaryEmbedding.compute_default_rope_parameters(config))
    expected, factor = make(config, torch.device("cpu"), seq_len=length or None)
    shape = ModelShape(
        architecture="LlamaForCausalLM", layers=1, hidden=64, intermediate=128, heads=4, kv_heads=4, head_dim=16, vocab=VOCAB,
        max_positions=512, rope_theta=500.0, norm_eps=1e-5, original_positions=original,
        rope_scaling=None if kind == "default" else RopeScaling.make({"rope_type": kind, **values}),
    )  # fmt: skip
    found, found_factor = make_rotary(shape, length=length)
    np.testing.assert_allclose(found, expected.double().numpy(), rtol=1e-6)
    assert found_factor == pytest.approx(factor, rel=1e-12)


# --- ranks


RANKED = ("llama with biases", "qwen2", "qwen3", "gemma2 with biases", "gemma3", "phi3")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tied", TIES)
@pytest.mark.parametrize("name", RANKED)
def test_two_tensor_parallel_ranks_joined_give_back_the_whole(make_config, name, tied, heads):
    kind, changes = CASES[name][0], {**CASES[name][1], **HEADS[heads], **TIES[tied]}
    whole = load_file(make_config(kind, changes).dir_of("target", "checkpoint") / "rank0.safetensors")
    split = make_config(kind, changes, tp=2).dir_of("target", "checkpoint")
    ranks = [load_file(split / f"rank{rank}.safetensors") for rank in (0, 1)]
    config = json.loads((split / "config.json").read_text())
    assert config["use_parallel_embedding"] == kind.startswith("gemma")
    assert ranks[0].keys() == ranks[1].keys() == whole.keys()
    for key, tensor in whole.items():
        joined = join_ranks(key, [rank[key] for rank in ranks], config)
        assert torch.equal(joined[: len(tensor)], tensor), key
        assert not joined[len(tensor) :].any(), key  # rows that pad the vocabulary


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
