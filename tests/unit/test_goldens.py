"""Our checkpoints against NVIDIA's own exporter: every tensor's name, dtype, shape and bytes, every key of config.json that is read.

The goldens are made by scripts/make_goldens.py. Where our checkpoint differs by choice, `in_exporter_form` and CHOSEN say how and why.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specbuild import tensorfile
from specbuild.artifacts import HFCheckpoint, TllmCheckpoint
from specbuild.config import ModelConfig, QuantizeConfig
from specbuild.convert import write_checkpoint
from specbuild.quant import find_scheme, load_scales
from specbuild.quantize import write_quantized

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("*/*.json") if path.stem[:-1].endswith("-tp"))
TENSORS = 1998  # of all cases
READ = {  # what the loader reads (TensorRT-LLM's PretrainedConfig) and must be equal, with its default where a key may be absent
    "architecture": None, "dtype": None, "num_hidden_layers": None, "num_attention_heads": None, "num_key_value_heads": None,
    "hidden_size": None, "intermediate_size": None, "head_size": None, "norm_epsilon": None,
    "max_position_embeddings": None, "position_embedding_type": None, "rotary_base": None, "rotary_scaling": None, "rotary_pct": 1.0,
    "residual_mlp": False, "embedding_sharding_dim": 0, "mapping": None, "quantization": None,
}  # fmt: skip
INFORMATION = {"producer", "rank", "decoder", "rmsnorm", "lm_head_bias", "bias", "share_embedding_table"}  # unknown to the loader
CHOSEN = {  # keys of ours that may differ, and how
    "logits_dtype": lambda ours, golden, case: ours == "float32",  # what the acceptance rule reads; the exporter knows 16 bits only
    "use_parallel_embedding": lambda ours, golden, case: golden is True and ours in (True, False),  # see in_exporter_form
    # Upstream has one GELU, the tanh form; both names are it.
    "hidden_act": lambda ours, golden, case: ours == {"gelu_pytorch_tanh": "gelu"}.get(golden, golden),
    # The exporter pads the vocabulary for int4_awq, as if lm_head were quantized; it is not.
    "vocab_size": lambda ours, golden, case: golden == (-(-ours // 64) * 64 if case["scheme"] == "int4_awq" else ours),
}


@pytest.fixture(scope="module")
def write_case(tmp_path_factory):
    """Return write(case): the directory of our own checkpoint, made from the golden's model and scales."""

    def write(case):
        source = HFCheckpoint.open(GOLDEN / case["model"] / "model")
        quantize = QuantizeConfig(scheme=case["scheme"], group_size=case["group_size"])
        model = ModelConfig(model=case["model"], dtype=case["dtype"], tp=case["tp"], quantize=quantize)
        plain, out = (tmp_path_factory.mktemp(name) for name in ("plain", "quantized"))
        write_checkpoint(source, model, plain, "golden")
        scales = GOLDEN / case["model"] / f"{case['scheme']}-{case['dtype']}.scales.safetensors"
        given = load_scales(scales) if scales.exists() else None
        write_quantized(TllmCheckpoint.open(plain), find_scheme(case["scheme"]), quantize, out, "golden", given)
        return out

    return write


def load_case(name):
    return json.loads((GOLDEN / name).read_text())


def in_exporter_form(ranks, case, config):
    """Change our rank files to what the exporter writes where we differ by choice; everything else stays as it is."""
    vocab, padded = config["vocab_size"], case["config"]["vocab_size"]
    embedding, head = "transformer.vocab_embedding.weight", "lm_head.weight"
    if not config["use_parallel_embedding"]:  # every rank has the whole embedding, the exporter's a share of its rows
        assert all(torch.equal(rank[embedding], ranks[0][embedding]) for rank in ranks)
        share_rows(ranks, embedding, ranks[0][embedding], padded)
    if head in ranks[0]:
        whole = torch.cat([rank[head] for rank in ranks])
        assert not whole[vocab:].any()
        share_rows(ranks, head, whole[:vocab], padded)
    assert (head in ranks[0]) == (not case["config"]["share_embedding_table"])
    return ranks


def share_rows(ranks, name, whole, rows):
    """Give every rank its share of a tensor padded with rows of zeros."""
    rows = -(-rows // len(ranks)) * len(ranks)
    padded = torch.nn.functional.pad(whole, (0, 0, 0, rows - whole.shape[0]))
    for tensors, share in zip(ranks, padded.chunk(len(ranks)), strict=True):
        tensors[name] = share


def digests(ranks):
    """Return what a golden lists of every tensor."""
    found = []
    for rank, tensors in enumerate(ranks):
        for name, tensor in sorted(tensors.items()):
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.append([rank, name, dtype, list(tensor.shape), hashlib.sha256(raw).hexdigest()])
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_and_every_key_equals_the_exporter_s(write_case, name):
    case = load_case(name)
    out = write_case(case)
    config = json.loads((out / "config.json").read_text())
    ranks = [load_file(out / f"rank{rank}.safetensors") for rank in range(case["tp"])]
    found = digests(in_exporter_form(ranks, case, config))
    golden = case["tensors"]
    assert [item[:2] for item in found] == [item[:2] for item in golden]
    different = [ours[:4] for ours, theirs in zip(found, golden, strict=True) if ours != theirs]
    assert not different, f"{len(different)} of {len(golden)} tensors differ: {different[:20]}"
    assert {key: config.get(key, default) for key, default in READ.items()} == {
        key: case["config"].get(key, default) for key, default in READ.items()
    }
    assert case["config"].keys() <= READ.keys() | INFORMATION | CHOSEN.keys()
    for key, allowed in CHOSEN.items():
        assert allowed(config[key], case["config"][key], case), (key, config[key], case["config"][key])


@pytest.mark.parametrize("name", ["llama/int4_awq-bfloat16-tp2.json", "llama/int8_sq-float16-tp2.json", "gemma/full_prec-float16-tp2.json"])
def test_blocks_of_rows_and_mapped_files_change_nothing(write_case, name, monkeypatch):
    """Real tensors are mapped and worked on in many blocks; these are too small for either, unless they are told to."""
    case = load_case(name)
    whole, blocks = write_case(case), None
    with monkeypatch.context() as patch:
        patch.setattr(tensorfile, "_BLOCK", 1000)
        patch.setattr(tensorfile, "_MAPPED", 1)
        patch.setattr(tensorfile, "_WRITE", 777)
        blocks = write_case(case)
    for rank in range(case["tp"]):
        assert (whole / f"rank{rank}.safetensors").read_bytes() == (blocks / f"rank{rank}.safetensors").read_bytes()


def test_no_golden_is_lost(capsys):
    counts = json.loads((GOLDEN / "goldens.json").read_text())["tensors (tp 1 and 2 together)"]
    listed = sum(len(json.loads((GOLDEN / name).read_text())["tensors"]) for name in CASES)
    with capsys.disabled():
        print(f"\n{listed} tensors of {len(CASES)} goldens")  # noqa: T201
    assert (len(CASES), listed) == (2 * len(counts), sum(counts.values()))
    assert listed == TENSORS
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 5_000_000
