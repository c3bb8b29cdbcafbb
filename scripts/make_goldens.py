#!/usr/bin/env python3
"""Write tests/golden: TensorRT-LLM checkpoints of seeded tiny models, made by NVIDIA's own exporter on the CPU.

usage: python scripts/make_goldens.py [--out tests/golden]      (about a minute; Python 3.12, in an environment of its own with
       nvidia-modelopt==0.33.1 torch==2.7.1 transformers==4.53.1 safetensors numpy: the package never needs it)

Per model: model/ (the Hugging Face checkpoint). Per scheme and dtype: SCHEME-DTYPE.scales.safetensors (what the calibration found: the
inputs of quantization), and for tp 1 and 2 SCHEME-DTYPE-tpN.json: config.json as exported, and of every exported tensor its rank, name,
dtype, shape and SHA-256.
q, k and v have one prequant vector in TensorRT-LLM: the mean of the three found, as the exporter takes it, applied once to the
original weights with modelopt's own function (left alone, the exporter multiplies weights that were already scaled and rounded once more).
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_tensorrt_llm_checkpoint
from modelopt.torch.quantization import model_calib
from safetensors.torch import load_file, save_file

DIMS = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 1, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 0,
        "tie_word_embeddings": False}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
ACTIVATION = "gelu_pytorch_tanh"
MODELS: dict[str, tuple[str, int, int, dict[str, Any]]] = {  # class, seed, INT4 group size, changes of DIMS
    "llama": ("Llama", 11, 128, WIDE),
    "llama-tied": ("Llama", 12, 64, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-bias": ("Llama", 13, 64, {"attention_bias": True, "mlp_bias": True, "vocab_size": 127}),
    "mistral": ("Mistral", 14, 64, {"sliding_window": 64}),
    "gemma": ("Gemma", 15, 64, {"tie_word_embeddings": True, "hidden_act": ACTIVATION, "hidden_activation": ACTIVATION}),
}
SCHEMES = {"full_prec": None, "int4_awq": mtq.INT4_AWQ_CFG, "int8_sq": mtq.INT8_SMOOTHQUANT_CFG}
DTYPES = ("float16", "bfloat16")
PARTS = {"self_attn.q_proj": "attention.qkv", "self_attn.k_proj": "attention.qkv", "self_attn.v_proj": "attention.qkv",
         "self_attn.o_proj": "attention.dense", "mlp.gate_proj": "mlp.fc", "mlp.up_proj": "mlp.gate",
         "mlp.down_proj": "mlp.proj"}  # fmt: skip
PACKAGES = ("nvidia-modelopt", "torch", "transformers", "safetensors", "numpy")


def make_model(name: str, out: Path) -> None:
    """Save a seeded model in float16; norms are not ones and biases not zero, so that a lost one shows."""
    kind, seed, _, changes = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**DIMS, **changes, "initializer_range": 0.1})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
                if kind == "Gemma":  # exact in bfloat16: the exporter adds one to the weight of a model that was cast before
                    parameter.copy_(parameter.bfloat16())
            elif key.endswith("bias"):
                parameter.uniform_(-1, 1)
            elif "proj" in key:  # columns of unequal size, so that scales are worth finding
                parameter.mul_(torch.exp(torch.randn(parameter.shape[1]) * 0.5))
    model.half().save_pretrained(out)


def calibrate(model: torch.nn.Module, scheme: str, group_size: int) -> dict[str, torch.Tensor]:
    """Quantize a model with modelopt; return the scales found, by TensorRT-LLM name. q, k and v share theirs afterwards."""
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.randint(1, model.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(1))
    recipe = copy.deepcopy(SCHEMES[scheme])
    if scheme == "int4_awq":
        recipe["quant_cfg"]["*weight_quantizer"]["block_sizes"][-1] = group_size
    found: dict[torch.nn.Module, torch.Tensor] = {}
    apply = model_calib.apply_pre_quant_scale_and_smooth

    def record(linear: torch.nn.Module, pre_quant_scale: torch.Tensor) -> None:
        found[linear] = pre_quant_scale.detach().float().reshape(-1).clone()
        apply(linear, pre_quant_scale)

    model_calib.apply_pre_quant_scale_and_smooth = record
    try:
        mtq.quantize(model, recipe, lambda m: m(tokens))
    finally:
        model_calib.apply_pre_quant_scale_and_smooth = apply
    scales: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        linears = {part: layer.get_submodule(part) for part in PARTS}
        attention = [linears[f"self_attn.{x}_proj"] for x in "qkv"]
        shared = torch.stack([found[linear] for linear in attention]).mean(dim=0)
        for part, linear in linears.items():
            name = f"transformer.layers.{index}.{PARTS[part]}"
            scale = shared if linear in attention else found[linear]
            if not torch.equal(scale, found[linear]):
                apply_again(linear, plain[f"model.layers.{index}.{part}.weight"], scale)
            scales[f"{name}.prequant_scaling_factor"] = scale.clone()
            if linear.input_quantizer.is_enabled:
                amax = linear.input_quantizer.export_amax().float()
                assert torch.equal(scales.get(f"{name}.activation_scaling_factor", amax / 127), amax / 127)
                scales[f"{name}.activation_scaling_factor"] = amax / 127
    return scales


def apply_again(linear: torch.nn.Module, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Apply prequant scales to the original weight."""
    linear.weight.data.copy_(weight)
    del linear.input_quantizer._pre_quant_scale
    linear.input_quantizer._enable_pre_quant_scale = False
    model_calib.apply_pre_quant_scale_and_smooth(linear, scale)


def make_case(name: str, scheme: str, dtype: str, out: Path) -> int:
    """Write one model's goldens of a scheme and dtype, for one and two ranks; return how many tensors were exported."""
    count, found = 0, []
    decoder, group_size = MODELS[name][0].lower().replace("mistral", "llama"), MODELS[name][2]
    for tp in (1, 2):
        model = transformers.AutoModelForCausalLM.from_pretrained(out / name / "model", torch_dtype=getattr(torch, dtype)).eval()
        if SCHEMES[scheme] is not None:
            found.append(calibrate(model, scheme, group_size))
        with tempfile.TemporaryDirectory() as exported, torch.no_grad():
            export_tensorrt_llm_checkpoint(model, decoder, getattr(torch, dtype), exported, tp)
            config = json.loads((Path(exported) / "config.json").read_text())
            ranks = [load_file(f"{exported}/rank{rank}.safetensors") for rank in range(tp)]
        tensors = [describe(rank, key, ranks[rank][key]) for rank in range(tp) for key in sorted(ranks[rank])]
        case = {"model": name, "scheme": scheme, "dtype": dtype, "tp": tp, "group_size": group_size, "config": config}
        lines = ",\n  ".join(json.dumps(tensor) for tensor in tensors)
        (out / name / f"{scheme}-{dtype}-tp{tp}.json").write_text(f'{json.dumps(case)[:-1]}, "tensors": [\n  {lines}\n]}}\n')
        count += len(tensors)
    if found:
        assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])
        save_file(found[0], out / name / f"{scheme}-{dtype}.scales.safetensors")
    return count


def describe(rank: int, name: str, tensor: torch.Tensor) -> list[Any]:
    """Return [rank, name, dtype, shape, SHA-256 of the bytes]."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [rank, name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hashlib.sha256(raw).hexdigest()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tests/golden"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    counts = {}
    for name in MODELS:
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name / "model").mkdir(parents=True)
        make_model(name, out / name / "model")
        for scheme in SCHEMES:
            for dtype in DTYPES:
                counts[f"{name}/{scheme}-{dtype}"] = make_case(name, scheme, dtype, out)
    note = {
        "what": "TensorRT-LLM checkpoints by export_tensorrt_llm_checkpoint on the CPU; see scripts/make_goldens.py",
        "command": "python scripts/make_goldens.py",
        "versions": {package: metadata.version(package) for package in PACKAGES},
        "seeds": {name: seed for name, (_, seed, *_) in MODELS.items()},
        "tensors (tp 1 and 2 together)": counts,
    }
    (out / "goldens.json").write_text(json.dumps(note, indent=2) + "\n")


if __name__ == "__main__":
    main()
