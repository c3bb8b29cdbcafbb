"""The speculation loop: propose, verify, commit, until an end token, the budget or the context ends it."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specbuild.errors import ConfigError, EngineError
from specbuild.spec.sampling import Logits, Probs, Sampling

DraftLength = int | Callable[[int], int]


@dataclass(frozen=True)
class Draft:
    """Proposed tokens and the distributions (k, V) they were drawn from; None means that they were certain (one-hot)."""

    tokens: tuple[int, ...]
    probs: Probs | None = None


@dataclass(frozen=True)
class Verified:
    """The new tokens of a round: the accepted prefix, then one of the target's own unless an end token or the limit came first.

    `accepted` counts the drafted tokens among them, `judged` the drafted tokens that the target ruled on:
    those behind the end of the sequence are not counted.
    """

    tokens: tuple[int, ...]
    accepted: int
    judged: int
    finish_reason: str | None


@dataclass(frozen=True)
class Step:
    """One round: its committed tokens, how many were drafted ones, out of how many; the reason if it was the last."""

    tokens: tuple[int, ...]
    accepted: int
    drafted: int
    finish_reason: str | None


class LogitsModel(Protocol):
    """A language model, as the loop sees it."""

    def logits(self, tokens: Sequence[int], n: int) -> Logits:
        """Logits (n, V) of the last n positions: row i predicts the token behind position len(tokens) - n + i."""
        ...


class Drafter(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, tokens: Sequence[int], k: int, sampling: Sampling) -> Draft:
        """At most k tokens to follow `tokens`; possibly none."""
        ...


class Verifier(Protocol):
    """Judges a draft with the target model."""

    def verify(self, tokens: Sequence[int], draft: Draft, sampling: Sampling, limit: int) -> Verified:
        """The accepted prefix of `draft` and one token more, at most `limit` in all."""
        ...


def commit(draft: Draft, accepted: int, token: int, sampling: Sampling, limit: int) -> Verified:
    """What a round yields that accepted `accepted` drafted tokens and then `token`: cut behind an end token and at `limit`."""
    tokens = (*draft.tokens[:accepted], token)[:limit]
    end = next((i for i, t in enumerate(tokens) if t in sampling.end_ids), None)
    reason = "length" if len(tokens) == limit else None
    if end is not None:
        tokens, reason = tokens[: end + 1], "stop"
    judged = min(len(draft.tokens), len(tokens)) if reason else len(draft.tokens)
    return Verified(tokens, min(accepted, len(tokens)), judged, reason)


def speculate(
    drafter: Drafter,
    verifier: Verifier,
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    max_tokens: int,
    draft_len: DraftLength,
    context: int,
    draft_context: int | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[Step, None, None]:
    """Generate round by round; `draft_len` is fixed or a function of the round, contexts count tokens (None: no bound).

    Raises ConfigError at the call, before anything runs. A draft context that is full turns drafting off, not generation.
    """
    if max_tokens < 1:
        raise ConfigError(f"Cannot generate {max_tokens} tokens: expected max_tokens >= 1. Ask for at least one token.")
    if not prompt:
        raise ConfigError("Cannot generate from an empty prompt: expected at least 1 token, got 0. Begin with the BOS token.")
    if len(prompt) >= context:
        raise ConfigError(
            f"Cannot generate from a prompt of {len(prompt)} tokens: the context of {context} has to hold it and one token more. "
            "Shorten the prompt, or build with a longer context."
        )
    budget = min(max_tokens, context - len(prompt))

    def longest(length: int, remaining: int, index: int) -> int:
        wanted = draft_len(index) if callable(draft_len) else draft_len
        room = remaining if draft_context is None else draft_context - length
        return max(0, min(wanted, remaining - 1, room))

    return _rounds(drafter, verifier, list(prompt), sampling, budget, longest, cancelled)


def _rounds(
    drafter: Drafter,
    verifier: Verifier,
    tokens: list[int],
    sampling: Sampling,
    remaining: int,
    longest: Callable[[int, int, int], int],
    cancelled: Callable[[], bool],
) -> Generator[Step, None, None]:
    """The rounds of `speculate`; `longest(length, remaining, index)` bounds the draft of a round."""
    index = 0
    while not cancelled():
        k = longest(len(tokens), remaining, index)
        draft = drafter.propose(tokens, k, sampling) if k else Draft(())
        verified = verifier.verify(tokens, draft, sampling, remaining)
        if not verified.tokens and verified.finish_reason is None:
            raise EngineError("The target gave 0 tokens and no reason to stop: expected at least 1. Check its output limits.")
        yield Step(verified.tokens, verified.accepted, verified.judged, verified.finish_reason)
        if verified.finish_reason is not None:
            return
        tokens.extend(verified.tokens)
        remaining -= len(verified.tokens)
        index += 1
    yield Step((), 0, 0, "cancelled")
