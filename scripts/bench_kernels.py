#!/usr/bin/env python3
"""Compare the two kernel choices of the onnx-cpu compiler on a quantized checkpoint: time of a pass, and whether rows round alike.

usage: python scripts/bench_kernels.py CHECKPOINT_DIR [--runs 7]      (for example build/demo/target/quantized)

Prints, per choice and threads, the time of a pass over n new tokens behind 80 cached ones, and the largest difference between
logits of passes of one token and of wider ones. Choices are timed in turn, so their ratio survives a noisy machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from specbuild.artifacts import TllmCheckpoint
from specbuild.compilers import Limits, Runner, find_compiler
from specbuild.provenance import find_version

WIDTHS = (1, 2, 3, 4, 5, 6, 9)
PAST = 80
KERNELS = ("width-independent", "fast")


def make_runner(checkpoint: TllmCheckpoint, kernels: str, threads: int, out: Path) -> Runner:
    compiler = find_compiler("onnx-cpu")
    engine = out / f"{kernels}-{threads}"
    engine.mkdir()
    compiler.build(checkpoint, Limits(1, min(512, checkpoint.shape.max_positions - 8), 8, kernels), engine, kernels)
    return compiler.open_runner(engine, 1, threads)


def time_pass(runner: Runner, tokens: list[int], width: int) -> float:
    """Return the milliseconds of one pass over `width` new tokens, the mean of ten in a row (each rewinds the one before)."""
    runner.logits(tokens[: PAST + width], width)
    start = time.perf_counter()
    for _ in range(10):
        runner.logits(tokens[: PAST + width], width)
    return 1e2 * (time.perf_counter() - start)


def largest_difference(runner: Runner, tokens: list[int]) -> float:
    """Return how far the logits of wider passes are from those of passes of one token."""
    runner.reset()
    narrow = np.concatenate([runner.logits(tokens[: PAST + i], 1) for i in range(1, 28)])
    differences = []
    for width in WIDTHS[1:]:
        runner.reset()
        runner.logits(tokens[:PAST], 1)
        wide = np.concatenate([runner.logits(tokens[: PAST + i + width], width) for i in range(0, 27 - width + 1, width)])
        differences.append(np.abs(wide - narrow[: len(wide)]).max())
    return float(max(differences))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    checkpoint = TllmCheckpoint.open(args.checkpoint)
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, checkpoint.shape.vocab, PAST + 40)]
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, onnxruntime {find_version('onnxruntime')}")
    with tempfile.TemporaryDirectory() as scratch:
        choices = [(kernels, threads) for kernels in KERNELS for threads in sorted({1, os.cpu_count() or 1})]
        runners = {choice: make_runner(checkpoint, *choice, Path(scratch)) for choice in choices}
        times = {choice: {width: [] for width in WIDTHS} for choice in choices}
        for _ in range(args.runs + 1):
            for choice, runner in runners.items():
                for width in WIDTHS:
                    times[choice][width].append(time_pass(runner, tokens, width))
        print(f"{'kernels':18} threads  largest difference  " + "  ".join(f"{f'n={width}':>8}" for width in WIDTHS) + "   (ms)")
        for (kernels, threads), runner in runners.items():
            row = "  ".join(f"{statistics.median(times[kernels, threads][width][1:]):8.2f}" for width in WIDTHS)
            print(f"{kernels:18} {threads:7}  {largest_difference(runner, tokens):18.1e}  {row}")


if __name__ == "__main__":
    main()
