"""Timed passes over the prompts of bench: when the tokens of every answer arrive."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from specbuild.bench_sources import Clock, Source
from specbuild.spec.loop import Step
from specbuild.spec.stats import SpecStats


@dataclass(frozen=True)
class Answer:
    """The rounds of one answer, and when the tokens of each arrived, in seconds from the request."""

    steps: tuple[Step, ...]
    arrivals: tuple[float, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for step in self.steps for token in step.tokens)

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive tokens as a client sees them: those of a round arrive together, so all but its first have 0."""
        waits = (0.0, *self.arrivals)
        return [
            wait for index, step in enumerate(self.steps) for wait in (self.arrivals[index] - waits[index], *[0.0] * (len(step.tokens) - 1))
        ][1:]


@dataclass(frozen=True)
class Sample:
    """One pass over all prompts: the answers in their order, wall time, and seconds in target and drafter where they can be seen."""

    answers: tuple[Answer, ...]
    seconds: float
    split: tuple[float, float] | None = None

    def rate(self) -> float:
        """Return tokens per second, of all requests together."""
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds

    def decode_rate(self) -> float:
        """Return tokens per second of an answer behind its first round."""
        tokens = sum(len(step.tokens) for answer in self.answers for step in answer.steps[1:])
        seconds = sum(answer.arrivals[-1] - answer.arrivals[0] for answer in self.answers)
        return tokens / seconds if seconds else 0.0

    def only(self, indices: Sequence[int]) -> Sample:
        """Return the pass over some of the prompts; of a batch of 1, whose answers follow each other."""
        chosen = tuple(self.answers[index] for index in indices)
        return Sample(chosen, sum(answer.arrivals[-1] for answer in chosen))

    def stats(self) -> SpecStats:
        stats = SpecStats()
        for answer in self.answers:
            for step in answer.steps:
                stats.add(step)
        return stats


def run_pass(source: Source, prompts: Sequence[str], draft_len: int, batch: int, clock: Clock, warm: bool = False) -> Sample:
    """Decode all prompts, `batch` at once; warm: each a second time at once, and only that one counts."""
    source.take_split()
    if batch > 1:
        source.forget(first=True)
        start = clock()
        with ThreadPoolExecutor(batch) as pool:
            answers = tuple(pool.map(lambda prompt: time_answer(source, prompt, draft_len, clock), prompts))
        return Sample(answers, clock() - start)
    single = []
    for index, prompt in enumerate(prompts):
        if warm:
            time_answer(source, prompt, draft_len, clock)
        else:
            source.forget(first=index == 0 or prompt in prompts[:index])
        single.append(time_answer(source, prompt, draft_len, clock))
    return Sample(tuple(single), sum(answer.arrivals[-1] for answer in single), source.take_split())


def time_answer(source: Source, prompt: str, draft_len: int, clock: Clock) -> Answer:
    """Decode one prompt and note when each round arrives."""
    start = clock()
    rounds = [(step, clock() - start) for step in source.decode(prompt, draft_len) if step.tokens]
    steps, arrivals = zip(*rounds, strict=True)
    return Answer(steps, arrivals)


def split_round(samples: Sequence[Sample]) -> dict[str, float] | None:
    """Return the seconds of a round behind the first that the draft, the target and the loop take; None where they cannot be seen."""
    splits = [sample.split for sample in samples if sample.split is not None]
    rounds = sum(len(answer.steps) - 1 for sample in samples for answer in sample.answers)
    if len(splits) < len(samples) or not rounds:
        return None
    total = sum(answer.arrivals[-1] - answer.arrivals[0] for sample in samples for answer in sample.answers)
    target, draft = (sum(column) for column in zip(*splits, strict=True))
    return {name: seconds / rounds for name, seconds in (("draft", draft), ("target", target), ("loop", total - target - draft))}
