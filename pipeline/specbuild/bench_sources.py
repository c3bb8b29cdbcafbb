"""Where bench gets its answers: from the engines in this process, or from a Triton server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from specbuild.pair import Pair
from specbuild.spec.loop import Draft, Drafter, Step
from specbuild.spec.sampling import Sampling
from specbuild.tokenizer import encode_prompt

Clock = Callable[[], float]
FLUSH_TOKENS = 80  # more than an engine rewinds (ort_runner.REWIND): a slot that holds so many is not cut for a prompt, but replaced
_FLUSHES = count()  # no two flushing prompts of this process are alike


class Source(Protocol):
    """Decodes prompts greedily, round by round."""

    place: str

    def forget(self, *, first: bool) -> None:
        """Make the next prompt cold; `first` of a pass, or one that came before in it."""
        ...

    def decode(self, prompt: str, draft_len: int) -> Iterator[Step]:
        """Return the rounds of one answer as they come."""
        ...

    def take_split(self) -> tuple[float, float] | None:
        """Return the seconds in the target and in the drafter since the last call; None where they cannot be seen."""
        ...


class TimedTarget:
    """A runner that adds up the time spent in it."""

    def __init__(self, runner: Any, clock: Clock) -> None:
        self._runner, self._clock, self.seconds = runner, clock, 0.0

    def logits(self, tokens: Sequence[int], n: int) -> np.ndarray[Any, Any]:
        start = self._clock()
        rows: np.ndarray[Any, Any] = self._runner.logits(tokens, n)
        self.seconds += self._clock() - start
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


@dataclass
class TimedDrafter:
    """A drafter that adds up the time spent in it."""

    drafter: Drafter
    clock: Clock
    seconds: float = 0.0

    def propose(self, tokens: Sequence[int], k: int, sampling: Sampling) -> Draft:
        start = self.clock()
        draft = self.drafter.propose(tokens, k, sampling)
        self.seconds += self.clock() - start
        return draft


class InProcess:
    """A pair in this process, whose target and drafter are timed from the second round on (the first reads the prompt)."""

    place = "in process"

    def __init__(self, pair: Pair, max_tokens: int, clock: Clock) -> None:
        self._target, self._drafter = TimedTarget(pair.target, clock), TimedDrafter(pair.drafter, clock)
        self._pair = replace(pair, target=self._target, drafter=self._drafter)
        self._max_tokens = max_tokens
        self._split = (0.0, 0.0)

    def forget(self, *, first: bool) -> None:  # noqa: ARG002
        self._pair.reset()

    def decode(self, prompt: str, draft_len: int) -> Iterator[Step]:
        before = (0.0, 0.0)
        steps = self._pair.steps(
            encode_prompt(self._pair.tokenizer, prompt), Sampling(end_ids=self._pair.end_ids), self._max_tokens, draft_len
        )
        for index, step in enumerate(steps):
            now = (self._target.seconds, self._drafter.seconds)
            if index:
                self._split = (self._split[0] + now[0] - before[0], self._split[1] + now[1] - before[1])
            before = now
            yield step

    def take_split(self) -> tuple[float, float] | None:
        split, self._split = self._split, (0.0, 0.0)
        return split


def make_flush(tokenizer: Tokenizer) -> str:
    """Return a prompt of FLUSH_TOKENS tokens or a few more that differs from all before it at its beginning."""
    text = f"{next(_FLUSHES):x}"
    for number in count(100):
        if len(tokenizer.encode(text).ids) >= FLUSH_TOKENS:
            break
        text += f" {number}"
    return text


class Served:
    """A Triton server. Its caches cannot be reset from outside: a long prompt for each of its `slots` pushes everything else out."""

    def __init__(self, url: str, max_tokens: int, slots: int, tokenizer: Tokenizer) -> None:
        self._url, self._max_tokens, self._slots, self._tokenizer = url, max_tokens, slots, tokenizer
        self.place = f"served at {url}"

    def forget(self, *, first: bool) -> None:
        """Fill every cache slot of both engines before what may be in one: the prompts of a pass are new to each other."""
        for _ in range(self._slots if first else 0):
            for _ in self._stream(make_flush(self._tokenizer), 2, 1):
                pass

    def decode(self, prompt: str, draft_len: int) -> Iterator[Step]:
        return self._stream(prompt, self._max_tokens, draft_len)

    def _stream(self, prompt: str, max_tokens: int, draft_len: int) -> Iterator[Step]:
        """Turn chunks, whose counts are of the request so far, into rounds."""
        from specbuild.triton.client import stream_generate

        accepted = drafted = 0
        for chunk in stream_generate(self._url, prompt, max_tokens=max_tokens, draft_len=draft_len):
            yield Step(chunk.token_ids, chunk.accepted - accepted, chunk.drafted - drafted, chunk.finish_reason)
            accepted, drafted = chunk.accepted, chunk.drafted

    def take_split(self) -> tuple[float, float] | None:
        return None
