"""A model without weights: logits that depend on the last two tokens, the same for any batch and any number of rows."""

import time

import numpy as np


class FakeRunner:
    """Peaked pseudo-random logits; `twist` makes another model that often agrees."""

    max_seq_len = 256

    def __init__(self, vocab_size=300, twist=0.0, seconds=0.0, end_id=2):
        self.vocab_size, self.twist, self.seconds, self.end_id = vocab_size, twist, seconds, end_id

    def _row(self, last):
        rng = np.random.default_rng(list(last))
        logits = rng.normal(size=self.vocab_size) * 3
        logits += self.twist * np.random.default_rng([7, *last]).normal(size=self.vocab_size)
        logits[self.end_id] += 4.0  # the end comes up now and then
        return logits.astype(np.float32)

    def logits(self, tokens, n):
        tokens = list(tokens)
        return np.stack([self._row(tokens[max(0, i - 1) : i + 1]) for i in range(len(tokens) - n, len(tokens))])

    def logits_batch(self, requests):
        time.sleep(self.seconds)
        return [self.logits(tokens, n) for tokens, n in requests]
