from collections import Counter

import pytest

from specbuild.spec.loop import Step
from specbuild.spec.stats import SpecStats


def stats_of(histogram):
    """Stats of rounds that each committed one token of the target's own."""
    return SpecStats(Counter(histogram), sum(n * (accepted + 1) for (_, accepted), n in histogram.items()))


def rounds_from_positions(k, at_least):
    """Histogram from how many rounds accepted position i: `at_least[0]` is the number of rounds."""
    return {(k, i): n - m for i, (n, m) in enumerate(zip(at_least, [*at_least[1:], 0], strict=True))}


def test_published_log_with_k_2():
    """A vLLM log: 192 drafted, 156 accepted: rate 81.2 %, length 2.62, positions .885 .740."""
    stats = stats_of(rounds_from_positions(2, [96, 85, 71]))
    assert (stats.rounds, stats.drafted, stats.accepted) == (96, 192, 156)
    assert stats.acceptance_rate == pytest.approx(0.8125)
    assert stats.acceptance_length == pytest.approx(2.625)
    assert stats.position_rates == pytest.approx([0.885, 0.740], abs=5e-4)


def test_published_log_with_k_10():
    """vLLM PR 26498: 4687 rounds, 46870 drafted, 12368 accepted: length 3.64."""
    shares = [0.74, 0.54, 0.41, 0.30, 0.22, 0.16, 0.12, 0.08, 0.05]
    at_least = [4687, *(round(4687 * share) for share in shares)]
    at_least.append(12368 - sum(at_least[1:]))  # the printed shares are rounded: the last position takes what is left
    stats = stats_of(rounds_from_positions(10, at_least))
    assert (stats.rounds, stats.drafted, stats.accepted) == (4687, 46870, 12368)
    assert round(stats.acceptance_length, 2) == 3.64
    assert stats.position_rates[:9] == pytest.approx(shares, abs=2e-4)
    assert stats.position_rates[9] == pytest.approx(0.02, abs=5e-3)


@pytest.mark.parametrize(
    ("drafted", "accepted", "rounds", "rate", "length"),
    [(297, 171, 99, 0.57576, 1 + 171 / 99), (128, 90, 32, 0.70312, 1 + 90 / 32), (204680, 48266, 20468, 0.23581, 3.358)],
)
def test_published_rates(drafted, accepted, rounds, rate, length):
    low, more = divmod(accepted, rounds)
    stats = stats_of({(drafted // rounds, low): rounds - more, (drafted // rounds, low + 1): more})
    assert (stats.drafted, stats.accepted) == (drafted, accepted)
    assert stats.acceptance_rate == pytest.approx(rate, abs=1e-5)
    assert stats.acceptance_length == pytest.approx(length, abs=1e-3)


def test_position_rates_sum_to_accepted_per_round_whatever_the_draft_lengths():
    stats = stats_of({(3, 2): 4, (0, 0): 2, (1, 1): 3, (5, 0): 1})
    assert sum(stats.position_rates) == pytest.approx(stats.accepted / stats.rounds)
    assert stats.acceptance_length == pytest.approx(1 + stats.accepted / stats.rounds)
    assert stats.accepted_histogram == {0: 3, 1: 3, 2: 4}


def test_steps_add_up_and_cancelled_ones_are_no_rounds():
    stats = SpecStats()
    for step in [Step((1, 2, 3), 2, 4, None), Step((4, 5, 9), 3, 3, "stop"), Step((), 0, 0, "cancelled")]:
        stats.add(step)
    assert (stats.rounds, stats.drafted, stats.accepted, stats.tokens) == (2, 7, 5, 6)


def test_merging_is_adding():
    steps = [Step((1,), 0, 2, None), Step((1, 2), 1, 2, None), Step((1, 2, 3), 2, 2, "length")]
    whole, left, right = SpecStats(), SpecStats(), SpecStats()
    for i, step in enumerate(steps):
        whole.add(step)
        (left if i else right).add(step)
    left.merge(right)
    assert left == whole
    assert left.to_dict() == whole.to_dict()


def test_nothing_drafted_divides_by_nothing():
    empty = SpecStats().to_dict()
    assert (empty["acceptance_rate"], empty["acceptance_length"], empty["position_rates"]) == (0.0, 0.0, [])
