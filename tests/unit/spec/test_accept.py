import numpy as np
import pytest

from specbuild.errors import ConfigError, EngineError
from specbuild.spec.accept import RULES, ModelVerifier, accept, exact, rejection
from specbuild.spec.loop import Draft
from specbuild.spec.sampling import DRAW, Sampling, draw, uniforms

P = np.array([0.5, 0.3, 0.2])  # target
Q = np.array([0.2, 0.5, 0.3])  # draft
N = 20000
# Critical values of chi-squared at 1e-6, by degrees of freedom: the false-alarm rate of each test here (seeds are fixed).
CRITICAL = {1: 23.93, 2: 27.63}


def chi_squared(counts, expected):
    """Pearson's statistic; infinite where something impossible happened."""
    expected = np.asarray(expected) * np.sum(counts)
    if np.any((expected == 0) & (np.asarray(counts) > 0)):
        return np.inf
    possible = expected > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


def first_tokens(rule, make_draft):
    """The first token of N single-token drafts judged by `rule`, and how many were accepted; `make_draft(u)` -> token, probs."""
    counts, hits = np.zeros(3, dtype=int), 0
    blocks = uniforms(1, 0, 2 * N).reshape(N, 2, 4)
    target = np.stack([P, P])
    for block in blocks:
        token, odds = make_draft(block[0, DRAW])
        accepted, own = rule(target, (token,), odds, block)
        counts[token if accepted else own] += 1
        hits += accepted
    return counts, hits


HONEST = {
    "drawn": lambda u: (draw(Q, u), Q[None]),
    "certain": lambda u: (1, None),
    "drawn, odds unknown": lambda u: (draw(Q, u), None),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("make_draft", HONEST.values(), ids=HONEST)
def test_output_has_the_distribution_of_the_target(rule, make_draft):
    """False-alarm rate 1e-6."""
    counts, _ = first_tokens(rule, make_draft)
    assert chi_squared(counts, P) < CRITICAL[2]


@pytest.mark.parametrize(
    ("rule", "make_draft", "rate"),
    [(rejection, "drawn", 0.7), (rejection, "certain", 0.3), (exact, "drawn", 0.6), (exact, "certain", 0.3)],
)
def test_acceptance_rate_is_the_one_of_theory(rule, make_draft, rate):
    """sum(min(p, q)) for rejection; for exact what the intervals of both cumulative sums share:
    [0, .2) + [.5, .7) + [.8, 1). False-alarm rate 1e-6."""
    _, hits = first_tokens(rule, HONEST[make_draft])
    assert chi_squared(np.array([hits, N - hits]), [rate, 1 - rate]) < CRITICAL[1]


def test_the_same_test_catches_an_argmax_draft_judged_by_soft_odds():
    """The draft takes its argmax, the ratio uses Q: the output is (.4, .6, 0), total variation 3/10."""
    counts, _ = first_tokens(rejection, lambda u: (1, Q[None]))
    assert chi_squared(counts, P) > 100 * CRITICAL[2]
    assert chi_squared(counts, [0.4, 0.6, 0.0]) < CRITICAL[2]


@pytest.mark.parametrize("u", [0.0, 0.3, 0.999])
def test_the_residual_of_the_oracle_is_certain(u):
    block = np.array([[0.6, u, 0, 0], [0, 0, 0, 0]])  # 0.6 >= 0.3 / 0.5: rejected
    assert rejection(np.stack([P, P]), (1,), Q[None], block) == (0, 0)


@pytest.mark.parametrize(("u", "accepted"), [(0.599, 1), (0.6, 0), (0.601, 0)])
def test_rejection_accepts_below_the_ratio(u, accepted):
    block = np.array([[u, 0.99, 0, 0], [0, 0.99, 0, 0]])
    assert rejection(np.stack([P, P]), (1,), Q[None], block) == (accepted, 2 if accepted else 0)


def test_equal_distributions_are_always_accepted():
    rows = np.random.default_rng(0).dirichlet(np.ones(5), size=2001)
    tokens = tuple(int(row.argmin()) for row in rows[:-1])
    block = np.full((2001, 4), 1 - 2**-53)
    assert rejection(rows, tokens, rows[:-1], block)[0] == 2000


@pytest.mark.parametrize("odds", [None, np.array([[0.0, 0.5, 0.5]]), np.array([[0.0, 1.0, 0.0]])])
def test_tokens_impossible_for_the_target_are_never_accepted(odds):
    target = np.array([[0.4, 0.0, 0.6]] * 2)
    assert rejection(target, (1,), odds, np.zeros((2, 4)))[0] == 0


def test_an_empty_residual_falls_back_to_the_target():
    target = np.array([[0.25, 0.25, 0.5]] * 2)
    odds = np.array([[0.3, 0.3, 0.5]])  # rounded up everywhere: target - draft leaves nothing
    assert rejection(target, (0,), odds, np.array([[0.9, 0.6, 0, 0]] * 2)) == (0, 2)


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_of_nothing_gives_one_token_of_the_target(rule):
    assert accept(rule, np.array([[0.0, 9.0]]), Draft(()), Sampling(), 4) == (0, 1)
    assert accept(rule, np.array([[-np.inf, 9.0]]), Draft(()), Sampling(1.0), 4) == (0, 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("tokens", "expected"), [((1, 2), (2, 0)), ((1, 0), (1, 2)), ((0, 2), (0, 1))])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=1)])
def test_greedy_accepts_while_the_draft_is_the_argmax(rule, tokens, expected, sampling):
    logits = np.array([[0, 5, 0], [0, 0, 5], [5, 0, 0]], dtype=np.float32)
    assert accept(rule, logits, Draft(tokens), sampling, 0) == expected
    one_hot = np.eye(3)[[1, 2, 0]]
    assert RULES[rule](one_hot, tokens, None, uniforms(0, 0, 3)) == expected


@pytest.mark.parametrize("rule", RULES)
def test_a_wider_draft_vocabulary_is_padding(rule):
    logits = np.log(np.stack([P, P]))
    odds = np.array([[0.0, 0.0, 0.0, 1.0]])
    accepted, token = accept(rule, logits, Draft((3,), odds), Sampling(1.0), 0)
    assert (accepted, token < 3) == (0, True)
    narrow = accept(rule, logits, Draft((0,), np.array([[1.0]])), Sampling(1.0), 0)
    assert narrow == accept(rule, logits, Draft((0,), np.array([[1.0, 0.0, 0.0]])), Sampling(1.0), 0)


def test_unknown_rules_and_missing_rows_are_refused():
    with pytest.raises(ConfigError, match=r"'typical'.*exact, rejection"):
        ModelVerifier(None, "typical")
    with pytest.raises(EngineError, match="2 drafted tokens with 1 rows"):
        accept("exact", np.zeros((1, 3)), Draft((0, 1)), Sampling(), 0)
