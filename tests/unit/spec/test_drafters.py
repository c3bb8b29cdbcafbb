import numpy as np
import pytest

from specbuild.errors import ConfigError
from specbuild.spec.drafters import DRAFTERS, ModelDrafter, NGramDrafter
from specbuild.spec.loop import Draft
from specbuild.spec.sampling import DRAW, Sampling, draw, probs, uniforms


class Chain:
    """Logits that depend on the last token alone."""

    def __init__(self, table):
        self.table = np.asarray(table)

    def logits(self, tokens, n):
        return self.table[list(tokens[-n:])]


COUNTER = Chain(10 * np.roll(np.eye(5), 1, axis=1))  # i is followed by i + 1 mod 5
SOFT = Chain(np.random.default_rng(5).normal(size=(8, 8)))


@pytest.mark.parametrize(
    ("tokens", "k", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 2, (4, 9)),  # three tokens agree
        ([7, 2, 3, 8, 5, 2, 3], 1, (8,)),  # two
        ([7, 3, 8, 5, 3], 2, (8, 5)),  # one
        ([1, 2, 3, 6, 9, 2, 3, 7, 1, 2, 3], 1, (6,)),  # the longest suffix wins over the latest
        ([3, 6, 3, 7, 3], 1, (7,)),  # the latest wins among equals
        ([4, 4], 3, (4, 4, 4)),  # a copy may run into itself
        ([5, 6, 5], 4, (6, 5, 6, 5)),
        ([1, 2, 3], 3, ()),
        ([1], 3, ()),
    ],
)
def test_ngram_look_up_proposes_what_followed(tokens, k, expected):
    assert NGramDrafter().propose(tokens, k, Sampling(1.0)) == Draft(expected)


@pytest.mark.parametrize("drafter", [NGramDrafter(), ModelDrafter(COUNTER)])
def test_drafts_stop_behind_an_end_token(drafter):
    prompt = [0, 1, 2, 3, 0, 1]
    assert drafter.propose(prompt, 5, Sampling(end_ids=frozenset({3}))).tokens == (2, 3)


def test_a_model_drafts_greedily_without_distributions():
    assert ModelDrafter(COUNTER).propose([0, 1], 4, Sampling()) == Draft((2, 3, 4, 0))


def test_a_model_returns_the_distributions_it_drew_from():
    sampling = Sampling(0.7, top_k=3, seed=11)
    draft = ModelDrafter(SOFT).propose([3, 1], 5, sampling)
    u = uniforms(11, 2, 5)[:, DRAW]
    previous = (1, *draft.tokens)
    for i, token in enumerate(draft.tokens):
        row = probs(SOFT.logits([previous[i]], 1), sampling)[0]
        np.testing.assert_array_equal(draft.probs[i], row)
        assert np.count_nonzero(row) == 3
        assert token == draw(row, u[i])


def test_a_shorter_draft_is_the_beginning_of_a_longer_one():
    drafts = [ModelDrafter(SOFT).propose([3, 1], k, Sampling(1.0, seed=4)).tokens for k in range(1, 7)]
    assert all(drafts[-1][: len(tokens)] == tokens for tokens in drafts)


def test_the_table_makes_drafters():
    assert DRAFTERS["model"](SOFT) == ModelDrafter(SOFT)
    assert DRAFTERS["ngram"](None) == NGramDrafter()
    with pytest.raises(ConfigError, match="no draft model"):
        DRAFTERS["model"](None)
