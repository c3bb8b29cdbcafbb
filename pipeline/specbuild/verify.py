"""The verify stage: is speculative decoding the target's own decoding, and how much of the draft is accepted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.errors import ConfigError
from specbuild.pair import Pair
from specbuild.progress import bar
from specbuild.spec.drafters import ModelDrafter
from specbuild.spec.sampling import Sampling
from specbuild.spec.stats import SpecStats
from specbuild.tokenizer import encode_prompt

DRAFT_LENS = (1, 2, 4, 8)
SELF_DRAFT_FLOOR = 0.95  # it is 1 unless the kernels round wider passes differently; below this a cache is out of step
LARGEST_ROUNDING = 0.1  # of the logits' spread; 8-bit activations give up to 0.08, a cache off by one more than 1


@dataclass(frozen=True)
class Divergence:
    """The first token at which a speculative answer left the plain one.

    top2_margin is how far the plain pass's best logit leads its second; rounding, the most that any logit there moves
    when the same position is computed in a wider pass; spread, the standard deviation of the logits there.
    A margin within twice the rounding is a near tie, unless the rounding itself is too large to be one.
    """

    prompt: int
    draft_len: int
    position: int
    plain_id: int | None
    speculative_id: int | None
    top2_margin: float
    rounding: float
    spread: float

    @property
    def near_tie(self) -> bool:
        both = self.plain_id is not None and self.speculative_id is not None
        return both and self.top2_margin <= 2 * self.rounding and self.rounding <= LARGEST_ROUNDING * self.spread


@dataclass(frozen=True)
class Report:
    """What verify found. A prompt counts as identical when it was so at every draft length."""

    prompts: int
    max_tokens: int
    draft_lens: tuple[int, ...]
    identical: int
    near_ties: int
    mismatches: int
    self_draft_acceptance: float | None  # None: nothing could be drafted
    acceptance: float
    acceptance_by_draft_len: dict[int, float]
    tokens_per_round: float
    divergences: tuple[Divergence, ...]

    @property
    def passed(self) -> bool:
        in_step = self.self_draft_acceptance is None or self.self_draft_acceptance >= SELF_DRAFT_FLOOR
        return self.mismatches == 0 and in_step

    def to_dict(self) -> dict[str, Any]:
        kinds = [{"kind": "near_tie" if d.near_tie else "mismatch", **asdict(d)} for d in self.divergences]
        return {**asdict(self), "divergences": kinds}


def load_prompts(path: Path | None) -> list[str]:
    """Return the prompts of a file: JSON lines of strings or of objects with `prompt`; None = the set that is shipped."""
    source = path or resources.files("specbuild") / "prompts.jsonl"
    try:
        lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [line if isinstance(line, str) else line["prompt"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Cannot read prompts from {path}: {error}. Expected one JSON string, or object with `prompt`, per line."
        ) from None
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise ConfigError(f"Cannot use prompts from {path}: expected at least one, none of them empty.")
    return prompts


def run_verify(pair: Pair, prompts: Sequence[str], max_tokens: int = 64, draft_lens: Sequence[int] = (), cut: bool = False) -> Report:
    """Decode every prompt plainly and at each draft length, greedily and with cold caches, and compare the ids.

    `cut` shortens prompts to half of the context, for those that were not written for this pair.
    """
    standard = [length for length in (*DRAFT_LENS, pair.draft_len) if length <= pair.max_draft_len]
    lengths = tuple(sorted({*(draft_lens or standard)} - {0}))
    stats = {length: SpecStats() for length in lengths}
    own = SpecStats()
    divergences: list[Divergence] = []
    with bar("verify", len(prompts), "prompt") as progress:
        for index, text in enumerate(prompts):
            prompt = encode_prompt(pair.tokenizer, text)[: pair.target.max_seq_len // 2 if cut else None]
            plain = _decode(pair, prompt, max_tokens, 0, SpecStats())
            for length in lengths:
                answer = _decode(pair, prompt, max_tokens, length, stats[length])
                if answer != plain:
                    divergences.append(find_divergence(pair, prompt, plain, answer, index, length))
            _decode(pair, prompt, max_tokens, max(lengths, default=0), own, own_draft=True)
            progress.update(1)
    return _make_report(pair, len(prompts), max_tokens, stats, own, divergences)


def _make_report(
    pair: Pair, prompts: int, max_tokens: int, stats: dict[int, SpecStats], own: SpecStats, divergences: list[Divergence]
) -> Report:
    wrong = {d.prompt for d in divergences if not d.near_tie}
    close = {d.prompt for d in divergences} - wrong
    packaged = stats.get(pair.draft_len) or next(reversed(stats.values()), SpecStats())
    return Report(
        prompts, max_tokens, tuple(stats), prompts - len(wrong) - len(close), len(close), len(wrong),
        own.acceptance_rate if own.drafted else None, packaged.acceptance_rate, {length: s.acceptance_rate for length, s in stats.items()},
        packaged.tokens / max(1, packaged.rounds), tuple(divergences),
    )  # fmt: skip


def _decode(pair: Pair, prompt: Sequence[int], max_tokens: int, draft_len: int, stats: SpecStats, own_draft: bool = False) -> list[int]:
    """Decode greedily from cold caches; the target drafts for itself if asked."""
    pair.reset()
    drafter = ModelDrafter(pair.target) if own_draft else None
    ids: list[int] = []
    for step in pair.steps(prompt, Sampling(end_ids=pair.end_ids), max_tokens, draft_len, drafter):
        stats.add(step)
        ids += step.tokens
    return ids


def find_divergence(pair: Pair, prompt: Sequence[int], plain: list[int], answer: list[int], index: int, draft_len: int) -> Divergence:
    """Locate the first difference and measure, at that position, the top-2 margin and what wider passes do to the logits."""
    pairs = zip(plain, answer, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(answer)))
    tokens = [*prompt, *plain[:position]]
    narrow = _logits_at(pair, tokens, 1)
    best = np.sort(narrow)[-2:]
    rounding = max(float(np.abs(_logits_at(pair, tokens, width) - narrow).max()) for width in range(2, draft_len + 2))
    ids = [ids[position] if position < len(ids) else None for ids in (plain, answer)]
    return Divergence(index, draft_len, position, ids[0], ids[1], float(best[1] - best[0]), rounding, float(narrow.std()))


def _logits_at(pair: Pair, tokens: list[int], width: int) -> np.ndarray[Any, Any]:
    """Return the logits behind a sequence whose last `width` tokens run in one pass over a cache of one-token passes."""
    pair.target.reset()
    cached = len(tokens) - min(width, len(tokens))
    if cached:
        pair.target.logits(tokens[:cached], 1)
    row: np.ndarray[Any, Any] = pair.target.logits(tokens, 1)[-1]
    return row


def format_report(report: Report) -> str:
    """Return the report as text: one line per claim, then the divergences."""
    own = report.self_draft_acceptance
    by_length = ", ".join(f"{length}: {rate:.3f}" for length, rate in report.acceptance_by_draft_len.items())
    lines = [
        f"prompts                {report.prompts} of {report.max_tokens} tokens, draft_len {', '.join(map(str, report.draft_lens))}",
        f"identical              {report.identical}",
        f"near ties              {report.near_ties}",
        f"mismatches             {report.mismatches}",
        f"self-draft acceptance  {'nothing drafted' if own is None else f'{own:.4f}'}",
        f"acceptance             {report.acceptance:.4f} ({by_length})",
        f"tokens per round       {report.tokens_per_round:.2f}",
    ]
    for d in report.divergences:
        kind = "near tie" if d.near_tie else "MISMATCH"
        lines.append(
            f"{kind}: prompt {d.prompt}, draft_len {d.draft_len}, position {d.position}: plain {d.plain_id}, speculative "
            f"{d.speculative_id}, "
            f"top-2 margin {d.top2_margin:.2e}, rounding {d.rounding:.2e}"
        )
    return "\n".join(lines)
