"""A decoder's forward pass in PyTorch from a TensorRT-LLM checkpoint (one rank; full precision or SmoothQuant), by TensorRT-LLM's rules.

It knows nothing of specbuild: names, layouts and keys are those of TensorRT-LLM 1.0's loader and models.
  mlp: activation(fc(x)) * gate(x); "swiglu" has no gate, and fc's rows are the up half and then the gate half
  norms: RMS norm times the weight as stored (Gemma's is stored plus one)
  W8A8_SQ_PER_CHANNEL: x * prequant rounds half to even to integers of one step per layer, -128..127; integers multiply integers
  attention: scores over the root of query_pre_attn_scalar (else of the head size), soft cap, then mask
"""

import json
import math

import torch
from safetensors.torch import load_file

ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}


def logits(directory, tokens, seen=None):
    """Return float32 logits (tokens, vocab) of a checkpoint directory; `seen` gets the input of every linear layer, by its name."""
    config = json.loads((directory / "config.json").read_text())
    assert config["mapping"]["world_size"] == 1
    weights = {name: tensor.float() for name, tensor in load_file(directory / "rank0.safetensors").items()}
    embedding = weights["transformer.vocab_embedding.weight"]
    x = embedding[torch.tensor(tokens)]
    if config["architecture"].startswith("Gemma"):
        x = x * math.sqrt(config["hidden_size"])
    for i in range(config["num_hidden_layers"]):
        prefix = f"transformer.layers.{i}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        layer["seen"] = lambda name, x, prefix=prefix: None if seen is None else seen.__setitem__(prefix + name, x)
        x = decoder_layer(config, layer, i, x)
    out = rms_norm(config, x, weights["transformer.ln_f.weight"]) @ weights.get("lm_head.weight", embedding).T
    return soft_cap(out, config.get("final_logit_softcapping"))


def decoder_layer(config, layer, index, x):
    attended = attention(config, layer, index, rms_norm(config, x, layer["input_layernorm.weight"]))
    if config.get("inter_layernorms"):
        x = x + rms_norm(config, attended, layer["post_layernorm.weight"])
        out = mlp(config, layer, rms_norm(config, x, layer["pre_feedforward_layernorm.weight"]))
        return x + rms_norm(config, out, layer["post_feedforward_layernorm.weight"])
    x = x + attended
    return x + mlp(config, layer, rms_norm(config, x, layer["post_layernorm.weight"]))


def rms_norm(config, x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["norm_epsilon"]) * weight


def linear(layer, name, x):
    layer["seen"](name, x)
    step, bias = layer.get(f"{name}.activation_scaling_factor"), layer.get(f"{name}.bias")
    if step is None:
        return torch.nn.functional.linear(x, layer[f"{name}.weight"], bias)
    rounded = (x * layer[f"{name}.prequant_scaling_factor"] / step).round().clamp(-128, 127)
    total = rounded.double() @ layer[f"{name}.weight"].double().T  # exact
    out = total.float() * (step * layer[f"{name}.weights_scaling_factor"])
    return out if bias is None else out + bias


def soft_cap(x, cap):
    return x if cap is None else cap * torch.tanh(x / cap)


def mlp(config, layer, x):
    fc = linear(layer, "mlp.fc", x)
    if config["hidden_act"] == "swiglu":
        assert not any(name.startswith("mlp.gate") for name in layer)
        up, gate = fc.chunk(2, dim=-1)
        return linear(layer, "mlp.proj", ACTIVATIONS["silu"](gate) * up)
    return linear(layer, "mlp.proj", ACTIVATIONS[config["hidden_act"]](fc) * linear(layer, "mlp.gate", x))


def attention(config, layer, index, x):
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_size"]
    q, k, v = linear(layer, "attention.qkv", x).split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, size)).transpose(0, 1) for part in (q, k, v))
    if config.get("qk_layernorm"):
        q = rms_norm(config, q, layer["attention.q_layernorm.weight"])
        k = rms_norm(config, k, layer["attention.k_layernorm.weight"])
    window = window_of(config, index)
    q, k = rotate(config, q, window), rotate(config, k, window)
    k, v = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(config.get("query_pre_attn_scalar") or size)
    scores = soft_cap(scores, config.get("attn_logit_softcapping"))
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    seen = (distance >= 0) & (distance < (window or len(x)))
    out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
    return linear(layer, "attention.dense", out.transpose(0, 1).flatten(1))


def window_of(config, index):
    """Gemma's every n-th layer sees all positions, other families' windows hold in all layers."""
    pattern = config.get("_sliding_window_pattern")
    return None if pattern and (index + 1) % pattern == 0 else config.get("sliding_window")


def rotate(config, x, window):
    """Rotate the first columns of each head, halves against each other (rope_gpt_neox)."""
    size = int(config["head_size"] * config.get("rotary_pct", 1.0))
    frequencies, scale = rotary(config, size, x.shape[1], window)
    angles = torch.arange(x.shape[1]).double()[:, None] * frequencies
    cos, sin = (angles.cos() * scale).float(), (angles.sin() * scale).float()
    a, b, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def rotary(config, size, length, window):
    """Return radians per position of each pair, and the factor on cosine and sine."""
    exponents = torch.arange(0, size, 2).double() / size
    if window and "rope_local_base_freq" in config:
        return config["rope_local_base_freq"] ** -exponents, 1.0
    plain = config["rotary_base"] ** -exponents
    if config["position_embedding_type"] == "long_rope":
        original = config["original_max_position_embeddings"]
        factors = config[f"longrope_scaling_{'long' if length > original else 'short'}_factors"]
        ratio = config["max_position_embeddings"] / original
        return plain / torch.tensor(factors).double(), math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    scaling = config["rotary_scaling"] or {}
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "llama3":
        return torch.tensor([llama3(float(frequency), scaling) for frequency in plain]).double(), 1.0
    if kind == "yarn":
        return yarn(plain, size, scaling, config)
    assert kind is None
    return plain, 1.0


def llama3(frequency, scaling):
    wavelength = 2 * math.pi / frequency
    original, low, high = scaling["original_max_position_embeddings"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / scaling["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency


def yarn(plain, size, scaling, config):
    """The pairs' share of slowing down rises from none to all between two indices; see the appendix of the paper."""
    original = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    bounds = [size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config["rotary_base"]))
              for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))]  # fmt: skip
    if scaling.get("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], size - 1)
    frequencies = []
    for i, frequency in enumerate(plain.tolist()):
        share = min(max((i - low) / (high - low), 0), 1)
        frequencies.append(frequency * (1 - share) + frequency / scaling["factor"] * share)
    return torch.tensor(frequencies).double(), scaling.get("attention_factor", 0.1 * math.log(scaling["factor"]) + 1)
