"""Calibration: the text, modelopt's scales found layer by layer, and GPTQ's integers."""

import contextlib
import copy
import io
import json
import re
import warnings

import gptq_oracle
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specbuild import calibration, decoder
from specbuild.artifacts import TllmCheckpoint
from specbuild.calibration import HOLD_OUT, calibrate, load_text, load_texts
from specbuild.config import CalibrationConfig, QualityConfig, QuantizeConfig, load_config
from specbuild.convert import run_convert
from specbuild.errors import ConfigError
from specbuild.quant import SCHEMES
from specbuild.quant.gptq import round_gptq
from specbuild.quant.packing import unpack_rows
from specbuild.quantize import run_quantize

RECIPES = {"int4_awq": "INT4_AWQ_CFG", "int8_sq": "INT8_SMOOTHQUANT_CFG"}
PARTS = {"self_attn.q_proj": "attention.qkv", "self_attn.k_proj": "attention.qkv", "self_attn.v_proj": "attention.qkv",
         "self_attn.o_proj": "attention.dense", "mlp.gate_proj": "mlp.fc", "mlp.up_proj": "mlp.gate",
         "mlp.down_proj": "mlp.proj"}  # fmt: skip
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


def whole_model_scales(directory, recipe, group_size, tokens):
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
        mtq.quantize(model, config, lambda m: [m(torch.tensor([sequence])) for sequence in tokens])
    found = {}
    for index, layer in enumerate(model.model.layers):
        for part, name in PARTS.items():
            quantizer = layer.get_submodule(part).input_quantizer
            scale = quantizer._pre_quant_scale.float().reshape(-1)
            amax = quantizer.amax.float().reshape(1) / 127 if quantizer.is_enabled else None
            found.setdefault(f"transformer.layers.{index}.{name}", []).append((scale, amax))
    return {name: (torch.stack([s for s, _ in each]).mean(dim=0), each[0][1]) for name, each in found.items()}


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
    converted, make_model, tmp_path, monkeypatch, scheme, kind, changes
):
    """To 1e-3 of each scale: both run in float32, in which the order of sums differs, and AWQ's best exponent is one of eleven."""
    monkeypatch.setattr(decoder, "CHUNK", 1)  # one sequence a call, as the whole model gets them: AWQ averages over calls
    tokens = sequences(6, 24)
    expected = whole_model_scales(make_model(kind, **changes), RECIPES[scheme], 32, tokens)
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
    assert len(texts("builtin")) > 100


@pytest.mark.parametrize(
    ("files", "data", "message"),
    [
        ({}, "absent.jsonl", "is no .jsonl or .txt file, nor a directory of them"),
        ({"a.md": "x"}, ".", "is no .jsonl or .txt file, nor a directory of them"),
        ({"a.jsonl": '"fine"\n{"other": 1}'}, "a.jsonl", "line 2 is no JSON string, nor an object with `text`"),
        ({"a.jsonl": "plain words"}, "a.jsonl", "line 1 is no JSON string"),
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
        load_text(wanted, tmp_path / "pair.yaml", tokenizer, 101)
    assert "\n" not in str(caught.value)


def test_a_text_of_other_ids_than_the_model_has_is_refused(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(TEXT * 20)
    with pytest.raises(ConfigError, match=r"the tokenizer gives id \d+, the model has 50 rows"):
        load_text(QuantizeConfig(quality=QualityConfig(data="a.txt")), tmp_path / "pair.yaml", tokenizer, 50)


def test_every_eighth_sequence_is_held_out_and_never_calibrated_on(tmp_path, tokenizer):
    lines = [json.dumps(f"{index:03} {TEXT}") for index in range(80)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    wanted = QuantizeConfig(
        scheme="int4_awq", calibration=CalibrationConfig(data="a.jsonl", samples=30, max_length=16), quality=QualityConfig(samples=5)
    )
    text = load_text(wanted, tmp_path / "pair.yaml", tokenizer, 101)
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
    text = load_text(wanted, tmp_path / "pair.yaml", tokenizer, 101)
    assert text.held_out == list(calibration._encode([tmp_path / "b.txt"], tokenizer, 16))[:3]
    assert text.calibration[0] == next(iter(calibration._encode([tmp_path / "a.txt"], tokenizer, 16)))


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
        ({"scheme": "int4_awq", "calibration": {"data": "nowhere"}}, "Cannot calibrate on nowhere: .* is no .jsonl or .txt file"),
        ({"scheme": "int4_awq", "calibration": {"samples": 0}}, "calibration.samples is 0"),
        ({"scheme": "int4_awq", "calibration": {"dta": "x"}}, "unknown key target.quantize.calibration.dta. Did you mean 'data'"),
        ({"scheme": "int4_awq", "rounding": "up"}, "target.quantize.rounding is 'up'"),
        ({"scheme": "int4_awq", "quality": {"min_top1": 2}}, "target.quantize.quality.min_top1 is 2"),
        ({"scheme": "int4_awq", "quality": {"data": "nowhere", "samples": 1}}, "Cannot calibrate on nowhere"),
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
