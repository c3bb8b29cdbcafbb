"""Tiny seeded models with everything that a real one may have, as Hugging Face directories, and a built pair of them."""

import copy
import json
import sys

import pytest
import yaml

VOCAB = 101
END = "<|end|>"
CORPUS = [
    "def read_file(path): return open(path).read()",
    "class Reader: the file is read line by line, then closed again",
    "for line in lines: print(line, end='') # 0123456789",
    "import os, sys; from pathlib import Path",
]
TINY = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip

KINDS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"), "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"), "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"), "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"), "phi3": ("Phi3Config", "Phi3ForCausalLM"),
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _offline(tmp_path_factory):
    """No model hub, and no cache outside the temporary directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf-home")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level BPE tokenizer with exactly VOCAB tokens, id 0 the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], show_progress=False))
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


@pytest.fixture(scope="session")
def make_model(tmp_path_factory, tokenizer):
    """Return make(kind, seed=, dtype=, **config): a saved random model's directory; the same arguments give the same directory.

    kind is a key of KINDS. Norms are not ones and biases not zero, so that a lost one shows in the logits.
    """
    made = {}

    def make(kind="llama", *, seed=0, dtype="float32", max_shard_size="5GB", **config):
        key = (kind, seed, dtype, max_shard_size, json.dumps(config, sort_keys=True))
        if key not in made:
            directory = tmp_path_factory.mktemp(kind)
            write_model(directory, kind, seed, dtype, max_shard_size, {**TINY, **config})
            tokenizer.save(str(directory / "tokenizer.json"))
            made[key] = directory
        return made[key]

    return make


def write_model(directory, kind, seed, dtype, max_shard_size, config):
    """Save a seeded random model with its generation_config."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config_class, model_class = (getattr(transformers, name) for name in KINDS[kind])
    model = model_class(config_class(**copy.deepcopy(config)))  # transformers writes into nested values
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-1, 1)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[0])
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)


@pytest.fixture(scope="session")
def write_pair_yaml(make_model):
    """Return write(directory, **sections): a YAML of the tiny pair with the given keys replaced, nested ones merged; None removes one.

    Quality is not measured unless a test asks for it.
    """
    base = {
        "name": "tiny",
        "target": {"model": "", "dtype": "bfloat16", "quantize": {"scheme": "int4_awq", "group_size": 32, "quality": {"samples": 0}}},
        "draft": {"model": "", "dtype": "bfloat16", "quantize": {"scheme": "int8_wo", "quality": {"samples": 0}}},
        "speculation": {"draft_len": 4, "acceptance": "rejection"},
        "build": {"compiler": "onnx-cpu", "max_batch_size": 4, "max_seq_len": 256},
    }

    def merge(values, changes):
        for key, value in changes.items():
            if isinstance(value, dict) and isinstance(values.get(key), dict):
                merge(values[key], value)
            elif value is None:
                values.pop(key, None)
            else:
                values[key] = value

    def write(directory, **sections):
        values = copy.deepcopy(base)
        values["workdir"] = str(directory / "work")
        values["target"]["model"] = str(make_model("llama", num_hidden_layers=3))
        values["draft"]["model"] = str(make_model("llama", seed=1, num_hidden_layers=1))
        merge(values, sections)
        path = directory / "pair.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


@pytest.fixture(scope="session")
def tiny_pair(write_pair_yaml, tmp_path_factory):
    """The configuration of a pair whose checkpoints and engines are built. Do not write into its directories."""
    from specbuild.build import run_build
    from specbuild.config import ROLES, load_config
    from specbuild.convert import run_convert
    from specbuild.quantize import run_quantize

    config = load_config(write_pair_yaml(tmp_path_factory.mktemp("tiny-pair")))
    for stage in (run_convert, run_quantize, run_build):
        for role in ROLES:
            stage(config, role)
    return config


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run a command line in this process; return (exit code, stdout, stderr)."""

    from specbuild.cli import main

    def run(*arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["specbuild", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        return code, *capsys.readouterr()

    return run
