#!/usr/bin/env python3
"""Train the demo pair: a Llama target and a smaller draft distilled from it, on the Python standard library.

usage: python scripts/train_demo_pair.py [--out configs/demo] [--target-steps 1800] [--draft-steps 1500] [--seed 0]

The corpus is every function of the running Python's standard library (tests left out), one document each.
Files whose name hashes into the hold-out are never trained on; prompts and the held-out loss come from them.
The draft learns the target's distribution, half on the corpus and half on the target's own samples.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import platform
import random
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SKIPPED = {"site-packages", "dist-packages", "lib2to3", "test", "tests", "idle_test", "idlelib", "turtledemo"}
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
CONTEXT = 1024
VOCAB = 2048
SHARED = {
    "vocab_size": VOCAB,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TARGET = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2}
DRAFT = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}


def load_functions(held_out: bool) -> list[str]:
    """Read every function of the standard library as dedented source; one file in 20 is held out, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    functions = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        digest = hashlib.sha256(name.as_posix().encode()).digest()[0]
        if SKIPPED & set(name.parts) or (digest % 20 == 0) != held_out:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        lines = text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])))
    return functions


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE that starts every text with the beginning token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=" {4}", behavior="isolated"),  # indentation stays one token wide
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[BOS, EOS, PAD], show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Join all documents, each between its beginning and end tokens, into one long row."""
    ids: list[int] = []
    for text in texts:
        ids += [*tokenizer.encode(text), tokenizer.eos_token_id]
    return torch.tensor(ids)


def sample_batches(row: torch.Tensor, batch: int, length: int, rng: random.Random) -> Iterator[torch.Tensor]:
    """Yield (batch, length + 1) windows at random places, for ever."""
    while True:
        starts = [rng.randrange(len(row) - length - 1) for _ in range(batch)]
        yield torch.stack([row[s : s + length + 1] for s in starts])


def optimize(model: LlamaForCausalLM, loss_of: Callable[[], torch.Tensor], steps: int, peak: float, name: str) -> None:
    """Minimize with AdamW: linear warm-up, then a cosine down to 2 % of the peak rate."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=peak, betas=(0.9, 0.95), fused=True
    )
    smooth = None
    for step in range(1, steps + 1):
        rate = peak * min(1.0, step / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if smooth is None else 0.97 * smooth + 0.03 * loss.item()
        if step % 50 == 0:
            print(f"{name} step {step}/{steps} loss {smooth:.3f}", file=sys.stderr, flush=True)


def logits_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=ids, use_cache=False).logits.float()


def measure_loss(model: LlamaForCausalLM, row: torch.Tensor) -> float:
    """Return the mean cross-entropy, in nats per token, on consecutive windows of the held-out row."""
    windows = row[: (len(row) - 1) // 512 * 512 + 1]
    with torch.no_grad():
        losses = [
            F.cross_entropy(logits_of(model, windows[None, i : i + 512])[0], windows[i + 1 : i + 513])
            for i in range(0, min(len(windows) - 1, 512 * 100), 512)
        ]
    return float(torch.stack(losses).mean())


def sample_from_target(target: LlamaForCausalLM, row: torch.Tensor, batches: int, rng: random.Random) -> torch.Tensor:
    """Let the target continue random corpus prompts (greedy and at temperature 0.7 in turn); return (n, 193) ids."""
    rows = []
    prompts = sample_batches(row, 128, 64, rng)
    for i in range(batches):
        rows.append(
            target.generate(
                next(prompts)[:, :65],
                attention_mask=torch.ones(128, 65, dtype=torch.long),
                min_new_tokens=128,
                max_new_tokens=128,
                do_sample=bool(i % 2),
                temperature=0.7 if i % 2 else None,
                top_k=0 if i % 2 else None,
            )
        )
        print(f"sampled {i + 1}/{batches}", file=sys.stderr, flush=True)
    return torch.cat(rows)


def train_target(row: torch.Tensor, steps: int, rng: random.Random) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SHARED, **TARGET))
    batches = sample_batches(row, 8, 512, rng)

    def loss() -> torch.Tensor:
        ids = next(batches)
        return F.cross_entropy(logits_of(model, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    optimize(model, loss, steps, 3e-3, "target")
    return model


def distill_draft(target: LlamaForCausalLM, row: torch.Tensor, steps: int, rng: random.Random) -> LlamaForCausalLM:
    """Train the draft to the target's distribution: KL(target || draft) on the corpus and on the target's samples."""
    draft = LlamaForCausalLM(LlamaConfig(**SHARED, **DRAFT))
    own = sample_from_target(target, row, 16, rng)
    corpus, turn = sample_batches(row, 8, 512, rng), iter(range(10**9))

    def loss() -> torch.Tensor:
        on_corpus = next(turn) % 2
        ids = next(corpus)[:, :-1] if on_corpus else own[torch.tensor([rng.randrange(len(own)) for _ in range(24)])]
        with torch.no_grad():
            teacher = torch.log_softmax(logits_of(target, ids), -1)
        student = torch.log_softmax(logits_of(draft, ids), -1)
        return F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1).mean()

    optimize(draft, loss, steps, 4e-3, "draft")
    return draft


def write_prompts(held_out: list[str], path: Path) -> None:
    """Write the beginnings, whole lines of up to 200 characters, of 20 held-out functions, evenly spaced."""
    long_enough = [text for text in held_out if len(text) > 400]
    prompts = []
    for text in long_enough[:: len(long_enough) // 20][:20]:
        cut = text.rfind("\n", 0, 200)
        prompts.append(text[:cut] if cut > 0 else text[:200])
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def write_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    model.generation_config.update(bos_token_id=0, eos_token_id=1, pad_token_id=2, max_length=CONTEXT)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("configs/demo"))
    parser.add_argument("--prompts", type=Path, help="only write the prompts that `specbuild verify` ships, and stop")
    parser.add_argument("--target-steps", type=int, default=1800)
    parser.add_argument("--draft-steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    texts, held = load_functions(held_out=False), load_functions(held_out=True)
    if args.prompts:
        write_prompts(held, args.prompts)
        return
    tokenizer = train_tokenizer(texts)
    row, held_row = encode(tokenizer, texts), encode(tokenizer, held)
    print(f"{len(texts)} functions, {len(row)} tokens; held out {len(held)}, {len(held_row)} tokens", file=sys.stderr, flush=True)
    target = train_target(row, args.target_steps, rng)
    write_model(target, tokenizer, args.out / "target")
    target = target.float()
    draft = distill_draft(target, row, args.draft_steps, rng)
    write_model(draft, tokenizer, args.out / "draft")
    note = {
        "corpus": f"functions of the Python {platform.python_version()} standard library, tests left out",
        "corpus_licence": "PSF-2.0",
        "train_tokens": len(row),
        "held_out_tokens": len(held_row),
        "seed": args.seed,
        "torch": torch.__version__,
        "steps": {"target": args.target_steps, "draft": args.draft_steps},
        "tokens_per_step": 8 * 512,
        "held_out_loss_nats_per_token": {
            "target": round(measure_loss(target, held_row), 4),
            "draft": round(measure_loss(draft.float(), held_row), 4),
        },
        "command": " ".join(
            [
                "python scripts/train_demo_pair.py",
                f"--target-steps {args.target_steps}",
                f"--draft-steps {args.draft_steps}",
                f"--seed {args.seed}",
            ]
        ),
    }
    (args.out / "training.json").write_text(json.dumps(note, indent=2) + "\n")
    print(json.dumps(note, indent=2))


if __name__ == "__main__":
    main()
