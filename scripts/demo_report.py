#!/usr/bin/env python3
"""Stream one answer from the running demo server and compare it with the target's own greedy output.

usage: python scripts/demo_report.py CONFIG --url HOST:PORT [--prompt TEXT] [--max-tokens N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from specbuild.config import load_config
from specbuild.generate import run_generate
from specbuild.pair import open_pair
from specbuild.spec.sampling import Sampling
from specbuild.tokenizer import encode_prompt
from specbuild.triton.client import Chunk, stream_generate

PROMPT = 'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a file.'
RUNS = 5


def call(url: str, prompt: str, max_tokens: int, draft_len: int | None, echo: bool = False) -> tuple[list[Chunk], float]:
    """Return the chunks of a streamed answer and its tokens per second."""
    start, chunks = time.perf_counter(), []
    for chunk in stream_generate(url, prompt, max_tokens=max_tokens, draft_len=draft_len):
        chunks.append(chunk)
        if echo:
            print(chunk.text, end="", flush=True)
    return chunks, sum(len(chunk.token_ids) for chunk in chunks) / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    print(f"\n{args.prompt}", end="", flush=True)
    chunks, _ = call(args.url, args.prompt, args.max_tokens, None, echo=True)
    print("\n")
    pair = open_pair(load_config(args.config))
    plain = run_generate(pair, encode_prompt(pair.tokenizer, args.prompt), Sampling(end_ids=pair.end_ids), args.max_tokens, 0)
    ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    rates = [
        (call(args.url, args.prompt, args.max_tokens, None)[1], call(args.url, args.prompt, args.max_tokens, 0)[1]) for _ in range(RUNS)
    ]
    speculative, unassisted = (statistics.median(column) for column in zip(*rates, strict=True))
    last = chunks[-1]
    print(f"identical to the target's own greedy output: {'yes' if ids == plain.token_ids else 'NO'}")
    print(f"drafted {last.drafted}, accepted {last.accepted}, rounds {last.rounds}, tokens {len(ids)}, {last.finish_reason}")
    print(f"served: speculative {speculative:.0f} tokens/s, plain {unassisted:.0f} tokens/s (medians of {RUNS} pairs of calls, warm)")
    return 0 if ids == plain.token_ids else 1


if __name__ == "__main__":
    raise SystemExit(main())
