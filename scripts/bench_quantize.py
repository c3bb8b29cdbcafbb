#!/usr/bin/env python3
"""Measure convert and quantize (int4_awq, null calibration) of a synthetic sharded Llama checkpoint against `cp` of the same bytes.

usage: python scripts/bench_quantize.py [--gigabytes 2] [--tp 2] [--runs 3] [--dir DIRECTORY]

Runs are paired, cp and ours in turn on the same disk, each until its bytes are on the disk (the stages sync their own files). The two
stages run in a child process whose peak resident memory is printed. The directory needs about five times the size; it is emptied again.
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
from pathlib import Path

import torch

from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.provenance import find_version
from specbuild.quantize import run_quantize
from specbuild.tensorfile import TensorSpec, TensorWriter

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB = 2048, 8192, 32, 8, 32000  # a Llama 3.2 1B layer
SHARD = 512 << 20
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": HEADS,
          "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
          "tie_word_embeddings": False}  # fmt: skip


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


def run_stages(config: Path, results: multiprocessing.Queue[tuple[float, float, int]]) -> None:
    """Convert and quantize; report both durations and the peak resident memory in bytes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    pair = load_config(config)
    times = [time.perf_counter()]
    for stage in (run_convert, run_quantize):
        stage(pair, "target", force=True)
        times.append(time.perf_counter())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    results.put((times[1] - times[0], times[2] - times[1], int(status["VmHWM"].split()[0]) * 1024))


def measure(root: Path, args: argparse.Namespace) -> None:
    source, work = root / "source", root / "work"
    size = make_source(source, int(args.gigabytes * 1e9))
    section = {"model": str(source), "dtype": "bfloat16", "tp": args.tp, "quantize": {"scheme": "int4_awq", "group_size": 128}}
    config = root / "pair.yaml"  # JSON is YAML
    config.write_text(json.dumps({"name": "bench", "workdir": str(work), "target": section, "draft": section}))
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[float, float, int]] = context.Queue()

    def ours() -> None:
        child = context.Process(target=run_stages, args=(config, results))
        child.start()
        child.join()
        if child.exitcode:
            sys.exit(f"the stages failed with {child.exitcode}")

    rows = []
    for run in range(args.runs):
        copy = timed(lambda: subprocess.run(["cp", "-r", source, root / "copy"], check=True), root / "copy")
        whole = timed(ours, work)
        convert, quantize, peak = results.get()
        stages = convert + quantize
        rows.append((copy, whole, stages, whole / copy, stages / copy, peak))
        print(
            f"run {run}: cp {copy:.2f} s; convert {convert:.2f} s + quantize {quantize:.2f} s, {stages / copy:.2f} times cp; the whole "
            f"process with its imports {whole:.2f} s, {whole / copy:.2f} times; peak resident memory {peak / 1e9:.2f} GB",
            flush=True,
        )
    copy, whole, stages, whole_ratio, ratio, _ = (statistics.median(column) for column in zip(*rows, strict=True))
    print(
        f"median of {args.runs}, {size / 1e9:.2f} GB, tp {args.tp}: cp {copy:.2f} s ({size / copy / 1e9:.2f} GB/s); convert and quantize "
        f"{stages:.2f} s ({size / stages / 1e9:.2f} GB/s), {ratio:.2f} times cp; the whole process {whole:.2f} s, {whole_ratio:.2f} times; "
        f"peak resident memory {max(row[-1] for row in rows) / 1e9:.2f} GB"
    )


def describe_machine() -> str:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "unknown CPU"
    )
    versions = ", ".join(f"{name} {find_version(name)}" for name in ("specbuild", "torch", "numpy"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GB memory; Python {platform.python_version()}, {versions}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to write; default a temporary directory")
    args = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory(dir=args.dir) as root:
        measure(Path(root), args)


if __name__ == "__main__":
    main()
