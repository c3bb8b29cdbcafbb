"""Which drafted tokens stand, and what the target says instead of the first that does not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from specbuild.errors import ConfigError, EngineError
from specbuild.spec.loop import Draft, LogitsModel, Verified, commit
from specbuild.spec.sampling import ACCEPT, DRAW, RECOVER, Logits, Probs, Sampling, argmax, draw, probs, uniforms

Rule: TypeAlias = Callable[[Probs, Sequence[int], Probs | None, Probs], tuple[int, int]]
"""(target (k + 1, V), drafted tokens (k,), draft (k, V) or None, uniforms (k + 1, 4)) -> (accepted, the target's own token)."""


def exact(target: Probs, tokens: Sequence[int], _draft: Probs | None, u: Probs) -> tuple[int, int]:
    """Draw from the target at every position and accept while the drafted token is the one drawn, whatever the draft's odds.

    The draft was drawn with the same numbers, so the more alike the distributions, the oftener both draw the same token;
    what comes out depends on the target and the numbers alone.
    """
    for i, drafted in enumerate(tokens):
        token = draw(target[i], u[i, DRAW])
        if token != drafted:
            return i, token
    return len(tokens), draw(target[len(tokens)], u[len(tokens), DRAW])


def rejection(target: Probs, tokens: Sequence[int], draft: Probs | None, u: Probs) -> tuple[int, int]:
    """Accept with probability min(1, target / draft), else draw the recovered token from the residual.

    Leviathan et al. 2211.17192, algorithm 1; Chen et al. 2302.01318, algorithm 2. For a draft that was certain this is `exact`:
    accepted with the target's probability of it, else drawn from what is left.
    """
    if draft is None:
        return exact(target, tokens, None, u)
    for i, token in enumerate(tokens):
        if u[i, ACCEPT] * draft[i, token] >= target[i, token]:
            return i, draw(_residual(target[i], draft[i]), u[i, RECOVER])
    return len(tokens), draw(target[len(tokens)], u[len(tokens), RECOVER])  # the bonus token


def _residual(target: Probs, draft: Probs) -> Probs:
    """max(target - draft, 0), not normalised (V,); the target itself where rounding leaves nothing of it."""
    residual = np.maximum(target - draft, 0.0)
    return residual if residual.any() else target


RULES: dict[str, Rule] = {"exact": exact, "rejection": rejection}


def find_rule(name: str) -> Rule:
    """The rule of that name; raises ConfigError for any other."""
    if name not in RULES:
        raise ConfigError(f"Cannot accept by the rule {name!r}: expected one of {', '.join(RULES)}. Choose one of them.")
    return RULES[name]


def accept(rule_name: str, target_logits: Logits, draft: Draft, sampling: Sampling, position: int) -> tuple[int, int]:
    """How many drafted tokens stand and the target's own next one, from `target_logits` (k + 1, V).

    `position` is the index in the sequence of the first drafted token: it keys the randomness.
    """
    k = len(draft.tokens)
    rule = find_rule(rule_name)
    if len(target_logits) != k + 1:
        raise EngineError(f"Cannot judge {k} drafted tokens with {len(target_logits)} rows of logits: expected {k + 1}.")
    if sampling.greedy:  # every rule comes to this, without arrays of the size of the vocabulary
        best = argmax(target_logits).tolist()
        accepted = next((i for i, token in enumerate(draft.tokens) if token != best[i]), k)
        return accepted, int(best[accepted])
    target = probs(target_logits, sampling)
    drafted = draft.probs
    if drafted is not None:
        width = max(target.shape[1], drafted.shape[1])  # padded vocabularies may differ: Qwen2.5 has 151936 and 152064
        target, drafted = _widened(target, width), _widened(drafted, width)
    return rule(target, draft.tokens, drafted, uniforms(sampling.seed, position, k + 1))


def _widened(rows: Probs, width: int) -> Probs:
    """`rows` with ids of probability 0 added up to `width`."""
    return rows if rows.shape[1] == width else np.pad(rows, ((0, 0), (0, width - rows.shape[1])))


@dataclass(frozen=True)
class ModelVerifier:
    """Verifies with one pass of `model` over the sequence and its draft, accepting by `rule`."""

    model: LogitsModel
    rule: str

    def __post_init__(self) -> None:
        find_rule(self.rule)

    def verify(self, tokens: Sequence[int], draft: Draft, sampling: Sampling, limit: int) -> Verified:
        """See `Verifier`."""
        logits = self.model.logits([*tokens, *draft.tokens], len(draft.tokens) + 1)
        accepted, token = accept(self.rule, logits, draft, sampling, len(tokens))
        return commit(draft, accepted, token, sampling, limit)
