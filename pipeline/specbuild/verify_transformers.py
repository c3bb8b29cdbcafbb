"""The CPU engine against transformers: the same integers and scales, plain and assisted generation in float32.

The engine rounds activations to 8 bits, transformers does not. So where answers part, the top-2 margin of transformers' logits is
held against how far the engine's logits are from them at that very position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specbuild.config import PairConfig
from specbuild.pair import Pair
from specbuild.progress import bar
from specbuild.spec.stats import SpecStats
from specbuild.tokenizer import encode_prompt
from specbuild.verify import Divergence, decode_greedily, describe_divergence, first_difference, logits_at, top2_margin

SMALL = 50_000_000  # parameters of a model that several threads only slow down
LARGEST_DIFFERENCE = 0.5  # of the logits' spread; 8-bit activations gave 0.05 on the shipped pair, 0.2 on random models, faults over 1


@dataclass(frozen=True)
class TransformersReport:
    """Plain decoding here against transformers' plain generation; beside it what either way of speculating accepts."""

    prompts: int
    max_tokens: int
    draft_len: int
    identical: int
    near_ties: int
    mismatches: int
    assisted_identical: int  # assisted answers of transformers that are its plain ones
    acceptance: float
    drafted: int
    accepted: int
    their_acceptance: float
    their_drafted: int
    their_accepted: int
    divergences: tuple[Divergence, ...]  # plain: transformers', speculative: the engine's, both without a draft

    @property
    def passed(self) -> bool:
        return self.mismatches == 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "divergences": [{"kind": each.kind, **asdict(each)} for each in self.divergences], "passed": self.passed}


def run_against_transformers(config: PairConfig, pair: Pair, prompts: Sequence[str], max_tokens: int) -> TransformersReport:
    """Generate every prompt here and in transformers, plainly and with the draft, greedily, and compare the ids."""
    from specbuild.dequantized import load_dequantized

    theirs = Generator(load_dequantized(config, "target"), None if pair.draft is None else load_dequantized(config, "draft"), pair)
    ours, divergences, assisted_identical = SpecStats(), [], 0
    with bar("transformers", len(prompts), "prompt") as progress, theirs.quiet():
        for index, text in enumerate(prompts):
            prompt = encode_prompt(pair.tokenizer, text)[: pair.target.max_seq_len // 2]
            room = min(max_tokens, pair.target.max_seq_len - len(prompt))
            plain = theirs.generate(prompt, room, 0)
            assisted_identical += theirs.generate(prompt, room, pair.draft_len) == plain
            decode_greedily(pair, prompt, room, pair.draft_len, ours)
            answer = decode_greedily(pair, prompt, room, 0, SpecStats())
            if answer != plain:
                divergences.append(locate(pair, theirs, prompt, plain, answer, index))
            progress.update(1)
    wrong = sum(not each.near_tie for each in divergences)
    return TransformersReport(
        len(prompts), max_tokens, pair.draft_len, len(prompts) - len(divergences), len(divergences) - wrong, wrong, assisted_identical,
        ours.acceptance_rate, ours.drafted, ours.accepted, theirs.accepted / max(1, theirs.drafted), theirs.drafted, theirs.accepted,
        tuple(divergences),
    )  # fmt: skip


def locate(pair: Pair, theirs: Generator, prompt: list[int], plain: list[int], answer: list[int], index: int) -> Divergence:
    """Say where the engine's answer leaves transformers' and whether 8-bit activations explain it."""
    position, ids = first_difference(plain, answer)
    tokens = [*prompt, *plain[:position]]
    row, here = theirs.logits(tokens), logits_at(pair, prompt, tokens, 1)
    width = min(len(row), len(here))
    difference = float(np.abs(row[:width] - here[:width]).max())
    return Divergence(index, 0, position, *ids, top2_margin(row[:width]), difference, float(row[:width].std()), LARGEST_DIFFERENCE)


class Generator:
    """transformers' greedy generation, which counts what its assistant drafts; without a draft model, its prompt look-up does."""

    def __init__(self, target: Any, draft: Any, pair: Pair) -> None:
        self.drafted = self.accepted = 0
        self._target, self._draft, self._end_ids = target, draft, sorted(pair.end_ids)
        self._vocab = pair.target.vocab_size
        self._passes: list[int] = []
        target.register_forward_hook(lambda _module, _inputs, outputs: self._passes.append(outputs.logits.shape[1]))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Generate without transformers' notes on its own settings, and with one thread where the target is small."""
        import torch
        import transformers

        threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
        torch.set_num_threads(1 if self._target.num_parameters() < SMALL else threads)
        transformers.logging.set_verbosity_error()
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            transformers.logging.set_verbosity(verbosity)

    def generate(self, prompt: list[int], max_tokens: int, draft_len: int) -> list[int]:
        """Return the new ids; draft_len 0 = without the assistant."""
        import torch

        padding = list(range(self._vocab, self._target.config.vocab_size))
        settings: dict[str, Any] = {
            "do_sample": False, "max_new_tokens": max_tokens, "eos_token_id": self._end_ids or None, "pad_token_id": 0,
            "suppress_tokens": padding or None,
        }  # fmt: skip
        if draft_len and self._draft is None:
            settings["prompt_lookup_num_tokens"] = draft_len
        elif draft_len:
            self._draft.generation_config.update(
                num_assistant_tokens=draft_len, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
            )
            settings["assistant_model"] = self._draft
        self._passes.clear()
        ids = torch.tensor([prompt])
        with torch.no_grad():
            answer = self._target.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
        if draft_len:  # a pass over n drafted tokens returns n + 1 rows, the first pass perhaps those of the prompt too
            self.drafted += sum(min(rows - 1, draft_len) for rows in self._passes)
            self.accepted += max(0, len(answer) - len(self._passes))
        return [int(token) for token in answer]

    def logits(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """Return the logits behind a sequence, those of padding ids left out."""
        import torch

        with torch.no_grad():
            row: np.ndarray[Any, Any] = self._target(torch.tensor([tokens])).logits[0, -1].numpy()
        return row[: self._vocab]


def format_transformers(report: TransformersReport) -> str:
    """Return the report as text, then the divergences."""
    r = report
    lines = [
        f"transformers           {r.prompts} prompts of {r.max_tokens} tokens, plain, dequantized to float32: {r.identical} identical, "
        f"{r.near_ties} near ties, {r.mismatches} mismatches",
        f"  acceptance           {r.acceptance:.4f} ({r.accepted} of {r.drafted}), transformers' assisted generation "
        f"{r.their_acceptance:.4f} ({r.their_accepted} of {r.their_drafted}), draft_len {r.draft_len}",
        f"  assisted = plain     {r.assisted_identical} of {r.prompts}, within transformers",
    ]
    return "\n".join([*lines, *(describe_divergence(each, "transformers", "engine") for each in r.divergences)])
