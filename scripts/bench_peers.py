#!/usr/bin/env python3
"""Time a built pair beside other engines that run the same Hugging Face models on a CPU, plain and speculative, in one run.

usage: python scripts/bench_peers.py CONFIG [--peer-python NAME=PYTHON ...] [--threads 2] [--draft-len 4]     (after `specbuild run CONFIG`)
       python scripts/bench_peers.py --random [--peer-python genai=PYTHON]     plain decoding of a seeded Llama of 24 layers, 1024 wide

Peers are optional; each may live in an environment of its own, named by --peer-python, and one that cannot run says why:
  transformers   torch and transformers; the weights as they are; assisted generation
  genai          pip install onnxruntime-genai onnx-ir onnx torch transformers; its own int4, in blocks of 32 columns; a draft model
  genai:BLOCK    the same in blocks of 128, or 256 with --random, which are faster and less exact
  openvino       pip install openvino-genai gguf safetensors torch; 4 bit from the GGUF below; a draft model
  llama.cpp      pip install xllamacpp gguf safetensors torch; Q4_0 with Q8_0 embeddings; a draft model

Every answer has exactly --max-tokens tokens. Passes over all prompts take turns, engine by engine and plain beside speculative, so
that ratios survive a noisy machine; quantizers differ, and with them the answers: each speedup is over the same engine's plain decoding.
With --random, specbuild:GROUP is our engine, INT4 in groups of 128 or 256 columns. A ratio is the median of those of the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from peer_engines import OPEN

PEERS = tuple(OPEN)
ENGINES = ("specbuild", "transformers", "genai", "genai:128", "openvino", "llama.cpp")
RANDOM_ENGINES = ("specbuild:256", "specbuild:128", "genai", "genai:128", "genai:256")
RANDOM = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16,
          "num_key_value_heads": 8, "max_position_embeddings": 1024, "tie_word_embeddings": False}  # fmt: skip
DEMO = Path(__file__).parents[1] / "configs" / "demo"


class Peer:
    """A peer in its own process."""

    def __init__(self, name: str, python: str, job: dict[str, Any]) -> None:
        self.name, self.max_tokens = name, job["max_tokens"]
        command = [python, str(Path(__file__).with_name("peer_engines.py")), name, json.dumps(job)]
        self.log = (Path(job["work"]) / f"{name}.log").open("w+")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.read()

    def read(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"it ended with {self.process.wait()}{self.last_line()}"}
        if "error" in answer:
            self.close()
            raise RuntimeError(answer["error"])
        return answer

    def last_line(self) -> str:
        self.log.seek(0)
        lines = self.log.read().strip().splitlines()
        return f" ({lines[-1]})" if lines else ""

    def rate(self, prompts: Sequence[list[int]], draft_len: int) -> float:
        """Return tokens per second of a pass over the prompts."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([prompts, draft_len]) + "\n")
        self.process.stdin.flush()
        answer = self.read()
        if answer["tokens"] != len(prompts) * self.max_tokens:
            self.close()
            raise RuntimeError(f"it gave {answer['tokens']} tokens, expected {len(prompts) * self.max_tokens}")
        return answer["tokens"] / answer["seconds"]

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


def open_peers(pythons: dict[str, str], wanted: Sequence[str], job: dict[str, Any]) -> Iterator[Peer]:
    """Start the peers; say why one cannot run."""
    from specbuild.errors import SpecbuildError

    for name in wanted:
        try:
            engine, _, block = name.partition(":")
            engines = {"target_engine": make_random(job, int(block))} if "random" in job and engine == "specbuild" else {}
            yield Peer(name, pythons.get(engine, sys.executable), {**job, **engines, "block": int(block) if block else None})
        except (OSError, RuntimeError, SpecbuildError) as error:
            print(f"{name}: skipped: {error}", flush=True)


def compare(peers: Sequence[Peer], prompts: Sequence[list[int]], draft_len: int, runs: int) -> None:
    """Run all peers in turn, and print medians over the runs behind the first one."""
    lengths = (0, draft_len) if draft_len else (0,)
    rates: dict[tuple[str, int], list[float]] = {(peer.name, length): [] for peer in peers for length in lengths}
    failed: dict[str, str] = {}
    for _ in range(runs + 1):
        for peer in peers:
            try:
                for length in lengths if peer.name not in failed else ():
                    rates[peer.name, length].append(peer.rate(prompts, length))
            except RuntimeError as error:
                failed[peer.name] = str(error)
    print(f"{'engine':14} {'plain tokens/s':>18} {'speculative':>13} {'speculative / plain (min..max)':>32} {'plain, ours / its':>24}")
    for name in [peer.name for peer in peers if peer.name not in failed]:
        own = rates[name, 0][1:]
        row = f"{name:14} {statistics.median(own):18.1f}"
        drafted = rates[name, draft_len][1:] if draft_len else []
        row += f" {statistics.median(drafted):13.1f} {spread(drafted, own):>32}" if drafted else f" {'-':>13} {'-':>32}"
        first = peers[0].name
        row += f" {spread(rates[first, 0][1:], own):>24}" if first.startswith("specbuild") and name != first else ""
        print(row.rstrip())
    for name, reason in failed.items():
        print(f"{name}: failed: {reason}")


def spread(above: Sequence[float], below: Sequence[float]) -> str:
    """Return the median and the range of ratios within a run."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"


def fail(message: str) -> NoReturn:
    print(f"Error: {message}", file=sys.stderr)
    raise SystemExit(1)


def make_job(args: argparse.Namespace, work_dir: Path) -> tuple[dict[str, Any], list[list[int]]]:
    """Return what every peer is told, and the prompts as ids."""
    from specbuild.artifacts import find_model_dir
    from specbuild.bench import load_bench_prompts
    from specbuild.config import load_config
    from specbuild.pair import open_pair
    from specbuild.tokenizer import count_ids, encode_prompt, load_tokenizer

    job = {"max_tokens": args.max_tokens, "draft_len": args.draft_len, "threads": args.threads, "work": str(work_dir)}
    if args.random:
        make_random_model(work_dir / "random")
        job |= {"random": args.kernels, "target_hf": str(work_dir / "random"), "draft_hf": None, "draft_engine": None}
        return job, [[0, *((17 * i + 31 * j) % 2048 for j in range(24))] for i in range(args.prompts)]
    config = load_config(args.config)
    open_pair(config)  # raises unless it is built, and current
    for role in ("target", "draft"):
        job[f"{role}_engine"] = str(config.dir_of(role, "engine").resolve())
        job[f"{role}_hf"] = str(find_model_dir(config.model_of(role), config.path, weights=True).resolve())
    tokenizer = load_tokenizer(Path(job["target_hf"]))
    job["unused_id"] = count_ids(tokenizer) - 1
    prompts = load_bench_prompts(None)
    return job, [encode_prompt(tokenizer, prompt.text) for prompt in prompts[:: max(1, len(prompts) // args.prompts)]][: args.prompts]


def make_random_model(directory: Path) -> None:
    """Write a seeded Llama as Hugging Face saves one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**RANDOM, bos_token_id=0, eos_token_id=1)).to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "target" / name, directory)


def make_random(job: dict[str, Any], group_size: int) -> str:
    """Build our engine of the seeded Llama, INT4 in groups, lm_head too as the peer does; return its directory."""
    import yaml

    from specbuild.build import run_build
    from specbuild.config import load_config
    from specbuild.convert import run_convert
    from specbuild.quantize import run_quantize

    work_dir = Path(job["work"])
    quantize = {"scheme": "int4_awq", "group_size": group_size, "lm_head": True, "quality": {"samples": 0}}
    values = {
        "name": "random",
        "workdir": str(work_dir / f"build-{group_size}"),
        "target": {"model": job["target_hf"], "quantize": quantize},
        "draft": {"model": str(DEMO / "draft")},
        "speculation": {"drafter": "ngram"},
        "build": {"compiler": "onnx-cpu", "kernels": job["random"], "max_seq_len": 512},
    }
    path = work_dir / f"random-{group_size}.yaml"
    path.write_text(yaml.safe_dump(values))
    config = load_config(path)
    for stage in (run_convert, run_quantize, run_build):
        stage(config, "target")
    return str(config.dir_of("target", "engine"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--kernels", choices=("width-independent", "fast"), default="width-independent", help="of our engine, for --random")
    parser.add_argument("--peer-python", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument(
        "--only", nargs="+", metavar="ENGINE", help=f"of {', '.join(ENGINES)}; with --random of {', '.join(RANDOM_ENGINES)}"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--draft-len", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    pythons = dict(each.split("=", 1) for each in args.peer_python if "=" in each)
    if len(pythons) < len(args.peer_python) or not set(pythons) <= set(PEERS):
        fail(f"Cannot use --peer-python {' '.join(args.peer_python)}: expected NAME=PYTHON with a name of {', '.join(PEERS)}.")
    if args.random == (args.config is not None):
        fail("Give CONFIG or --random.")
    known = RANDOM_ENGINES if args.random else ENGINES
    args.only = args.only or known
    if unknown := [name for name in args.only if name not in known]:
        fail(f"Cannot compare {', '.join(unknown)}: expected {', '.join(known)}.")
    run(args, pythons)


def run(args: argparse.Namespace, pythons: dict[str, str]) -> None:
    """Start the peers and compare them."""
    from specbuild.bench import describe_machine
    from specbuild.errors import SpecbuildError

    with tempfile.TemporaryDirectory() as work_dir, ExitStack() as stack:
        try:
            job, prompts = make_job(args, Path(work_dir))
        except SpecbuildError as error:
            fail(str(error))
        machine = describe_machine()
        parameters = (
            f"{len(prompts)} prompts of {args.max_tokens} tokens, greedy, draft_len {args.draft_len}, {args.runs} runs behind the first"
        )
        print(f"{machine['cpu']}, {machine['cores']} cores, {args.threads} threads; {parameters}\n$ {' '.join(sys.argv)}")
        peers = []
        for peer in open_peers(pythons, args.only, job):
            stack.callback(peer.close)
            peers.append(peer)
        if peers:
            compare(peers, prompts, 0 if args.random else args.draft_len, args.runs)


if __name__ == "__main__":
    main()
