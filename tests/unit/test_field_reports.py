"""What hit people who did this job, each with the smallest input that shows it, through the real stages. Names begin with a row's id.

The rows are public threads about conversion (c) and quantization (q); other files hold those of engines, serving and decoding.
"""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specbuild.artifacts import TllmCheckpoint
from specbuild.build import run_build
from specbuild.check import check_pair
from specbuild.compilers.ort_runner import OrtRunner
from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.errors import CheckpointError, EngineError
from specbuild.generate import run_generate
from specbuild.pair import open_pair
from specbuild.quant import scheme_of_algo
from specbuild.quantize import run_quantize
from specbuild.spec.sampling import Sampling

VOCAB = 101
STAGES = {"convert": run_convert, "quantize": run_quantize, "build": run_build}
SCHEMES = ("full_prec", "int8_wo", "int4_wo", "int4_awq")
# Largest error of logits. full_prec: the order of float32 sums. Others: root mean square in standard deviations of the logits; the
# engine's weights are the checkpoint's own integers, its activations are rounded to 8 bits in blocks.
EXACT, ROUNDED = 1e-4, 0.05


@pytest.fixture
def make(tmp_path, write_pair_yaml):
    """Return make(model, last stage, **target): the configuration of a target that went through the stages up to that one."""

    def run(model, last="build", scheme="full_prec", group_size=32, calibration=None, **target):
        quantize = {"scheme": scheme, "group_size": group_size, "calibration": calibration, "quality": {"samples": 0}}
        section = {"model": str(model), "dtype": "float32", **target, "quantize": quantize}
        config = load_config(write_pair_yaml(tmp_path, target=section))
        for name, stage in STAGES.items():
            stage(config, "target", force=True)
            if name == last:
                break
        return config

    return run


@pytest.fixture
def edited(tmp_path, make_model):
    """Return edited(change, **config): a copy of a tiny model whose tensors went through change(tensors)."""

    def run(change, **config):
        directory = shutil.copytree(make_model(**config), tmp_path / "edited", dirs_exist_ok=True)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return run


def random_tokens(count):
    return [int(token) for token in np.random.default_rng(0).integers(1, VOCAB, count)]


def ranks_of(config, stage):
    return [load_file(path) for path in sorted(config.dir_of("target", stage).glob("rank*.safetensors"))]


def dequantized(tensors, name, algo):
    """Return the weight that a quantized linear's tensors stand for."""
    prefix = name.removesuffix("weight")
    levels = scheme_of_algo(algo).levels({key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)})
    return tensors[name].float() if levels is None else levels.weight()


def hf_logits(model, tokens, config=None, scheme="full_prec"):
    """Return the logits of transformers' own model; with a scheme, its linear weights are what the quantized checkpoint stands for."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    if scheme != "full_prec":
        (tensors,) = ranks_of(config, "quantized")
        algo = json.loads((config.dir_of("target", "quantized") / "config.json").read_text())["quantization"]["quant_algo"]
        for index, layer in enumerate(reference.model.layers):
            prefix = f"transformer.layers.{index}."
            attention, mlp = layer.self_attn, layer.mlp
            rows = [attention.q_proj.out_features, attention.k_proj.out_features, attention.v_proj.out_features]
            qkv = dequantized(tensors, f"{prefix}attention.qkv.weight", algo).split(rows)
            parts = {"attention.dense": attention.o_proj, "mlp.fc": mlp.gate_proj, "mlp.gate": mlp.up_proj, "mlp.proj": mlp.down_proj}
            for linear, weight in zip((attention.q_proj, attention.k_proj, attention.v_proj), qkv, strict=True):
                linear.weight.data.copy_(weight)
            for part, linear in parts.items():
                linear.weight.data.copy_(dequantized(tensors, f"{prefix}{part}.weight", algo))
    with torch.no_grad():
        return reference(torch.tensor([tokens])).logits[0].numpy()


def assert_logits(config, model, tokens, scheme="full_prec"):
    """Compare the built engine's logits with those of transformers."""
    expected = hf_logits(model, tokens, config, scheme)
    found = OrtRunner(config.dir_of("target", "engine")).logits(tokens, len(tokens))[:, : expected.shape[1]]
    assert expected.std() > 0.3  # flat logits would prove nothing
    if scheme == "full_prec":
        np.testing.assert_allclose(found, expected, atol=EXACT, rtol=0)
    else:
        assert np.sqrt(((found - expected) ** 2).mean()) / expected.std() < ROUNDED


# --- conversion


@pytest.mark.parametrize("scheme", SCHEMES)
def test_c_01_a_tied_model_without_lm_head_goes_through_every_stage(make, make_model, scheme):
    model = make_model(tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(model / "model.safetensors")
    config = make(model, scheme=scheme)
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    for stage in ("checkpoint", "quantized"):
        (tensors,) = ranks_of(config, stage)
        assert torch.equal(tensors["lm_head.weight"], embedding)
        assert json.loads((config.dir_of("target", stage) / "config.json").read_text())["tie_word_embeddings"] is True
    assert_logits(config, model, random_tokens(20), scheme)


def test_c_01_a_tied_model_whose_ranks_share_the_embedding_has_an_lm_head_on_each(make, make_model):
    model = make_model(tie_word_embeddings=True)
    ranks = ranks_of(make(model, "quantize", scheme="int4_awq", tp=2), "quantized")
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(torch.cat([rank["lm_head.weight"] for rank in ranks])[:VOCAB], embedding)


@pytest.mark.parametrize(
    ("scheme", "tied", "dtype"), [("int8_sq", True, "float32"), ("int8_sq", False, "bfloat16"), ("int4_awq", True, "bfloat16")]
)
def test_c_01_and_c_10_the_calibrating_path_takes_tied_models_and_bfloat16(make, make_model, scheme, tied, dtype):
    pytest.importorskip("modelopt")
    model = make_model(tie_word_embeddings=tied, dtype=dtype)
    config = make(model, "quantize", scheme=scheme, dtype=dtype, tp=2, calibration={"samples": 8, "max_length": 32})
    source = load_file(model / "model.safetensors")
    ranks = ranks_of(config, "quantized")
    expected = source["model.embed_tokens.weight" if tied else "lm_head.weight"]
    found = torch.cat([rank["lm_head.weight"] for rank in ranks])
    assert (found.dtype, found.shape[0]) == (expected.dtype, 102)
    assert torch.equal(found[:VOCAB], expected)
    assert all(bool(tensor.isfinite().all()) for rank in ranks for tensor in rank.values())


def test_c_03_llama3_rope_scaling_holds_past_the_original_positions(make, make_model):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model, tokens = make_model(rope_scaling=scaling, rope_theta=500.0), random_tokens(100)
    assert np.abs(hf_logits(model, tokens) - hf_logits(make_model(rope_theta=500.0), tokens))[64:].max() > 0.1  # the scaling matters
    config = make(model)
    assert json.loads((config.dir_of("target", "checkpoint") / "config.json").read_text())["rotary_scaling"]["rope_type"] == "llama3"
    assert_logits(config, model, tokens)


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=["linear, old key", "linear", "yarn"],
)
def test_c_04_rope_scaling_is_honoured_in_both_spellings(make, make_model, scaling):
    model, tokens = make_model(rope_scaling=scaling), random_tokens(100)
    assert np.abs(hf_logits(model, tokens) - hf_logits(make_model(), tokens)).max() > 0.1  # the scaling matters
    assert_logits(make(model), model, tokens)


@pytest.mark.parametrize(
    ("kind", "config", "name"),
    [
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        (
            "phi3",
            {
                "pad_token_id": None,
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            },
            "longrope",
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_c_04_rope_scaling_that_follows_the_length_is_refused_by_name(cli, tmp_path, make_model, write_pair_yaml, kind, config, name):
    path = write_pair_yaml(tmp_path, target={"model": str(make_model(kind, **config)), "quantize": {"scheme": "full_prec"}})
    code, _, err = cli("check", path)
    assert code == 1
    assert f"rotary scaling is '{name}'" in err


def test_c_16_a_head_size_without_kernels_is_refused_for_tensorrt_and_runs_on_the_cpu(cli, tmp_path, make, make_model, write_pair_yaml):
    model = make_model(hidden_size=40, num_attention_heads=4)
    section = {"model": str(model), "quantize": {"scheme": "full_prec"}}
    code, _, err = cli("check", write_pair_yaml(tmp_path, target=section, build={"compiler": "tensorrt"}))
    assert code == 1
    assert "head size 10 has no attention kernels" in err
    assert_logits(make(model), model, random_tokens(30))


def enlarge_biases(tensors):
    for name, tensor in tensors.items():
        if name.endswith("proj.bias"):
            tensor.mul_(3)


def test_c_06_large_attention_biases_are_carried_exactly_that_of_o_proj_too(make, edited):
    model = edited(enlarge_biases, attention_bias=True)
    source = load_file(model / "model.safetensors")
    config = make(model)
    for stage in ("checkpoint", "quantized"):
        (tensors,) = ranks_of(config, stage)
        for layer in range(2):
            prefix = f"model.layers.{layer}.self_attn."
            joined = torch.cat([source[f"{prefix}{part}_proj.bias"] for part in "qkv"])
            assert torch.equal(tensors[f"transformer.layers.{layer}.attention.qkv.bias"], joined)
            assert torch.equal(tensors[f"transformer.layers.{layer}.attention.dense.bias"], source[f"{prefix}o_proj.bias"])
    assert_logits(config, model, random_tokens(20))


@pytest.mark.parametrize("scheme", ["full_prec", "int4_awq"])
@pytest.mark.parametrize(("kind", "biases"), [("qwen2", ["attention.qkv"]), ("qwen3", []), ("llama", [])])
def test_c_06_biases_that_a_family_always_or_never_has(make, make_model, kind, biases, scheme):
    model = make_model(kind)
    config = make(model, scheme=scheme)
    (tensors,) = ranks_of(config, "quantized")
    found = {name.split(".", 3)[-1].removesuffix(".bias") for name in tensors if name.endswith(".bias")}
    assert sorted(found) == biases
    assert_logits(config, model, random_tokens(20), scheme)


def test_c_08_key_value_heads_are_repeated_where_ranks_are_a_multiple_of_them(make, make_model):
    model = make_model(num_attention_heads=4, num_key_value_heads=2)
    source = load_file(model / "model.safetensors")
    query, key, value = (source[f"model.layers.0.self_attn.{part}_proj.weight"].chunk(n) for part, n in zip("qkv", (4, 2, 2), strict=True))
    for rank, tensors in enumerate(ranks_of(make(model, "quantize", tp=4), "quantized")):
        expected = torch.cat([query[rank], key[rank // 2], value[rank // 2]])
        assert torch.equal(tensors["transformer.layers.0.attention.qkv.weight"], expected)


@pytest.mark.parametrize(
    ("heads", "tp", "numbers"),
    [
        ({"num_key_value_heads": 2}, 3, ["tp=3", "4 attention heads"]),
        (
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 144},
            6,
            ["tp=6", "4 key-value heads"],
        ),
    ],
)
def test_c_08_other_ranks_are_refused_with_both_numbers_before_a_weight_is_read(make, make_model, tmp_path, heads, tp, numbers):
    model = shutil.copytree(make_model(**heads), tmp_path / "model")
    spoil_data(model / "model.safetensors")
    with pytest.raises(CheckpointError, match="Cannot split") as caught:
        make(model, "convert", tp=tp)
    assert all(number in str(caught.value) for number in numbers), str(caught.value)
    assert not (tmp_path / "work").exists()


def spoil_data(path):
    """Overwrite a file's tensors with NaN: whoever reads one fails otherwise."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[:start] + b"\xff" * (len(raw) - start))


@pytest.mark.parametrize("scheme", ["full_prec", "int8_wo", "int4_awq"])
def test_c_09_a_vocabulary_that_no_rank_divides_is_padded_and_keeps_its_size(make, make_model, scheme):
    config = make(make_model(), "quantize", scheme=scheme, tp=2)
    ranks = [rank["lm_head.weight"] for rank in ranks_of(config, "quantized")]
    assert [tuple(rank.shape) for rank in ranks] == [(51, 64), (51, 64)]
    assert not ranks[1][50].any()
    assert torch.equal(torch.cat(ranks)[:VOCAB], load_file(make_model() / "model.safetensors")["lm_head.weight"])
    checkpoint = TllmCheckpoint.open(config.dir_of("target", "quantized"))
    assert checkpoint.shape.vocab == VOCAB


def favour_padding(tensors):
    """Make every id beyond the tokenizer's more likely than all others: the last hidden state is normed to ones along one column."""
    tensors["model.norm.weight"][0] = 50
    tensors["lm_head.weight"][:, 0] = 0
    tensors["lm_head.weight"][VOCAB::2, 0] = 1  # either sign of that column has its winners
    tensors["lm_head.weight"][VOCAB + 1 :: 2, 0] = -1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft_len", [0, 4])
def test_c_09_an_id_of_padding_is_never_emitted_though_it_would_win(edited, tmp_path, write_pair_yaml, sampling, draft_len):
    model = edited(favour_padding, vocab_size=128)
    section = {"model": str(model), "quantize": {"scheme": "int4_awq", "group_size": 32, "quality": {"samples": 0}}}
    config = load_config(write_pair_yaml(tmp_path, target=section, draft=section))
    for stage in STAGES.values():
        for role in ("target", "draft"):
            stage(config, role)
    prompt = random_tokens(8)
    raw = OrtRunner(config.dir_of("target", "engine")).logits(prompt, 8)
    assert (raw.argmax(axis=1) >= VOCAB).all()
    pair = open_pair(config)
    answer = run_generate(pair, prompt, sampling, 40, draft_len)
    assert answer.token_ids
    assert max(answer.token_ids) < VOCAB
    assert pair.target.logits(prompt, 8).shape == pair.draft.logits(prompt, 8).shape == (8, VOCAB)


@pytest.mark.parametrize("scheme", ["int8_wo", "int4_awq"])
def test_c_10_bfloat16_weights_stay_bfloat16_through_padding_and_quantizing(make, make_model, scheme):
    model = make_model(dtype="bfloat16")
    config = make(model, "quantize", scheme=scheme, dtype="bfloat16", tp=2)
    scales = "weights_scaling_factor"  # float32 by the format
    for stage in ("checkpoint", "quantized"):
        for rank in ranks_of(config, stage):
            kinds = {tensor.dtype for name, tensor in rank.items() if not name.endswith(scales) and tensor.dtype != torch.int8}
            assert kinds == {torch.bfloat16}
    sizes = [
        sum(path.stat().st_size for path in config.dir_of("target", stage).glob("*.safetensors")) for stage in ("checkpoint", "quantized")
    ]
    assert sizes[0] < 1.2 * (model / "model.safetensors").stat().st_size  # norms and the embedding are on both ranks
    assert sizes[1] <= sizes[0]


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float16", "float32"])
def test_c_10_weights_are_cast_to_the_dtype_that_is_asked_for(make, make_model, source, wanted):
    config = make(make_model(dtype=source), "quantize", scheme="int8_wo", dtype=wanted, tp=2)
    lm_head = load_file(make_model(dtype=source) / "model.safetensors")["lm_head.weight"].to(getattr(torch, wanted))
    found = torch.cat([rank["lm_head.weight"] for rank in ranks_of(config, "quantized")])[:VOCAB]
    assert found.dtype == lm_head.dtype
    assert torch.equal(found, lm_head)


FOO = {"architectures": ["FooForCausalLM"], "model_type": "foo", "auto_map": {"AutoModelForCausalLM": "modeling_foo.FooForCausalLM"}}
REMOTE = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\nclass FooForCausalLM: pass\nclass FooTokenizer: pass\n"


@pytest.mark.parametrize("command", ["check", "convert", "run"])
def test_c_19_an_unsupported_architecture_is_refused_first_with_the_list(cli, tmp_path, make_model, write_pair_yaml, command):
    model = shutil.copytree(make_model(), tmp_path / "model")
    (model / "modeling_foo.py").write_text(REMOTE)
    (model / "config.json").write_text(json.dumps({**json.loads((model / "config.json").read_text()), **FOO}))
    code, _, err = cli(command, write_pair_yaml(tmp_path, target={"model": str(model)}))
    assert code == 1
    assert all(part in err for part in ("FooForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Remote code is never run")), err
    assert not (tmp_path / "work").exists()
    assert not (model / "ran").exists()


@pytest.mark.parametrize("command", ["check", "run"])
def test_c_19_a_custom_tokenizer_class_without_tokenizer_json_is_refused_first(cli, tmp_path, make_model, write_pair_yaml, command):
    model = custom_tokenizer(make_model(), tmp_path)
    (model / "tokenizer.json").unlink()
    code, _, err = cli(command, write_pair_yaml(tmp_path, target={"model": str(model)}))
    assert code == 1
    assert "no tokenizer.json" in err
    assert not (tmp_path / "work").exists()
    assert not (model / "ran").exists()


def test_c_19_a_custom_tokenizer_class_is_not_run_where_tokenizer_json_says_it_all(tmp_path, make_model, write_pair_yaml):
    model = custom_tokenizer(make_model(), tmp_path)
    report = check_pair(load_config(write_pair_yaml(tmp_path, target={"model": str(model)})))
    assert report.target.tokenizer_vocab == VOCAB
    assert not (model / "ran").exists()


def custom_tokenizer(source, tmp_path):
    model = shutil.copytree(source, tmp_path / "model")
    (model / "tokenization_foo.py").write_text(REMOTE)
    auto_map = {"AutoTokenizer": ["tokenization_foo.FooTokenizer", None]}
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "FooTokenizer", "auto_map": auto_map}))
    return model


# --- quantization


@pytest.mark.parametrize(
    ("changes", "group_size", "parts"),
    [
        ({"intermediate_size": 100}, 32, ["mlp.proj", "100 input columns", "group_size 32", "int8_wo"]),
        ({}, 48, ["attention.qkv", "64 input columns", "group_size 48", "Use group_size 64 or 32"]),
        ({"intermediate_size": 100}, 48, ["attention.qkv", "64 input columns", "group_size 48", "int8_wo"]),
    ],
)
def test_q_02_columns_that_groups_do_not_divide_are_refused_before_anything_is_written(make, make_model, changes, group_size, parts):
    with pytest.raises(CheckpointError, match="Cannot quantize layer 0") as caught:
        make(make_model(**changes), "quantize", "int4_awq", group_size)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize("command", ["check", "run"])
def test_q_02_the_command_line_refuses_them_before_it_converts(cli, tmp_path, make_model, write_pair_yaml, command):
    section = {"model": str(make_model(intermediate_size=100)), "quantize": {"scheme": "int4_awq", "group_size": 32}}
    code, _, err = cli(command, write_pair_yaml(tmp_path, target=section))
    assert code == 1
    assert all(part in err for part in ("mlp.proj", "100 input columns", "group_size 32")), err
    assert not (tmp_path / "work").exists()


LEGAL = {"onnx-cpu": (32, 64, 96, 128), "tensorrt": (64, 128)}


@pytest.mark.parametrize("group_size", [16, 32, 48, 64, 96, 128, 192])
@pytest.mark.parametrize("compiler", LEGAL)
def test_q_02_each_engine_says_which_groups_it_takes(tmp_path, make_model, write_pair_yaml, compiler, group_size):
    model = make_model(hidden_size=384, intermediate_size=768, num_attention_heads=6, num_key_value_heads=6, num_hidden_layers=1)
    section = {"model": str(model), "quantize": {"scheme": "int4_awq", "group_size": group_size}}
    draft = {"model": str(model), "quantize": {"scheme": "full_prec"}}
    config = load_config(write_pair_yaml(tmp_path, target=section, draft=draft, build={"compiler": compiler}))
    if group_size in LEGAL[compiler] or (compiler == "onnx-cpu" and group_size % 32 == 0):
        check_pair(config)
        return
    with pytest.raises(EngineError, match=f"{compiler} at group_size {group_size}: .* 64") as caught:
        check_pair(config)
    assert "128" in str(caught.value)


@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize("tied", [False, True])
def test_q_03_lm_head_and_embedding_are_left_out_and_said_to_be(make, make_model, capsys, scheme, tied):
    config = make(make_model(tie_word_embeddings=tied), "quantize", scheme=scheme)
    (plain,), (found,) = ranks_of(config, "checkpoint"), ranks_of(config, "quantized")
    for name in ("lm_head.weight", "transformer.vocab_embedding.weight"):
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], plain[name])
    assert not [name for name in found if name.startswith(("lm_head.", "transformer.vocab_embedding.")) and not name.endswith(".weight")]
    line = next(line for line in capsys.readouterr().err.splitlines() if "excluded" in line)
    assert all(name in line.split("excluded")[1] for name in ("lm_head", "vocab_embedding", "norms"))


FC = "model.layers.0.mlp.gate_proj.weight"  # TensorRT-LLM's mlp.fc
Q = "model.layers.1.self_attn.q_proj.weight"


def set_row(name, row, value):
    return lambda tensors: tensors[name][row].fill_(value)


@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_q_04_a_row_of_zeros_has_finite_scales_and_stays_zero(make, edited, scheme, dtype):
    config = make(edited(set_row(FC, 5, 0)), scheme=scheme, dtype=dtype)
    (tensors,) = ranks_of(config, "quantized")
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    algo = json.loads((config.dir_of("target", "quantized") / "config.json").read_text())["quantization"]["quant_algo"]
    weight = dequantized(tensors, "transformer.layers.0.mlp.fc.weight", algo)
    assert not weight[5].any()
    assert bool(weight[4].any())
    assert np.isfinite(OrtRunner(config.dir_of("target", "engine")).logits(random_tokens(4), 4)).all()


@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_q_04_a_row_of_1e30_keeps_finite_scales_where_the_dtype_holds_it(make, edited, scheme, dtype):
    config = make(edited(set_row(FC, 5, 1e30)), "quantize", scheme=scheme, dtype=dtype)
    (tensors,) = ranks_of(config, "quantized")
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    algo = json.loads((config.dir_of("target", "quantized") / "config.json").read_text())["quantization"]["quant_algo"]
    weight = dequantized(tensors, "transformer.layers.0.mlp.fc.weight", algo)
    top = {"int4_awq": 1, "int8_wo": 127 / 128, "int4_wo": 7 / 8}[scheme]  # a scale per row saturates at the largest
    torch.testing.assert_close(weight[5], torch.full((64,), top * 1e30), rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("value", "dtype"), [(1e30, "float16"), (float("nan"), "float32"), (float("inf"), "bfloat16"), (float("-inf"), "float16")]
)
@pytest.mark.parametrize(("name", "row"), [(FC, 5), (Q, 0)])
def test_q_04_what_is_not_finite_is_refused_with_tensor_and_row(make, edited, tmp_path, name, row, value, dtype):
    with pytest.raises(CheckpointError) as caught:
        make(edited(set_row(name, row, value)), "quantize", "int4_awq", dtype=dtype)
    assert name in str(caught.value)
    assert f"row {row} " in str(caught.value)
    assert not (tmp_path / "work").exists()


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.quantize import run_quantize

assert not torch.cuda.is_available()
small, big, more = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
for path in (small, big):
    if path == big:  # all that is imported and started once is there by now
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))
    config = load_config(path)
    for stage in (run_convert, run_quantize):
        stage(config, "target")
try:
    torch.empty(3 * more, dtype=torch.uint8)
except RuntimeError:
    print("the whole model does not fit")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("scheme", ["int8_wo", "int4_awq"])
def test_q_06_eight_layers_convert_and_quantize_in_the_memory_of_a_few_tensors_without_a_gpu(tmp_path, make_model, write_pair_yaml, scheme):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
    models = {"small": make_model(), "big": make_model(num_hidden_layers=8, **sizes)}
    paths = []
    for name, model in models.items():
        (tmp_path / name).mkdir()
        section = {"model": str(model), "dtype": "float32", "quantize": {"scheme": scheme, "group_size": 32, "quality": {"samples": 0}}}
        paths.append(write_pair_yaml(tmp_path / name, target=section))
    size = (models["big"] / "model.safetensors").stat().st_size
    assert size > 128 << 20
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MALLOC_ARENA_MAX": "1"}  # an arena a thread would reserve more than the model
    command = [sys.executable, "-c", LIMITED, *map(str, paths), str(size * 2 // 5)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "the whole model does not fit" in result.stdout
