"""Make tests/golden/compressed: tiny Llamas quantized by llm-compressor itself, with the logits of compressed-tensors' own decompression.

It runs in an environment of its own, made once with llmcompressor 0.14.0.1, compressed-tensors 0.19.0, torch 2.13 and transformers 5.17.
usage: python scripts/make_compressed_golden.py tests/golden/compressed

Weights and scales are float32, so that a decompressed weight is the exact product of its integer and its scale.
"""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import save_file

CONFIG = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
CASES = {
    "w4a16": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    "w8a16": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
}
IDS = [(7 * position * position + 3 * position + 1) % 101 for position in range(48)]


def make_model(seed: int) -> transformers.LlamaForCausalLM:
    """Return a random Llama whose norms are not ones."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[0])
    return model.eval()


def write_case(out: Path, weights: dict[str, object], seed: int) -> None:
    """Quantize, save packed, then load what was saved, let compressed-tensors decompress it, and save that model's logits."""
    shutil.rmtree(out, ignore_errors=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    with TemporaryDirectory() as directory:  # oneshot reads a model's config.json again
        make_model(seed).save_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        oneshot(model=model, recipe=QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"]))
        model.save_pretrained(out / "model", save_compressed=True)
    (out / "model" / "recipe.yaml").unlink()
    for path in (out / "model").iterdir():
        path.chmod(0o644)
    settings = transformers.CompressedTensorsConfig(run_compressed=False)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        out / "model", dtype=torch.float32, quantization_config=settings, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = loaded(torch.tensor([IDS])).logits[0]
    save_file({"ids": torch.tensor(IDS), "logits": logits.contiguous()}, out / "logits.safetensors")


def main() -> None:
    """Write every case below the directory of the command line."""
    root = Path(sys.argv[1])
    for seed, (name, weights) in enumerate(CASES.items()):
        write_case(root / name, weights, seed)
        print(name, sum(path.stat().st_size for path in (root / name).rglob("*")), "bytes")


if __name__ == "__main__":
    main()
