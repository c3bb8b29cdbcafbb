#!/usr/bin/env python3
"""Print what the planner predicts beside what others published for draft-model speculation, as a markdown table, and the median error.

One set of constants for every row, the planner's own (pipeline/specbuild/planning/speed.py). Model dimensions are those of the public
config.json files. What a source does not say is assumed by rules that hold for every row:

  alpha    from the published tokens per round, where there are any; else ALPHA (published greedy values: 0.61 to 0.88)
  k        as published; else what Hugging Face's heuristic schedule settles at (+2 after a draft that was accepted whole, else -1:
           a third of all drafts are) for its rows; else the planner's best up to 10
  FP8      as int8_sq: a byte per weight, and the same peak
  length   1024 tokens in the cache
  eager    PyTorch launches about 40 operators a layer, 10 microseconds each: a pass takes that, or the roofline if it is longer;
           transformers' generate adds 0.5 ms to a plain token, and 3 ms to an assisted round (measured, transformers 5.24)

usage: plan_published.py [--alpha A]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import median

from specbuild.compilers import Limits
from specbuild.config import ModelConfig, QuantizeConfig
from specbuild.planning.formula import alpha_from_tau, expected_tokens, find_best, make_table
from specbuild.planning.hardware import GPUS
from specbuild.planning.memory import Part
from specbuild.planning.speed import PassCost, cost_ratio, pass_cost, verify_cost
from specbuild.shape import ModelShape

ALPHA = 0.8
LENGTH = 1024
HEURISTIC = "HF"  # for a draft length
EAGER_LAYER_SECONDS = 40 * 10e-6
EAGER_TOKEN_SECONDS, EAGER_ROUND_SECONDS = 0.5e-3, 3e-3


def llama(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, head_dim: int = 0) -> ModelShape:
    return ModelShape("", layers, hidden, intermediate, heads, kv_heads, head_dim or hidden // heads, vocab, 131072, 1e4, 1e-5)


MODELS = {
    "Llama-3.1-405B": llama(126, 16384, 53248, 128, 8, 128256),
    "Llama-3.3-70B": llama(80, 8192, 28672, 64, 8, 128256),
    "Llama-3.1-70B": llama(80, 8192, 28672, 64, 8, 128256),
    "Llama-3.1-8B": llama(32, 4096, 14336, 32, 8, 128256),
    "Llama-3.2-3B": llama(28, 3072, 8192, 24, 8, 128256),
    "Llama-3.2-1B": llama(16, 2048, 8192, 32, 8, 128256),
    "Llama-2-70B": llama(80, 8192, 28672, 64, 8, 32000),
    "Llama-2-7B": llama(32, 4096, 11008, 32, 32, 32000),
    "CodeLlama-34B": llama(48, 8192, 22016, 64, 8, 32000),
    "CodeLlama-7B": llama(32, 4096, 11008, 32, 32, 32016),
    "Qwen2.5-Coder-7B": llama(28, 3584, 18944, 28, 4, 152064),
    "Qwen2.5-Coder-0.5B": llama(24, 896, 4864, 14, 2, 151936),
    "Vicuna-7B": llama(32, 4096, 11008, 32, 32, 32000),
    "Vicuna-13B": llama(40, 5120, 13824, 40, 40, 32000),
    "Vicuna-33B": llama(60, 6656, 17920, 52, 52, 32000),
    "Vicuna-68M": llama(2, 768, 3072, 12, 12, 32000),
}


@dataclass(frozen=True)
class Published:
    """A row of a publication: tau is tokens per round, k the draft length; None: it does not say."""

    source: str
    gpu: str
    target: str
    draft: str
    scheme: str
    speedup: float
    tp: int = 1
    k: int | str | None = None
    tau: float | None = None


TRT, SPEC, HF = "TensorRT-LLM blog", "Spec-Bench, eager", "HF, eager"
ROWS = (
    Published(TRT, "h200", "Llama-3.1-405B", "Llama-3.2-1B", "int8_sq", 3.33, 4, 10),
    Published(TRT, "h200", "Llama-3.1-405B", "Llama-3.2-3B", "int8_sq", 3.61, 4, 10),
    Published(TRT, "h200", "Llama-3.1-405B", "Llama-3.1-8B", "int8_sq", 3.04, 4, 10),
    Published(TRT, "h200", "Llama-3.3-70B", "Llama-3.2-1B", "int8_sq", 3.55, 1, 10),
    Published(TRT, "h200", "Llama-3.3-70B", "Llama-3.2-3B", "int8_sq", 3.16, 1, 10),
    Published(TRT, "h200", "Llama-3.3-70B", "Llama-3.1-8B", "int8_sq", 2.63, 1, 10),
    Published(TRT, "h200", "Llama-3.1-70B", "Llama-3.2-1B", "int8_sq", 2.86, 1, 10),
    Published("gpt-fast", "a100-80", "Llama-2-70B", "Llama-2-7B", "int4_awq", 1.92),
    Published("vLLM PR 13849", "rtx4090", "Qwen2.5-Coder-7B", "Qwen2.5-Coder-0.5B", "full_prec", 1.72, 1, 4),
    Published(SPEC, "rtx3090", "Vicuna-7B", "Vicuna-68M", "full_prec", 1.83, 1, HEURISTIC, 2.29),
    Published(SPEC, "a100-80", "Vicuna-7B", "Vicuna-68M", "full_prec", 1.49, 1, HEURISTIC, 2.28),
    Published(SPEC, "a100-80", "Vicuna-13B", "Vicuna-68M", "full_prec", 1.49, 1, HEURISTIC, 2.18),
    Published(SPEC, "a100-80", "Vicuna-33B", "Vicuna-68M", "full_prec", 1.61, 1, HEURISTIC, 2.01),
    Published(HF, "rtx4090", "Llama-3.1-8B", "Llama-3.2-1B", "full_prec", 1.03, 1, HEURISTIC),
    Published("llama-cpp-python 675", "cpu", "CodeLlama-34B", "CodeLlama-7B", "int4_awq", 1.88),
)
SKIPPED = (
    ("vLLM blog, Llama-3-70B + Qwama-0.5B", "a load in requests per second, no batch"),
    ("vLLM PR 42775", "neither models nor hardware named"),
    ("TensorRT-LLM README, Baseten, OpenVINO, FastDraft", "ranges, or hardware and models not named"),
    ("HF, OPT-6.7B + 125M; Phi-3, gemma-2, starcoder pairs", "not Llama-shaped, or drafts through another tokenizer"),
    ("Intel, StarCoder-15B + 164M", "not Llama-shaped, and a server CPU that the planner does not know"),
    ("tensai, 7B + 0.5B", "CPU and models not named"),
    ("Chen et al., Leviathan et al.", "TPUs; tested as formulas instead"),
)  # fmt: skip


def make_part(row: Published, draft: bool) -> Part:
    """Return a model as the planner takes it. The draft of a tensor parallel target runs on one GPU."""
    model = ModelConfig(
        model=row.draft if draft else row.target, dtype="float16", tp=1 if draft else row.tp, quantize=QuantizeConfig(scheme=row.scheme)
    )
    return Part("draft" if draft else "target", MODELS[model.model], model, Limits(1, 2 * LENGTH, 0, ""), on_cpu=row.gpu == "cpu")


@dataclass(frozen=True)
class EagerPass(PassCost):
    """A pass that the processor may launch more slowly than the GPU runs it."""

    launches: float = 0.0

    def seconds(self, batch: int, tokens: int = 1) -> float:
        return max(super().seconds(batch, tokens), self.launches)


def make_pass(row: Published, draft: bool) -> PassCost:
    """Return what a pass of a model costs in the row's runtime."""
    part = make_part(row, draft)
    cost = pass_cost(part, GPUS[row.gpu])
    return EagerPass(**vars(cost), launches=part.shape.layers * EAGER_LAYER_SECONDS) if "eager" in row.source else cost


def settle(row: Published, alpha: float) -> tuple[int, float]:
    """Return the draft length at which a third of all drafts is accepted whole, and alpha there."""
    lengths = [k for k in range(1, 21) if row.tau is None or row.tau <= k + 1]
    alphas = {k: alpha if row.tau is None else alpha_from_tau(row.tau, k) for k in lengths}
    best = min(lengths, key=lambda k: abs(alphas[k] ** k - 1 / 3))
    return best, alphas[best]


def predict(row: Published, alpha: float) -> tuple[int, float, float, float, float]:
    """Return k, alpha, tokens per round, c and the predicted speedup."""
    target, draft = (make_pass(row, which) for which in (False, True))
    c, v = cost_ratio(target, draft, 1), verify_cost(target, 1)
    k = row.k
    if k == HEURISTIC:
        k, alpha = settle(row, alpha)
    elif k is None:
        k = find_best(make_table((alpha,), c, v, 10)).draft_len
    tokens = expected_tokens((alpha,), int(k))
    plain = target.seconds(1)
    before, after = (EAGER_TOKEN_SECONDS / plain, EAGER_ROUND_SECONDS / plain) if "eager" in row.source else (0.0, 0.0)
    return int(k), alpha, tokens, c, tokens * (1 + before) / (int(k) * c + v(int(k) + 1) + after)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted beside published speedups.")
    parser.add_argument("--alpha", type=float, default=ALPHA, help="acceptance where none is published (default: %(default)s)")
    alpha = parser.parse_args().alpha
    print("| source | hardware | target + draft | k | alpha | tokens per round | c | predicted | published | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    errors = {}
    for row in ROWS:
        k, used, tokens, c, predicted = predict(row, alpha)
        errors[row] = predicted / row.speedup - 1
        hardware = f"{row.tp} x {row.gpu}" if row.tp > 1 else row.gpu
        known = "" if row.tau else " (assumed)"
        print(
            f"| {row.source} | {hardware} | {row.target} + {row.draft.rsplit('-', 1)[1]}, {row.scheme} | {k} | {used:.2f}{known} | "
            f"{tokens:.2f} | {c:.3f} | {predicted:.2f} | {row.speedup:.2f} | {errors[row]:+.0%} |"
        )
    sizes = {row: abs(error) for row, error in errors.items()}
    compiled = [size for row, size in sizes.items() if "eager" not in row.source]
    print(f"\nmedian relative error {median(sizes.values()):.0%} of {len(sizes)} rows; {median(compiled):.0%} of the {len(compiled)} that")
    print(f"ran compiled engines or graphs, {median(s for r, s in sizes.items() if 'eager' in r.source):.0%} of those in eager PyTorch")
    for name, reason in SKIPPED:
        print(f"left out: {name}: {reason}")


if __name__ == "__main__":
    main()
