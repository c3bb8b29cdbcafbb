"""The verify stage: is speculative decoding the target's own decoding, and how much of the draft is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
ALL_DRAFT_LENS = tuple(range(1, 9))
SELF_DRAFT_FLOOR = 0.95  # it is 1 unless the kernels round wider passes differently; below this a cache is out of step
LARGEST_ROUNDING = 0.1  # of the logits' spread; 8-bit activations give up to 0.08, a cache off by one more than 1
ACCEPTANCE_FLOOR = 0.05  # a draft below it costs more than it gains, whatever its length
DRAFTED_FLOOR = 0.5  # drafted tokens per round; below it the acceptance rate says little

Decode = Callable[[int, int, SpecStats], list[int]]
"""(index of the prompt, draft length, statistics to add to) -> the answer's ids."""
Locate = Callable[[int, int, list[int], list[int]], "Divergence"]
"""(index of the prompt, draft length, plain ids, other ids) -> where they part, and why."""


@dataclass(frozen=True)
class Divergence:
    """The first token at which a speculative answer left the plain one.

    top2_margin is how far the plain pass's best logit leads its second; rounding, the most that any logit there moves
    when it and those before it are computed in wider passes; spread, the standard deviation of the logits there.
    A margin within twice the rounding is a near tie, unless the rounding itself is too large to be one.
    None: there is no engine here to measure it with.
    """

    prompt: int
    draft_len: int
    position: int
    plain_id: int | None
    speculative_id: int | None
    top2_margin: float | None = None
    rounding: float = 0.0
    spread: float = 0.0
    largest: float = LARGEST_ROUNDING  # share of the spread that rounding may reach

    @property
    def near_tie(self) -> bool:
        if self.plain_id is None or self.speculative_id is None or self.top2_margin is None:
            return False
        return self.top2_margin <= 2 * self.rounding and self.rounding <= self.largest * self.spread

    @property
    def kind(self) -> str:
        return "near_tie" if self.near_tie else "mismatch"


@dataclass(frozen=True)
class Report:
    """What verify found. A prompt counts as identical when it was so at every draft length.

    rounds, drafted, accepted and what follows from them are of the packaged draft length, or the longest where that was not asked for.
    """

    prompts: int
    max_tokens: int
    draft_lens: tuple[int, ...]
    identical: int
    near_ties: int
    mismatches: int
    self_draft_acceptance: float | None  # None: nothing could be drafted
    acceptance: float
    acceptance_by_draft_len: dict[int, float]
    position_rates: tuple[float, ...]  # the share of rounds that accepted the first, second, ... drafted token
    rounds: int
    drafted: int
    accepted: int
    tokens_per_round: float
    divergences: tuple[Divergence, ...]
    warnings: tuple[str, ...] = ()
    url: str | None = None  # the server that was asked; None: decoded in this process
    served_differently: int | None = None  # plain answers of the server that are not this process's; None: not compared

    @property
    def passed(self) -> bool:
        in_step = self.self_draft_acceptance is None or self.self_draft_acceptance >= SELF_DRAFT_FLOOR
        return self.mismatches == 0 and in_step and not self.served_differently

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "divergences": [{"kind": each.kind, **asdict(each)} for each in self.divergences], "passed": self.passed}


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
    lengths = choose_lengths(draft_lens or standard_lengths(pair.draft_len, pair.max_draft_len))
    encoded = [encode_prompt(pair.tokenizer, text)[: pair.target.max_seq_len // 2 if cut else None] for text in prompts]
    own = SpecStats()

    def decode(index: int, draft_len: int, stats: SpecStats) -> list[int]:
        if draft_len == 0:  # once per prompt: the target drafts for itself, too
            decode_greedily(pair, encoded[index], max_tokens, max(lengths, default=0), own, own_draft=True)
        return decode_greedily(pair, encoded[index], max_tokens, draft_len, stats)

    def locate(index: int, draft_len: int, plain: list[int], answer: list[int]) -> Divergence:
        return find_divergence(pair, encoded[index], plain, answer, index, draft_len)

    stats, divergences, _ = compare_lengths(decode, locate, len(prompts), lengths)
    return make_report(len(prompts), max_tokens, stats, divergences, pair.draft_len, own)


def standard_lengths(packaged: int, longest: int) -> list[int]:
    """Return the draft lengths to compare where none are asked for: the usual ones and the packaged one."""
    return [length for length in (*DRAFT_LENS, packaged) if length <= longest]


def choose_lengths(draft_lens: Sequence[int]) -> tuple[int, ...]:
    """Return draft lengths in order, each once, without plain decoding."""
    return tuple(sorted({*draft_lens} - {0}))


def compare_lengths(
    decode: Decode, locate: Locate, prompts: int, lengths: Sequence[int]
) -> tuple[dict[int, SpecStats], list[Divergence], list[list[int]]]:
    """Decode each prompt plainly and at each length; return what was accepted, where answers part, and the plain answers."""
    stats = {length: SpecStats() for length in lengths}
    divergences: list[Divergence] = []
    answers: list[list[int]] = []
    with bar("verify", prompts, "prompt") as progress:
        for index in range(prompts):
            plain = decode(index, 0, SpecStats())
            answers.append(plain)
            for length in lengths:
                answer = decode(index, length, stats[length])
                if answer != plain:
                    divergences.append(locate(index, length, plain, answer))
            progress.update(1)
    return stats, divergences, answers


def make_report(
    prompts: int, max_tokens: int, stats: dict[int, SpecStats], divergences: list[Divergence], packaged_len: int, own: SpecStats
) -> Report:
    """Sum up: a prompt is a mismatch when any of its answers is one."""
    wrong = {d.prompt for d in divergences if not d.near_tie}
    close = {d.prompt for d in divergences} - wrong
    packaged = stats.get(packaged_len) or next(reversed(stats.values()), SpecStats())
    return Report(
        prompts=prompts, max_tokens=max_tokens, draft_lens=tuple(stats), identical=prompts - len(wrong) - len(close), near_ties=len(close),
        mismatches=len(wrong), self_draft_acceptance=own.acceptance_rate if own.drafted else None, acceptance=packaged.acceptance_rate,
        acceptance_by_draft_len={length: s.acceptance_rate for length, s in stats.items()},
        position_rates=tuple(packaged.position_rates) if packaged.rounds else (),
        rounds=packaged.rounds, drafted=packaged.drafted, accepted=packaged.accepted,
        tokens_per_round=packaged.tokens / max(1, packaged.rounds), divergences=tuple(divergences), warnings=find_warnings(packaged),
    )  # fmt: skip


def find_warnings(stats: SpecStats) -> tuple[str, ...]:
    """Say when the output is right and yet nothing is gained."""
    counts = f"accepted {stats.accepted} of {stats.drafted} drafted tokens in {stats.rounds} rounds"
    if stats.rounds and stats.drafted < DRAFTED_FLOOR * stats.rounds:
        return (f"hardly anything is drafted ({counts}): the acceptance rate says little, and speculation gains little",)
    if stats.drafted and stats.acceptance_rate < ACCEPTANCE_FLOOR:
        return (f"the draft is hardly ever right ({counts}): the output is the target's, only slower. Is it a draft for this target?",)
    return ()


def decode_greedily(
    pair: Pair, prompt: Sequence[int], max_tokens: int, draft_len: int, stats: SpecStats, own_draft: bool = False
) -> list[int]:
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
    position, ids = first_difference(plain, answer)
    tokens = [*prompt, *plain[:position]]
    narrow = logits_at(pair, prompt, tokens, 1)
    rounding = max(float(np.abs(logits_at(pair, prompt, tokens, width) - narrow).max()) for width in range(2, draft_len + 2))
    return Divergence(index, draft_len, position, *ids, top2_margin(narrow), rounding, float(narrow.std()))


def first_difference(plain: Sequence[int], other: Sequence[int]) -> tuple[int, tuple[int | None, int | None]]:
    """Return the first position at which two answers differ, and both ids there; None where one has ended."""
    shared = zip(plain, other, strict=False)
    position = next((i for i, (a, b) in enumerate(shared) if a != b), min(len(plain), len(other)))
    plain_id, other_id = (ids[position] if position < len(ids) else None for ids in (plain, other))
    return position, (plain_id, other_id)


def top2_margin(logits: np.ndarray[Any, Any]) -> float:
    """Return how far the largest logit of a row leads the second."""
    best = np.sort(logits)[-2:]
    return float(best[1] - best[0])


def logits_at(pair: Pair, prompt: Sequence[int], tokens: list[int], width: int) -> np.ndarray[Any, Any]:
    """Return the logits behind a sequence whose tokens behind the prompt run in passes of `width`: what is cached is rounded, too."""
    pair.target.reset()
    for end in range(len(tokens) - width * ((len(tokens) - len(prompt)) // width + 1), len(tokens), width):
        if end > 0:
            pair.target.logits(tokens[:end], 1)
    row: np.ndarray[Any, Any] = pair.target.logits(tokens, 1)[-1]
    return row


def format_report(report: Report) -> str:
    """Return the report as text: one line per claim, then the divergences and warnings."""
    own = "nothing drafted" if report.self_draft_acceptance is None else f"{report.self_draft_acceptance:.4f}"
    by_length = ", ".join(f"{length}: {rate:.3f}" for length, rate in report.acceptance_by_draft_len.items())
    counts = f"{report.accepted} of {report.drafted} drafted, {report.rounds} rounds"
    different = report.served_differently
    lines = [
        f"prompts                {report.prompts} of {report.max_tokens} tokens, draft_len {', '.join(map(str, report.draft_lens))}",
        f"identical              {report.identical}",
        f"near ties              {report.near_ties}",
        f"mismatches             {report.mismatches}",
        f"self-draft acceptance  {own}" if report.url is None else f"served by              {report.url}",
        f"acceptance             {report.acceptance:.4f} ({by_length})",
        f"  by position          {', '.join(f'{rate:.3f}' for rate in report.position_rates)} ({counts})",
        f"tokens per round       {report.tokens_per_round:.2f}",
    ]
    if report.url is not None:
        how = "not compared: no engines here" if different is None else "identical" if not different else f"{different} DIFFERENT"
        lines.append(f"plain, in this process {how}")
    lines += [describe_divergence(each) for each in report.divergences]
    return "\n".join([*lines, *(f"warning: {text}" for text in report.warnings)])


def describe_divergence(d: Divergence, first: str = "plain", second: str = "speculative") -> str:
    """Return one line: where two answers, by these names, part and by how little."""
    margin = (
        "no engine here to measure the margin" if d.top2_margin is None else f"top-2 margin {d.top2_margin:.2e}, rounding {d.rounding:.2e}"
    )
    return (
        f"{'near tie' if d.near_tie else 'MISMATCH'}: prompt {d.prompt}, draft_len {d.draft_len}, position {d.position}: "
        f"{first} {d.plain_id}, {second} {d.speculative_id}, {margin}"
    )
