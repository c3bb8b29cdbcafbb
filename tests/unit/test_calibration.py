"""Calibration: the text, modelopt's scales found layer by layer, and GPTQ's integers."""

import contextlib
import copy
import io
import json
import re
import shutil
import subprocess
import sys
import warnings
import weakref
from dataclasses import replace

import gptq_oracle
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specbuild import calibration, decoder
from specbuild.artifacts import TllmCheckpoint
from specbuild.calibration import HOLD_OUT, calibrate, load_text, load_texts
from specbuild.config import CalibrationConfig, QualityConfig, QuantizeConfig, load_config
from specbuild.convert import run_convert
from specbuild.errors import CheckpointError, ConfigError
from specbuild.quant import SCHEMES
from specbuild.quant.gptq import round_gptq
from specbuild.quant.packing import unpack_rows
from specbuild.quantize import run_quantize
from specbuild.shape import ModelShape

RECIPES = {"int4_awq": "INT4_AWQ_CFG", "int8_sq": "INT8_SMOOTHQUANT_CFG"}
PARTS = {"self_attn.q_proj": "attention.qkv", "self_attn.k_proj": "attention.qkv", "self_attn.v_proj": "attention.qkv",
         "self_attn.o_proj": "attention.dense", "mlp.gate_proj": "mlp.fc", "mlp.up_proj": "mlp.gate",
         "mlp.down_proj": "mlp.proj"}  # fmt: skip
SHAPE = ModelShape("LlamaForCausalLM", 2, 64, 128, 4, 2, 16, 101, 512, 1e4, 1e-5)
TEXT = "the optional file is read line by line, then closed again; import os, sys"


def settings(scheme="int4_awq", group_size=32, samples=8, max_length=32, **more):
    return QuantizeConfig(
        scheme=scheme, group_size=group_size, calibration=CalibrationConfig(samples=samples, max_length=max_length), **more
    )


def sequences(count, length, seed=0):
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(1, 101, length)] for _ in range(count)]


@pytest.fixture(scope="module")
def converted(make_model, write_pair_yaml, tmp_path_factory):
    """Return convert(kind, changes, **target): the checkpoint of a tiny model."""

    def convert(kind="llama", changes=(), **target):
        values = {"dtype": "float32", **target, "model": str(make_model(kind, **dict(changes)))}
        config = load_config(write_pair_yaml(tmp_path_factory.mktemp("calibration"), target=values))
        run_convert(config, "target")
        return TllmCheckpoint.open(config.dir_of("target", "checkpoint"))

    return convert


# --- scales, against modelopt over the whole model


def whole_model_scales(directory, recipe, group_size, batches):
    """modelopt's own path: transformers' model, quantized whole; q, k and v then share the mean, as its exporter has it."""
    import transformers

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq

        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        config = copy.deepcopy(getattr(mtq, recipe))
        for entry in config["quant_cfg"]:
            blocks = (entry.get("cfg") or {}).get("block_sizes")
            if blocks:
                blocks[-1] = group_size
        mtq.quantize(model, config, lambda m: [m(torch.tensor(batch)) for batch in batches])
    found = {}
    for index, layer in enumerate(model.model.layers):
        for part, name in PARTS.items():
            quantizer = layer.get_submodule(part).input_quantizer
            scale = quantizer._pre_quant_scale.float().reshape(-1)
            amax = quantizer.amax.float().reshape(1) / 127 if quantizer.is_enabled else None
            found.setdefault(f"transformer.layers.{index}.{name}", []).append((scale, amax))
    return {name: (torch.stack([s for s, _ in each]).mean(dim=0), each[0][1]) for name, each in found.items()}


@pytest.mark.parametrize("together", [1, 6], ids=["a sequence a call", "all in one call"])
@pytest.mark.parametrize("scheme", RECIPES)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"num_hidden_layers": 3}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_size": 96, "intermediate_size": 160}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma2", {"head_dim": 16, "pad_token_id": None, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    ],
    ids=["llama", "llama with biases", "mistral", "qwen2", "qwen3", "gemma2"],
)
def test_scales_found_layer_by_layer_are_those_of_modelopt_over_the_whole_model(
    converted, make_model, tmp_path, monkeypatch, scheme, kind, changes, together
):
    """To 1e-3 of each scale: both run in float32, in which the order of sums differs, and AWQ's best exponent is one of eleven.

    Both get the same sequences in the same calls, over which AWQ averages.
    """
    monkeypatch.setattr(decoder, "CHUNK", 24 * together)
    tokens = sequences(6, 24)
    expected = whole_model_scales(
        make_model(kind, **changes), RECIPES[scheme], 32, [tokens[i : i + together] for i in range(0, 6, together)]
    )
    found = calibrate(converted(kind, changes.items()), SCHEMES[scheme], settings(scheme), tokens, tmp_path / "scratch", "tiny")
    assert found.keys() == expected.keys()
    for name, (prequant, activation) in expected.items():
        assert not bool((prequant == 1).all())
        torch.testing.assert_close(found[name].prequant, prequant, rtol=1e-3, atol=0)
        if scheme == "int8_sq":
            torch.testing.assert_close(found[name].activation, activation, rtol=1e-3, atol=0)
        else:
            assert found[name].activation is None


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("scheme", RECIPES)
def test_scales_do_not_depend_on_how_the_checkpoint_is_split(converted, tmp_path, scheme, ranks):
    tokens = sequences(4, 24)
    changes = {"num_hidden_layers": 2, "vocab_size": 101}.items()
    whole = calibrate(converted("llama", changes), SCHEMES[scheme], settings(scheme), tokens, tmp_path / "scratch", "tiny")
    split = calibrate(converted("llama", changes, **ranks), SCHEMES[scheme], settings(scheme), tokens, tmp_path / "scratch", "tiny")
    assert split.keys() == whole.keys()
    assert all(torch.equal(split[name].prequant, whole[name].prequant) for name in whole)


@pytest.mark.parametrize("chunk", [1, 24, 64, 4096])
def test_sequences_of_any_length_together_leave_no_padding_in_the_statistics(converted, tmp_path, monkeypatch, chunk):
    """Q-04. The largest activation of each input is that of the tokens alone, however sequences are grouped."""
    monkeypatch.setattr(decoder, "CHUNK", chunk)
    tokens = [sequence[:length] for sequence, length in zip(sequences(6, 40), (3, 40, 9, 1, 17, 40), strict=True)]
    source = converted()
    found = calibrate(source, SCHEMES["int8_sq"], settings("int8_sq"), tokens, tmp_path / "scratch", "tiny")
    norm = load_file(source.rank_files[0])["transformer.layers.0.input_layernorm.weight"]
    embedding = load_file(source.rank_files[0])["transformer.vocab_embedding.weight"]
    seen = torch.cat([embedding[torch.tensor(sequence)] for sequence in tokens])
    inputs = torch.nn.functional.rms_norm(seen, (64,), norm, source.shape.norm_eps)
    expected = (1 / inputs.abs().amax(dim=0)).clamp(1e-4, 1e4)  # SmoothQuant at alpha 1
    torch.testing.assert_close(found["transformer.layers.0.attention.qkv"].prequant, expected, rtol=1e-4, atol=0)


# --- GPTQ


@pytest.mark.parametrize("group_size", [8, 16, 32])
@pytest.mark.parametrize("rank", [32, 12], ids=["inputs of full rank", "correlated inputs"])
def test_gptq_rounds_as_the_paper_derives_it(group_size, rank):
    rng = np.random.default_rng(group_size + rank)
    inputs = (rng.normal(size=(200, rank)) @ rng.normal(size=(rank, 32))).astype(np.float32)
    weight = rng.normal(size=(24, 32)).astype(np.float32)
    q, scale = round_gptq(torch.from_numpy(weight), torch.from_numpy(inputs.T @ inputs), group_size)
    expected, scales = gptq_oracle.round_columns(weight, inputs, group_size)
    assert (q.numpy() == expected).mean() > 0.995  # float32 may round a tie the other way
    np.testing.assert_allclose(scale.numpy(), scales, rtol=2e-2)
    assert q.dtype == torch.int8
    assert int(q.min()) >= -8
    assert int(q.max()) <= 7


def test_gptq_changes_outputs_less_than_rounding_to_nearest():
    rng = np.random.default_rng(3)
    inputs = torch.from_numpy((rng.normal(size=(500, 20)) @ rng.normal(size=(20, 64))).astype(np.float32))
    weight = torch.from_numpy(rng.normal(size=(48, 64)).astype(np.float32))
    errors = []
    for rounded in (round_gptq(weight, inputs.T @ inputs, 32), SCHEMES["int4_awq"].levels(SCHEMES["int4_awq"].quantize(weight, 32, None))):
        q, scale = rounded if isinstance(rounded, tuple) else (rounded.q, rounded.scale)
        back = (q.reshape(48, 2, 32) * scale[:, :, None]).reshape(48, 64)
        errors.append(float((inputs @ (back - weight).T).norm()))
    assert errors[0] < 0.7 * errors[1]


def test_gptq_takes_inputs_that_are_always_zero_and_rows_of_zeros():
    inputs = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    inputs[:, 5] = 0
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    q, scale = round_gptq(weight, inputs.T @ inputs, 16)
    assert bool(scale.isfinite().all())
    assert not q[3].any()


@pytest.mark.parametrize("ranks", [{}, {"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_gptq_integers_are_stored_in_the_portable_layout_on_every_rank(make_model, write_pair_yaml, tmp_path, ranks):
    section = {"scheme": "int4_awq", "group_size": 32, "rounding": "gptq", "calibration": {"samples": 8, "max_length": 32},
               "quality": {"samples": 2}}  # fmt: skip
    made = {}
    for name, split in (("whole", {}), ("split", ranks)):
        (tmp_path / name).mkdir()
        target = {"model": str(make_model()), "dtype": "float32", "quantize": section, **split}
        config = load_config(write_pair_yaml(tmp_path / name, target=target))
        run_convert(config, "target")
        run_quantize(config, "target")
        made[name] = TllmCheckpoint.open(config.dir_of("target", "quantized"))
    files = {path.name for path in made["split"].directory.iterdir()}
    assert files == {"config.json", "specbuild.json", "quality.json", "quality.png", *(path.name for path in made["split"].rank_files)}
    one, other = (decoder.Decoder(made[name]) for name in ("whole", "split"))
    for index in range(2):
        for (name, whole), split in zip(one.layer(index).linears().items(), other.layer(index).linears().values(), strict=True):
            assert torch.equal(whole.weight, split.weight), name
    tensors = load_file(made["whole"].rank_files[0])
    assert bool((tensors["transformer.layers.0.mlp.fc.prequant_scaling_factor"] == 1).all())
    plain = load_file(make_model() / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    q = unpack_rows(tensors["transformer.layers.0.mlp.fc.weight"])
    nearest = SCHEMES["int4_awq"].levels(SCHEMES["int4_awq"].quantize(plain, 32, None)).q
    assert 0.05 < float((q != nearest).float().mean()) < 0.6  # other integers than rounding, but not wild ones


@pytest.mark.parametrize("chunk", [24, 4096], ids=["a sequence a chunk", "one chunk"])
def test_gptq_of_a_model_uses_the_inputs_that_its_quantized_layers_give(converted, make_model, tmp_path, monkeypatch, chunk):
    """Layer 1's integers are the oracle's on the inputs that transformers computes behind a quantized layer 0."""
    import transformers

    monkeypatch.setattr(decoder, "CHUNK", chunk)
    tokens = sequences(16, 24)
    found = calibrate(converted(), SCHEMES["int4_awq"], settings(rounding="gptq"), tokens, tmp_path / "scratch", "tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(make_model(), dtype=torch.float32)
    agreement = {}
    for index, layer in enumerate(model.model.layers):
        inputs = {part: [] for part in PARTS}
        handles = [
            layer.get_submodule(part).register_forward_pre_hook(lambda _, args, part=part, seen=inputs: seen[part].append(args[0][0]))
            for part in PARTS
        ]
        with torch.no_grad():
            for sequence in tokens:
                model(torch.tensor([sequence]))
        for handle in handles:
            handle.remove()
        rounded = {name: found[f"transformer.layers.{index}.{name}"].rounded for name in set(PARTS.values())}
        qkv = [each.split([64, 32, 32]) for each in rounded["attention.qkv"]]
        for part, name in PARTS.items():
            which = "qkv".find(part.removeprefix("self_attn.")[0]) if name == "attention.qkv" else None
            q, scale = rounded[name] if which is None else (qkv[0][which], qkv[1][which])
            weight = layer.get_submodule(part).weight
            expected, _ = gptq_oracle.round_columns(weight.detach().numpy(), torch.cat(inputs[part]).numpy(), 32)
            agreement[index, part] = float((q.numpy() == expected).mean())
            with torch.no_grad():
                weight.copy_((q.reshape(*scale.shape, 32) * scale[:, :, None]).reshape(weight.shape))
    assert min(agreement.values()) > 0.98, agreement


@pytest.mark.parametrize(
    "changes", [{"rounding": "gptq"}, {"calibration": None}, {"group_size": 64}, {"quality": {"samples": 2}}, {"lm_head": True}], ids=str
)
def test_any_change_of_the_quantization_makes_the_checkpoint_anew(write_pair_yaml, make_model, tmp_path, changes):
    section = {"calibration": {"samples": 4, "max_length": 16}, "quality": {"samples": 1}, "group_size": 32}
    model = str(make_model("llama", vocab_size=128))
    config = load_config(write_pair_yaml(tmp_path, target={"model": model, "quantize": section}))
    run_convert(config, "target")
    assert run_quantize(config, "target")
    changed = {**section, **changes}
    assert run_quantize(load_config(write_pair_yaml(tmp_path, target={"model": model, "quantize": changed})), "target")


def test_inputs_that_are_always_zero_leave_scales_that_can_be_stored(make_model, tmp_path, write_pair_yaml):
    source, directory = make_model("llama"), tmp_path / "model"
    shutil.copytree(source, directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].zero_()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    for scheme in RECIPES:
        quantize = {"scheme": scheme, "calibration": {"samples": 4, "max_length": 16}}
        config = load_config(write_pair_yaml(tmp_path, target={"model": str(directory), "quantize": quantize}))
        run_convert(config, "target")
        assert run_quantize(config, "target")


def test_shapes_are_refused_before_anything_is_calibrated(converted, write_pair_yaml, make_model, tmp_path, monkeypatch):
    monkeypatch.setattr("specbuild.quantize.calibrate", None)
    model = str(make_model("llama", hidden_size=96, intermediate_size=160))
    for rounding in ("nearest", "gptq"):
        quantize = {"group_size": 128, "rounding": rounding, "calibration": {"samples": 4}}
        config = load_config(write_pair_yaml(tmp_path, target={"model": model, "quantize": quantize}))
        run_convert(config, "target")
        with pytest.raises(CheckpointError, match="96 input columns per rank are not a multiple of group_size 128"):
            run_quantize(config, "target")


# --- the text


def test_text_files_are_read_in_all_their_forms(tmp_path):
    (tmp_path / "b.jsonl").write_text('"one"\n\n{"text": "two"}\n{"prompt": "three", "id": 4}\n')
    (tmp_path / "a.txt").write_text("four\n\nfive")
    (tmp_path / "c.md").write_text("no")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.txt").write_text("six")
    yaml = tmp_path / "pair.yaml"

    def texts(data):
        return list(load_texts(calibration.find_text_files(data, yaml)))

    assert texts("b.jsonl") == ["one", "two", "three"]
    assert texts(".") == ["four\n\nfive", "one", "two", "three", "six"]
    (tmp_path / "e.jsonl").write_bytes('\ufeff"seven\u2028and\u0085eight"\r\n"nine"\r\n'.encode())
    assert texts("e.jsonl") == ["seven\u2028and\u0085eight", "nine"]
    assert len(texts("builtin")) > 100


@pytest.mark.parametrize(
    ("files", "data", "message"),
    [
        ({}, "absent.jsonl", "is no .jsonl or .txt file, nor a directory of them"),
        ({"a.md": "x"}, ".", "is no .jsonl or .txt file, nor a directory of them"),
        ({"a.jsonl": '"fine"\n{"other": 1}'}, "a.jsonl", "line 2 is no JSON string, nor an object with `text`"),
        ({"a.jsonl": "plain words"}, "a.jsonl", "line 1 is no JSON string"),
        ({"a.jsonl": '"fine"\n"\\ud800 half"'}, "a.jsonl", "line 2 is no JSON string"),
        ({"a.jsonl": "[" * 200000}, "a.jsonl", "line 1 is no JSON string"),
        ({"a.txt": "too short"}, "a.txt", "holds 1 sequences of 8 to 32 tokens, expected at least 8"),
        ({"a.txt": ""}, "a.txt", "holds 0 sequences"),
        ({"a.txt": b"\xff\xfe\x00"}, "a.txt", "Cannot read text"),
    ],
)
def test_text_that_cannot_serve_is_refused_in_one_line(tmp_path, tokenizer, files, data, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    wanted = QuantizeConfig(scheme="int4_awq", calibration=CalibrationConfig(data=data, max_length=32))
    with pytest.raises(ConfigError, match=message) as caught:
        load_text(wanted, tmp_path / "pair.yaml", tokenizer, SHAPE)
    assert "\n" not in str(caught.value)


def test_a_text_of_other_ids_than_the_model_has_is_refused(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(TEXT * 20)
    with pytest.raises(ConfigError, match=r"the tokenizer gives id \d+, the model has 50 rows"):
        load_text(QuantizeConfig(quality=QualityConfig(data="a.txt")), tmp_path / "pair.yaml", tokenizer, replace(SHAPE, vocab=50))


def test_every_eighth_sequence_is_held_out_and_never_calibrated_on(tmp_path, tokenizer):
    lines = [json.dumps(f"{index:03} {TEXT}") for index in range(80)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    wanted = QuantizeConfig(
        scheme="int4_awq", calibration=CalibrationConfig(data="a.jsonl", samples=30, max_length=16), quality=QualityConfig(samples=5)
    )
    text = load_text(wanted, tmp_path / "pair.yaml", tokenizer, SHAPE)
    assert len(text.calibration) == 30
    assert len(text.held_out) == 5
    assert all(8 <= len(sequence) <= 16 for sequence in [*text.calibration, *text.held_out])
    everything = list(calibration._encode([tmp_path / "a.jsonl"], tokenizer, 16))
    assert text.held_out == everything[HOLD_OUT - 1 :: HOLD_OUT][:5]
    assert text.calibration == [sequence for index, sequence in enumerate(everything, 1) if index % HOLD_OUT][:30]


def test_quality_may_have_a_text_of_its_own(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(TEXT * 30)
    (tmp_path / "b.txt").write_text("0123456789 class Reader " * 60)
    wanted = QuantizeConfig(
        scheme="int4_awq", calibration=CalibrationConfig(data="a.txt", max_length=16), quality=QualityConfig(data="b.txt", samples=3)
    )
    text = load_text(wanted, tmp_path / "pair.yaml", tokenizer, SHAPE)
    assert text.held_out == list(calibration._encode([tmp_path / "b.txt"], tokenizer, 16))[:3]
    assert text.calibration[0] == next(iter(calibration._encode([tmp_path / "a.txt"], tokenizer, 16)))


def test_sequences_end_where_the_context_of_the_model_does(tmp_path, tokenizer):
    text = load_text(QuantizeConfig(), tmp_path / "pair.yaml", tokenizer, replace(SHAPE, max_positions=40))
    assert max(map(len, text.held_out)) == 40


@pytest.mark.parametrize("name", ["a.txt", "./a.txt", "link.txt"])
def test_a_text_that_is_both_calibrated_and_measured_on_is_shared_out(tmp_path, tokenizer, name):
    (tmp_path / "a.txt").write_text(" ".join(map(str, range(3000))))
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    wanted = QuantizeConfig(
        scheme="int4_awq", calibration=CalibrationConfig(data="a.txt", samples=100, max_length=16), quality=QualityConfig(data=name)
    )
    text = load_text(wanted, tmp_path / "pair.yaml", tokenizer, SHAPE)
    assert text.held_out
    assert not {tuple(each) for each in text.held_out} & {tuple(each) for each in text.calibration}


def test_texts_that_share_some_files_are_refused(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(TEXT * 60)
    (tmp_path / "b.txt").write_text(TEXT * 60)
    wanted = QuantizeConfig(scheme="int4_awq", calibration=CalibrationConfig(data="."), quality=QualityConfig(data="a.txt"))
    with pytest.raises(ConfigError, match=r"the model is calibrated on .*a\.txt too"):
        load_text(wanted, tmp_path / "pair.yaml", tokenizer, SHAPE)


def test_a_long_text_is_read_no_further_than_it_is_needed(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT * 20000)
    read = []
    monkeypatch.setattr(calibration, "load_texts", lambda paths, load=load_texts: (read.append(len(t)) or t for t in load(paths)))
    load_text(QuantizeConfig(quality=QualityConfig(data="a.txt", samples=2)), tmp_path / "pair.yaml", tokenizer, SHAPE)
    assert sum(read) < 10 * calibration.PIECE < len(TEXT) * 20000


def test_fewer_sequences_than_asked_for_are_said(tmp_path, tokenizer, capsys):
    (tmp_path / "a.txt").write_text(TEXT * 30)
    load_text(QuantizeConfig(quality=QualityConfig(data="a.txt", samples=200)), tmp_path / "pair.yaml", tokenizer, SHAPE)
    assert re.search(r"the text for quality has only \d+ of 200 sequences of up to 512 tokens", capsys.readouterr().err)


def test_another_tokenizer_makes_the_checkpoint_anew(write_pair_yaml, make_model, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(make_model("llama"), directory)
    config = load_config(write_pair_yaml(tmp_path, target={"model": str(directory), "quantize": {"quality": {"samples": 1}}}))
    run_convert(config, "target")
    assert run_quantize(config, "target")
    path = directory / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    assert run_quantize(config, "target")


# --- what the YAML may ask for


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"scheme": "int8_sq"},
            "Cannot quantize with scheme 'int8_sq' and no calibration: it needs activations. Add `calibration: {data: builtin}`",
        ),
        ({"scheme": "int4_awq", "rounding": "gptq"}, "Cannot quantize with rounding gptq and no calibration: it needs activations"),
        ({"scheme": "int8_wo", "calibration": {}}, "Cannot calibrate scheme 'int8_wo': it has no scales to find"),
        ({"scheme": "full_prec", "calibration": {"data": "builtin"}}, "Cannot calibrate scheme 'full_prec'"),
        ({"scheme": "int4_wo", "rounding": "gptq", "calibration": {}}, "Cannot round by gptq with scheme 'int4_wo': expected int4_awq"),
        ({"scheme": "int4_awq", "calibration": {"data": "nowhere"}}, "Cannot use text nowhere: .* is no .jsonl or .txt file"),
        ({"scheme": "int4_awq", "calibration": {"samples": 0}}, "calibration.samples is 0"),
        ({"scheme": "int4_awq", "calibration": {"dta": "x"}}, "unknown key target.quantize.calibration.dta. Did you mean 'data'"),
        ({"scheme": "int4_awq", "rounding": "up"}, "target.quantize.rounding is 'up'"),
        ({"scheme": "int4_awq", "quality": {"min_top1": 2}}, "target.quantize.quality.min_top1 is 2"),
        ({"scheme": "int4_awq", "quality": {"data": "nowhere", "samples": 1}}, "Cannot use text nowhere"),
        ({"scheme": "int4_awq", "quality": {"max_kl": 0.1, "samples": 0}}, "Cannot hold a limit of quality with samples 0"),
    ],
)
def test_check_refuses_what_cannot_be_calibrated(write_pair_yaml, tmp_path, cli, section, message):
    path = write_pair_yaml(tmp_path, target={"quantize": {"scheme": None, "group_size": None, **section}})
    code, out, err = cli("check", path)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert re.search(message, err), err


def test_calibration_without_modelopt_says_how_to_get_it(write_pair_yaml, tmp_path, cli, monkeypatch):
    monkeypatch.setattr(calibration, "find_version", lambda name: "absent")
    path = write_pair_yaml(tmp_path, target={"quantize": {"calibration": {}}})
    code, _, err = cli("check", path)
    assert code == 1
    assert "nvidia-modelopt is not installed. Run `pip install 'specbuild[calibrate]'`" in err


def test_another_text_makes_the_checkpoint_anew_and_its_digest_is_kept(write_pair_yaml, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(TEXT * 30)
    section = {"calibration": {"data": "a.txt", "samples": 4, "max_length": 16}, "quality": {"samples": 1}}
    config = load_config(write_pair_yaml(tmp_path, target={"quantize": section}))
    run_convert(config, "target")
    assert run_quantize(config, "target")
    assert not run_quantize(config, "target")
    first = json.loads((config.dir_of("target", "quantized") / "specbuild.json").read_text())
    assert {"checkpoint", "calibration", "quality"} <= first["inputs"].keys()
    assert "nvidia-modelopt" in first["packages"]
    (tmp_path / "a.txt").write_text("class Reader: " * 60)
    assert run_quantize(config, "target")
    second = json.loads((config.dir_of("target", "quantized") / "specbuild.json").read_text())
    assert first["inputs"]["calibration"] != second["inputs"]["calibration"]
    assert "scales calibrated on 4 sequences of a.txt" in capsys.readouterr().err


# --- memory

PEAK = """
import sys
from pathlib import Path
from specbuild.artifacts import TllmCheckpoint
from specbuild.calibration import calibrate
from specbuild.config import CalibrationConfig, QuantizeConfig
from specbuild.quant import SCHEMES
from specbuild.quantize import write_quantized
source, out = TllmCheckpoint.open(Path(sys.argv[1])), Path(sys.argv[2])
settings = QuantizeConfig(scheme="int4_awq", group_size=128, rounding=sys.argv[3], calibration=CalibrationConfig())
tokens = [[(i * j) % 100 + 1 for i in range(16)] for j in range(1, 5)]
scales = calibrate(source, SCHEMES["int4_awq"], settings, tokens, out / "scratch", "x")
write_quantized(source, SCHEMES["int4_awq"], settings, out, "x", scales)
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024)  # ru_maxrss would be that of the parent
"""


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_q_06_calibration_lets_go_of_a_layer_before_it_loads_the_next_but_one(converted, tmp_path, monkeypatch, rounding):
    alive, most = [], []
    load = decoder.Decoder.layer

    def watched(self, index):
        most.append(sum(reference() is not None for reference in alive))
        layer = load(self, index)
        alive.extend(weakref.ref(module) for module in layer.modules() if module is layer)
        return layer

    monkeypatch.setattr(decoder.Decoder, "layer", watched)
    source = converted("llama", {"num_hidden_layers": 6}.items())
    calibrate(source, SCHEMES["int4_awq"], settings(rounding=rounding), sequences(4, 16), tmp_path / "scratch", "tiny")
    assert len(most) == 6
    assert max(most) <= 2


def test_q_06_memory_does_not_grow_with_the_layers(converted, tmp_path):
    """GPTQ's integers of the whole model lie on the disk. Eight more layers of 12 MB each may add what two of them take."""
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "vocab_size": 101}
    peaks = {}
    for layers in (2, 10):
        source = converted("llama", {**wide, "num_hidden_layers": layers}.items())
        out = tmp_path / str(layers)
        out.mkdir()
        command = [sys.executable, "-c", PEAK, source.directory, out, "gptq"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        peaks[layers] = int(done.stdout)
    layer = sum(rows * columns for rows, columns in source.shape.linears().values()) * 4
    assert layer > 10e6
    assert peaks[10] - peaks[2] < 2 * layer
