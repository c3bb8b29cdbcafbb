"""Checkpoints as people have them: quantized ones kept integer by integer or expanded, odd directories, and what is refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import packed_writers
import pytest
import tllm_forward
import torch
from safetensors.torch import load_file, save_file

from specbuild.artifacts import TllmCheckpoint
from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.errors import CheckpointError, ConfigError, SpecbuildError
from specbuild.packed import link_quantized
from specbuild.quant import find_scheme

GOLDEN = Path(__file__).parent.parent / "golden" / "compressed"
IDS = [int(token) for token in np.random.default_rng(3).integers(1, 101, 40)]
INT4, INT8 = {"scheme": "int4_awq", "group_size": 32}, {"scheme": "int8_wo"}
OFFER = "`dequantize: true` under target, which expands it and quantizes again"
PARTS = {  # TensorRT-LLM part: its Hugging Face sources, joined along the rows
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "attention.dense": ["self_attn.o_proj"],
    "mlp.fc": ["mlp.gate_proj"], "mlp.gate": ["mlp.up_proj"], "mlp.proj": ["mlp.down_proj"],
}  # fmt: skip


def to_ends(layers):
    """Give every row of INT8 codes one at an end of the range, as a symmetric quantizer leaves it."""
    for layer in layers.values():
        layer.codes[:, 0] = 255


WRITERS = {
    "AutoAWQ": (packed_writers.write_awq, {}, INT4),
    "GPTQ": (packed_writers.write_gptq, {}, INT4),
    "GPTQ without checkpoint_format": (packed_writers.write_gptq, {"checkpoint_format": None}, INT4),
    "GPTQ v2": (packed_writers.write_gptq, {"checkpoint_format": "gptq_v2", "group": 64}, {"scheme": "int4_awq", "group_size": 64}),
    "GPTQ, one scale per row": (packed_writers.write_gptq, {"group": -1, "desc_act": True}, INT4),
    "GPTQ, 8 bit": (packed_writers.write_gptq, {"group": -1, "bits": 8, "change": to_ends}, INT8),
    "compressed-tensors W4A16": (packed_writers.write_compressed, {}, INT4),
    "compressed-tensors W4A16, rounded by activation order": (packed_writers.write_compressed, {"actorder": "static"}, INT4),
    "compressed-tensors W4A16 by channel": (packed_writers.write_compressed, {"group": -1}, INT4),
    "compressed-tensors W8A16": (packed_writers.write_compressed, {"group": -1, "bits": 8, "change": to_ends}, INT8),
}
EXPANDED = {  # what no scheme can store, but float weights can
    "AutoAWQ with zero points": (packed_writers.write_awq, {"zeros": "random"}),
    "GPTQ with zero points": (packed_writers.write_gptq, {"zeros": "random"}),
    "GPTQ v2 with zero points": (packed_writers.write_gptq, {"zeros": "random", "checkpoint_format": "gptq_v2"}),
    "GPTQ by activation order": (packed_writers.write_gptq, {"order": "shuffled", "desc_act": True}),
    "GPTQ, 8 bit in groups": (packed_writers.write_gptq, {"bits": 8}),
    "compressed-tensors with zero points": (packed_writers.write_compressed, {"zeros": "random"}),
    "compressed-tensors by activation order": (packed_writers.write_compressed, {"order": "shuffled", "actorder": "group"}),
    "compressed-tensors W8A16 in groups": (packed_writers.write_compressed, {"bits": 8}),
    "a packed lm_head": (packed_writers.write_compressed, {"also": ("lm_head",)}),
    "a layer left as it was": (packed_writers.write_awq, {"skip": ("down_proj",)}),
}


@pytest.fixture
def convert(tmp_path, write_pair_yaml):
    """Convert a directory as the target; return the checkpoint's directory."""

    def run(model, quantize=INT4, force=True, **settings):
        target = {"model": str(model), "dtype": "float16", "quantize": quantize, **settings}
        config = load_config(write_pair_yaml(tmp_path, target=target))
        run_convert(config, "target", force=force)
        return config.dir_of("target", "checkpoint")

    return run


@pytest.fixture
def write(make_model, tmp_path):
    """Write a tiny float16 model by one of the writers."""

    def run(writer, **choices):
        # 101 tokens do not fill words of eight; lm_head is packed along the output in the formats that are tested with it
        return writer(make_model(dtype="float16"), tmp_path / "packed", **choices)

    return run


def stored_levels(directory, name, bits, rank=0):
    """The integers and scales of a stored linear layer, by the layouts of TensorRT-LLM."""
    tensors = load_file(directory / f"rank{rank}.safetensors")
    weight = tensors[f"{name}.weight"]
    if bits == 4:
        q = torch.stack(((weight << 4) >> 4, weight >> 4), dim=1).reshape(-1, weight.shape[1])
        assert bool((tensors[f"{name}.prequant_scaling_factor"] == 1).all())
        return q, tensors[f"{name}.weights_scaling_factor"]
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 128
    return torch.clamp(torch.round(weight.float() / scale), -128, 127).to(torch.int8), scale


def expected_levels(written, layer, part, bits, groups):
    layers = [written.layers[f"model.layers.{layer}.{source}"] for source in PARTS[part]]
    q = np.concatenate([packed.codes for packed in layers]) - 2 ** (bits - 1)
    scale = np.concatenate([np.repeat(packed.scales, groups // packed.scales.shape[1], axis=1) for packed in layers])
    return torch.from_numpy(q).to(torch.int8), torch.from_numpy(scale).float()


def float_copy(directory, out):
    """A checkpoint's integers and scales as a full_prec checkpoint in float32."""
    checkpoint = TllmCheckpoint.open(directory)
    algo = checkpoint.config["quantization"]["quant_algo"]
    scheme = find_scheme({"W4A16_AWQ": "int4_awq", "W8A16": "int8_wo"}[algo])
    tensors, found = {}, load_file(directory / "rank0.safetensors")
    stems = {name.rsplit(".", 1)[0] for name in found if name.rsplit(".", 2)[-2] in ("qkv", "dense", "fc", "gate", "proj")}
    for stem in stems:
        parts = {name.rsplit(".", 1)[1]: tensor for name, tensor in found.items() if name.startswith(f"{stem}.")}
        tensors[f"{stem}.weight"] = scheme.levels(parts).weight()
    plain = {name: tensor.float() for name, tensor in found.items() if name.rsplit(".", 1)[0] not in stems}
    out.mkdir()
    save_file({**plain, **tensors}, out / "rank0.safetensors")
    config = {**checkpoint.config, "quantization": {"quant_algo": None, "kv_cache_quant_algo": None}}
    (out / "config.json").write_text(json.dumps(config))
    return out


def transformers_logits(config_dir, weights):
    """transformers' float32 logits of a model with the given weights."""
    import transformers

    values = json.loads((config_dir / "config.json").read_text())
    values.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, attn_implementation="eager")).float()
    model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in weights.items()})
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize(("writer", "choices", "quantize"), WRITERS.values(), ids=WRITERS)
def test_the_integers_and_scales_of_a_packed_model_are_kept_as_they_are(convert, write, writer, choices, quantize):
    written = write(writer, **choices)
    bits = 8 if quantize is INT8 else 4
    out = convert(written.directory, quantize)
    algo = json.loads((out / "config.json").read_text())["quantization"]
    assert (algo["quant_algo"], algo.get("group_size")) == (("W8A16", None) if bits == 8 else ("W4A16_AWQ", quantize["group_size"]))
    for layer in range(2):
        for part in PARTS:
            q, scale = stored_levels(out, f"transformer.layers.{layer}.{part}", bits)
            expected = expected_levels(written, layer, part, bits, scale.shape[1])
            assert torch.equal(q, expected[0]), part
            assert torch.equal(scale, expected[1]), part


@pytest.mark.parametrize(("writer", "choices", "quantize"), WRITERS.values(), ids=WRITERS)
def test_a_forward_pass_over_what_was_kept_gives_transformers_logits(convert, write, tmp_path, writer, choices, quantize):
    written = write(writer, **choices)
    expected = transformers_logits(written.directory, written.weights)
    assert expected.std() > 0.5
    found = tllm_forward.logits(float_copy(convert(written.directory, quantize), tmp_path / "float"), IDS)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


CAN_EXPAND = {**{name: row[:2] for name, row in WRITERS.items()}, **EXPANDED}


@pytest.mark.parametrize(("writer", "choices"), CAN_EXPAND.values(), ids=CAN_EXPAND)
def test_dequantize_expands_a_packed_model_into_a_plain_one(convert, write, writer, choices):
    written = write(writer, **choices)
    out = convert(written.directory, {"scheme": "full_prec"}, dequantize=True, dtype="float32")
    assert json.loads((out / "config.json").read_text())["quantization"]["quant_algo"] is None
    torch.testing.assert_close(tllm_forward.logits(out, IDS), transformers_logits(written.directory, written.weights), atol=1e-4, rtol=0)
    tensors = load_file(out / "rank0.safetensors")
    for layer in range(2):
        for part, sources in PARTS.items():
            whole = np.concatenate([written.weights[f"model.layers.{layer}.{source}.weight"] for source in sources])
            assert torch.equal(tensors[f"transformer.layers.{layer}.{part}.weight"], torch.from_numpy(whole)), part


@pytest.mark.parametrize("name", ["AutoAWQ", "GPTQ", "compressed-tensors W4A16", "compressed-tensors W4A16 by channel"])
def test_ranks_share_the_integers_and_scales_of_one(convert, write, name):
    writer, choices, quantize = WRITERS[name]
    written = write(writer, **choices)
    one = convert(written.directory, quantize).rename(written.directory.parent / "one")
    two = convert(written.directory, quantize, tp=2)
    for layer in range(2):
        for part in PARTS:
            stem = f"transformer.layers.{layer}.{part}"
            for whole, *pieces in zip(stored_levels(one, stem, 4), *(stored_levels(two, stem, 4, rank) for rank in range(2)), strict=True):
                if part == "attention.qkv":
                    apart = [torch.split(piece, [32, 16, 16]) for piece in pieces]
                    joined = torch.cat([torch.cat(kind) for kind in zip(*apart, strict=True)])
                else:
                    joined = torch.cat(pieces, dim=1 if part in ("attention.dense", "mlp.proj") else 0)
                assert torch.equal(joined, whole), part


@pytest.mark.parametrize(("name", "quantize", "moved", "atol"), [("w4a16", INT4, 0, 1e-4), ("w8a16", INT8, 82, 0.05)])
def test_a_model_of_llm_compressor_gives_the_logits_of_its_own_decompression(convert, tmp_path, capsys, name, quantize, moved, atol):
    """INT8: in some rows llm-compressor's largest integer is -127, which becomes -128."""
    golden = load_file(GOLDEN / name / "logits.safetensors")
    assert golden["logits"].std() > 0.5
    out = convert(GOLDEN / name / "model", quantize, dtype="float32")
    assert (f"in {moved} rows the largest integer moved by one step" in capsys.readouterr().err) == bool(moved)
    found = tllm_forward.logits(float_copy(out, tmp_path / "float"), golden["ids"].tolist())
    torch.testing.assert_close(found, golden["logits"], atol=atol, rtol=0)
    plain = convert(GOLDEN / name / "model", {"scheme": "full_prec"}, dtype="float32", dequantize=True)
    torch.testing.assert_close(tllm_forward.logits(plain, golden["ids"].tolist()), golden["logits"], atol=1e-4, rtol=0)


# --- what no scheme can store is refused by one line that offers to expand it

UNKEPT = {
    "zero points of AutoAWQ": (packed_writers.write_awq, {"zeros": "random"}, INT4, "has zero point .*, expected 8 everywhere"),
    "zero points of GPTQ": (packed_writers.write_gptq, {"zeros": "random"}, INT4, "has zero point .*, expected 8 everywhere"),
    "zero points of GPTQ v2": (packed_writers.write_gptq, {"zeros": "random", "checkpoint_format": "gptq_v2"}, INT4, "has zero point"),
    "zero points of compressed-tensors": (packed_writers.write_compressed, {"zeros": "random"}, INT4, "has zero point"),
    "desc_act": (packed_writers.write_gptq, {"desc_act": True}, INT4, "activation order"),
    "g_idx out of order": (packed_writers.write_gptq, {"order": "shuffled"}, INT4, "activation order .g_idx."),
    "actorder": (packed_writers.write_compressed, {"order": "shuffled", "actorder": "group"}, INT4, "activation order"),
    "8 bit in groups": (packed_writers.write_gptq, {"bits": 8}, INT8, "int8_wo has one scale per row"),
    "W8A16 in groups": (packed_writers.write_compressed, {"bits": 8}, INT8, "int8_wo has one scale per row"),
    "mixed precision": (
        packed_writers.write_awq,
        {"skip": ("down_proj",)},
        INT4,
        r"layers\.0\.mlp\.down_proj\.weight is not quantized \(2 ",
    ),
    "lm_head": (packed_writers.write_compressed, {"also": ("lm_head",)}, INT4, "lm_head.weight is quantized"),
}


def assert_refused(convert, tmp_path, model, quantize, parts, **settings):
    with pytest.raises(SpecbuildError) as caught:
        convert(model, quantize, **settings)
    message = str(caught.value)
    assert message.startswith("Cannot ")
    assert message.endswith(".")
    assert "\n" not in message
    for part in parts:
        assert part in message, message
    assert not (tmp_path / "work").exists()
    return message


@pytest.mark.parametrize(("writer", "choices", "quantize", "match"), UNKEPT.values(), ids=UNKEPT)
def test_what_no_scheme_stores_is_refused_with_the_offer_to_expand_it(convert, write, tmp_path, writer, choices, quantize, match):
    message = assert_refused(convert, tmp_path, write(writer, **choices).directory, quantize, [OFFER])
    with pytest.raises(AssertionError if not match else SpecbuildError, match=match):
        raise SpecbuildError(message)


OTHER = {
    "another method": ({"quant_method": "fp8"}, "quant_method 'fp8': expected one of awq, gptq, compressed-tensors"),
    "no method": ({"bits": 4}, "quant_method None: expected one of awq"),
    "no mapping": ("int4", "quant_method 'int4': expected one of"),
    "AWQ gemv": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version 'gemv': expected gemm"),
    "AWQ of 8 bits": ({"quant_method": "awq", "bits": 8, "group_size": 32}, "bits 8: expected 4"),
    "GPTQ of 3 bits": ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "bits 3: expected 4 or 8"),
    "GPTQ for Marlin": ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "'marlin': expected gptq or"),
    "GPTQ without a group size": ({"quant_method": "gptq", "bits": 4}, "group_size is None, expected a whole number"),
    "nothing packed": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, r"no tensor is named \*\.qweight"),
}  # fmt: skip
COMPRESSED = {
    "float8": ({"weights": {"num_bits": 8, "type": "float"}}, "weights 'float8': expected int4 or int8"),
    "3 bits": ({"weights": {"num_bits": 3}}, "weights 'int3': expected int4 or int8"),
    "blocks": ({"weights": {"strategy": "block"}}, "strategy 'block': expected group or channel"),
    "another format": ({"top": {"format": "int-quantized"}}, "format 'int-quantized': expected pack-quantized"),
    "a quantized cache": ({"top": {"kv_cache_scheme": {"num_bits": 8}}}, "kv_cache_scheme"),
    "transforms": ({"top": {"transform_config": {"config_groups": {}}}}, "transform_config"),
    "sparsity": ({"top": {"sparsity_config": {"format": "sparse-24-bitmask"}}}, "sparsity 'sparse-24-bitmask': expected dense"),
    "quantized activations": (
        {"top": {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32}, "input_activations": {"num_bits": 8}}}}},
        "input_activations 8: expected none",
    ),
    "two schemes": (
        {"top": {"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 32}}, "b": {"weights": {"num_bits": 8}}}}},
        "expected the same for all layers",
    ),
    "no groups": ({"top": {"config_groups": {}}}, "config_groups is {}"),
}


@pytest.mark.parametrize(("settings", "match"), OTHER.values(), ids=OTHER)
def test_another_format_is_refused_with_the_supported_ones(convert, make_model, tmp_path, settings, match):
    model = shutil.copytree(make_model(dtype="float16"), tmp_path / "model")
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**values, "quantization_config": settings}))
    with pytest.raises(CheckpointError, match=match):
        convert(model, INT4)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(("choices", "match"), COMPRESSED.values(), ids=COMPRESSED)
def test_what_compressed_tensors_has_besides_is_refused_by_name(convert, write, choices, match):
    with pytest.raises(CheckpointError, match=match):
        convert(write(packed_writers.write_compressed, **choices).directory, INT4)


YAMLS = {
    "another scheme": (
        {"quantize": {"scheme": "int8_wo"}},
        f"it is already quantized (gptq, 4 bit, group 32). Use quantize: {{scheme: int4_awq, group_size: 32}}, or {OFFER}.",
    ),
    "no scheme": ({"quantize": {"scheme": "full_prec"}}, "Use quantize: {scheme: int4_awq, group_size: 32}, or"),
    "another group size": ({"quantize": {"scheme": "int4_awq", "group_size": 64}}, "Use quantize: {scheme: int4_awq, group_size: 32}, or"),
    "calibration": ({"quantize": {**INT4, "calibration": {"data": "builtin"}}}, "Cannot use calibration"),
    "a dtype without its scales": ({"quantize": INT4, "dtype": "bfloat16"}, "Use dtype: float16, or"),
    "an adapter": ({"quantize": INT4, "merge_lora": "adapter"}, "Cannot merge adapter into"),
}  # fmt: skip


@pytest.mark.parametrize("command", ["check", "convert"])
@pytest.mark.parametrize(("settings", "part"), YAMLS.values(), ids=YAMLS)
def test_a_yaml_that_asks_for_something_else_is_one_line_without_reading_weights(
    cli, write, write_pair_yaml, tmp_path, command, settings, part
):
    written = write(packed_writers.write_gptq)
    path = write_pair_yaml(tmp_path, target={"model": str(written.directory), "dtype": "float16", **settings})
    code, out, err = cli(command, path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert part in err
    assert OFFER in err
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(("writer", "choices", "quantize"), WRITERS.values(), ids=WRITERS)
def test_check_accepts_a_packed_model(cli, write, write_pair_yaml, tmp_path, writer, choices, quantize):
    target = {"model": str(write(writer, **choices).directory), "dtype": "float16", "quantize": quantize}
    code, _, err = cli("check", write_pair_yaml(tmp_path, target=target))
    assert code == 0, err


def test_rounding_by_gptq_is_refused(convert, write, tmp_path):
    model = write(packed_writers.write_gptq).directory
    assert_refused(convert, tmp_path, model, {**INT4, "rounding": "gptq"}, ["Cannot use rounding", "its integers are kept", OFFER])


def test_a_float_model_cannot_be_dequantized(convert, make_model, tmp_path):
    assert_refused(convert, tmp_path, make_model(), INT4, ["it is not quantized", "Remove `dequantize` under target"], dequantize=True)


def test_a_group_size_that_ranks_cannot_share_is_refused(convert, write, tmp_path):
    model = write(packed_writers.write_gptq, group=64).directory
    parts = ["for tp=2", "32 columns per rank", "multiple of group_size 64", OFFER]
    assert_refused(convert, tmp_path, model, {"scheme": "int4_awq", "group_size": 64}, parts, tp=2)


PART_DAMAGES = {
    "no scales": (lambda t, n: t.pop(f"{n}.scales"), "scales is missing"),
    "scales of another shape": (lambda t, n: t.update({f"{n}.scales": torch.ones(1, 64)}), r"scales is \(1, 64\), expected \(2, 64\)"),
    "another word": (lambda t, n: t.update({f"{n}.qweight": t[f"{n}.qweight"].short()}), "qweight is I16, of another format"),
    "a plain weight too": (lambda t, n: t.update({f"{n}.weight": torch.zeros(64, 64)}), "has both qweight and weight"),
    "a group without scale": (lambda t, n: t[f"{n}.g_idx"].fill_(9), "g_idx names group 9"),
    "an infinite scale": (lambda t, n: t[f"{n}.scales"].fill_(float("inf")), "a scale is NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "match"), PART_DAMAGES.values(), ids=PART_DAMAGES)
def test_parts_that_do_not_fit_are_refused_by_name(convert, write, damage, match):
    model = write(packed_writers.write_gptq).directory
    tensors = load_file(model / "model.safetensors")
    damage(tensors, "model.layers.1.self_attn.q_proj")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=match):
        convert(model)


# --- int8_wo: a row's largest integer is an end of the range


def short_of_end(by, rows):
    """Rows whose largest integer is `by` steps short of the upper end."""

    def change(layers):
        to_ends(layers)
        codes = layers["model.layers.0.mlp.up_proj"].codes
        codes[:rows] = 128
        codes[:rows, 0] = 255 - by

    return change


def test_a_row_one_step_short_of_its_range_is_moved_and_counted(convert, write, capsys):
    written = write(packed_writers.write_compressed, bits=8, group=-1, change=short_of_end(1, 3))
    out = convert(written.directory, INT8)
    assert "in 3 rows the largest integer moved by one step" in capsys.readouterr().err
    q, scale = stored_levels(out, "transformer.layers.0.mlp.gate", 8)
    expected, scales = expected_levels(written, 0, "mlp.gate", 8, 1)
    assert torch.equal(scale, scales)
    assert int((q.short() - expected.short()).abs().sum()) == 3


def test_a_row_further_from_its_range_is_refused(convert, write, tmp_path):
    model = write(packed_writers.write_compressed, bits=8, group=-1, change=short_of_end(2, 3)).directory
    assert_refused(convert, tmp_path, model, INT8, ["row 0 reach 0 to 125", "-128 to 127", OFFER])


@pytest.mark.parametrize("limit", [{"max_kl": 0.1}, {"min_top1": 0.9}], ids=str)
def test_limits_of_quality_are_refused_where_nothing_can_be_measured(convert, write, limit):
    with pytest.raises(ConfigError, match=rf"Cannot use quality\.{next(iter(limit))} for .*: it is already quantized"):
        convert(write(packed_writers.write_gptq).directory, {**INT4, "quality": {"samples": 2, **limit}})


def test_biases_that_add_nothing_are_left_out_and_others_refused(convert, write):
    directory = write(packed_writers.write_gptq).directory
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.bias"] = torch.zeros(64, dtype=torch.float16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert not any("bias" in name for name in load_file(convert(directory) / "rank0.safetensors"))
    tensors["model.layers.0.mlp.down_proj.bias"][3] = 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.layers\.0\.mlp\.down_proj\.bias"):
        convert(directory)


def test_a_gptq_zero_point_of_zero_is_stored_as_all_ones():
    from specbuild.hf_formats import gptq

    packing = gptq.read_config({"bits": 4, "group_size": 32, "checkpoint_format": "gptq"})

    class Words:
        def load(self):
            return torch.full((1, 1), -1, dtype=torch.int32)

    assert gptq._zeros({"qzeros": Words()}, packing).unique().tolist() == [0]


def test_a_checkpoint_that_was_expanded_is_not_quantized_as_one_that_was_kept(convert, write, write_pair_yaml, tmp_path):
    from specbuild.quantize import run_quantize

    directory = write(packed_writers.write_gptq).directory
    convert(directory, INT4, dequantize=True)
    config = load_config(write_pair_yaml(tmp_path, target={"model": str(directory), "dtype": "float16", "quantize": INT4}))
    with pytest.raises(ConfigError, match=r"it was made for dequantize True, .* says False"):
        run_quantize(config, "target")


def test_a_row_of_zeros_stays_one(convert, write):
    def change(layers):
        to_ends(layers)
        layers["model.layers.0.mlp.up_proj"].codes[5] = 128

    out = convert(write(packed_writers.write_compressed, bits=8, group=-1, change=change).directory, INT8)
    assert not load_file(out / "rank0.safetensors")["transformer.layers.0.mlp.gate.weight"][5].any()


# --- the stages after it


def test_the_cpu_engine_of_a_packed_model_is_close_to_transformers(make_model, write_pair_yaml, tmp_path):
    """It multiplies by the same integers and scales, in its own arithmetic."""
    from specbuild import quantize
    from specbuild.build import run_build
    from specbuild.compilers.ort_runner import OrtRunner

    written = packed_writers.write_awq(make_model(dtype="float16"), tmp_path / "packed")
    target = {"model": str(written.directory), "dtype": "float16", "quantize": INT4}
    config = load_config(write_pair_yaml(tmp_path, target=target))
    run_convert(config, "target")
    quantize.run_quantize(config, "target")
    run_build(config, "target")
    found = torch.from_numpy(OrtRunner(config.dir_of("target", "engine")).logits(IDS, len(IDS)))
    expected = transformers_logits(written.directory, written.weights)
    assert float((found - expected).abs().mean()) < 0.05 * float(expected.std())


def test_quantize_keeps_the_files_and_says_so(convert, write, tmp_path, capsys):
    source = TllmCheckpoint.open(convert(write(packed_writers.write_gptq).directory))
    settings = load_config(tmp_path / "pair.yaml").target.quantize
    (tmp_path / "out").mkdir()
    link_quantized(source, find_scheme("int4_awq"), settings, tmp_path / "out", "target")
    assert "target: already quantized (gptq): kept" in capsys.readouterr().err
    assert (tmp_path / "out" / "rank0.safetensors").samefile(source.rank_files[0])
    assert TllmCheckpoint.open(tmp_path / "out").config == source.config


def test_quantize_copies_where_files_cannot_be_linked(convert, write, tmp_path, monkeypatch):
    source = TllmCheckpoint.open(convert(write(packed_writers.write_gptq).directory))

    def fail(*_):
        raise OSError("Invalid cross-device link")

    monkeypatch.setattr("os.link", fail)
    (tmp_path / "out").mkdir()
    link_quantized(source, find_scheme("int4_awq"), load_config(tmp_path / "pair.yaml").target.quantize, tmp_path / "out", "target")
    assert (tmp_path / "out" / "rank0.safetensors").read_bytes() == source.rank_files[0].read_bytes()


@pytest.mark.parametrize("changes", [{"scheme": "int8_wo"}, {"group_size": 64}])
def test_quantize_refuses_another_scheme_than_the_checkpoint_has(convert, write, tmp_path, changes):
    source = TllmCheckpoint.open(convert(write(packed_writers.write_gptq).directory))
    settings = load_config(tmp_path / "pair.yaml").target.quantize.model_copy(update=changes)
    with pytest.raises(ConfigError, match="it is already W4A16_AWQ, group 32"):
        link_quantized(source, find_scheme(settings.scheme), settings, tmp_path, "target")


def test_another_group_size_of_one_scale_per_row_makes_the_checkpoint_anew(convert, write, tmp_path):
    model = write(packed_writers.write_gptq, group=-1).directory
    record = convert(model, INT4) / "specbuild.json"
    first = record.read_text()
    assert json.loads(first)["parameters"]["packed"] == "gptq"
    convert(model, INT4, force=False)
    assert record.read_text() == first
    convert(model, {"scheme": "int4_awq", "group_size": 64}, force=False)
    assert record.read_text() != first


# --- directories as people have them: docs of the field, by their row


def add_consolidated(model):
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, model / "consolidated.safetensors")


def save_as_bin(model, shards=1):
    """Save a model's weights as torch saves them, in one file or several with an index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, model / "pytorch_model.bin")
        return
    files = {name: f"pytorch_model-{1 + i % shards:05}-of-{shards:05}.bin" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in tensors if files[name] == file}, model / file)
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def leave_shard_out(model):
    save_as_bin(model, 2)
    (model / "pytorch_model-00002-of-00002.bin").unlink()


def only(ending):
    def change(model):
        (model / "model.safetensors").rename(model / f"model.{ending}")

    return change


def make_adapter(model, **values):
    (model / "model.safetensors").unlink()
    (model / "config.json").unlink()
    (model / "adapter_config.json").write_text(json.dumps(values))
    save_file({"base_model.model.x.lora_magnitude_vector": torch.ones(2)}, model / "adapter_model.safetensors")


LOADED = {
    "C-11 consolidated.safetensors beside the model": (add_consolidated, "ignoring consolidated.safetensors"),
    "C-13 only pytorch_model.bin": (save_as_bin, ""),
    "C-13 only .bin shards and their index": (lambda model: save_as_bin(model, 3), ""),
}
REFUSED = {
    "C-13 a missing .bin shard": (leave_shard_out, ["missing pytorch_model-00002-of-00002.bin", "of 2 weight files"]),
    "C-13 only .pt": (only("pt"), ["found model.pt", "expected model.safetensors or pytorch_model.bin"]),
    "C-13 only .pth": (only("pth"), ["found model.pth", "Save the model as safetensors"]),
    "C-13 only .gguf": (only("gguf"), ["found model.gguf", "Save the model as safetensors"]),
    "C-13 another format without config.json": (lambda model: (model / "config.json").unlink(), ["config.json is missing"]),
    "C-18 an adapter": (make_adapter, ["it is an adapter", "Merge it", "as its merge_lora"]),
    "C-18 a DoRA adapter": (lambda model: make_adapter(model, use_dora=True), ["it is a DoRA adapter", "Merge it"]),
}


@pytest.mark.parametrize(("change", "said"), LOADED.values(), ids=LOADED)
def test_a_directory_as_people_have_it_converts_like_the_plain_one(convert, make_model, tmp_path, capsys, change, said):
    plain = load_file(convert(make_model(), {"scheme": "full_prec"}) / "rank0.safetensors")
    capsys.readouterr()
    model = shutil.copytree(make_model(), tmp_path / "model")
    change(model)
    found = load_file(convert(model, {"scheme": "full_prec"}) / "rank0.safetensors")
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    warnings = [line for line in capsys.readouterr().err.split("\n") if "ignoring" in line]
    assert len(warnings) == bool(said)
    assert not said or said in warnings[0]


@pytest.mark.parametrize("command", ["check", "convert"])
@pytest.mark.parametrize(("change", "parts"), REFUSED.values(), ids=REFUSED)
def test_a_directory_that_is_no_model_is_one_line(cli, make_model, write_pair_yaml, tmp_path, command, change, parts):
    model = shutil.copytree(make_model(), tmp_path / "model")
    change(model)
    code, out, err = cli(command, write_pair_yaml(tmp_path, target={"model": "model"}))
    assert (code, out, err.count("\n")) == (1, "", 1)
    for part in parts:
        assert part in err, err
    assert not (tmp_path / "work").exists()
