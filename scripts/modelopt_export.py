#!/usr/bin/env python3
"""Quantize a Hugging Face model to INT4 groups of 128 with NVIDIA's modelopt, on the CPU: the baseline of bench_quantize.py.

usage: python scripts/modelopt_export.py MODEL OUT [--tp 1]

The recipe is INT4_AWQ_CFG without a search (algorithm "max": no data, no prequant scales), written by export_tensorrt_llm_checkpoint
where the installed version has it, otherwise by export_hf_checkpoint. The last line of stdout is a JSON object of versions, seconds,
CPU seconds and peak resident memory. Needs nvidia-modelopt, torch and transformers, not this package: any environment will do.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch import export

DECODER = "llama"


def export_model(model: torch.nn.Module, out: Path, tp: int) -> str:
    """Write the quantized checkpoint; return the name of the exporter."""
    with torch.inference_mode():
        if hasattr(export, "export_tensorrt_llm_checkpoint"):
            export.export_tensorrt_llm_checkpoint(model, DECODER, torch.bfloat16, str(out), tp)
            return "export_tensorrt_llm_checkpoint"
        export.export_hf_checkpoint(model, torch.bfloat16, out)  # has no ranks
        return "export_hf_checkpoint"


def sync(directory: Path) -> None:
    """Put the files of a directory on the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    recipe = copy.deepcopy(mtq.INT4_AWQ_CFG)
    recipe["algorithm"] = "max"
    times, cpu = [time.perf_counter()], time.process_time()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16).eval()
    times.append(time.perf_counter())
    mtq.quantize(model, recipe)
    times.append(time.perf_counter())
    exporter = export_model(model, args.out, args.tp)
    sync(args.out)
    times.append(time.perf_counter())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {
        "versions": {name: metadata.version(name) for name in ("nvidia-modelopt", "torch", "transformers")},
        "exporter": exporter,
        "seconds": dict(zip(("load", "quantize", "export"), (b - a for a, b in pairwise(times)), strict=True)),
        "cpu_seconds": time.process_time() - cpu,
        "peak": int(status["VmHWM"].split()[0]) * 1024,
    }
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
