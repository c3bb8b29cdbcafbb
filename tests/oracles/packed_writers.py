"""Float models written as other tools write quantized ones, bit by bit, from the published layouts alone; it knows nothing of specbuild.

AutoAWQ gemm: qweight (in, out / 8), nibble i of a word is output 0, 2, 4, 6, 1, 3, 5, 7 of its eight; qzeros (in / g, out / 8) likewise
GPTQ: qweight (in * bits / 32, out), low bits first down the input; qzeros (in / g, out * bits / 32), low bits first, minus one in "gptq"
compressed-tensors pack-quantized: weight_packed (out, in * bits / 32), low bits first, plus half the range; weight_scale (out, in / g)
"""

import json
import shutil
from dataclasses import dataclass, field

import numpy as np
from safetensors.numpy import load_file, save_file

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Layer:
    """A linear layer: codes (out, in) from 0 up, zeros and scales (out, groups), the group of each input column."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    order: np.ndarray

    def weight(self):
        """(code - zero) * scale, column by column."""
        columns = [
            (self.codes[:, i].astype(np.float32) - self.zeros[:, g]) * self.scales[:, g].astype(np.float32)
            for i, g in enumerate(self.order)
        ]
        return np.stack(columns, axis=1)


@dataclass
class Written:
    """A packed model's directory, its layers by Hugging Face name, and all its weights in float32."""

    directory: object
    layers: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)


def round_layer(weight, bits, group, rng, zeros="middle", order="neighbours"):
    """Round a weight: symmetric around the middle, or with random zero points; columns in order, or shuffled among groups."""
    rows, columns = weight.shape
    size = columns if group == -1 else group
    place = np.arange(columns) // size
    if order == "shuffled":
        place = rng.permutation(place)
    middle, groups = 2 ** (bits - 1), columns // size
    zero = np.full((rows, groups), middle) if zeros == "middle" else rng.integers(1, 2 * middle, (rows, groups))
    scale = np.zeros((rows, groups), dtype=np.float16)
    codes = np.zeros(weight.shape, dtype=np.int64)
    for g in range(groups):
        part = weight[:, place == g]
        scale[:, g] = np.abs(part).max(axis=1) / (middle - 0.5)
        codes[:, place == g] = np.clip(np.round(part / scale[:, g : g + 1].astype(np.float32)) + zero[:, g : g + 1], 0, 2 * middle - 1)
    return Layer(codes, zero, scale, place)


def words(values, bits, order=None):
    """Pack whole numbers (rows, n) into int32 (rows, n * bits / 32), low bits first; order: which of a word's values goes where."""
    per = 32 // bits
    rows, count = values.shape
    padded = np.zeros((rows, -(-count // per) * per), dtype=np.int64)
    padded[:, :count] = values
    out = np.zeros((rows, padded.shape[1] // per), dtype=np.uint32)
    for column in range(out.shape[1]):
        for i in range(per):
            place = i if order is None else order[i]
            out[:, column] |= padded[:, column * per + place].astype(np.uint32) << np.uint32(bits * i)
    return np.ascontiguousarray(out).view(np.int32)


def awq_parts(layer):
    return {
        "qweight": words(layer.codes.T, 4, AWQ_ORDER), "qzeros": words(layer.zeros.T, 4, AWQ_ORDER),
        "scales": np.ascontiguousarray(layer.scales.T),
    }  # fmt: skip


def gptq_parts(layer, bits, less):
    return {
        "qweight": np.ascontiguousarray(words(layer.codes, bits).T), "qzeros": words(layer.zeros.T - less, bits),
        "scales": np.ascontiguousarray(layer.scales.T), "g_idx": layer.order.astype(np.int32),
    }  # fmt: skip


def compressed_parts(layer, bits, asymmetric=False, shuffled=False):
    parts = {
        "weight_packed": words(layer.codes, bits), "weight_scale": layer.scales,
        "weight_shape": np.array(layer.codes.shape, dtype=np.int64),
    }  # fmt: skip
    if asymmetric:
        parts["weight_zero_point"] = np.ascontiguousarray(words(layer.zeros.T, bits).T)
    if shuffled:
        parts["weight_g_idx"] = layer.order.astype(np.int32)
    return parts


def write_packed(source, out, settings, make_parts, bits, group, zeros="middle", order="neighbours", skip=(), also=(), change=None, seed=0):
    """Copy a float model's directory with its linear layers packed; `skip` and `also`: names left out, names besides.

    change(layers): mend the layers before they are packed. settings: the quantization_config.
    """
    shutil.copytree(source, out)
    rng = np.random.default_rng(seed)
    tensors = load_file(out / "model.safetensors")
    written = Written(out)
    for name in [name for name in tensors if name.endswith(".weight")]:
        stem = name.removesuffix(".weight")
        if stem.endswith((*LINEARS, *also)) and not stem.endswith(tuple(skip) or ("nothing",)):
            written.layers[stem] = round_layer(tensors.pop(name).astype(np.float32), bits, group, rng, zeros, order)
    if change is not None:
        change(written.layers)
    written.weights = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    for stem, layer in written.layers.items():
        written.weights[f"{stem}.weight"] = layer.weight()
        tensors |= {f"{stem}.{part}": value for part, value in make_parts(layer).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return written


def write_awq(source, out, group=32, version="gemm", **choices):
    """As AutoAWQ saves it."""
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": version}
    return write_packed(source, out, settings, awq_parts, 4, group, **choices)


def write_gptq(source, out, group=32, bits=4, checkpoint_format="gptq", desc_act=False, **choices):
    """As AutoGPTQ and GPTQModel save it; a checkpoint_format of None writes no such key."""
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": choices.get("zeros", "middle") == "middle",
                "desc_act": desc_act}  # fmt: skip
    if checkpoint_format is not None:
        settings["checkpoint_format"] = checkpoint_format
    less = 0 if checkpoint_format == "gptq_v2" else 1
    return write_packed(source, out, settings, lambda layer: gptq_parts(layer, bits, less), bits, group, **choices)


def write_compressed(source, out, group=32, bits=4, actorder=None, weights=None, top=None, **choices):
    """As compressed-tensors saves it; weights and top: further keys of its scheme and of the whole."""
    asymmetric, shuffled = choices.get("zeros", "middle") != "middle", choices.get("order", "neighbours") != "neighbours"
    scheme = {
        "num_bits": bits, "type": "int", "symmetric": not asymmetric, "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group, "actorder": actorder, "dynamic": False, **(weights or {}),
    }  # fmt: skip
    settings = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}},
        "kv_cache_scheme": None, **(top or {}),
    }  # fmt: skip
    return write_packed(source, out, settings, lambda layer: compressed_parts(layer, bits, asymmetric, shuffled), bits, group, **choices)
