import math

import numpy as np
import pytest

from specbuild.spec.fit import Fit, chi_squared_tail, combine, fit_distribution, fit_samples

ZIPF = 1 / np.arange(1, 301) / (1 / np.arange(1, 301)).sum()
SHAPES = {
    "long tail": (ZIPF, 1000), "flat": (np.full(100, 0.01), 600), "peaked": (np.array([0.97, 0.01, 0.01] + [0.001] * 10), 1000),
    "all but certain": (np.array([0.999] + [1e-5] * 100), 1000),
}  # fmt: skip


def counted(row):
    return {int(token): int(row[token]) for token in np.flatnonzero(row)}


def closed_form(x, degrees):
    """The tail of chi-squared for 1 degree of freedom or an even number of them."""
    if degrees == 1:
        return math.erfc(math.sqrt(x / 2))
    return math.fsum(math.exp(i * math.log(x / 2) - x / 2 - math.lgamma(i + 1)) for i in range(degrees // 2))


@pytest.mark.parametrize("degrees", [1, 2, 8, 40, 300])
def test_the_tail_is_that_of_chi_squared(degrees):
    for x in (0.1, 1, 5, 30, 80, 300, 900):
        assert chi_squared_tail(x, degrees) == pytest.approx(closed_form(x, degrees), rel=1e-9, abs=1e-15)
    assert chi_squared_tail(3.0, 3) == pytest.approx(0.3916251762710877)
    assert chi_squared_tail(0, degrees) == 1
    assert chi_squared_tail(5, 0) == 1


@pytest.mark.parametrize(("weights", "draws"), SHAPES.values(), ids=SHAPES)
def test_honest_samples_fail_as_often_as_stated(weights, draws):
    """At a level of 1e-2 a rate of at most 1.5e-2 over 4000 samples, at 1e-4 at most 3 of them (the seed is fixed)."""
    rows = np.random.default_rng(0).multinomial(draws, weights / weights.sum(), size=4000)
    alone = np.array([fit_distribution(counted(row), weights / weights.sum()).p_value for row in rows])
    both = np.array([fit_samples(counted(a), counted(b)).p_value for a, b in zip(rows[:2000], rows[2000:], strict=True)])
    for values in (alone, both):
        assert (values < 1e-2).mean() < 1.5e-2
        assert (values < 1e-4).sum() <= 3


@pytest.mark.parametrize("other", [[0.4, 0.6, 0.0], [0.2, 0.5, 0.3], [0.45, 0.33, 0.22]])
def test_another_distribution_is_told_apart(other):
    expected, draws = np.array([0.5, 0.3, 0.2]), 20_000
    counts = {token: round(draws * share) for token, share in enumerate(other)}
    assert fit_distribution(counts, expected).p_value < 1e-10
    assert fit_samples(counts, {token: round(draws * share) for token, share in enumerate(expected)}).p_value < 1e-5


def test_tokens_of_probability_zero_are_impossible_but_for_rounding():
    expected = np.array([0.5, 0.5, 0.0])
    assert fit_distribution({0: 500, 1: 499, 2: 1}, expected).p_value > 1e-5  # the edge of a nucleus
    assert fit_distribution({0: 500, 1: 495, 2: 5}, expected).p_value < 1e-10
    assert fit_distribution({0: 500, 1: 495, 7: 5}, expected).p_value < 1e-10  # an id beyond the distribution


def test_a_rare_token_that_is_always_drawn_is_told_from_the_likely_one():
    assert fit_distribution({1: 1000}, np.array([0.9995, 0.0005])).p_value < 1e-10


def test_a_certain_token_says_nothing_and_independent_tests_add_up():
    assert fit_distribution({1: 50}, np.array([0.0, 1.0])).p_value > 0.9
    assert fit_samples({1: 50}, {1: 50}) == Fit(100, 0.0, 0)
    assert combine([Fit(10, 1.5, 1), Fit(20, 2.5, 3)]) == Fit(30, 4.0, 4)
    assert combine([]).p_value == 1
