#!/usr/bin/env python3
"""Measure convert and quantize (int4_awq, null calibration) of synthetic sharded Llama checkpoints: GB/s of source weights, peak memory.

usage: python scripts/bench_quantize.py [--gigabytes 0.5 2] [--tp 2] [--runs 3] [--modelopt-python PYTHON] [--dir DIRECTORY]

Beside `cp` of the same bytes, and modelopt's own null calibration and export of the same model (scripts/modelopt_export.py, in PYTHON;
default this one). The three take turns on the same disk, each until its bytes are on the disk. Ours and modelopt's seconds begin when
everything is imported; peak resident memory is the whole process's. The directory needs about five times the size; it is emptied again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.provenance import find_version
from specbuild.quantize import run_quantize
from specbuild.tensorfile import TensorSpec, TensorWriter

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 2048, 8192, 32, 8, 32000  # a Llama 3.2 1B layer
SHARD = 512 << 20
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": HIDDEN,
          "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
          "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip


def make_specs(size: int) -> tuple[int, list[TensorSpec]]:
    """Return the number of layers, and the tensors, of a model of at least `size` bytes."""
    kv = HIDDEN // HEADS * KV_HEADS
    linears = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN),
               "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN),
               "mlp.down_proj": (HIDDEN, INTERMEDIATE), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}  # fmt: skip
    ends = [TensorSpec("model.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)), TensorSpec("lm_head.weight", "BF16", (VOCAB, HIDDEN)),
            TensorSpec("model.norm.weight", "BF16", (HIDDEN,))]  # fmt: skip
    specs, layers = [*ends], 0
    while sum(spec.nbytes for spec in specs) < size:
        specs += [TensorSpec(f"model.layers.{layers}.{name}.weight", "BF16", shape) for name, shape in linears.items()]
        layers += 1
    return layers, specs


def make_source(directory: Path, size: int) -> int:
    """Write a sharded model of random weights, one tensor in memory at a time; return its bytes."""
    layers, specs = make_specs(size)
    shards: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if sum(other.nbytes for other in shards[-1]) + spec.nbytes > SHARD:
            shards.append([])
        shards[-1].append(spec)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    directory.mkdir()
    for name, shard in zip(names, shards, strict=True):
        writer = TensorWriter(directory / name, shard)
        for spec in shard:
            writer.write(spec.name, torch.randn(spec.shape, dtype=torch.bfloat16).mul_(0.02))
        writer.close()
    weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    return sum(path.stat().st_size for path in directory.iterdir())


def sync(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def timed(make: Callable[[], None], directory: Path) -> float:
    """Return the seconds until a directory is made and on the disk, then remove it. Earlier writes are finished first.

    The pause lets a virtual machine hand memory that was freed back to its host, for both sides alike: new pages cost more afterwards.
    """
    os.sync()
    time.sleep(5)
    start = time.perf_counter()
    make()
    sync(directory)
    seconds = time.perf_counter() - start
    shutil.rmtree(directory)
    return seconds


@dataclass(frozen=True)
class Run:
    """One run: its seconds, its CPU seconds a second, and the peak resident memory of its process in bytes (0 = not measured)."""

    seconds: float
    cores: float = 0.0
    peak: int = 0
    whole: float = 0.0  # with the start of its process and its imports


def run_stages(config: Path, results: multiprocessing.Queue[tuple[float, float, float, int]]) -> None:
    """Convert and quantize; report both durations, the CPU seconds of both and the peak resident memory in bytes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    pair = load_config(config)
    times, cpu = [time.perf_counter()], time.process_time()
    for stage in (run_convert, run_quantize):
        stage(pair, "target", force=True)
        times.append(time.perf_counter())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    results.put((times[1] - times[0], times[2] - times[1], time.process_time() - cpu, peak))


def measure_cp(root: Path) -> Run:
    seconds = timed(lambda: subprocess.run(["cp", "-r", root / "source", root / "copy"], check=True), root / "copy")
    return Run(seconds, whole=seconds)


def measure_ours(root: Path, tp: int) -> Run:
    """Convert and quantize in a child process."""
    section = {"model": str(root / "source"), "dtype": "bfloat16", "tp": tp,
               "quantize": {"scheme": "int4_awq", "group_size": 128, "quality": {"samples": 0}}}  # fmt: skip
    config = root / "pair.yaml"  # JSON is YAML
    config.write_text(json.dumps({"name": "bench", "workdir": str(root / "work"), "target": section, "draft": section}))
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[float, float, float, int]] = context.Queue()

    def work() -> None:
        child = context.Process(target=run_stages, args=(config, results))
        child.start()
        child.join()
        if child.exitcode:
            sys.exit(f"the stages failed with {child.exitcode}")

    whole = timed(work, root / "work")
    convert, quantize, cpu, peak = results.get()
    print(f"  convert {convert:.2f} s, quantize {quantize:.2f} s", flush=True)
    return Run(convert + quantize, cpu / (convert + quantize), peak, whole)


def measure_modelopt(root: Path, tp: int, python: str) -> Run | str:
    """Quantize and export with modelopt; return the reason where it cannot be done."""
    script = Path(__file__).with_name("modelopt_export.py")
    found: dict[str, Any] = {}
    failure = ""

    def work() -> None:
        nonlocal found, failure
        (root / "modelopt").mkdir()
        command = [python, script, root / "source", root / "modelopt", "--tp", str(tp)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            failure = str(error)
            return
        lines = [line for line in result.stderr.splitlines() if line]
        if result.returncode:
            failure = lines[-1] if lines else f"exit code {result.returncode}"
        else:
            found = json.loads(result.stdout.splitlines()[-1])

    whole = timed(work, root / "modelopt")
    if failure:
        return failure
    seconds = found["seconds"]
    total = sum(seconds.values())
    print(f"  {', '.join(f'{name} {value:.2f} s' for name, value in seconds.items())}; {found['exporter']} of "
          f"{', '.join(f'{name} {version}' for name, version in found['versions'].items())}", flush=True)  # fmt: skip
    return Run(total, found["cpu_seconds"] / total, found["peak"], whole)


def measure(root: Path, gigabytes: float, args: argparse.Namespace) -> list[str]:
    """Run all sides in turn on a model of one size; return a row of the table."""
    size = make_source(root / "source", int(gigabytes * 1e9))
    sides: dict[str, Callable[[], Run | str]] = {"cp": lambda: measure_cp(root), "ours": lambda: measure_ours(root, args.tp),
                                                 "modelopt": lambda: measure_modelopt(root, args.tp, args.modelopt_python)}  # fmt: skip
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for index in range(args.runs):
        for name, side in list(sides.items()):
            run = side()
            if isinstance(run, str):
                print(f"modelopt skipped, because it does not run in {args.modelopt_python}: {run}", flush=True)
                del sides[name]
                continue
            runs[name].append(run)
            more = (f", {run.cores * run.seconds:.2f} CPU s ({run.cores:.2f} of {os.cpu_count()} cores), peak {run.peak / 1e9:.2f} GB"
                    if run.peak else "")  # fmt: skip
            print(f"{size / 1e9:.2f} GB, run {index}: {name} {run.seconds:.2f} s, {size / run.seconds / 1e9:.2f} GB/s, whole process "
                  f"{run.whole:.2f} s{more}", flush=True)  # fmt: skip
    shutil.rmtree(root / "source")
    return make_row(size, runs)


def make_row(size: int, runs: dict[str, list[Run]]) -> list[str]:
    """Return medians as a row: rates of the three, the ratios of paired runs, our use of the cores, the highest peaks."""

    def rate(name: str) -> str:
        return f"{size / statistics.median(run.seconds for run in runs[name]) / 1e9:.2f}" if runs[name] else "-"

    def ratio(other: str) -> str:
        """Tell how many times as fast ours is: the median of runs side by side."""
        pairs = zip(runs[other], runs["ours"], strict=False)
        return f"{statistics.median(b.seconds / a.seconds for b, a in pairs):.2f}" if runs[other] else "-"

    peaks = [f"{max(run.peak for run in runs[name]) / 1e9:.2f}" if runs[name] else "-" for name in ("ours", "modelopt")]
    cores = f"{statistics.median(run.cores for run in runs['ours']):.2f}"
    return [f"{size / 1e9:.2f}", rate("cp"), rate("ours"), rate("modelopt"), ratio("modelopt"), ratio("cp"), cores, *peaks]


def describe_machine() -> str:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "unknown CPU"
    )
    versions = ", ".join(f"{name} {find_version(name)}" for name in ("specbuild", "torch", "numpy"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GB memory; Python {platform.python_version()}, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.5, 2.0])
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--modelopt-python", default=sys.executable, help="an interpreter whose environment has nvidia-modelopt")
    parser.add_argument("--dir", type=Path, help="where to write; default a temporary directory")
    args = parser.parse_args()
    print(describe_machine())
    print(f"bfloat16 to int4_awq in groups of 128, null calibration, tp {args.tp}, {args.runs} runs of each in turn", flush=True)
    with tempfile.TemporaryDirectory(dir=args.dir) as root:
        rows = [measure(Path(root), gigabytes, args) for gigabytes in args.gigabytes]
    titles = [
        "size GB",
        "cp GB/s",
        "ours GB/s",
        "modelopt GB/s",
        "ours/modelopt",
        "ours/cp",
        "our cores",
        "our peak GB",
        "modelopt peak GB",
    ]
    print("\nmedians of runs side by side; peaks are the highest")
    for row in [titles, *rows]:
        print("  ".join(value.rjust(len(title)) for value, title in zip(row, titles, strict=True)))


if __name__ == "__main__":
    main()
