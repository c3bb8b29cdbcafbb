"""The generate stage: one answer in this process, on the built engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specbuild.pair import Pair
from specbuild.spec.sampling import Sampling
from specbuild.spec.stats import SpecStats


@dataclass(frozen=True)
class Answer:
    """One answer and what it took. tokens_per_second counts from the request on; first_token_seconds likewise."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    rounds: int
    drafted: int
    accepted: int
    tokens_per_second: float
    first_token_seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_generate(
    pair: Pair, prompt_ids: Sequence[int], sampling: Sampling, max_tokens: int, draft_len: int | None = None,
    stop: Sequence[str] = (), on_text: Callable[[str], None] | None = None,
) -> Answer:  # fmt: skip
    """Generate one answer, giving its text to `on_text` as it comes."""
    start = time.perf_counter()
    stats, first, reason = SpecStats(), 0.0, "length"
    pieces: list[str] = []
    ids: list[int] = []
    for step in pair.generate(prompt_ids, sampling, max_tokens, draft_len, stop):
        first = first or time.perf_counter() - start
        stats.add(step)
        pieces.append(step.text)
        ids += step.tokens
        reason = step.finish_reason or reason
        if on_text is not None:
            on_text(step.text)
    seconds = time.perf_counter() - start
    return Answer(
        "".join(pieces), tuple(ids), tuple(prompt_ids), reason, stats.rounds, stats.drafted, stats.accepted, len(ids) / seconds, first
    )
