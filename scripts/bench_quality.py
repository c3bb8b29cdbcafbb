#!/usr/bin/env python3
"""Quantize the target of a pair in every way and print what each did to it, as one table.

usage: python scripts/bench_quality.py [configs/demo.yaml] [--samples 128] [--group-size 128]

Needs the extras calibrate and cpu. Everything is written below a temporary directory, and removed. On 2 cores the demo pair takes a few
minutes, most of them in nvidia-modelopt's search.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import yaml

from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.provenance import find_version
from specbuild.quality import QualityReport, load_quality
from specbuild.quantize import run_quantize

WAYS: dict[str, dict[str, Any]] = {
    "full_prec": {"scheme": "full_prec"},
    "int8_wo": {"scheme": "int8_wo"},
    "int8_sq, calibrated": {"scheme": "int8_sq", "calibration": {}},
    "int4_awq, calibration: null": {"scheme": "int4_awq"},
    "int4_awq, calibrated": {"scheme": "int4_awq", "calibration": {}},
    "int4_awq, calibrated, rounding: gptq": {"scheme": "int4_awq", "calibration": {}, "rounding": "gptq"},
    "int4_wo": {"scheme": "int4_wo"},
}


def measure(config: Path, root: Path, section: dict[str, Any], args: argparse.Namespace) -> QualityReport:
    """Quantize the target in one way; return the report."""
    values = yaml.safe_load(config.read_text())
    quantize = {"group_size": args.group_size, **section}
    if "calibration" in section:
        quantize["calibration"] = {"data": "builtin", "samples": args.samples}
    values["target"]["quantize"] = quantize
    values["target"]["model"] = str((config.parent / values["target"]["model"]).resolve())
    values["draft"]["model"] = str((config.parent / values["draft"]["model"]).resolve())
    values["workdir"] = str(root / "work")
    path = root / "pair.yaml"
    path.write_text(yaml.safe_dump(values))
    pair = load_config(path)
    run_convert(pair, "target")
    run_quantize(pair, "target")
    report = load_quality(pair.dir_of("target", "quantized"))
    assert report is not None
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/demo.yaml"))
    parser.add_argument("--samples", type=int, default=128, help="sequences to calibrate on")
    parser.add_argument("--group-size", type=int, default=128)
    args = parser.parse_args()
    versions = ", ".join(f"{name} {find_version(name)}" for name in ("specbuild", "torch", "nvidia-modelopt"))
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name, section in WAYS.items():
            rows.append((name, measure(args.config, Path(root), section, args)))
    tokens = rows[0][1].tokens
    print(f"target of {args.config}, group_size {args.group_size}, {args.samples} sequences of `builtin`, {tokens} held-out tokens")
    print(f"{'quantize':<38} {'perplexity':>10} {'KL':>9} {'top-1':>7} {'worst layer':>12}")
    for name, report in rows:
        worst = report.worst[0].error
        print(f"{name:<38} {report.perplexity_after:>10.2f} {report.kl:>9.5f} {report.top1:>7.4f} {worst:>12.4f}")


if __name__ == "__main__":
    main()
