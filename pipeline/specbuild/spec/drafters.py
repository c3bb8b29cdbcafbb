"""Where guesses come from: a smaller model, or the sequence itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbuild.errors import ConfigError
from specbuild.spec.loop import Draft, Drafter, LogitsModel
from specbuild.spec.sampling import DRAW, Probs, Sampling, argmax, draw, probs, uniforms


@dataclass(frozen=True)
class ModelDrafter:
    """Drafts with a model, one token after another, under the same sampling as the target."""

    model: LogitsModel

    def propose(self, tokens: Sequence[int], k: int, sampling: Sampling) -> Draft:
        """See `Drafter`. Nothing follows an end token; the distributions are those that were drawn from."""
        sequence = list(tokens)
        rows: list[Probs] = []
        numbers = None if sampling.greedy else uniforms(sampling.seed, len(tokens), k)[:, DRAW]
        for i in range(k):
            logits = self.model.logits(sequence, 1)
            if numbers is None:
                sequence.append(int(argmax(logits)[0]))
            else:
                rows.append(probs(logits, sampling)[0])
                sequence.append(draw(rows[-1], numbers[i]))
            if sequence[-1] in sampling.end_ids:
                break
        return Draft(tuple(sequence[len(tokens) :]), np.stack(rows) if rows else None)


@dataclass(frozen=True)
class NGramDrafter:
    """Prompt look-up: what followed the latest earlier occurrence of the last `longest`, ..., 2, 1 tokens."""

    longest: int = 3

    def propose(self, tokens: Sequence[int], k: int, sampling: Sampling) -> Draft:
        """See `Drafter`. A copy that reaches the end of the sequence goes on into itself, so a loop is drafted in full."""
        source = self._find_continuation(np.asarray(tokens))
        if source is None:
            return Draft(())
        sequence = list(tokens)
        for i in range(source, source + k):
            sequence.append(sequence[i])
            if sequence[-1] in sampling.end_ids:
                break
        return Draft(tuple(sequence[len(tokens) :]))

    def _find_continuation(self, tokens: NDArray[np.int64]) -> int | None:
        """Index behind the latest earlier occurrence of the longest suffix that has one."""
        for n in range(min(self.longest, len(tokens) - 1), 0, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
            hits = np.flatnonzero((windows == tokens[-n:]).all(axis=1))
            if hits.size:
                return int(hits[-1]) + n
        return None


def _make_model_drafter(model: LogitsModel | None) -> Drafter:
    if model is None:
        raise ConfigError("Cannot draft with 'model': there is no draft model. Name a draft model, or use the drafter 'ngram'.")
    return ModelDrafter(model)


DRAFTERS: dict[str, Callable[[LogitsModel | None], Drafter]] = {
    "model": _make_model_drafter,
    "ngram": lambda _model: NGramDrafter(),
}
