"""Scales for a layer's linear modules by NVIDIA's own search (nvidia-modelopt), which TensorRT-LLM calibrates with too."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from specbuild.quant.scales import LinearScales

if TYPE_CHECKING:
    import torch


def find_scales(
    layer: torch.nn.Module, forward: Callable[[torch.nn.Module], None], recipe: str, group_size: int
) -> dict[str, LinearScales]:
    """Return the scales of every torch.nn.Linear in a layer, by module name; the layer's own weights are spent.

    forward(layer) runs all calibration inputs through it, and is called twice. recipe: a config of modelopt.torch.quantization,
    INT4_AWQ_CFG (with `group_size`) or INT8_SMOOTHQUANT_CFG. Versions 0.33 to 0.47 were tried.
    """
    import torch

    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # modelopt warns of absent CUDA and prints its progress
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq

        config = copy.deepcopy(getattr(mtq, recipe))
        _set_group_size(config["quant_cfg"], group_size)
        mtq.quantize(layer, config, forward)
    scales = {}
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            quantizer: Any = module.input_quantizer
            amax = quantizer.amax if quantizer.is_enabled else None
            activation = None if amax is None else amax.float().reshape(1).cpu() / 127
            if activation is not None and not activation.any():
                activation = torch.ones(1)  # inputs that are always zero: any scale holds them
            scales[name] = LinearScales(quantizer._pre_quant_scale.float().reshape(-1).cpu(), activation)
    gc.collect()  # what modelopt makes of a layer refers to itself: it would stay until some later collection
    return scales


def _set_group_size(quant_cfg: Any, group_size: int) -> None:
    """Put the group size where the version at hand has it: a mapping by pattern up to 0.37, later a list of entries."""
    entries = quant_cfg.values() if isinstance(quant_cfg, dict) else [entry.get("cfg") for entry in quant_cfg]
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("block_sizes"), dict) and -1 in entry["block_sizes"]:
            entry["block_sizes"][-1] = group_size
