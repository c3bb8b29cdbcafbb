import numpy as np
import pytest

from specbuild.errors import ConfigError, EngineError
from specbuild.spec.sampling import Sampling, draw, probs, uniforms

P = np.array([0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_impossible_sampling_is_refused_by_name(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=rf"{name} {value}.*expected") as error:
        Sampling(**wrong)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1), [0.5, 0.3, 0.2]),
        (Sampling(temperature=0.5), [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
        (Sampling(temperature=0), [1, 0, 0]),
        (Sampling(temperature=1, top_k=1), [1, 0, 0]),
        (Sampling(temperature=1, top_k=2), [0.625, 0.375, 0]),
        (Sampling(temperature=1, top_k=9), [0.5, 0.3, 0.2]),
        (Sampling(temperature=1, top_p=0.4), [1, 0, 0]),
        (Sampling(temperature=1, top_p=0.6), [0.625, 0.375, 0]),
        (Sampling(temperature=1, top_p=0.9), [0.5, 0.3, 0.2]),
        (Sampling(temperature=1, top_p=1e-9), [1, 0, 0]),
        (Sampling(temperature=1, top_k=2, top_p=0.6), [1, 0, 0]),  # top-p after top-k: 0.625 reaches 0.6 alone
        (Sampling(temperature=0.5, top_p=0.6), [1, 0, 0]),  # top-p after temperature: 0.658 reaches 0.6 alone
    ],
)
def test_probs_apply_temperature_then_top_k_then_top_p(sampling, expected):
    np.testing.assert_allclose(probs(np.log(P)[None], sampling), [expected], atol=1e-12)


@pytest.mark.parametrize(("k", "survivors"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (4, [0, 1, 2, 4]), (5, [0, 1, 2, 3, 4])])
def test_top_k_keeps_exactly_k_ids_and_the_lowest_on_ties(k, survivors):
    row = np.array([[0.0, 1.0, 1.0, 0.0, 1.0, -1.0]])
    assert np.flatnonzero(probs(row, Sampling(temperature=1, top_k=k))[0]).tolist() == survivors


def test_top_p_keeps_the_lowest_ids_on_ties():
    assert np.flatnonzero(probs(np.zeros((1, 4)), Sampling(temperature=1, top_p=0.6))[0]).tolist() == [0, 1, 2]


def test_greedy_takes_the_lowest_id_on_ties():
    assert probs(np.array([[0.0, 2.0, 2.0]]), Sampling()).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1), Sampling(temperature=1e-300), Sampling(1, 3), Sampling(1, 0, 0.9)]
)
def test_masked_ids_have_probability_zero(sampling):
    row = probs(np.array([[-np.inf, 0.0, -np.inf, 1.0]], dtype=np.float32), sampling)[0]
    assert row[[0, 2]].tolist() == [0, 0]
    assert row.sum() == pytest.approx(1)


@pytest.mark.parametrize("bad", [[0.0, np.nan], [-np.inf, -np.inf], [0.0, np.inf]])
@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_without_a_finite_maximum_are_refused(bad, temperature):
    with pytest.raises(EngineError, match="row 1 of 2"):
        probs(np.array([[0.0, 1.0], bad]), Sampling(temperature=temperature))


@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=3), Sampling(0.7, top_p=0.8), Sampling(1.3), Sampling()])
def test_rows_of_a_batch_are_independent(sampling):
    logits = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    alone = np.concatenate([probs(row[None], sampling) for row in logits])
    np.testing.assert_array_equal(probs(logits, sampling), alone)


def test_uniforms_are_keyed_by_seed_and_position():
    block = uniforms(7, 5, 3)
    assert block.shape == (3, 4)
    for i in range(3):
        np.testing.assert_array_equal(block[i], uniforms(7, 5 + i, 1)[0])
    for other in [uniforms(8, 5, 3), uniforms(7, 8, 3), uniforms(2**64 - 1, 5, 3)]:
        assert not np.isin(block, other).any()
    assert len(np.unique(uniforms(7, 0, 1000))) == 4000


def test_uniforms_are_uniform():
    """Ten cells, 40000 numbers, fixed seed; the critical value of chi-squared with 9 degrees at 0.001 is 27.88."""
    counts = np.histogram(uniforms(3, 0, 10000), bins=10, range=(0, 1))[0]
    assert ((counts - 4000) ** 2 / 4000).sum() < 27.88


@pytest.mark.parametrize(("u", "expected"), [(0.0, 1), (0.49, 1), (0.5, 3), (0.999, 3), (1 - 2**-53, 3), (1.0, 3)])
def test_draw_inverts_the_distribution_and_never_returns_an_impossible_id(u, expected):
    assert draw(np.array([0.0, 0.5, 0.0, 0.5, 0.0]), u) == expected
    assert draw(np.array([0.0, 0.35, 0.0, 0.35, 0.0]), u) == expected  # weights need not sum to 1


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0, 20.0])
def test_top_p_keeps_what_a_full_sort_would(top_p, scale):
    row = np.random.default_rng(0).normal(size=300) * scale
    mass = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    order = sorted(range(300), key=lambda i: (-mass[i], i))
    fewest = next(n for n in range(1, 301) if mass[order[:n]].sum() >= top_p)
    assert np.flatnonzero(probs(row[None], Sampling(1.0, top_p=top_p))[0]).tolist() == sorted(order[:fewest])
