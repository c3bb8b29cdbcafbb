import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from specbuild.errors import ConfigError, EngineError
from specbuild.spec.accept import RULES, ModelVerifier
from specbuild.spec.drafters import ModelDrafter, NGramDrafter
from specbuild.spec.loop import Draft, Step, Verified, commit, speculate
from specbuild.spec.sampling import Sampling, probs
from specbuild.spec.stats import SpecStats


@dataclass
class Recurrent:
    """A model whose logits depend on every token before; keeps its state and rewinds it to the longest common prefix."""

    seed: int = 0
    vocab: int = 16
    cached: list = field(default_factory=list)
    states: list = field(default_factory=lambda: [1])

    def logits(self, tokens, n):
        common = next((i for i, (a, b) in enumerate(zip(self.cached, tokens, strict=False)) if a != b), len(self.cached))
        common = min(common, len(tokens))
        del self.cached[common:], self.states[common + 1 :]
        for token in tokens[common:]:
            self.cached.append(token)
            self.states.append((self.states[-1] * 31 + token + 7) % 9973)
        return np.stack([np.random.default_rng([self.seed, state]).normal(size=self.vocab) for state in self.states[-n:]])


class Chain:
    """Logits that depend on the last token alone."""

    def __init__(self, table):
        self.table = np.asarray(table)

    def logits(self, tokens, n):
        return self.table[list(tokens[-n:])]


@dataclass
class RandomDrafter:
    """Proposes anything, sometimes less than was asked; remembers what was asked."""

    seed: int = 0
    vocab: int = 16
    asked: list = field(default_factory=list)

    def propose(self, tokens, k, sampling):
        self.asked.append(k)
        rng = np.random.default_rng([self.seed, len(tokens)])
        return Draft(tuple(int(t) for t in rng.integers(self.vocab, size=rng.integers(k + 1))))


COUNTER = Chain(10 * np.roll(np.eye(10), 1, axis=1))  # i is followed by i + 1 mod 10


def run(drafter, verifier, prompt=(1, 2), *, sampling=Sampling(), max_tokens=24, draft_len=4, context=1000, **more):  # noqa: B008
    """Tokens, steps and stats of a whole generation."""
    options = {"sampling": sampling, "max_tokens": max_tokens, "draft_len": draft_len, "context": context, **more}
    steps = list(speculate(drafter, verifier, prompt, **options))
    stats = SpecStats()
    for step in steps:
        stats.add(step)
    return [token for step in steps for token in step.tokens], steps, stats


def plain(model, prompt, n):
    """Greedy decoding, one token at a time, without the loop."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(model.logits(tokens, 1)[0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", [RandomDrafter(), ModelDrafter(Recurrent(seed=1)), NGramDrafter(), ModelDrafter(Recurrent())])
def test_greedy_output_is_plain_decoding_for_every_draft(k, rule, drafter):
    tokens, _, stats = run(drafter, ModelVerifier(Recurrent(), rule), draft_len=k, max_tokens=40)
    assert tokens == plain(Recurrent(), (1, 2), 40)
    assert stats.tokens == 40


def test_greedy_output_is_plain_decoding_when_a_draft_is_right_now_and_then():
    target = Recurrent(vocab=2)
    tokens, _, stats = run(RandomDrafter(vocab=2), ModelVerifier(target, "exact"), max_tokens=64)
    assert tokens == plain(Recurrent(vocab=2), (1, 2), 64)
    assert 0.2 < stats.acceptance_rate < 0.9


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize(("rule", "sampling"), list(itertools.product(RULES, [Sampling(), Sampling(0.8, 5, 0.9, 3)])))
def test_self_draft_is_accepted_in_full(k, rule, sampling):
    _, steps, stats = run(ModelDrafter(Recurrent()), ModelVerifier(Recurrent(), rule), sampling=sampling, draft_len=k, max_tokens=200)
    assert stats.acceptance_rate == 1.0
    assert all(step.drafted == k for step in steps[:-1])
    assert stats.tokens == 200


@pytest.mark.parametrize("sampling", [Sampling(0.8, seed=5), Sampling(1.2, top_k=4, seed=6), Sampling(0.8, top_p=0.7, seed=2**64 - 1)])
def test_the_exact_rule_samples_the_same_tokens_for_every_draft_length(sampling):
    outputs = {
        tuple(run(drafter, ModelVerifier(Recurrent(), "exact"), sampling=sampling, draft_len=k)[0])
        for k in range(8)
        for drafter in (RandomDrafter(), ModelDrafter(Recurrent(seed=1)), NGramDrafter())
    }
    assert len(outputs) == 1


TARGET = Chain(np.random.default_rng(1).normal(size=(4, 4)) * 1.5)
OTHER = Chain(np.random.default_rng(2).normal(size=(4, 4)) * 1.5)


def sequence_odds(sampling, first, n):
    """Probability of every sequence of n tokens behind `first`."""
    step = np.stack([probs(row[None], sampling)[0] for row in TARGET.table])
    paths = itertools.product(range(4), repeat=n)
    return {path: float(np.prod([step[a, b] for a, b in itertools.pairwise((first, *path))])) for path in paths}


class ArgmaxWithSoftOdds(ModelDrafter):
    """The planted mistake: proposes the argmax but hands over the distribution it did not draw from."""

    def propose(self, tokens, k, sampling):
        draft = super().propose(tokens, k, sampling)
        tokens, rows = [tokens[-1]], []
        for _ in range(k if draft.tokens else 0):
            rows.append(probs(self.model.logits(tokens, 1), sampling)[0])
            tokens.append(int(rows[-1].argmax()))
        return Draft(tuple(tokens[1:]), np.stack(rows) if rows else None)


def sequence_chi_squared(drafter, rule, n=3000):
    """Pearson's statistic of the 3 tokens behind token 0, and its degrees of freedom, over n seeds."""
    expected = sequence_odds(Sampling(0.8, top_k=3), 0, 3)
    counts = dict.fromkeys(expected, 0)
    for seed in range(n):
        sampling = Sampling(0.8, top_k=3, seed=seed)
        counts[tuple(run(drafter, ModelVerifier(TARGET, rule), (0,), sampling=sampling, max_tokens=3, draft_len=2)[0])] += 1
    assert all(counts[path] == 0 for path, odds in expected.items() if odds == 0)
    likely = [path for path, odds in expected.items() if odds * n >= 5]
    observed = np.array([*(counts[path] for path in likely), 0.0])
    wanted = np.array([*(expected[path] * n for path in likely), 0.0])
    observed[-1], wanted[-1] = n - observed.sum(), n - wanted.sum()
    return float(((observed - wanted) ** 2 / wanted).sum()), len(likely)


def critical(degrees):
    """Wilson and Hilferty's critical value of chi-squared at 1e-6 (normal quantile 4.753)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.753 * spread**0.5) ** 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", [ModelDrafter(OTHER), NGramDrafter()])
def test_sampled_sequences_have_the_distribution_of_the_target(drafter, rule):
    """Three tokens at temperature 0.8 with top-k through the whole loop; false-alarm rate 1e-6 each, seeds fixed."""
    statistic, degrees = sequence_chi_squared(drafter, rule)
    assert statistic < critical(degrees)


def test_the_same_test_catches_a_drafter_that_lies_about_its_odds():
    """Argmax drafts judged by soft odds; the honest drafter passes the very same test."""
    statistic, degrees = sequence_chi_squared(ArgmaxWithSoftOdds(OTHER), "rejection")
    assert statistic > 2 * critical(degrees)


@pytest.mark.parametrize("rule", RULES)
def test_s11_an_end_token_inside_the_draft_ends_the_counts_with_it(rule):
    """Self-draft, the third new token is the end, five were asked for: three tokens, three drafted, three accepted."""
    sampling = Sampling(end_ids=frozenset({5}))
    tokens, steps, stats = run(ModelDrafter(COUNTER), ModelVerifier(COUNTER, rule), sampling=sampling, draft_len=5)
    assert tokens == [3, 4, 5]
    assert steps == [Step((3, 4, 5), 3, 3, "stop")]
    assert stats.acceptance_rate == 1.0


@pytest.mark.parametrize("end_ids", [{5}, {5, 7}, {7, 5, 99}])
@pytest.mark.parametrize("k", range(7))
def test_any_of_several_end_tokens_stops(end_ids, k):
    sampling = Sampling(end_ids=frozenset(end_ids))
    tokens, steps, _ = run(NGramDrafter(), ModelVerifier(COUNTER, "exact"), (1, 2, 3, 4, 1, 2), sampling=sampling, draft_len=k)
    assert tokens == [3, 4, 5]
    assert steps[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("draft", "accepted", "token", "limit", "expected"),
    [
        ((1, 2), 2, 3, 9, Verified((1, 2, 3), 2, 2, None)),
        ((1, 2), 1, 3, 9, Verified((1, 3), 1, 2, None)),
        ((), 0, 3, 9, Verified((3,), 0, 0, None)),
        ((1, 9, 2), 3, 3, 9, Verified((1, 9), 2, 2, "stop")),  # an accepted end token
        ((1, 2, 4), 1, 9, 9, Verified((1, 9), 1, 2, "stop")),  # the target's own: the token it replaced was judged, the next not
        ((1, 2), 2, 9, 9, Verified((1, 2, 9), 2, 2, "stop")),
        ((1, 2), 2, 3, 3, Verified((1, 2, 3), 2, 2, "length")),
        ((1, 2), 2, 3, 2, Verified((1, 2), 2, 2, "length")),
        ((1, 2), 2, 3, 1, Verified((1,), 1, 1, "length")),
        ((1, 9), 2, 3, 2, Verified((1, 9), 2, 2, "stop")),  # an end token inside the limit wins
        ((1, 9), 2, 3, 1, Verified((1,), 1, 1, "length")),  # one outside does not leak
    ],
)
def test_s12_commit_cuts_at_the_first_end_token_and_at_the_limit(draft, accepted, token, limit, expected):
    assert commit(Draft(draft), accepted, token, Sampling(end_ids=frozenset({9})), limit) == expected


@pytest.mark.parametrize(
    ("limits", "asked", "produced"),
    [
        ({"max_tokens": 3, "draft_len": 8}, [2], 3),
        ({"max_tokens": 1, "draft_len": 8}, [], 1),
        ({"max_tokens": 50, "draft_len": 8, "context": 4}, [1], 2),  # two places are left behind a prompt of two
        ({"max_tokens": 50, "draft_len": 8, "context": 3}, [], 1),
        ({"max_tokens": 9, "draft_len": 8, "draft_context": 4}, [2], 9),  # the draft context fills up: plainly on
        ({"max_tokens": 4, "draft_len": 8, "draft_context": 1}, [], 4),
        ({"max_tokens": 4, "draft_len": 0}, [], 4),
        ({"max_tokens": 4, "draft_len": -3}, [], 4),
    ],
)
def test_s12_drafts_are_bounded_by_budget_and_contexts(limits, asked, produced):
    drafter = Asked(ModelDrafter(COUNTER))
    tokens, steps, _ = run(drafter, ModelVerifier(COUNTER, "exact"), **limits)
    assert tokens == plain(COUNTER, (1, 2), produced)
    assert drafter.asked == asked
    assert [step.finish_reason for step in steps] == [None] * (len(steps) - 1) + ["length"]


@dataclass
class Asked:
    """Remembers what a drafter was asked for."""

    drafter: object
    asked: list = field(default_factory=list)

    def propose(self, tokens, k, sampling):
        self.asked.append(k)
        return self.drafter.propose(tokens, k, sampling)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, seed=1)])
def test_s23_an_idle_drafter_is_back_at_full_acceptance_at_once(sampling):
    """Draft lengths 3, 0, 0, 3: the whole sequence comes with every call, so the draft catches up with what it missed."""
    schedule, draft = (3, 0, 0, 3), Recurrent()
    verifier = ModelVerifier(Recurrent(), "rejection")
    tokens, steps, _ = run(ModelDrafter(draft), verifier, sampling=sampling, draft_len=schedule.__getitem__, max_tokens=10)
    assert [(step.drafted, step.accepted) for step in steps] == [(3, 3), (0, 0), (0, 0), (3, 3)]
    assert draft.cached == [1, 2, *tokens[:-2]]  # all but the last proposal and the bonus token


def test_t11_cancelling_ends_with_a_step_of_its_own():
    polls = iter([False, False, True])
    _, steps, _ = run(RandomDrafter(vocab=10), ModelVerifier(COUNTER, "exact"), cancelled=lambda: next(polls))
    assert [step.finish_reason for step in steps] == [None, None, "cancelled"]
    assert steps[-1] == Step((), 0, 0, "cancelled")


@pytest.mark.parametrize(
    ("prompt", "limits", "message"),
    [
        ([], {}, "empty prompt"),
        ([1, 2, 3], {"context": 3}, "prompt of 3 tokens: the context of 3"),
        ([1, 2, 3], {"context": 2}, "prompt of 3 tokens: the context of 2"),
        ([1], {"max_tokens": 0}, "0 tokens: expected max_tokens >= 1"),
    ],
)
def test_impossible_requests_are_refused_at_the_call(prompt, limits, message):
    options = {"sampling": Sampling(), "max_tokens": 4, "draft_len": 2, "context": 9, **limits}
    with pytest.raises(ConfigError, match=message):
        speculate(RandomDrafter(), ModelVerifier(COUNTER, "exact"), prompt, **options)


def test_a_target_that_gives_nothing_is_an_error_not_an_endless_loop():
    class Mute:
        def verify(self, tokens, draft, sampling, limit):
            return Verified((), 0, 0, None)

    with pytest.raises(EngineError, match="0 tokens"):
        run(RandomDrafter(), Mute())


def test_the_prompt_is_left_as_it_was():
    prompt = [1, 2]
    run(RandomDrafter(vocab=10), ModelVerifier(COUNTER, "exact"), prompt)
    assert prompt == [1, 2]
