"""The quality table, its limits and the pair's acceptance, against numbers computed from transformers' logits."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specbuild import acceptance
from specbuild.artifacts import TllmCheckpoint
from specbuild.calibration import load_text
from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.errors import CheckpointError
from specbuild.quality import PICTURE, WARN_KL, load_quality
from specbuild.quant import SCHEMES
from specbuild.quantize import run_quantize
from specbuild.tokenizer import load_tokenizer

CALIBRATION = {"samples": 16, "max_length": 64}


@pytest.fixture
def quantized(write_pair_yaml, make_model, tmp_path):
    """Return quantize(section, **target): the configuration of a pair whose target was quantized."""

    def quantize(section, **target):
        values = {"dtype": "float32", **target, "quantize": {"group_size": 32, "quality": None, **section}}
        config = load_config(write_pair_yaml(tmp_path, target=values))
        run_convert(config, "target")
        run_quantize(config, "target")
        return config

    return quantize


def hf_logits(directory, sequences, weights=None):
    """transformers' float32 logits of each sequence; `weights` replace some of the model's."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.load_state_dict(weights or {}, strict=False)
    with torch.no_grad():
        return [model(torch.tensor([sequence])).logits[0].double() for sequence in sequences]


def dequantized(config, scheme, layers):
    """Hugging Face's names -> the weights that a checkpoint's integers stand for."""
    tensors = load_file(TllmCheckpoint.open(config.dir_of("target", "quantized")).rank_files[0])
    weights = {}
    for i in range(layers):

        def part(name, index=i):
            prefix = f"transformer.layers.{index}.{name}."
            levels = SCHEMES[scheme].levels({key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)})
            return levels.weight() * (1 if levels.prequant is None else levels.prequant)

        q, k, v = part("attention.qkv").split([64, 32, 32])
        values = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": part("attention.dense"),
                  "mlp.gate_proj": part("mlp.fc"), "mlp.up_proj": part("mlp.gate"), "mlp.down_proj": part("mlp.proj")}  # fmt: skip
        weights |= {f"model.layers.{i}.{name}.weight": value for name, value in values.items()}
    return weights


def held_out(config):
    shape = TllmCheckpoint.open(config.dir_of("target", "quantized")).shape
    return load_text(config.target.quantize, config.path, load_tokenizer(config.path.parent / config.target.model), shape).held_out


@pytest.mark.parametrize(
    ("scheme", "calibration"), [("int4_awq", None), ("int4_awq", CALIBRATION), ("int4_wo", None), ("int8_wo", None)],
    ids=["int4_awq", "int4_awq, calibrated", "int4_wo", "int8_wo"],
)  # fmt: skip
def test_the_table_is_that_of_the_logits_of_transformers(quantized, scheme, calibration):
    config = quantized({"scheme": scheme, "calibration": calibration, "quality": {"samples": 6}})
    sequences = held_out(config)
    assert len(sequences) == 6
    before = hf_logits(config.target.model, sequences)
    after = hf_logits(config.target.model, sequences, dequantized(config, scheme, 3))
    p, q = (torch.cat(logits).log_softmax(-1) for logits in (before, after))
    nll = [sum(float(-log.log_softmax(-1)[range(len(s) - 1), s[1:]].sum()) for log, s in zip(logits, sequences, strict=True))
           for logits in (before, after)]  # fmt: skip
    predicted = sum(len(sequence) - 1 for sequence in sequences)
    report = load_quality(config.dir_of("target", "quantized"))
    assert report.tokens == sum(map(len, sequences))
    assert report.perplexity_before == pytest.approx(math.exp(nll[0] / predicted), rel=1e-3)
    assert report.perplexity_after == pytest.approx(math.exp(nll[1] / predicted), rel=1e-3)
    assert report.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-2)
    assert report.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=2 / report.tokens)


def test_the_divergence_is_of_the_quantized_from_the_unquantized(quantized, outlier):
    """A model that lost much: the divergence the other way round is another number."""
    config = quantized({"scheme": "int4_wo", "quality": {"samples": 4}}, model=str(outlier))
    sequences = held_out(config)
    before, after = (torch.cat(hf_logits(outlier, sequences, w)).log_softmax(-1) for w in (None, dequantized(config, "int4_wo", 2)))
    forward, backward = (float((a.exp() * (a - b)).sum(-1).mean()) for a, b in ((before, after), (after, before)))
    assert abs(forward - backward) > 0.015 * forward
    assert load_quality(config.dir_of("target", "quantized")).kl == pytest.approx(forward, rel=3e-3)


def test_a_perplexity_beyond_all_numbers_is_still_json(quantized, make_model, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(make_model("llama"), directory)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] *= 3000
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = quantized({"scheme": "int8_wo", "quality": {"samples": 2}}, model=str(directory))

    def refuse(name):
        raise AssertionError(name)

    values = json.loads((config.dir_of("target", "quantized") / "quality.json").read_text(), parse_constant=refuse)
    assert values["perplexity_before"] > 1e100


def test_the_error_of_a_layer_is_that_of_its_output_alone(quantized):
    config = quantized({"scheme": "int4_wo", "quality": {"samples": 4}})
    report = load_quality(config.dir_of("target", "quantized"))
    parts = ["attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"]
    assert [(each.layer, each.part) for each in report.layers] == [(i, part) for i in range(3) for part in parts]
    weights = load_file(config.path.parent / config.target.model / "model.safetensors")
    model, sequences = config.target.model, held_out(config)
    inputs = first_inputs(model, sequences)
    plain = torch.cat([weights[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    rounded = dequantized(config, "int4_wo", 1)
    back = torch.cat([rounded[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    expected = float((inputs @ (back - plain).T).norm() / (inputs @ plain.T).norm())
    assert report.layers[0].error == pytest.approx(expected, rel=1e-3)
    assert report.worst[0].error == max(each.error for each in report.layers)


def first_inputs(directory, sequences):
    """What transformers gives q_proj of the first layer, all tokens."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        for sequence in sequences:
            model(torch.tensor([sequence]))
    return torch.cat(seen)


def test_full_precision_loses_nothing(quantized):
    report = load_quality(quantized({"scheme": "full_prec"}).dir_of("target", "quantized"))
    assert (report.kl, report.top1) == (0.0, 1.0)
    assert report.perplexity_before == report.perplexity_after
    assert all(each.error == 0 for each in report.layers)


# --- limits


@pytest.fixture
def outlier(make_model, tmp_path):
    """Q-07's model: one input channel of every linear layer's activations is a thousand times the others."""
    source, directory = make_model("llama", num_hidden_layers=2), tmp_path / "outlier"
    directory.mkdir()
    for path in source.iterdir():
        if path.name != "model.safetensors":
            (directory / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if "layernorm" in name:
            weight[7] *= 1000
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            weight[:, 7] /= 1000  # the function stays; its weights now hide a column that matters
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_q_07_a_model_that_lost_much_is_named_with_the_better_scheme(quantized, outlier, capsys):
    config = quantized({"scheme": "int4_wo", "quality": {"samples": 4}}, model=str(outlier))
    report = load_quality(config.dir_of("target", "quantized"))
    assert report.kl > WARN_KL
    err = capsys.readouterr().err
    assert "warning: the quantized target lost much: KL" in err
    assert "Use scheme int4_awq with calibration" in err


def test_q_07_calibration_finds_the_channel_that_matters(quantized, outlier):
    quality = {"samples": 4}
    plain = quantized({"scheme": "int4_awq", "quality": quality}, model=str(outlier))
    lost = load_quality(plain.dir_of("target", "quantized"))
    found = load_quality(
        quantized({"scheme": "int4_awq", "calibration": CALIBRATION, "quality": quality}, model=str(outlier)).dir_of("target", "quantized")
    )
    assert found.kl < 0.75 * lost.kl
    assert found.top1 > lost.top1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_kl": 1e-6}, r"KL is 0\.\d+ nats per token, expected at most 1e-06"),
        ({"min_top1": 1}, r"top-1 agreement is 0\.\d+, expected at least 1"),
        ({"max_kl": 1e-6, "min_top1": 1}, "expected at most 1e-06 and top-1 agreement is"),
    ],
)
def test_a_missed_limit_fails_the_stage_and_leaves_nothing(quantized, tmp_path, limits, message, capsys):
    with pytest.raises(CheckpointError, match=message) as caught:
        quantized({"scheme": "int4_awq", "quality": {**limits, "samples": 4}})
    assert "Add calibration: {data: builtin}" in str(caught.value)
    assert "worst: layer" in str(caught.value)
    assert not list((tmp_path / "work" / "target").glob("*quantized*"))
    assert "perplexity" in capsys.readouterr().err  # the table is shown before the stage fails


def test_limits_that_are_met_pass_without_a_warning(quantized, capsys):
    config = quantized({"scheme": "int8_wo", "quality": {"max_kl": 0.5, "min_top1": 0.5, "samples": 4}})
    assert load_quality(config.dir_of("target", "quantized")) is not None
    assert "warning" not in capsys.readouterr().err


def test_a_changed_limit_is_held_without_quantizing_again(quantized):
    section = {"scheme": "int8_wo", "quality": {"samples": 4, "max_kl": 0.5}}
    path = quantized(section).dir_of("target", "quantized") / "specbuild.json"
    made = path.stat().st_mtime_ns
    quantized({"scheme": "int8_wo", "quality": {"samples": 4, "max_kl": 0.4}})
    with pytest.raises(CheckpointError, match="expected at most 1e-09"):
        quantized({"scheme": "int8_wo", "quality": {"samples": 4, "max_kl": 1e-9}})
    assert path.stat().st_mtime_ns == made


def test_an_engine_is_not_built_of_a_checkpoint_that_misses_a_limit(quantized, cli):
    path = quantized({"scheme": "int8_wo", "quality": {"samples": 4}}).path
    path.write_text(path.read_text().replace("samples: 4", "samples: 4\n      max_kl: 1.0e-09"))
    assert load_config(path).target.quantize.quality.max_kl == 1e-9
    code, _, err = cli("build", path, "--only", "target")
    assert code == 1
    assert "Cannot accept the quantized target: KL is" in err


def test_nothing_is_measured_where_no_samples_are_asked_for(quantized):
    directory = quantized({"scheme": "int4_awq", "quality": {"samples": 0}}).dir_of("target", "quantized")
    assert load_quality(directory) is None
    assert not (directory / PICTURE).exists()


def test_the_picture_is_a_png_that_shows_every_layer(quantized):
    picture = (quantized({"scheme": "int4_awq"}).dir_of("target", "quantized") / PICTURE).read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 5000


def test_without_matplotlib_the_picture_is_left_out_with_a_line(quantized, monkeypatch, capsys):
    monkeypatch.setattr("specbuild.quality.find_spec", lambda name: None)
    assert not (quantized({"scheme": "int4_awq"}).dir_of("target", "quantized") / PICTURE).exists()
    assert "quality.png not drawn: matplotlib is not installed (`pip install 'specbuild[calibrate]'`)" in capsys.readouterr().err


# --- the pair


def test_acceptance_is_that_of_the_logits_of_transformers(write_pair_yaml, tmp_path, cli):
    path = write_pair_yaml(
        tmp_path, target={"dtype": "float32", "quantize": {"scheme": "int8_wo", "quality": {"samples": 4}}},
        draft={"dtype": "float32", "quantize": {"scheme": "full_prec", "quality": {"samples": 4}}},
    )  # fmt: skip
    assert cli("convert", path)[0] == 0
    code, out, _ = cli("quantize", path, "--json")
    assert code == 0
    values = json.loads(out)
    assert values.keys() == {"target", "draft", "acceptance"}
    cells = {(cell["target"], cell["draft"]): cell for cell in values["acceptance"]["cells"]}
    names = ["float32", "int8_wo (as built)", "int4_awq, rounded"]
    assert list(cells) == [(t, d) for t in names for d in ("float32", "int8_wo, rounded", "int4_awq, rounded")]
    config = load_config(path)
    sequences = held_out(config)
    weights = {"float32": None, "int8_wo (as built)": dequantized(config, "int8_wo", 3)}
    draft = torch.cat(hf_logits(config.draft.model, sequences)).softmax(-1)
    for name, changed in weights.items():
        target = torch.cat(hf_logits(config.target.model, sequences, changed)).softmax(-1)
        cell = cells[name, "float32"]
        assert cell["sampled"] == pytest.approx(float(torch.minimum(target, draft).sum(-1).mean()), rel=1e-3)
        assert cell["greedy"] == pytest.approx(float((target.argmax(-1) == draft.argmax(-1)).double().mean()), abs=2 / len(target))


def test_a_model_that_drafts_for_itself_is_always_accepted(write_pair_yaml, make_model, tmp_path, cli):
    model = str(make_model("llama", num_hidden_layers=3))
    quantize = {"scheme": "int4_awq", "group_size": 32, "quality": {"samples": 4}}
    path = write_pair_yaml(tmp_path, target={"quantize": quantize}, draft={"model": model, "quantize": quantize})
    assert cli("convert", path)[0] == 0
    code, out, _ = cli("quantize", path)
    assert code == 0
    report = acceptance.run_acceptance(load_config(path))
    same = [cell for cell in report.cells if cell.target == cell.draft]
    assert len(report.cells) == 9
    assert len(same) == 3
    assert all(cell.greedy == 1 and cell.sampled == pytest.approx(1, abs=1e-5) for cell in same)
    assert all(cell.sampled < 1 for cell in report.cells if cell not in same)
    lines = out.splitlines()
    assert sum("quality of the" in line for line in lines) == 2
    assert np.isclose(float(lines[-3].split()[1]), 1.0)


# --- lm_head, on request


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("scheme", ["int8_wo", "int4_awq", "int4_wo"])
def test_q_03_lm_head_is_quantized_on_request_alone(write_pair_yaml, make_model, tmp_path, capsys, scheme, tied):
    from specbuild.build import run_build
    from specbuild.compilers.ort_runner import OrtRunner

    model = make_model("llama", vocab_size=128, tie_word_embeddings=tied, num_hidden_layers=2)
    quantize = {"scheme": scheme, "group_size": 32, "lm_head": True, "quality": {"samples": 4}}
    config = load_config(write_pair_yaml(tmp_path, target={"model": str(model), "dtype": "float32", "quantize": quantize}))
    run_convert(config, "target")
    run_quantize(config, "target")
    run_build(config, "target")
    assert "excluded: norms, vocab_embedding\n" in capsys.readouterr().err
    tensors = load_file(config.dir_of("target", "quantized") / "rank0.safetensors")
    embedding = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(tensors["transformer.vocab_embedding.weight"], embedding)
    levels = SCHEMES[scheme].levels({key.removeprefix("lm_head."): value for key, value in tensors.items() if key.startswith("lm_head.")})
    step = levels.scale.repeat_interleave(64 // levels.scale.shape[1], dim=1)
    plain = embedding if tied else load_file(model / "model.safetensors")["lm_head.weight"]
    error = (levels.weight() - plain).abs()
    assert float(error.max()) > 0
    assert bool((error <= step * 1.0001).all())
    sequences = [list(range(1, 40))]
    changed = {**dequantized_layers(tensors, scheme, 2), "lm_head.weight": levels.weight()}
    expected = torch.cat(hf_logits_untied(model, sequences, changed, embedding))
    found = torch.from_numpy(OrtRunner(config.dir_of("target", "engine")).logits(sequences[0], 39))
    assert float((found - expected).abs().mean()) < 0.05 * float(expected.std())
    report = load_quality(config.dir_of("target", "quantized"))
    assert report.kl > 0


def dequantized_layers(tensors, scheme, layers):
    weights = {}
    for i in range(layers):
        values = {}
        for part in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"):
            prefix = f"transformer.layers.{i}.{part}."
            named = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            values[part] = SCHEMES[scheme].levels(named).weight()
        q, k, v = values.pop("attention.qkv").split([64, 32, 32])
        names = {"attention.dense": "self_attn.o_proj", "mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj", "mlp.proj": "mlp.down_proj"}
        weights |= {f"model.layers.{i}.self_attn.{x}_proj.weight": value for x, value in zip("qkv", (q, k, v), strict=True)}
        weights |= {f"model.layers.{i}.{names[part]}.weight": value for part, value in values.items()}
    return weights


def hf_logits_untied(directory, sequences, weights, embedding):
    """transformers' logits with an lm_head of its own beside the embedding."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(embedding))
    model.load_state_dict({**weights, "model.embed_tokens.weight": embedding}, strict=False)
    with torch.no_grad():
        return [model(torch.tensor([sequence])).logits[0].double() for sequence in sequences]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"scheme": "full_prec"}, "Cannot quantize lm_head with scheme 'full_prec'"),
        ({"scheme": "int8_sq", "calibration": {}}, "Cannot quantize lm_head with scheme 'int8_sq'"),
        ({"scheme": "int4_awq"}, "its 101 rows per rank cannot be packed in pairs. Remove `lm_head`"),
    ],
)
def test_an_lm_head_that_cannot_be_quantized_is_refused(write_pair_yaml, tmp_path, cli, section, message):
    code, _, err = cli("check", write_pair_yaml(tmp_path, target={"quantize": {**section, "lm_head": True}}))
    assert code == 1
    assert message in err
