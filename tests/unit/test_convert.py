"""Checkpoints against TensorRT-LLM's checkpoint format: every tensor bit by bit, every key of config.json."""

import json
import shutil
import tracemalloc

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbuild.artifacts import HFCheckpoint, TllmCheckpoint
from specbuild.config import ModelConfig, load_config
from specbuild.convert import run_convert, write_checkpoint
from specbuild.errors import CheckpointError

LAYER = "transformer.layers.{}."
NAMES = {  # TensorRT-LLM part: its Hugging Face sources, in order
    "input_layernorm": ["input_layernorm"],
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.dense": ["self_attn.o_proj"],
    "post_layernorm": ["post_attention_layernorm"],
    "mlp.fc": ["mlp.gate_proj"],
    "mlp.gate": ["mlp.up_proj"],
    "mlp.proj": ["mlp.down_proj"],
}


def load_hf(directory):
    tensors = {}
    for path in directory.glob("model*.safetensors"):
        tensors |= load_file(path)
    return tensors


def expected_tensors(hf, layers):
    """Return the unsplit TensorRT-LLM tensors that a Hugging Face state dict stands for."""
    embedding = hf["model.embed_tokens.weight"]
    tensors = {
        "transformer.vocab_embedding.weight": embedding,
        "transformer.ln_f.weight": hf["model.norm.weight"],
        "lm_head.weight": hf.get("lm_head.weight", embedding),
    }
    for layer in range(layers):
        for part, sources in NAMES.items():
            for kind in ("weight", "bias"):
                found = [hf[f"model.layers.{layer}.{source}.{kind}"] for source in sources if f"model.layers.{layer}.{source}.{kind}" in hf]
                if found:
                    tensors[f"{LAYER.format(layer)}{part}.{kind}"] = torch.cat(found)
    return tensors


@pytest.fixture
def convert(tmp_path, write_pair_yaml):
    """Convert a directory as the target; return the checkpoint's directory."""

    def run(model, **settings):
        config = load_config(write_pair_yaml(tmp_path, target={"model": str(model), "dtype": "float32", **settings}))
        run_convert(config, "target", force=True)
        return config.dir_of("target", "checkpoint")

    return run


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


VARIANTS = {
    "GQA": ("llama", {}),
    "MHA": ("llama", {"num_key_value_heads": 4}),
    "one key-value head": ("llama", {"num_key_value_heads": 1}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "attention biases alone": ("llama", {"attention_bias": True}),
    "head_dim": ("llama", {"head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 24}),
}


@pytest.mark.parametrize(("kind", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_every_tensor_is_carried_bit_by_bit_under_its_contract_name(convert, make_model, kind, changes):
    model = make_model(kind, **changes)
    assert_same(load_file(convert(model) / "rank0.safetensors"), expected_tensors(load_hf(model), 2))


def test_a_tied_model_has_no_lm_head_of_its_own_and_gets_a_copy(convert, make_model):
    model = make_model(tie_word_embeddings=True)
    assert "lm_head.weight" not in load_hf(model)
    out = convert(model)
    tensors = load_file(out / "rank0.safetensors")
    assert torch.equal(tensors["lm_head.weight"], load_hf(model)["model.embed_tokens.weight"])
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_weights_are_cast_to_the_dtype_asked_for_as_torch_casts(convert, make_model, source, wanted):
    model = make_model(dtype=source, attention_bias=True)
    out = convert(model, dtype=wanted)
    expected = {name: tensor.to(getattr(torch, wanted)) for name, tensor in expected_tensors(load_hf(model), 2).items()}
    assert_same(load_file(out / "rank0.safetensors"), expected)
    assert json.loads((out / "config.json").read_text())["dtype"] == wanted


def test_config_json_has_the_keys_and_values_of_the_contract(convert, make_model):
    config = json.loads((convert(make_model(head_dim=24, attention_bias=True, rope_theta=5000.0)) / "config.json").read_text())
    expected = {
        "architecture": "LlamaForCausalLM", "dtype": "float32", "logits_dtype": "float32", "vocab_size": 101, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_size": 24, "intermediate_size": 128,
        "hidden_act": "silu", "norm_epsilon": 1e-5, "max_position_embeddings": 512, "position_embedding_type": "rope_gpt_neox",
        "rotary_base": 5000.0, "rotary_scaling": None, "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "use_parallel_embedding": False, "embedding_sharding_dim": 0, "tie_word_embeddings": False, "attn_bias": True, "mlp_bias": False,
    }  # fmt: skip
    assert {key: config.get(key, "absent") for key in expected} == expected
    assert set(config["quantization"]) <= {
        "quant_algo", "kv_cache_quant_algo", "group_size", "smoothquant_val", "clamp_val", "use_meta_recipe", "has_zero_point",
        "pre_quant_scale", "exclude_modules",
    }  # fmt: skip
    assert config["quantization"]["quant_algo"] is None
    assert not {"quant_mode", "kv_dtype", "quant_algo"} & config.keys()  # read-only properties upstream: they would raise


def test_a_shape_survives_the_way_through_config_json(convert, make_model):
    out = convert(make_model("mistral", sliding_window=8, head_dim=24))
    shape = TllmCheckpoint.open(out).shape
    assert (shape.architecture, shape.head_dim, shape.kv_heads, shape.window) == ("MistralForCausalLM", 24, 2, 8)


def heads(tensor, count, dim):
    return list(tensor.reshape(count, dim, *tensor.shape[1:]))


def split_qkv(tensor, rank, tp, q_heads, kv_heads, dim):
    """Section 3.2: q, k and v split apart; key-value heads repeated tp / kv_heads times where there are fewer than ranks."""
    q, k, v = tensor.split([q_heads * dim, kv_heads * dim, kv_heads * dim])
    pieces = []
    for part, count in ((q, q_heads), (k, kv_heads), (v, kv_heads)):
        repeated = [head for head in heads(part, count, dim) for _ in range(max(1, tp // count))]
        share = len(repeated) // tp
        pieces += repeated[rank * share : (rank + 1) * share]
    return torch.cat(pieces)


@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 4), (2, 2), (2, 1), (4, 2), (4, 1)])
def test_tensor_parallel_ranks_share_the_tensors_by_the_contract(convert, make_model, tp, kv_heads):
    model = make_model(num_key_value_heads=kv_heads, attention_bias=True, mlp_bias=True)
    out = convert(model, tp=tp)
    for rank in range(tp):
        expected = expected_tensors(load_hf(model), 2)
        for name, tensor in expected.items():
            if "qkv" in name:
                expected[name] = split_qkv(tensor, rank, tp, 4, kv_heads, 16)
            elif "mlp.fc" in name or "mlp.gate" in name:
                expected[name] = tensor[rank * 128 // tp : (rank + 1) * 128 // tp]
            elif name.endswith(("dense.weight", "proj.weight")):
                width = tensor.shape[1] // tp
                expected[name] = tensor[:, rank * width : (rank + 1) * width]
            elif name == "lm_head.weight":
                rows = -(-101 // tp)
                padded = torch.cat([tensor, torch.zeros(rows * tp - 101, 64)])
                expected[name] = padded[rank * rows : (rank + 1) * rows]
        assert_same(load_file(out / f"rank{rank}.safetensors"), expected)


def test_the_vocabulary_is_padded_with_zeros_and_config_json_keeps_its_size(convert, make_model):
    out = convert(make_model(dtype="bfloat16"), tp=2, dtype="bfloat16")
    ranks = [load_file(out / f"rank{rank}.safetensors")["lm_head.weight"] for rank in range(2)]
    assert [tuple(rank.shape) for rank in ranks] == [(51, 64), (51, 64)]
    assert not ranks[1][50].any()
    assert ranks[1].dtype == torch.bfloat16
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 101
    assert config["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}


def test_pipeline_ranks_renumber_layers_and_keep_the_ends_apart(convert, make_model):
    model = make_model(num_hidden_layers=4)
    out = convert(model, pp=2)
    whole = expected_tensors(load_hf(model), 4)
    first = {name: tensor for name, tensor in whole.items() if name.startswith((LAYER.format(0), LAYER.format(1)))}
    first["transformer.vocab_embedding.weight"] = whole["transformer.vocab_embedding.weight"]
    last = {
        name.replace(LAYER.format(i + 2), LAYER.format(i)): whole[name] for i in (0, 1) for name in whole if LAYER.format(i + 2) in name
    }
    last |= {name: whole[name] for name in ("transformer.ln_f.weight", "lm_head.weight")}
    assert_same(load_file(out / "rank0.safetensors"), first)
    assert_same(load_file(out / "rank1.safetensors"), last)


def test_ranks_are_numbered_pipeline_first_when_both_are_split(convert, make_model):
    out = convert(make_model(num_hidden_layers=4), pp=2, tp=2)
    names = [load_file(out / f"rank{rank}.safetensors").keys() for rank in range(4)]
    assert ["transformer.vocab_embedding.weight" in rank for rank in names] == [True, True, False, False]
    assert ["lm_head.weight" in rank for rank in names] == [False, False, True, True]


def test_a_tied_model_on_two_pipeline_ranks_has_its_lm_head_on_the_last(convert, make_model):
    model = make_model(tie_word_embeddings=True)
    out = convert(model, pp=2)
    embedding = load_hf(model)["model.embed_tokens.weight"]
    assert torch.equal(load_file(out / "rank0.safetensors")["transformer.vocab_embedding.weight"], embedding)
    assert torch.equal(load_file(out / "rank1.safetensors")["lm_head.weight"], embedding)


def test_a_sharded_source_gives_the_same_checkpoint(convert, make_model):
    whole, sharded = make_model(), make_model(max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    first = load_file(convert(whole) / "rank0.safetensors")
    assert_same(load_file(convert(sharded) / "rank0.safetensors"), first)


def copied(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


def test_a_stray_weight_file_is_not_read(convert, make_model, tmp_path):
    model = copied(make_model(), tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, model / "consolidated.safetensors")
    assert_same(load_file(convert(model) / "rank0.safetensors"), expected_tensors(load_hf(make_model()), 2))


def test_a_whole_file_goes_before_an_index_as_in_transformers(convert, make_model, tmp_path):
    import transformers

    model = copied(make_model(max_shard_size="60KB"), tmp_path)
    shutil.copy(make_model(seed=5) / "model.safetensors", model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model).state_dict()
    found = load_file(convert(model) / "rank0.safetensors")
    assert torch.equal(found["lm_head.weight"], loaded["lm_head.weight"])


def test_buffers_that_carry_no_weights_are_ignored(convert, make_model, tmp_path):
    model = copied(make_model(), tmp_path)
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, model / "model.safetensors")
    assert_same(load_file(convert(model) / "rank0.safetensors"), expected_tensors(tensors, 2))


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"tp": 3}, ["tp=3", "4 attention heads"]),
        ({"tp": 8}, ["tp=8", "4 attention heads"]),
        ({"pp": 3}, ["pp=3", "2 layers"]),
    ],
)
def test_ranks_that_do_not_divide_are_refused_with_both_numbers(convert, make_model, settings, numbers):
    with pytest.raises(CheckpointError, match="Cannot split") as caught:
        convert(make_model(), **settings)
    assert all(number in str(caught.value) for number in numbers)


def test_key_value_heads_that_fit_no_rank_are_refused(convert, make_model):
    with pytest.raises(CheckpointError, match="4 key-value heads neither divide nor are divided by 6"):
        convert(make_model(hidden_size=96, num_attention_heads=12, num_key_value_heads=4, intermediate_size=144), tp=6)


def test_a_value_that_the_dtype_cannot_hold_is_refused_with_tensor_and_row(convert, make_model, tmp_path):
    model = copied(make_model(), tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][7, 3] = 1e30
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: row 7 .* float16"):
        convert(model, dtype="float16")
    assert load_file(convert(model, dtype="bfloat16") / "rank0.safetensors")["transformer.layers.1.mlp.gate.weight"][7, 3] > 9e29


def test_memory_holds_a_tensor_and_not_the_model(make_model, tmp_path):
    source = HFCheckpoint.open(make_model(num_hidden_layers=24, hidden_size=128, intermediate_size=512))
    settings = ModelConfig(model="tiny", dtype="float32")
    for _ in range(2):  # the first time imports
        tracemalloc.start()
        write_checkpoint(source, settings, tmp_path, "target")
        peak = tracemalloc.get_traced_memory()[1]  # NumPy's buffers are traced
        tracemalloc.stop()
    assert peak < sum(entry.nbytes for entry in source.entries.values()) / 8  # a layer is 1/25, its largest tensor 1/100
