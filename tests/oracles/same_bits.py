"""Any split of a sequence into passes, and any batch of its beginnings, gives the same bits."""

import numpy as np

WIDTHS = ([1] * 140, [2] * 70, [5] * 28, [3, 1, 64, 9, 1, 1, 50, 2, 9], [127, 1, 1, 11])
REQUESTS = ((7, 2), (1, 1), (30, 5), (140, 3))  # (length, logits of the last)


def assert_same_bits(open_runner, tokens):
    """open_runner(slots) opens an engine with nothing cached; tokens are 140, over the first growth of its cache."""
    assert len(tokens) == 140
    expected = open_runner(1).logits(tokens, 140)
    for widths in WIDTHS:
        runner, end = open_runner(1), 0
        for width in widths:
            end += width
            assert np.array_equal(runner.logits(tokens[:end], width), expected[end - width : end]), widths
    requests = [(tokens[:length], n) for length, n in REQUESTS]
    for found, (sequence, n) in zip(open_runner(4).logits_batch(requests), requests, strict=True):
        assert np.array_equal(found, expected[len(sequence) - n : len(sequence)])
