#!/usr/bin/env python3
"""Measure a built pair: tokens per second, first-token time and acceptance, speculative against plain, in process and served.

usage: python scripts/bench_demo.py CONFIG [--prompts 20] [--max-tokens 64] [--runs 5]      (after `specbuild run CONFIG`)

Every run decodes all prompts plainly and speculatively in turn, so the ratio of a pair of runs survives a noisy machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.compilers import Runner
from specbuild.config import load_config
from specbuild.generate import run_generate
from specbuild.pair import Pair, open_pair
from specbuild.provenance import find_version
from specbuild.spec.drafters import ModelDrafter
from specbuild.spec.sampling import Sampling
from specbuild.tokenizer import encode_prompt
from specbuild.triton.client import stream_generate
from specbuild.triton.server import Ports, Server
from specbuild.verify import load_prompts

Decode = Callable[[str, int], tuple[int, float, float, int, int]]
"""(prompt, draft_len) -> (tokens, seconds, seconds to the first, drafted, accepted)."""


@dataclass
class Sample:
    """One run over all prompts."""

    tokens_per_second: float
    first_token_seconds: float
    drafted: int
    accepted: int


def measure(decode: Decode, prompts: list[str], draft_len: int) -> Sample:
    rows = [decode(prompt, draft_len) for prompt in prompts]
    tokens, seconds, firsts, drafted, accepted = zip(*rows, strict=True)
    return Sample(sum(tokens) / sum(seconds), statistics.median(firsts), sum(drafted), sum(accepted))


def report(name: str, decode: Decode, prompts: list[str], draft_len: int, runs: int) -> None:
    """Print medians over the runs, and the ratio of each pair of runs."""
    measure(decode, prompts, draft_len)  # warm-up
    pairs = [(measure(decode, prompts, 0), measure(decode, prompts, draft_len)) for _ in range(runs)]
    for label, samples in zip(("plain", f"draft_len {draft_len}"), zip(*pairs, strict=True), strict=True):
        rate = statistics.median(sample.tokens_per_second for sample in samples)
        first = statistics.median(sample.first_token_seconds for sample in samples)
        acceptance = f", accepted {samples[0].accepted} of {samples[0].drafted}" if samples[0].drafted else ""
        print(f"{name:10} {label:12} {rate:7.0f} tokens/s, first token {first * 1e3:5.1f} ms{acceptance}")
    ratios = sorted(fast.tokens_per_second / plain.tokens_per_second for plain, fast in pairs)
    print(
        f"{name:10} speculative / plain {statistics.median(ratios):.2f} (min {ratios[0]:.2f}, max {ratios[-1]:.2f}, {runs} pairs of runs)"
    )


class Timed:
    """A runner that adds up the time spent in it."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self.seconds = runner, 0.0

    def logits(self, tokens: Sequence[int], n: int) -> np.ndarray[Any, Any]:
        start = time.perf_counter()
        rows = self._runner.logits(tokens, n)
        self.seconds += time.perf_counter() - start
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def report_split(pair: Pair, prompts: list[str], max_tokens: int) -> None:
    """Print where the time of a round goes, after the first (which reads the prompt)."""
    target, draft = Timed(pair.target), Timed(pair.draft)
    pair = replace(pair, target=target, draft=draft, drafter=ModelDrafter(draft))
    for draft_len in (0, pair.draft_len):
        rounds = tokens = 0
        seconds = target_seconds = draft_seconds = 0.0
        for prompt in prompts:
            pair.reset()
            for index, step in enumerate(
                pair.steps(encode_prompt(pair.tokenizer, prompt), Sampling(end_ids=pair.end_ids), max_tokens, draft_len)
            ):
                if index == 0:
                    start, target.seconds, draft.seconds = time.perf_counter(), 0.0, 0.0
                else:
                    rounds, tokens = rounds + 1, tokens + len(step.tokens)
            seconds += time.perf_counter() - start
            target_seconds, draft_seconds = target_seconds + target.seconds, draft_seconds + draft.seconds
        total, verify, drafting = (1e3 * value / rounds for value in (seconds, target_seconds, draft_seconds))
        split = f"target {verify:.2f}, draft {drafting:.2f}, loop {total - verify - drafting:.2f}"
        print(f"a round at draft_len {draft_len}: {total:.2f} ms ({split}) for {tokens / rounds:.2f} tokens")


def free_ports() -> Ports:
    """Return three ports that were free a moment ago."""
    with socket.socket() as a, socket.socket() as b, socket.socket() as c:
        for probe in (a, b, c):
            probe.bind(("127.0.0.1", 0))
        return Ports(*(probe.getsockname()[1] for probe in (a, b, c)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    config = load_config(args.config)
    prompts = load_prompts(None)[: args.prompts]
    pair = open_pair(config)
    versions = ", ".join(f"{name} {find_version(name)}" for name in ("specbuild", "onnxruntime", "numpy", "nvidia-pytriton"))
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?"
    )
    print(f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
    print(f"{len(prompts)} prompts, {args.max_tokens} tokens, greedy, draft_len {pair.draft_len}, cold caches in process")

    def in_process(prompt: str, draft_len: int) -> tuple[int, float, float, int, int]:
        pair.reset()
        ids = encode_prompt(pair.tokenizer, prompt)
        answer = run_generate(pair, ids, Sampling(end_ids=pair.end_ids), args.max_tokens, draft_len)
        count = len(answer.token_ids)
        return count, count / answer.tokens_per_second, answer.first_token_seconds, answer.drafted, answer.accepted

    ports = free_ports()

    def served(prompt: str, draft_len: int) -> tuple[int, float, float, int, int]:
        start, first, count = time.perf_counter(), 0.0, 0
        for chunk in stream_generate(f"127.0.0.1:{ports.grpc}", prompt, max_tokens=args.max_tokens, draft_len=draft_len):
            first = first or time.perf_counter() - start
            count += len(chunk.token_ids)
        return count, time.perf_counter() - start, first, chunk.drafted, chunk.accepted

    report("in process", in_process, prompts, pair.draft_len, args.runs)
    report_split(pair, prompts, args.max_tokens)
    with Server(config.repository_dir, ports) as server:
        server.wait_until_ready()
        report("served", served, prompts, pair.draft_len, args.runs)


if __name__ == "__main__":
    main()
