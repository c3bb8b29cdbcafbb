"""scripts/grow_target.py: a larger model, the same function."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from specbuild.artifacts import HFCheckpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "grow_target.py"
SOURCE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
WIDE = ("--hidden", 256, "--parameters", 4e6)  # 5 layers


@pytest.fixture
def grow(tmp_path, monkeypatch, capsys):
    """Run the script; return (directory, what it printed). SystemExit where it fails."""

    def run(source, *options, out=tmp_path / "grown"):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--source", str(source), "--out", str(out), *map(str, options)])
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        if leaving.value.code:
            raise leaving.value
        return out, capsys.readouterr().out

    return run


def load(directory):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def tensors_of(directory):
    return {name: entry.load().float() for name, entry in HFCheckpoint.open(directory).entries.items()}


@pytest.mark.parametrize(
    ("options", "config"),
    [
        (WIDE, {}),
        (WIDE, {"tie_word_embeddings": True}),
        (WIDE, {"attention_bias": True, "mlp_bias": True}),
        (WIDE, {"dtype": "bfloat16"}),
        (("--hidden", 64, "--parameters", 3e5), {}),  # deeper only
        (("--hidden", 1024, "--parameters", 2.4e7), {}),  # wider only
    ],
    ids=["untied", "tied", "biases", "bfloat16", "deeper", "wider"],
)
def test_the_logits_are_those_of_the_source(options, config, make_model, grow):
    source = make_model("llama", **SOURCE, **config)
    out, _ = grow(source, *options)
    ids = torch.randint(0, 101, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, after = (load(directory)(input_ids=ids).logits for directory in (source, out))
    assert torch.allclose(before, after, atol=1e-4, rtol=0), (before - after).abs().max()
    assert torch.equal(before.argmax(-1), after.argmax(-1))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_it_is_as_large_as_it_says(tied, make_model, grow):
    out, printed = grow(make_model("llama", **SOURCE, tie_word_embeddings=tied), *WIDE)
    config, model = json.loads((out / "config.json").read_text()), load(out)
    assert (config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]) == (5, 256, 768)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (16, 8, 16)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f" {count} parameters" in printed
    assert abs(count - 4e6) < sum(parameter.numel() for parameter in model.model.layers[0].parameters()) / 2
    assert "another likeliest token at 0 of" in printed


def test_new_weights_cost_what_old_ones_do_and_write_nothing(make_model, grow):
    source = make_model("llama", **SOURCE)
    out, _ = grow(source, *WIDE)
    old, new = tensors_of(source), tensors_of(out)
    for layer, kept in enumerate([0, None, 1, None, None]):  # the old layers lie evenly among the added ones
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            weight, like = new[f"model.layers.{layer}.{part}.weight"], old[f"model.layers.{kept or 0}.{part}.weight"]
            assert (weight != 0).all()
            outside = weight[like.shape[0] :]
            assert outside.std().item() == pytest.approx(like.std().item(), rel=0.1)
            assert torch.equal(weight[: like.shape[0], : like.shape[1]], like) == (kept is not None)
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            weight, like = new[f"model.layers.{layer}.{part}.weight"], old[f"model.layers.{kept or 0}.{part}.weight"]
            rest = weight.clone()
            if kept is not None:
                assert torch.equal(weight[: like.shape[0], : like.shape[1]], like)
                rest[: like.shape[0], : like.shape[1]] = 0
            assert (rest == 0).all()
    assert (new["model.embed_tokens.weight"][:, 64:] == 0).all()
    assert (new["lm_head.weight"] != 0).all()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(make_model, tmp_path):
    source, files = make_model("llama", **SOURCE), []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        runpy.run_path(str(SCRIPT))["grow"](source, tmp_path / name, 256, 2e6, seed)
        files.append((tmp_path / name / "model-00001-of-00001.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_shards_are_cut_where_they_are_full():
    script = runpy.run_path(str(SCRIPT))
    specs = [script["TensorSpec"](str(index), "BF16", (100_000_000,)) for index in range(5)]  # 200 MB each
    items = [script["Grown"](spec, spec.name, False) for spec in specs]
    assert [len(shard) for shard in script["split_shards"](items)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mistral", (), "Cannot grow .* it is a MistralForCausalLM, expected a LlamaForCausalLM. Use a Llama."),
        ("llama", ("--hidden", 128), "Cannot grow 64 channels to 128: that is 2 times as many, expected 1, 4, 16 .* Use --hidden 256."),
        ("llama", ("--hidden", 32), "that is 0.5 times as many"),
        ("llama", ("--hidden", 256, "--parameters", 1e6), "Cannot grow to 1e[+]06 parameters: 2 layers of 256 channels have [0-9]+, "),
    ],
    ids=["family", "ratio", "narrower", "parameters"],
)
def test_what_cannot_be_grown_is_refused(kind, options, message, make_model, grow, tmp_path):
    with pytest.raises(SystemExit, match=message):
        grow(make_model(kind), *options)
    assert not (tmp_path / "grown").exists()


def test_a_directory_of_something_else_is_not_replaced(make_model, grow, tmp_path):
    other = shutil.copytree(make_model("llama"), tmp_path / "mine")
    with pytest.raises(SystemExit, match=r"Cannot write .*mine: it is there and was not made by this script"):
        grow(make_model("llama"), *WIDE, out=other)
    assert (other / "model.safetensors").exists()
