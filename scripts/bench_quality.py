#!/usr/bin/env python3
"""Quantize the target of a pair in every way and print what each did to it, as one table.

usage: python scripts/bench_quality.py [configs/demo.yaml] [--samples 128] [--group-size 128 --group-size 256 ...]

The schemes that have groups of columns are measured at each --group-size. "KL, engine" is of the logits that the CPU engine answers with:
it also rounds activations, in blocks as wide as the groups. Needs the extras calibrate and cpu. Everything is written below a temporary
directory, and removed. On 2 cores the demo pair takes a few minutes, most of them in nvidia-modelopt's search.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import yaml

from specbuild.acceptance import run_decoder
from specbuild.artifacts import TllmCheckpoint, find_model_dir
from specbuild.build import run_build
from specbuild.calibration import DEFAULT_LENGTH, load_text
from specbuild.check import load_shape
from specbuild.compilers import find_compiler
from specbuild.config import PairConfig, load_config
from specbuild.convert import run_convert
from specbuild.decoder import Decoder
from specbuild.provenance import find_version
from specbuild.quality import QualityReport, load_quality
from specbuild.quant import find_scheme
from specbuild.quantize import run_quantize
from specbuild.tokenizer import load_tokenizer

WAYS: dict[str, dict[str, Any]] = {
    "full_prec": {"scheme": "full_prec"},
    "int8_wo": {"scheme": "int8_wo"},
    "int8_sq, calibrated": {"scheme": "int8_sq", "calibration": {}},
    "int4_awq, calibration: null": {"scheme": "int4_awq"},
    "int4_awq, calibrated": {"scheme": "int4_awq", "calibration": {}},
    "int4_awq, calibrated, rounding: gptq": {"scheme": "int4_awq", "calibration": {}, "rounding": "gptq"},
    "int4_wo": {"scheme": "int4_wo"},
}


def measure(config: Path, root: Path, section: dict[str, Any], group_size: int, samples: int) -> tuple[QualityReport, float]:
    """Quantize the target in one way and build it; return the report, and the KL divergence of the engine."""
    values = yaml.safe_load(config.read_text())
    quantize = {"group_size": group_size, **section}
    if "calibration" in section:
        quantize["calibration"] = {"data": "builtin", "samples": samples}
    values["target"]["quantize"] = quantize
    values["target"] |= {"tp": 1, "pp": 1}
    length = min(DEFAULT_LENGTH, load_shape(load_config(config), "target")[2].context)  # of the held-out sequences
    values["build"] = {"compiler": "onnx-cpu", "max_seq_len": length}
    values["target"]["model"] = str((config.parent / values["target"]["model"]).resolve())
    values["draft"]["model"] = str((config.parent / values["draft"]["model"]).resolve())
    values["workdir"] = str(root / "work")
    path = root / "pair.yaml"
    path.write_text(yaml.safe_dump(values))
    pair = load_config(path)
    for stage in (run_convert, run_quantize, run_build):
        stage(pair, "target")
    report = load_quality(pair.dir_of("target", "quantized"))
    assert report is not None
    return report, measure_engine(pair)


def measure_engine(pair: PairConfig) -> float:
    """Return the KL divergence of what the engine answers from the unquantized model, in nats per held-out token."""
    import torch

    source = TllmCheckpoint.open(pair.dir_of("target", "checkpoint"))
    tokenizer = load_tokenizer(find_model_dir(pair.target, pair.path, weights=False))
    sequences = load_text(pair.target.quantize, pair.path, tokenizer, source.shape).held_out
    decoder, runner = Decoder(source), find_compiler("onnx-cpu").open_runner(pair.dir_of("target", "engine"), 1)
    total = 0.0
    with torch.no_grad():
        states = run_decoder(decoder, sequences).split([len(sequence) for sequence in sequences])
        for hidden, sequence in zip(states, sequences, strict=True):
            plain = decoder.logits(hidden).log_softmax(-1)
            built = torch.from_numpy(runner.logits(sequence, len(sequence))).log_softmax(-1)
            total += float((plain.exp() * (plain - built)).sum())
    return max(0.0, total / sum(map(len, sequences)))  # of equal logits, rounding alone is left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/demo.yaml"))
    parser.add_argument("--samples", type=int, default=128, help="sequences to calibrate on")
    parser.add_argument("--group-size", type=int, action="append", help="columns that share a scale; may be given again [default: 128]")
    args = parser.parse_args()
    sizes = args.group_size or [128]
    versions = ", ".join(f"{name} {find_version(name)}" for name in ("specbuild", "torch", "nvidia-modelopt"))
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
    rows = []
    for name, section in WAYS.items():
        grouped = find_scheme(section["scheme"]).grouped
        for size in sizes if grouped else sizes[:1]:
            with tempfile.TemporaryDirectory() as root:
                label = f"{name}, group {size}" if grouped else name
                rows.append((label, *measure(args.config, Path(root), section, size, args.samples)))
    print(f"target of {args.config}, {args.samples} sequences of `builtin`, {rows[0][1].tokens} held-out tokens")
    print(f"{'quantize':<48} {'perplexity':>10} {'KL':>9} {'KL, engine':>10} {'top-1':>7} {'worst layer':>12}")
    for name, report, engine in rows:
        worst = report.worst[0].error
        print(f"{name:<48} {report.perplexity_after:>10.2f} {report.kl:>9.5f} {engine:>10.5f} {report.top1:>7.4f} {worst:>12.4f}")


if __name__ == "__main__":
    main()
