"""verify tells apart what is identical, a near tie, and a fault, on targets whose wide passes are planted with each."""

import json

import numpy as np
import pytest

from specbuild.errors import ConfigError
from specbuild.pair import Pair
from specbuild.spec.drafters import ModelDrafter
from specbuild.verify import format_report, load_prompts, run_verify

VOCAB = 101


class Runner:
    """Logits from the last token alone; `wide(rows)` is applied in passes of several new tokens behind cached ones."""

    max_seq_len = 200
    vocab_size = VOCAB

    def __init__(self, seed=0, wide=None):
        self.table = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)
        self.wide, self.seen = wide, 0

    def reset(self):
        self.seen = 0

    def logits(self, tokens, n):
        is_wide = self.seen > 0 and len(tokens) - min(self.seen, len(tokens) - n) > 1
        self.seen = len(tokens)
        rows = self.table[list(tokens[-n:])]
        return self.wide(rows.copy()) if is_wide and self.wide else rows


def make_pair(tokenizer, target, draft):
    return Pair(target, draft, ModelDrafter(draft), tokenizer, frozenset(), "rejection", 4, 8)


def tie(rows):
    """Move the best logit of token 7's row below the second by a hair."""
    rows[:, 5] += 1e-3
    return rows


def fault(rows):
    """Give every row the logits of its neighbour, as a cache off by one does."""
    return np.roll(rows, 1, axis=-1)


PROMPTS = ["def read", "class Reader", "for line in lines"]


def test_equal_passes_are_identical(tokenizer):
    report = run_verify(make_pair(tokenizer, Runner(), Runner(1)), PROMPTS, 32)
    assert (report.prompts, report.identical, report.near_ties, report.mismatches) == (3, 3, 0, 0)
    assert report.draft_lens == (1, 2, 4, 8)
    assert report.self_draft_acceptance == 1.0
    assert 0 <= report.acceptance < 0.5


def test_a_margin_below_the_rounding_of_wider_passes_is_a_near_tie(tokenizer):
    target = Runner(wide=tie)
    best = target.table.max(axis=1)
    target.table[:, 5] = best - 5e-4  # token 5 is second everywhere, by less than wide passes add to it
    report = run_verify(make_pair(tokenizer, target, Runner(1)), PROMPTS, 32, (4,))
    assert report.mismatches == 0
    assert report.near_ties == len(report.divergences) > 0
    for divergence in report.divergences:
        assert divergence.speculative_id == 5
        assert divergence.top2_margin == pytest.approx(5e-4, rel=0.01)
        assert divergence.rounding == pytest.approx(1e-3, rel=0.01)
    assert "near tie: prompt" in format_report(report)


def test_a_fault_of_wide_passes_is_a_mismatch_however_narrow_the_margin(tokenizer):
    target = Runner(wide=fault)
    target.table[:, 5] = target.table.max(axis=1) - 5e-4
    report = run_verify(make_pair(tokenizer, target, Runner(1)), PROMPTS, 32, (4,))
    assert report.mismatches == len(report.divergences) == 3
    assert min(divergence.rounding for divergence in report.divergences) > 1


def test_a_fault_of_speculation_is_a_mismatch(tokenizer):
    """The target is right in any pass, but a drafter's tokens are taken unverified: nothing in the logits explains it."""

    class Unverified(Runner):
        def logits(self, tokens, n):
            rows = super().logits(tokens, n)
            if n > 1:
                rows = rows.copy()
                rows[np.arange(n - 1), tokens[-n + 1 :]] = 99.0
            return rows

    report = run_verify(make_pair(tokenizer, Unverified(), Runner(1)), PROMPTS, 32)
    assert report.mismatches == 3
    assert report.to_dict()["divergences"][0]["kind"] == "mismatch"
    assert {"prompt", "position", "plain_id", "speculative_id", "top2_margin"} <= report.to_dict()["divergences"][0].keys()
    assert "MISMATCH: prompt 0" in format_report(report)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected at least one"),
        ('""\n', "none of them empty"),
        ("not json\n", "Expected one JSON string"),
        ('{"text": "x"}\n', "prompt"),
    ],
)
def test_prompt_files_that_cannot_be_used_are_refused(tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_prompts(tmp_path / "p.jsonl")
    with pytest.raises(ConfigError, match="Cannot read prompts"):
        load_prompts(tmp_path / "absent.jsonl")


def test_prompt_files_hold_strings_or_objects(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps("a") + "\n" + json.dumps({"prompt": "b", "kind": "prose"}) + "\n")
    assert load_prompts(tmp_path / "p.jsonl") == ["a", "b"]
    assert len(load_prompts(None)) == 20
