"""What hit people who decoded speculatively, each with the smallest input that shows it. Names begin with a row's id."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specbuild.build import run_build
from specbuild.check import check_pair
from specbuild.config import ROLES, load_config
from specbuild.convert import run_convert
from specbuild.pair import Pair, open_pair
from specbuild.quantize import run_quantize
from specbuild.spec.accept import RULES, ModelVerifier
from specbuild.spec.drafters import ModelDrafter
from specbuild.spec.fit import fit_distribution
from specbuild.spec.loop import Draft, speculate
from specbuild.spec.sampling import Sampling, probs
from specbuild.tokenizer import encode_prompt, load_tokenizer
from specbuild.verify import format_report, load_prompts, run_verify

END = "<|end|>"
SEPARATE = 1e-4  # false-alarm rate of each test of a distribution here; the seeds are fixed


@pytest.fixture
def build(tmp_path, write_pair_yaml):
    """Return build(**sections): a pair that went through every stage, opened."""

    def run(**sections):
        config = load_config(write_pair_yaml(tmp_path, **sections))
        check_pair(config)
        for stage in (run_convert, run_quantize, run_build):
            for role in ROLES:
                stage(config, role)
        return open_pair(config)

    return run


@pytest.fixture
def copied(tmp_path, make_model):
    """Return copied(name, **config): a copy of a tiny model that may be changed."""
    return lambda name, **config: shutil.copytree(make_model(**config), tmp_path / name)


class Table:
    """Logits from the last token: log probabilities of a table (V, V)."""

    def __init__(self, rows):
        self.rows = np.log(np.asarray(rows, dtype=float))

    def logits(self, tokens, n):
        return self.rows[list(tokens[-n:])]


def count_first(target, drafter, rule, sampling, draws, position=0):
    """Count the token at one position behind token 0, over seeds."""
    counts = Counter()
    for seed in range(draws):
        drawn = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed)
        steps = speculate(drafter, ModelVerifier(target, rule), [0], sampling=drawn, max_tokens=position + 2, draft_len=2, context=99)
        counts[[token for step in steps for token in step.tokens][position]] += 1
    return counts


# --- s-01: the same tokenizer, sizes padded differently


@pytest.mark.parametrize("rows", [(128, 112), (112, 128)])
def test_s_01_a_pair_that_is_padded_differently_decodes_as_the_target_does(build, make_model, rows):
    target, draft = (make_model(seed=seed, vocab_size=size) for seed, size in enumerate(rows))
    pair = build(target={"model": str(target)}, draft={"model": str(draft)})
    report = run_verify(pair, load_prompts(None)[:3], 24, cut=True)
    assert (report.identical, report.self_draft_acceptance) == (3, 1.0)
    prompt = encode_prompt(pair.tokenizer, "def read")
    for sampling in (Sampling(), Sampling(5.0, seed=3)):
        assert max(token for step in pair.steps(prompt, sampling, 100) for token in step.tokens) < 101


# --- s-03 and s-04: what of a tokenizer can reach the output


def with_bos(directory):
    """Let a model's tokenizer put the end token before every text, as Llama's puts its BOS."""
    values = json.loads((directory / "tokenizer.json").read_text())
    values["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(values))
    return directory


def test_s_03_flags_and_classes_that_differ_are_warnings_where_all_ids_match(tmp_path, write_pair_yaml, copied):
    target, draft = with_bos(copied("target", num_hidden_layers=3)), copied("draft", seed=1, num_hidden_layers=1)
    (target / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": True, "pad_token": END, "tokenizer_class": "LlamaTokenizer"})
    )
    (draft / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "pad_token": "!", "tokenizer_class": "GPT2Tokenizer"}))
    report = check_pair(load_config(write_pair_yaml(tmp_path, target={"model": str(target)}, draft={"model": str(draft)})))
    assert {each.what for each in report.differences} == {"the post_processor", "add_bos_token", "pad_token", "tokenizer_class"}
    assert {each.effect for each in report.differences} == {"none"}


@pytest.mark.parametrize("text", ["def read", f"def {END} read", END])
def test_s_04_both_models_get_the_ids_of_the_plain_path(build, copied, monkeypatch, text):
    target, draft = with_bos(copied("target", num_hidden_layers=3)), copied("draft", seed=1, num_hidden_layers=1)
    pair = build(target={"model": str(target)}, draft={"model": str(draft)})
    expected = load_tokenizer(target).encode(text).ids
    assert expected[0] == 0
    seen = {}
    for role, runner in (("target", pair.target), ("draft", pair.draft)):
        whole = runner.logits
        monkeypatch.setattr(
            runner, "logits", lambda tokens, n, role=role, whole=whole: seen.setdefault(role, list(tokens)) and whole(tokens, n)
        )
    prompt = encode_prompt(pair.tokenizer, text)
    assert prompt == expected
    plain = [token for step in pair.steps(prompt, Sampling(), 12, 0) for token in step.tokens]
    assert seen.pop("target") == expected
    assert [token for step in pair.steps(prompt, Sampling(), 12, 4) for token in step.tokens] == plain
    assert seen["draft"] == expected
    assert seen["target"][: len(expected)] == expected


# --- s-05: cache positions after a rejection


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_s_05_answers_after_many_rejections_are_the_plain_ones_and_a_self_draft_is_accepted_whole(build, make_model, kind):
    window = {"sliding_window": 8} if kind == "mistral" else {}
    pair = build(target={"model": str(make_model(kind, **window))}, draft={"model": str(make_model(kind, seed=7, **window))})
    report = run_verify(pair, load_prompts(None), 64, (1, 4, 8), cut=True)
    assert (report.identical, report.self_draft_acceptance) == (20, 1.0)
    assert report.accepted < report.drafted / 2  # there were rejections to recover from


# --- s-07 and s-08: sampling keeps the target's distribution

P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]


class ArgmaxWithSoftOdds(ModelDrafter):
    """The mistake: the draft proposes its argmax, the ratio uses its odds."""

    def propose(self, tokens, k, sampling):
        draft = super().propose(tokens, k, sampling)
        return Draft(tuple(int(row.argmax()) for row in draft.probs), draft.probs)


@pytest.mark.parametrize("rule", RULES)
def test_s_07_what_is_drawn_has_the_target_s_distribution_and_the_mistake_does_not(rule):
    target, draft = Table([P] * 3), Table([Q] * 3)
    honest = count_first(target, ModelDrafter(draft), rule, Sampling(1.0), 20_000)
    assert fit_distribution(honest, np.array(P)).p_value > SEPARATE
    if rule == "rejection":
        biased = count_first(target, ArgmaxWithSoftOdds(draft), rule, Sampling(1.0), 20_000)
        assert fit_distribution(biased, np.array(P)).p_value < 1e-100
        assert fit_distribution(biased, np.array([0.4, 0.6, 0.0])).p_value > SEPARATE


@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=3), Sampling(0.7, top_k=3, top_p=0.8)])
def test_s_08_target_and_draft_go_through_the_same_processors_row_by_row(sampling):
    rng = np.random.default_rng(0)
    target, draft = (Table(rng.dirichlet(np.ones(8), size=8)) for _ in range(2))
    for position in (0, 1):
        counts = count_first(target, ModelDrafter(draft), "rejection", sampling, 6000, position)
        first = probs(target.logits([0], 1), sampling)[0]
        expected = first if position == 0 else first @ probs(target.rows, sampling)  # each first token's own row
        assert fit_distribution(counts, expected).p_value > SEPARATE


# --- s-15: a wider pass of a quantized target rounds differently


@pytest.mark.parametrize("kernels", ["width-independent", "fast"])
def test_s_15_a_divergence_is_a_near_tie_by_its_margin_and_width_independent_kernels_have_none(build, kernels, copied):
    """Every two rows of lm_head are all but equal: a rounding decides between them."""
    model = copied("target", num_hidden_layers=3)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"][1:100:2] = tensors["lm_head.weight"][0:100:2] * (1 + 1e-7)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    pair = build(target={"model": str(model), "dtype": "float32"}, build={"kernels": kernels})
    report = run_verify(pair, load_prompts(None)[:6], 48, range(1, 9), cut=True)
    assert report.mismatches == 0
    if kernels == "width-independent":
        assert (report.passed, report.identical) == (True, 6)
    else:  # or the test would say nothing of near ties
        assert report.near_ties > 0
    assert all(each.kind == "near_tie" and each.top2_margin <= 2 * each.rounding for each in report.divergences)


@pytest.mark.parametrize(("shift", "kind"), [(1e-3, "near_tie"), (5.0, "mismatch")])
def test_s_15_a_margin_below_the_rounding_is_a_near_tie_and_a_large_one_a_fault(tokenizer, shift, kind):
    class Wide:
        """A pass of several new tokens lifts token 5 by `shift`."""

        max_seq_len, vocab_size = 200, 101

        def __init__(self):
            self.table = np.random.default_rng(0).normal(size=(101, 101)).astype(np.float32)
            self.table[:, 5] = self.table.max(axis=1) - shift / 2
            self.seen = 0

        def reset(self):
            self.seen = 0

        def logits(self, tokens, n):
            wide = self.seen > 0 and len(tokens) - min(self.seen, len(tokens) - n) > 1
            self.seen = len(tokens)
            rows = self.table[list(tokens[-n:])]
            rows[:, 5] += shift * wide
            return rows

    target = Wide()
    pair = Pair(target, Wide(), ModelDrafter(Wide()), tokenizer, frozenset(), "rejection", 4, 8)
    report = run_verify(pair, ["def read"], 16, (4,))
    assert [each.kind for each in report.divergences] == [kind]
    assert ("near tie: prompt 0" if kind == "near_tie" else "MISMATCH: prompt 0") in format_report(report)
    assert report.mismatches == (kind == "mismatch")


def test_s_15_what_wider_passes_left_in_the_cache_is_rounding_too(tokenizer):
    class Trace:
        """A wider pass rounds what it caches: every later position sees token 5 lifted, but not the pass itself."""

        max_seq_len, vocab_size = 200, 101

        def __init__(self):
            self.table = np.random.default_rng(0).normal(size=(101, 101)).astype(np.float32)
            self.table[:, 5] = self.table.max(axis=1) - 5e-4
            self.reset()

        def reset(self):
            self.seen, self.traced_from = 0, 1000

        def logits(self, tokens, n):
            cached = min(self.seen, len(tokens) - n)
            if cached > 0 and len(tokens) - cached > 1:
                self.traced_from = min(self.traced_from, len(tokens))
            self.seen = len(tokens)
            rows = self.table[list(tokens[-n:])]
            rows[np.arange(len(tokens) - n, len(tokens)) >= self.traced_from, 5] += 1e-3
            return rows

    target = Trace()
    pair = Pair(target, Trace(), ModelDrafter(Trace()), tokenizer, frozenset(), "rejection", 4, 8)
    report = run_verify(pair, ["def read"], 16, (4,))
    assert [each.kind for each in report.divergences] == ["near_tie"]


# --- s-22: nothing accepted, or hardly anything drafted


def test_s_22_a_draft_with_a_permuted_lm_head_gives_the_right_output_and_a_warning(build, copied):
    draft = copied("draft", num_hidden_layers=3)
    tensors = load_file(draft / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][torch.arange(101).roll(7)].contiguous()
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    pair = build(draft={"model": str(draft)})
    report = run_verify(pair, load_prompts(None)[:4], 32, (4,), cut=True)
    assert (report.identical, report.passed) == (4, True)
    assert report.acceptance < 0.05
    assert "the draft is hardly ever right (accepted" in report.warnings[0]
    text = format_report(report)
    assert "warning: the draft is hardly ever right" in text
    assert f"{report.accepted} of {report.drafted} drafted, {report.rounds} rounds" in text
    assert {"drafted", "accepted", "rounds", "tokens_per_round"} <= report.to_dict().keys()


def test_s_22_full_acceptance_of_hardly_anything_is_a_warning(tokenizer):
    class Shy(ModelDrafter):
        """Drafts a token where the sequence's length is a multiple of eight."""

        def propose(self, tokens, k, sampling):
            return super().propose(tokens, 1, sampling) if len(tokens) % 8 == 0 else Draft(())

    class Cycle(Table):
        """Each token follows from the last."""

        max_seq_len, vocab_size = 200, 101

        def reset(self):
            pass

    model = Cycle(np.roll(np.eye(101) + 1e-9, 1, axis=1))
    report = run_verify(Pair(model, model, Shy(model), tokenizer, frozenset(), "rejection", 4, 8), ["def read"], 48, (4,))
    assert (report.acceptance, report.identical) == (1.0, 1)
    assert "hardly anything is drafted" in report.warnings[0]
