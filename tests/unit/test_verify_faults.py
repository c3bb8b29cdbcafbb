"""verify catches planted faults: greedy ones by ids, those of sampling by the distribution; an honest pair passes with the same seed."""

import json

import numpy as np
import pytest

from specbuild.compilers.ort_runner import common_prefix
from specbuild.pair import Pair, open_pair
from specbuild.spec import accept
from specbuild.spec.drafters import ModelDrafter
from specbuild.spec.loop import Draft, Verified
from specbuild.spec.sampling import ACCEPT, RECOVER, Sampling, draw, probs
from specbuild.verify import choose_lengths, format_report, run_verify, standard_lengths
from specbuild.verify_sampling import FALSE_ALARMS, PLAIN, format_sampling, judge_sampling, run_sampling

VOCAB = 101
PROMPTS = ["def read", "class Reader", "for line in lines"]
DRAWS = 400


class Model:
    """Logits from the last two tokens; `alike` is the weight of what all models have in common."""

    max_seq_len = 200
    vocab_size = VOCAB

    def __init__(self, seed, alike=0.7):
        make = np.random.default_rng
        tables = [make(number).normal(size=(2, VOCAB, VOCAB)) * 2 for number in (0, seed + 1)]
        self.tables = alike * tables[0] + (1 - alike) * tables[1]

    def reset(self):
        pass

    def logits(self, tokens, n):
        ends = range(len(tokens) - n, len(tokens))
        return np.stack([self.tables[0, tokens[i]] + self.tables[1, tokens[max(0, i - 1)]] for i in ends]).astype(np.float32)


class Stale(Model):
    """Behind the first pass, a cache that is one position late: a pass of several tokens sees each one's predecessor."""

    def logits(self, tokens, n):
        rows = super().logits(tokens, n)
        return rows if n == 1 else np.concatenate([rows[:1], rows[:-1]])


class ArgmaxWithSoftOdds(ModelDrafter):
    """transformers #32867: proposes the likeliest token and hands over a distribution that it did not draw from."""

    def propose(self, tokens, k, sampling):
        if sampling.greedy:
            return super().propose(tokens, k, sampling)
        sequence, rows = list(tokens), []
        for _ in range(k):
            rows.append(probs(self.model.logits(sequence, 1), sampling)[0])
            sequence.append(int(rows[-1].argmax()))
        return Draft(tuple(sequence[len(tokens) :]), np.stack(rows))


class RawOdds(ModelDrafter):
    """transformers #47932: draws with top-k and temperature, hands over the distribution without them."""

    def propose(self, tokens, k, sampling):
        draft = super().propose(tokens, k, sampling)
        if draft.probs is None:
            return draft
        raw = probs(self.model.logits([*tokens, *draft.tokens[:-1]], len(draft.tokens)), Sampling(1.0))
        return Draft(draft.tokens, raw)


def make_pair(tokenizer, target=None, drafter=ModelDrafter, rule="rejection"):
    target, draft = target or Model(1), Model(2)
    return Pair(target, draft, drafter(draft), tokenizer, frozenset(), rule, 4, 8)


def always(target, tokens, draft, u):
    return len(tokens), draw(target[len(tokens)], u[len(tokens), RECOVER])


def draw_unscaled(weights, u):
    return min(int(np.searchsorted(np.cumsum(weights), u, side="right")), VOCAB - 1)


def rejection_with(residual, draw=draw):
    def rule(target, tokens, draft, u):
        for i, token in enumerate(tokens):
            if u[i, ACCEPT] * draft[i, token] >= target[i, token]:
                return i, draw(residual(target[i], draft[i]), u[i, RECOVER])
        return always(target, tokens, draft, u)

    return rule


def off_by_one(target, tokens, draft, u):
    """Judges each token by the distribution behind it."""
    return accept.rejection(np.roll(target, -1, axis=0), tokens, draft, u)


RULES = {
    "accepts everything": always,
    "a residual that is not clamped": rejection_with(lambda target, draft: np.abs(target - draft)),
    "the target itself for a residual": rejection_with(lambda target, _: target),
    "a residual that was clamped before it was normalised away": rejection_with(
        lambda target, draft: np.maximum(target - draft, 0) + 0.002
    ),
    "off by one": off_by_one,
}


@pytest.mark.parametrize("rule", accept.RULES)
def test_an_honest_pair_passes_with_the_same_seed(tokenizer, rule):
    """False-alarm rate 1e-4 over all tests."""
    pair = make_pair(tokenizer, rule=rule)
    report = run_sampling(pair, PROMPTS, DRAWS)
    assert report.passed
    assert report.false_alarms == FALSE_ALARMS == 1e-4
    assert {test.position for test in report.tests} == {0, 1, 2}
    assert "sampling               ok against the target's own probabilities" in format_sampling(report)
    assert "(seed 0)" in format_sampling(report)
    assert run_verify(pair, PROMPTS, 32).passed
    assert run_sampling(pair, PROMPTS, DRAWS) == report


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_wrong_rule_is_told_by_the_distribution(tokenizer, monkeypatch, rule):
    monkeypatch.setitem(accept.RULES, "rejection", rule)
    report = run_sampling(make_pair(tokenizer), PROMPTS, DRAWS)
    assert not report.passed
    assert "DIFFERENT against" in format_sampling(report)
    assert "DIFFERENT: prompt 0, temperature" in format_sampling(report) or report.tests[0].p_value > 0
    assert json.loads(json.dumps(report.to_dict()))["passed"] is False
    assert run_verify(make_pair(tokenizer), PROMPTS, 32).passed  # greedy decoding does not ask the rule


@pytest.mark.parametrize("drafter", [ArgmaxWithSoftOdds, RawOdds])
def test_a_draft_that_hands_over_other_odds_is_told_by_the_distribution(tokenizer, drafter):
    pair = make_pair(tokenizer, drafter=drafter)
    assert not run_sampling(pair, PROMPTS, DRAWS).passed
    assert run_verify(pair, PROMPTS, 32).passed


def test_a_cache_one_position_late_is_told_by_the_ids_and_by_the_distribution(tokenizer):
    pair = make_pair(tokenizer, Stale(1))
    report = run_verify(pair, PROMPTS, 32)
    assert report.mismatches == 3
    assert not report.passed
    assert not run_sampling(pair, PROMPTS, DRAWS).passed


def test_a_rejected_token_that_stays_in_an_engine_s_cache_is_told_by_the_ids(tiny_pair, monkeypatch):
    """The cache of the built target is rewound by one token too few: a rejected token stands where the target's own belongs."""
    pair = open_pair(tiny_pair)
    assert run_verify(pair, PROMPTS, 32).passed
    honest, last = pair.target.logits, []

    def logits(tokens, n):
        tokens = list(tokens)
        kept = common_prefix(last, tokens)
        rejected = last[kept] if kept < min(len(last), len(tokens)) else None
        last[:] = tokens
        if rejected is not None and n > 1:
            tokens[kept] = rejected
        return honest(tokens, n)

    monkeypatch.setattr(pair.target, "logits", logits)
    assert run_verify(pair, PROMPTS, 32).mismatches == 3


def test_a_greedy_rule_that_accepts_everything_is_told_by_the_ids(tokenizer, monkeypatch):
    def verify(self, tokens, draft, sampling, limit):
        found = accept.commit(draft, len(draft.tokens), int(self.model.logits([*tokens, *draft.tokens], 1)[0].argmax()), sampling, limit)
        return Verified(found.tokens, found.accepted, found.judged, found.finish_reason)

    monkeypatch.setattr(accept.ModelVerifier, "verify", verify)
    assert run_verify(make_pair(tokenizer), PROMPTS, 32).mismatches == 3


def test_without_the_target_s_probabilities_plain_draws_are_the_reference(tokenizer, monkeypatch):
    def judge():
        pair = make_pair(tokenizer)

        def draw_ids(index, sampling, draft_len):
            prompt = tokenizer.encode(PROMPTS[index]).ids
            return tuple(token for step in pair.steps(prompt, sampling, 3, draft_len) for token in step.tokens)

        return judge_sampling(draw_ids, None, 2, 4, DRAWS, 0)

    report = judge()
    assert report.passed
    assert report.against == PLAIN
    monkeypatch.setitem(accept.RULES, "rejection", always)
    assert not judge().passed


def test_lengths_are_those_asked_for_or_the_usual_ones_that_the_engine_takes():
    assert choose_lengths((4, 1, 4, 0)) == (1, 4)
    assert standard_lengths(3, 5) == [1, 2, 4, 3]


def test_every_length_from_1_to_8_is_compared_and_positions_add_up(tokenizer):
    report = run_verify(make_pair(tokenizer), PROMPTS, 32, range(1, 9))
    assert report.draft_lens == tuple(range(1, 9))
    assert report.identical == 3
    assert sum(report.position_rates) == pytest.approx(report.accepted / report.rounds)
    assert list(report.position_rates) == sorted(report.position_rates, reverse=True)
    assert len(report.to_dict()["position_rates"]) == 4
    assert f"({report.accepted} of {report.drafted} drafted, {report.rounds} rounds)" in format_report(report)
