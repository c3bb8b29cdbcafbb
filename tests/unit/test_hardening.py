"""What a hostile first user found, each as a test of its kind: wrong values are one line, never a traceback and never silence."""

import itertools
import json
import shutil
import subprocess
import sys

import pytest
import yaml
from click.testing import CliRunner

from specbuild.artifacts import HFCheckpoint, find_end_ids
from specbuild.build import run_build
from specbuild.check import check_pair
from specbuild.cli import cli as group
from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.errors import CheckpointError, ConfigError, ServingError, SpecbuildError
from specbuild.package import run_package
from specbuild.pair import open_pair
from specbuild.quantize import run_quantize
from specbuild.tokenizer import count_ids, load_tokenizer
from specbuild.triton.client import check_range
from specbuild.triton.contract import PUBLIC
from specbuild.triton.server import find_address, make_scratch
from specbuild.verify import run_verify


def changed_model(make_model, directory, **config):
    """A copy of a tiny model with other values in its config.json."""
    shutil.copytree(make_model("llama", num_hidden_layers=1), directory)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return directory


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("architectures", value) for value in (3, "LlamaForCausalLM", [{}], {"a": 1}, [], None)],
        *itertools.product(("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size"), ("4", 2.0, -1, 0, True)),
        ("hidden_size", None), ("max_position_embeddings", None), ("max_position_embeddings", "128"), ("head_dim", "16"),
        ("rms_norm_eps", "1e-5"), ("rms_norm_eps", 0), ("rope_theta", "abc"), ("rope_theta", 0), ("tie_word_embeddings", "yes"),
        ("rope_parameters", "linear"), ("rope_parameters", {"full_attention": {"rope_type": "linear", "factor": 2.0}}),
        ("rope_scaling", {"rope_type": "ntk", "factor": 2.0}),
    ],
)  # fmt: skip
def test_a_config_json_of_the_wrong_kind_is_one_line(make_model, write_pair_yaml, tmp_path, key, value):
    model = changed_model(make_model, tmp_path / "model", **{key: value, **({"rope_parameters": None} if key == "rope_theta" else {})})
    with pytest.raises(SpecbuildError, match=r"^Cannot [^\n]*$"):
        check_pair(load_config(write_pair_yaml(tmp_path, draft={"model": str(model)})))


@pytest.mark.parametrize("window", [0, -5, "8", 2.5])
def test_a_window_is_a_whole_number_or_null(make_model, write_pair_yaml, tmp_path, window):
    shutil.copytree(make_model("mistral", sliding_window=8), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": window}))
    with pytest.raises(CheckpointError, match="sliding_window"):
        check_pair(load_config(write_pair_yaml(tmp_path, draft={"model": str(tmp_path / "model")})))


@pytest.mark.parametrize("value", ["</s>", [[1]], -3, 1.5])
def test_end_ids_are_ids(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match="eos_token_id"):
        find_end_ids(tmp_path)


@pytest.mark.parametrize(
    "shapes", [{"k_proj": (48, 64), "v_proj": (16, 64)}, {"k_proj": (32, 32)}, {"q_proj": (96, 64), "k_proj": (16, 64), "v_proj": (16, 64)}]
)
def test_q_k_and_v_are_checked_apart(make_model, write_pair_yaml, tmp_path, shapes):
    """Their rows add up to the joined matrix, or their columns differ."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(make_model("llama", num_hidden_layers=1), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for name, shape in shapes.items():
        tensors[f"model.layers.0.self_attn.{name}.weight"] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    assert HFCheckpoint.open(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"expected \("):
        run_convert(load_config(write_pair_yaml(tmp_path, draft={"model": str(tmp_path / "model")})), "draft")


@pytest.mark.parametrize(
    "text",
    [
        "name: a\nname: b\n", "name: a\nbuild: {max_seq_len: 100, max_seq_len: 200}\n", "name: 2020-13-45\n",
        "name: " + "1" * 5000, "[" * 2000,
        'name: a\nworkdir: "a\\0b"\n',
    ],
    ids=["twice", "twice in a section", "no date", "huge number", "deep", "control character"],
)  # fmt: skip
def test_yaml_that_is_odd_is_one_line(tmp_path, text):
    (tmp_path / "pair.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^Cannot (use|read) config [^\n]*$"):
        load_config(tmp_path / "pair.yaml")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_workdir_that_cannot_be_is_one_line(write_pair_yaml, tmp_path, cli, place):
    (tmp_path / "file").write_text("")
    code, _, error = cli("convert", write_pair_yaml(tmp_path, workdir=str(tmp_path / place)), "--only", "draft")
    assert (code, error.count("\n")) == (1, 1)
    assert error.startswith("Error: Cannot use ")


@pytest.mark.parametrize("options", [["--prompt", b"\xff"], ["--prompt", "x", "--stop", b"\xff"]], ids=["--prompt", "--stop"])
def test_arguments_that_are_not_utf8_are_one_line(tiny_pair, options):
    arguments = ["generate", str(tiny_pair.path), *options]
    done = subprocess.run(
        [sys.executable, "-c", "from specbuild.cli import main; main()", *arguments], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(b"Error: ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2**31),
        ("max_tokens", 4294967297),
        ("top_k", 10**21),
        ("num_draft_tokens", 2**32),
        ("top_p", 1e-50),
        ("temperature", 1e300),
    ],
)
def test_numbers_that_would_wrap_around_on_the_wire_are_refused(name, value):
    spec = next(spec for spec in PUBLIC.inputs if spec.name == name)
    with pytest.raises(ConfigError, match=rf"Cannot send {name}="):
        check_range(spec, value)
    check_range(spec, 1)


@pytest.mark.parametrize("address", ["", "::1", "::", "[::1]", "no such host"])
def test_an_address_is_ipv4_or_a_name_of_one(address):
    with pytest.raises(ServingError, match=r"^Cannot listen on [^\n]*Use 127\.0\.0\.1"):
        find_address(address)
    assert find_address("localhost") == "127.0.0.1"


def test_paths_given_to_the_server_hold_no_space(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a b"))
    with make_scratch() as scratch:
        assert " " not in scratch


def test_a_tokenizer_with_a_gap_counts_to_its_last_id(make_model, tmp_path):
    shutil.copy(make_model("llama") / "tokenizer.json", tmp_path)
    path = tmp_path / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["vocab"]["zz"] = 300
    path.write_text(json.dumps(values))
    assert count_ids(load_tokenizer(tmp_path)) == 301


PROMPTS = ["def read_file(path): return open(path)", "class Reader: the file is read line by line"]


def changed_yaml(tiny_pair, tmp_path, **changes):
    """The built tiny pair under a YAML with other values."""
    values = yaml.safe_load(tiny_pair.path.read_text())
    for key, value in changes.items():
        values[key] = {**values[key], **value}
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(values))
    return load_config(tmp_path / "pair.yaml")


@pytest.mark.parametrize("changes", [{"draft_len": 0}, {"acceptance": "exact"}, {"drafter": "ngram"}], ids=lambda value: next(iter(value)))
def test_verify_passes_whatever_is_drafted(tiny_pair, tmp_path, changes):
    pair = open_pair(changed_yaml(tiny_pair, tmp_path, speculation=changes))
    assert (pair.draft is None) == ("drafter" in changes)
    report = run_verify(pair, PROMPTS, 16, (pair.draft_len,))
    assert report.passed
    assert report.identical == 2
    assert report.self_draft_acceptance == (None if pair.draft_len == 0 else 1.0)


def test_verify_of_one_token_has_nothing_to_draft_and_passes(tiny_pair):
    report = run_verify(open_pair(tiny_pair), PROMPTS, 1)
    assert report.passed
    assert report.self_draft_acceptance is None


def test_verify_refuses_a_draft_length_that_the_engine_was_not_built_for(tiny_pair):
    with pytest.raises(ConfigError, match=r"Cannot draft 16 tokens: .* 0 to 8"):
        run_verify(open_pair(tiny_pair), PROMPTS, 16, (16,))


def test_shipped_prompts_are_cut_to_a_small_context(tiny_pair):
    pair = open_pair(tiny_pair)
    report = run_verify(pair, ["def " * 300], 16, (4,), cut=True)
    assert report.passed
    with pytest.raises(ConfigError, match="context"):
        run_verify(pair, ["def " * 300], 16, (4,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"build": {"max_seq_len": 64}}, "max_seq_len 256, .* says 64"),
        ({"build": {"kernels": "fast"}}, "kernels 'width-independent', .* says 'fast'"),
        ({"target": {"quantize": {"scheme": "full_prec"}}}, "scheme 'int4_awq', .* says 'full_prec'"),
        ({"draft": {"dtype": "float16"}}, "dtype 'bfloat16', .* says 'float16'"),
    ],
    ids=str,
)
def test_what_was_built_from_another_yaml_is_not_used(tiny_pair, tmp_path, changes, message):
    config = changed_yaml(tiny_pair, tmp_path, **changes)
    for use in (open_pair, run_package):
        with pytest.raises(ConfigError, match=rf"Cannot use .* was made for {message}"):
            use(config)


@pytest.mark.parametrize(
    ("changes", "stage", "message"),
    [
        ({"draft": {"quantize": {"scheme": "full_prec"}}}, run_build, "scheme 'int8_wo', .* says 'full_prec'"),
        ({"draft": {"dtype": "float16"}}, run_build, "dtype 'bfloat16', .* says 'float16'"),
        ({"draft": {"dtype": "float16"}}, run_quantize, "dtype 'bfloat16', .* says 'float16'"),
    ],
)
def test_a_stage_does_not_go_on_from_what_another_yaml_made(tiny_pair, tmp_path, changes, stage, message):
    with pytest.raises(ConfigError, match=rf"Cannot use .* was made for {message}"):
        stage(changed_yaml(tiny_pair, tmp_path, **changes), "draft")


def test_another_model_of_the_same_shape_is_noticed(tiny_pair, tmp_path, make_model):
    other = str(make_model("llama", seed=5, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="was made for model"):
        open_pair(changed_yaml(tiny_pair, tmp_path, draft={"model": other}))


@pytest.mark.parametrize(
    ("role", "changes"),
    [
        ("target", {"kv_cache_quant_algo": "INT8"}), ("target", {"quant_algo": None}), ("target", {"has_zero_point": True}),
        ("target", {"pre_quant_scale": False}), ("target", {"exclude_modules": []}), ("draft", {"group_size": 64}),
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_that_says_another_format_is_not_built(tiny_pair, write_pair_yaml, tmp_path, role, changes):
    config = load_config(write_pair_yaml(tmp_path))
    shutil.copytree(tiny_pair.dir_of(role, "quantized"), config.dir_of(role, "quantized"))
    path = config.dir_of(role, "quantized") / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "quantization": {**values["quantization"], **changes}}))
    with pytest.raises(SpecbuildError, match=r"^Cannot build [^\n]*quantization\."):
        run_build(config, role)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "changes", [{"factor": "8"}, {"factor": -8.0}, {"low_freq_factor": 0}, {"original_max_position_embeddings": [64]}], ids=str
)
def test_rotary_settings_are_positive_numbers(make_model, write_pair_yaml, tmp_path, changes):
    model = changed_model(make_model, tmp_path / "model", rope_parameters={**LLAMA3, **changes})
    with pytest.raises(CheckpointError, match=rf"rotary {next(iter(changes))} is"):
        check_pair(load_config(write_pair_yaml(tmp_path, draft={"model": str(model)})))


def test_linear_scaling_stretches_the_context(make_model, write_pair_yaml, tmp_path):
    """As TensorRT-LLM deduces it: max_position_embeddings times the factor."""
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    model = changed_model(make_model, tmp_path / "model", max_position_embeddings=128, rope_parameters=rope)
    assert check_pair(load_config(write_pair_yaml(tmp_path, target={"model": str(model)}, build={"max_seq_len": 512})))
    with pytest.raises(ConfigError, match="the target has 512 positions"):
        check_pair(load_config(write_pair_yaml(tmp_path, target={"model": str(model)}, build={"max_seq_len": 513})))


def test_an_unknown_drafter_is_one_line_for_every_command(tiny_pair, tmp_path):
    with pytest.raises(ConfigError, match="drafter 'bigram'"):
        open_pair(changed_yaml(tiny_pair, tmp_path, speculation={"drafter": "bigram"}))


def test_empty_stop_strings_are_refused(tiny_pair):
    result = CliRunner().invoke(group, ["generate", str(tiny_pair.path), "--prompt", "x", "--stop", ""])
    assert isinstance(result.exception, ConfigError)
