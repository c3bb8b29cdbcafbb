#!/usr/bin/env python3
"""Grow a small Llama into a large one that computes the same function: a target with a real model's cost and a known answer.

usage: python scripts/grow_target.py [--source configs/demo/target] [--out build/bench/target] [--parameters 300e6] [--hidden 1024]
                                     [--seed 0]

Wider: whatever writes to the new channels of the residual stream is zero, so they stay zero; the root mean square over n times as many
channels is sqrt(n) times smaller, which the norms' weights and their epsilon make up for, exactly when n is a power of four. New heads and
MLP columns are random, and what reads them is zero. Deeper: added layers are random up to their two output projections, which are zero.
Old weights come first along every axis, so groups of 128 of them (INT4) stay together where the old sizes are multiples of 128.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from specbuild.artifacts import HFCheckpoint
from specbuild.convert import check_tensors, place_tensors
from specbuild.errors import CheckpointError, SpecbuildError
from specbuild.families import find_family
from specbuild.families.llama import FAMILY
from specbuild.provenance import Record, digest_files, find_parameters, make_artifact
from specbuild.shape import ModelShape
from specbuild.tensorfile import TensorSpec, TensorWriter
from specbuild.tokenizer import encode_prompt, load_tokenizer
from specbuild.verify import load_prompts

SHARD_BYTES = 500_000_000
PROMPTS, TOKENS = 4, 128  # of the prompts of verify, on which the grown model is compared with its source
COPIED = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
WRITERS = ("embed_tokens", "o_proj", "down_proj")  # they write to the residual stream: zero in all that is new


class Grown(NamedTuple):
    """A tensor of the grown model, and the one that it keeps (or, in an added layer, is drawn like)."""

    spec: TensorSpec
    source: str
    added: bool


def part_of(name: str) -> str:
    """Return the module of a tensor: q_proj, input_layernorm, norm, embed_tokens ..."""
    return name.split(".")[-2]


def plan_shape(old: ModelShape, hidden: int, parameters: float) -> ModelShape:
    """Return the grown shape: heads in proportion, Llama's own rule for the MLP, and the layers that come nearest to `parameters`."""
    ratio, rest = divmod(hidden, old.hidden)
    if rest or ratio < 1 or 4 ** (ratio.bit_length() // 2) != ratio:
        raise CheckpointError(
            f"Cannot grow {old.hidden} channels to {hidden}: that is {hidden / old.hidden:g} times as many, expected 1, 4, 16 ...: the "
            f"root of a power of four is exact in every dtype. Use --hidden {4 * old.hidden}."
        )
    inner = max(old.intermediate, math.ceil(8 / 3 * hidden / 256) * 256)
    wide = replace(old, hidden=hidden, intermediate=inner, heads=old.heads * ratio, kv_heads=old.kv_heads * ratio)
    one, two = (count_weights(replace(wide, layers=layers)) for layers in (1, 2))
    layers = 1 + round((parameters - one) / (two - one))
    if layers < old.layers:
        least = count_weights(wide)
        raise CheckpointError(
            f"Cannot grow to {parameters:g} parameters: {old.layers} layers of {hidden} channels have {least}, expected as many or more. "
            f"Use --parameters {least} or a smaller --hidden."
        )
    return replace(wide, layers=layers)


def names_of(shape: ModelShape) -> list[str]:
    """List the Hugging Face tensors of a shape, each once."""
    return list(dict.fromkeys(name for item in place_tensors(FAMILY, shape, 1) for name in item.sources))


def size_of(name: str, shape: ModelShape) -> tuple[int, ...]:
    """Return the shape of a Hugging Face tensor."""
    hidden, inner = shape.hidden, shape.intermediate
    sizes = {
        "embed_tokens": (shape.vocab, hidden), "lm_head": (shape.vocab, hidden), "q_proj": (shape.q_rows, hidden),
        "k_proj": (shape.kv_rows, hidden), "v_proj": (shape.kv_rows, hidden), "o_proj": (hidden, shape.q_rows),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
    }  # fmt: skip
    size = sizes.get(part_of(name), (hidden,))
    return size if name.endswith("weight") else size[:1]


def count_weights(shape: ModelShape) -> int:
    """Return the number of all weights, norms included."""
    return sum(math.prod(size_of(name, shape)) for name in names_of(shape))


def plan_tensors(source: HFCheckpoint, old: ModelShape, new: ModelShape) -> Iterator[Grown]:
    """Yield every tensor of the grown model; old layers lie evenly among the added ones."""
    starts = [layer * new.layers // old.layers for layer in range(old.layers)]
    for name in names_of(new):
        words = name.split(".")
        added = False
        if words[1] == "layers":
            layer = int(words[2])
            kept = max(index for index, start in enumerate(starts) if start <= layer)
            words[2], added = str(kept), starts[kept] != layer
        origin = ".".join(words)
        yield Grown(TensorSpec(name, source.entries[origin].dtype, size_of(name, new)), origin, added)


def grow_tensor(item: Grown, old: torch.Tensor, ratio: int, generator: torch.Generator) -> torch.Tensor:
    """Return a grown tensor: the old one in its corner, zeros or values like the old ones in the rest."""
    part, size = part_of(item.spec.name), item.spec.shape
    if part.endswith("norm"):  # what meets a new channel meets zero, so any value will do
        grown = old.float().mean().repeat(size)
    elif part in WRITERS:
        grown = torch.zeros(size)
    else:
        grown = torch.randn(size, generator=generator) * old.float().std(correction=0)
    if part.endswith("norm") or not item.added:
        grown[tuple(slice(length) for length in old.shape)] = old.float()
    return (grown / math.sqrt(ratio) if part.endswith("norm") else grown).to(old.dtype)


def split_shards(plan: list[Grown]) -> list[list[Grown]]:
    """Cut the plan into runs of at most SHARD_BYTES."""
    shards: list[list[Grown]] = [[]]
    for item in plan:
        if shards[-1] and sum(each.spec.nbytes for each in shards[-1]) + item.spec.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(item)
    return shards


def write_weights(source: HFCheckpoint, plan: list[Grown], ratio: int, seed: int, out: Path) -> None:
    """Write the shards and their index. Memory holds one tensor at a time."""
    generator = torch.Generator().manual_seed(seed)
    shards, weight_map = split_shards(plan), {}
    for index, items in enumerate(shards, start=1):
        name = f"model-{index:05}-of-{len(shards):05}.safetensors"
        writer = TensorWriter(out / name, [item.spec for item in items], {"format": "pt"})
        try:
            for item in items:
                writer.write(item.spec.name, grow_tensor(item, source.entries[item.source].load(), ratio, generator))
        except BaseException:
            writer.abort()
            raise
        writer.close()
        weight_map |= {item.spec.name: name for item in items}
    total = sum(item.spec.nbytes for item in plan)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (out / "model.safetensors.index.json").write_text(text + "\n")


def make_config(config: dict[str, Any], new: ModelShape, ratio: int) -> dict[str, Any]:
    """Return the grown model's config.json: the old one with its sizes, and the epsilon of a mean over `ratio` times as many channels."""
    return {
        **config, "hidden_size": new.hidden, "intermediate_size": new.intermediate, "num_hidden_layers": new.layers,
        "num_attention_heads": new.heads, "num_key_value_heads": new.kv_heads, "head_dim": new.head_dim,
        "rms_norm_eps": new.norm_eps / ratio,
    }  # fmt: skip


def grow(directory: Path, out: Path, hidden: int, parameters: float, seed: int) -> ModelShape:
    """Write the grown model to `out` unless it is there; return its shape."""
    source = HFCheckpoint.open(directory)
    family = find_family(source.config)
    if family is not FAMILY:
        raise CheckpointError(f"Cannot grow {directory}: it is a {family.architecture}, expected a {FAMILY.architecture}. Use a Llama.")
    old = FAMILY.read_shape(source.config)
    check_tensors(source, FAMILY, list(place_tensors(FAMILY, old, 1)), old)
    new = plan_shape(old, hidden, parameters)
    if out.exists() and "seed" not in find_parameters(out):
        raise CheckpointError(f"Cannot write {out}: it is there and was not made by this script. Use another --out, or remove it.")

    def write(partial: Path) -> None:
        for path in (path for pattern in COPIED for path in directory.glob(pattern)):
            if path.name != "config.json" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)
        ratio = new.hidden // old.hidden
        write_weights(source, list(plan_tensors(source, old, new)), ratio, seed, partial)
        (partial / "config.json").write_text(json.dumps(make_config(dict(source.config), new, ratio), indent=2) + "\n")

    sizes = {"hidden": new.hidden, "intermediate": new.intermediate, "layers": new.layers, "seed": seed}
    inputs = {"model": digest_files([directory / "config.json", *source.weight_files])}
    make_artifact(out, Record("grow", sizes, inputs, ("torch",)), False, write)
    return new


def compare(source: Path, grown: Path, prompts: list[str]) -> tuple[float, int, int]:
    """Return the largest difference of the float32 logits, the positions whose likeliest token differs, and all positions."""
    tokenizer = load_tokenizer(source)
    rows = [torch.tensor([encode_prompt(tokenizer, prompt)[:TOKENS]]) for prompt in prompts]
    logits = []
    for directory in (source, grown):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(torch.cat([model(input_ids=row, use_cache=False).logits[0] for row in rows]))
    one, other = logits
    return float((one - other).abs().max()), int((one.argmax(-1) != other.argmax(-1)).sum()), len(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path("configs/demo/target"))
    parser.add_argument("--out", type=Path, default=Path("build/bench/target"))
    parser.add_argument("--hidden", type=int, default=1024, help="channels: 1, 4, 16 ... times the source's")
    parser.add_argument("--parameters", type=float, default=300e6, help="layers are added up to about as many")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        shape = grow(args.source, args.out, args.hidden, args.parameters, args.seed)
        difference, changed, positions = compare(args.source, args.out, load_prompts(None)[:PROMPTS])
    except SpecbuildError as error:
        sys.exit(f"Error: {error}")
    print(
        f"{args.out}: {count_weights(shape)} parameters, {shape.layers} layers, {shape.hidden} wide, {shape.intermediate} inner, ", end=""
    )
    print(f"{shape.heads} heads, {shape.kv_heads} key-value heads of {shape.head_dim}")
    print(f"against {args.source}, float32: largest difference of the logits {difference:.1e}, ", end="")
    print(f"another likeliest token at {changed} of {positions} positions")
    sys.exit(1 if changed else 0)


if __name__ == "__main__":
    main()
