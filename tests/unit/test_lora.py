"""LoRA adapters are merged while converting: W + scale * B @ A, or refused by name."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.errors import CheckpointError, ConfigError

PREFIX = "base_model.model."
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (64, 64), DOWN: (64, 128)}
PLAIN = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None,
    "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True,
}  # fmt: skip


def make_tensors(ranks=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for module, (rows, columns) in SHAPES.items():
        rank = (ranks or {}).get(module, 4)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator).to(dtype)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator).to(dtype)
    return tensors


def write_adapter(directory, tensors=None, pickled=False, **config):
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({**PLAIN, **config}))
    tensors = make_tensors() if tensors is None else tensors
    if pickled:
        torch.save(tensors, directory / "adapter_model.bin")
    else:
        save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture
def make_config(make_model, write_pair_yaml, tmp_path):
    """Return make(**target): a configuration of a float32 target without quantization."""

    def make(**target):
        values = {"model": str(make_model()), "dtype": "float32", "quantize": {"scheme": "full_prec"}, **target}
        return load_config(write_pair_yaml(tmp_path, target=values))

    return make


@pytest.fixture
def merged(make_config):
    """Convert with the adapter `adapter` beside the YAML; return the tensors."""

    def run(**target):
        config = make_config(**{"merge_lora": "adapter", **target})
        run_convert(config, "target", force=True)
        return load_file(config.dir_of("target", "checkpoint") / "rank0.safetensors")

    return run


def assert_merged(found, plain, tensors, scales):
    """Only the two weights differ from the plain ones, each by its scaled product."""
    expected = dict(plain)
    for module, name, rows in ((Q, "transformer.layers.0.attention.qkv.weight", 64), (DOWN, "transformer.layers.1.mlp.proj.weight", 64)):
        a, b = (tensors[f"{PREFIX}{module}.lora_{letter}.weight"].double() for letter in "AB")
        expected[name] = plain[name].clone()
        expected[name][:rows] = (plain[name][:rows].double() + scales[module] * b @ a).float()
    assert found.keys() == plain.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)
        assert name.endswith(("qkv.weight", "mlp.proj.weight")) or torch.equal(found[name], plain[name])
    assert not torch.equal(found["transformer.layers.0.attention.qkv.weight"], plain["transformer.layers.0.attention.qkv.weight"])


SCALES = {
    "alpha over rank": ({}, {}, {Q: 2.0, DOWN: 2.0}),
    "rank-stabilized": ({"use_rslora": True}, {}, {Q: 4.0, DOWN: 4.0}),
    "own rank of a module": ({"rank_pattern": {"q_proj": 2}}, {Q: 2}, {Q: 4.0, DOWN: 2.0}),
    "own alpha of a module": ({"alpha_pattern": {"layers.1.mlp.down_proj": 3}}, {}, {Q: 2.0, DOWN: 0.75}),
    "patterns are regular expressions": ({"alpha_pattern": {r"model\.layers\.\d+\.self_attn\..*": 16}}, {}, {Q: 4.0, DOWN: 2.0}),
    "a pattern names ends of names, not parts": ({"alpha_pattern": {"_proj": 99, "proj": 99}}, {}, {Q: 2.0, DOWN: 2.0}),
    "both, rank-stabilized": (
        {"rank_pattern": {DOWN: 8}, "alpha_pattern": {DOWN: 5}, "use_rslora": True}, {DOWN: 8}, {Q: 4.0, DOWN: 5 / math.sqrt(8)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "ranks", "scales"), SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
def test_a_merged_weight_is_the_base_plus_the_scaled_product(merged, tmp_path, pickled, config, ranks, scales):
    tensors = make_tensors(ranks)
    write_adapter(tmp_path / "adapter", tensors, pickled, **config)
    assert_merged(merged(), merged(merge_lora=None), tensors, scales)


def test_the_sum_is_made_in_float32_and_cast_once(merged, tmp_path, make_model):
    tensors = make_tensors(dtype=torch.bfloat16)
    write_adapter(tmp_path / "adapter", tensors)
    base = make_model(dtype="bfloat16")
    found = merged(model=str(base), dtype="bfloat16")["transformer.layers.1.mlp.proj.weight"]
    a, b = (tensors[f"{PREFIX}{DOWN}.lora_{letter}.weight"].float() for letter in "AB")
    expected = (load_file(base / "model.safetensors")[f"{DOWN}.weight"].float() + 2 * (b @ a)).bfloat16()
    assert torch.equal(found, expected)


REFUSED = {
    "DoRA": ({"use_dora": True}, None, "DoRA adapter .*use_dora is True"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, None, "fan_in_fan_out is True, expected False"),
    "biases": ({"bias": "lora_only"}, None, "bias is 'lora_only', expected 'none'"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, None, "modules_to_save is .'lm_head'., expected None"),
    "another kind": ({"peft_type": "LOHA"}, None, "peft_type is 'LOHA', expected 'LORA'"),
    "layer_replication": ({"layer_replication": [[0, 1]]}, None, "layer_replication is"),
    "an initialization that changes the base": ({"init_lora_weights": "pissa_niter_4"}, None, "'pissa_niter_4', which changes the base"),
    "no alpha": ({"lora_alpha": None}, None, "lora_alpha of .* is None, expected a number above 0"),
    "another rank": ({"r": 8}, None, r"q_proj has lora_A \(4, 64\) and lora_B \(64, 4\), expected rank 8 for \(64, 64\)"),
    "an embedding": ({}, {f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(4, 101)}, "lora_embedding_A matches no weight"),
    "a module that is not there": ({}, {f"{PREFIX}model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}, "9.* matches no"),
    "a magnitude": ({}, {f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector matches no weight"),
    "a bias": ({}, {f"{PREFIX}{Q}.bias": torch.ones(64)}, r"q_proj\.bias matches no weight"),
    "half a pair": ({}, {f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}, "up_proj has only lora_A"),
    "integers": ({}, {f"{PREFIX}{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)}, "is I8, expected floats"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "more", "match"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_is_more_than_products_is_refused_by_name(merged, tmp_path, config, more, match):
    write_adapter(tmp_path / "adapter", {**make_tensors(), **(more or {})}, **config)
    with pytest.raises(CheckpointError, match=rf"^Cannot merge [^\n]*{match}[^\n]*\.$"):
        merged()
    assert not (tmp_path / "work").exists()


def test_an_adapter_without_tensors_is_refused(merged, tmp_path):
    write_adapter(tmp_path / "adapter", {})
    with pytest.raises(CheckpointError, match="holds no tensors"):
        merged()


@pytest.mark.parametrize("command", ["check", "convert"])
def test_a_directory_that_is_no_adapter_is_one_line(cli, make_config, tmp_path, command):
    (tmp_path / "adapter").mkdir()
    make_config(merge_lora="adapter")
    code, _, err = cli(command, tmp_path / "pair.yaml")
    assert (code, err.count("\n")) == (1, 1)
    assert "expected adapter_config.json and adapter_model.safetensors or adapter_model.bin" in err


# --- the option, and what is remembered of a merge


def test_the_option_merges_like_the_key(cli, make_config, merged, tmp_path, monkeypatch):
    write_adapter(tmp_path / "adapter")
    by_key = merged()
    config = make_config(merge_lora=None)
    monkeypatch.chdir(tmp_path)
    assert cli("convert", "pair.yaml", "--only", "target", "--merge-lora", "adapter", "--force")[0] == 0
    found = load_file(config.dir_of("target", "checkpoint") / "rank0.safetensors")
    assert all(torch.equal(found[name], by_key[name]) for name in by_key)
    make_config(merge_lora="adapter")  # the key that the option's record stands for
    assert "is up to date" in cli("convert", "pair.yaml", "--only", "target")[2]


def test_the_option_needs_a_role(cli, make_config, tmp_path):
    make_config()
    code, _, err = cli("convert", tmp_path / "pair.yaml", "--merge-lora", tmp_path)
    assert code == 2
    assert "--merge-lora needs --only" in err


def test_a_merge_is_not_undone_without_a_word(make_config, merged, tmp_path):
    write_adapter(tmp_path / "adapter")
    merged()
    config = make_config(merge_lora=None)
    with pytest.raises(ConfigError, match=r"made with one, .* names none\. Add merge_lora: adapter under target, or use --force\."):
        run_convert(config, "target")
    assert run_convert(config, "target", force=True)
    assert not run_convert(config, "target")


def test_the_record_has_the_key_only_when_it_is_set_and_the_adapters_files(make_config, tmp_path):
    def record(**target):
        config = make_config(**target)
        run_convert(config, "target", force=True)
        return json.loads((config.dir_of("target", "checkpoint") / "specbuild.json").read_text())

    write_adapter(tmp_path / "adapter")
    plain, with_adapter = record(), record(merge_lora="adapter")
    assert set(plain["parameters"]) == {"model", "revision", "dtype", "tp", "pp", "dequantize"}
    assert set(plain["inputs"]) == {"model"}
    assert with_adapter["parameters"]["merge_lora"] == "adapter"
    assert set(with_adapter["inputs"]) == {"model", "adapter"}


def test_a_changed_adapter_makes_the_checkpoint_anew(make_config, tmp_path):
    write_adapter(tmp_path / "adapter")
    config = make_config(merge_lora="adapter")
    assert run_convert(config, "target")
    assert not run_convert(config, "target")
    save_file({name: tensor + 1 for name, tensor in make_tensors().items()}, tmp_path / "adapter" / "adapter_model.safetensors")
    assert run_convert(config, "target")


def test_an_expanded_model_takes_an_adapter(merged, make_model, tmp_path):
    import packed_writers

    written = packed_writers.write_gptq(make_model(dtype="float16"), tmp_path / "packed")
    tensors = make_tensors()
    write_adapter(tmp_path / "adapter", tensors)
    settings = {"model": str(written.directory), "dequantize": True}
    assert_merged(merged(**settings), merged(merge_lora=None, **settings), tensors, {Q: 2.0, DOWN: 2.0})


def test_an_adapter_of_a_tied_lm_head_is_refused(make_model, write_pair_yaml, tmp_path):
    """The file may hold an lm_head that the model does not use."""
    directory = tmp_path / "tied"
    shutil.copytree(make_model("llama", tie_word_embeddings=True), directory)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tensors = {"base_model.model.lm_head.lora_A.weight": torch.randn(4, 64), "base_model.model.lm_head.lora_B.weight": torch.randn(101, 4)}
    write_adapter(tmp_path / "adapter", tensors, r=4)
    config = load_config(write_pair_yaml(tmp_path, target={"model": str(directory), "merge_lora": "adapter"}))
    with pytest.raises(CheckpointError, match=r"it changes lm_head\.weight, which a tied model does not have"):
        run_convert(config, "target")
