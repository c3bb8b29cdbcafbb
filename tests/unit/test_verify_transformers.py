"""The dequantized checkpoint is a transformers model whose logits are ours, and its answers are compared by margin."""

import json

import numpy as np
import pytest
import torch

from specbuild.artifacts import TllmCheckpoint
from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.decoder import Decoder
from specbuild.dequantized import load_dequantized
from specbuild.pair import open_pair
from specbuild.quantize import run_quantize
from specbuild.spec.accept import RULES
from specbuild.verify import load_prompts
from specbuild.verify_transformers import format_transformers, run_against_transformers

SMALL = {"head_dim": 16, "pad_token_id": None}
KIND_CONFIGS = {
    "llama": {"attention_bias": True, "mlp_bias": True}, "mistral": {"sliding_window": 8}, "qwen2": {}, "qwen3": {"head_dim": 24},
    "gemma": SMALL, "gemma2": {**SMALL, "sliding_window": 8}, "gemma3": {**SMALL, "sliding_window": 8}, "phi3": {"pad_token_id": None},
}  # fmt: skip
PREPARED = {
    "int4_awq": {}, "int8_wo": {}, "int4_wo": {}, "full_prec": {}, "int4_awq with lm_head, tied": {"lm_head": True},
}  # fmt: skip


@pytest.fixture
def prepare(tmp_path, write_pair_yaml):
    """Return prepare(model, scheme, tp, pp, lm_head): the configuration of a quantized target."""

    def run(model, scheme="int4_awq", tp=1, pp=1, lm_head=False):
        quantize = {"scheme": scheme, "group_size": 16 if tp > 1 else 32, "lm_head": lm_head}
        config = load_config(write_pair_yaml(tmp_path, target={"model": str(model), "tp": tp, "pp": pp, "quantize": quantize}))
        run_convert(config, "target")
        run_quantize(config, "target")
        return config

    return run


def decode(config, tokens):
    """Return logits of the quantized checkpoint by our own decoder, float32."""
    decoder = Decoder(TllmCheckpoint.open(config.dir_of("target", "quantized")))
    with torch.no_grad():
        (chunk,) = decoder.embed([tokens])
        for index in range(decoder.shape.layers):
            chunk = decoder.layer(index)(chunk)
        return decoder.logits(chunk.hidden).cpu().numpy()


def assert_equal_logits(config):
    tokens = [int(token) for token in np.random.default_rng(0).integers(1, 101, 40)]
    with torch.no_grad():
        found = load_dequantized(config, "target")(torch.tensor([tokens])).logits[0].numpy()
    expected = decode(config, tokens)
    assert expected.std() > 0.3
    assert np.abs(found - expected).max() < 2e-3 * expected.std()


@pytest.mark.parametrize("kind", KIND_CONFIGS)
def test_every_family_s_checkpoint_is_given_back_under_its_own_names(prepare, make_model, kind):
    assert_equal_logits(prepare(make_model(kind, **KIND_CONFIGS[kind])))


@pytest.mark.parametrize("name", PREPARED)
def test_every_scheme_s_integers_become_weights(prepare, make_model, name):
    assert_equal_logits(prepare(make_model(tie_word_embeddings="tied" in name, vocab_size=102), name.split()[0], **PREPARED[name]))


@pytest.mark.parametrize("kind", ["llama", "gemma", "phi3"])
def test_ranks_are_joined(prepare, make_model, kind):
    assert_equal_logits(prepare(make_model(kind, **KIND_CONFIGS[kind]), tp=2, pp=2))


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_the_engine_s_answers_are_transformers_or_near_ties(tiny_pair, drafter):
    config = tiny_pair.model_copy(update={"speculation": tiny_pair.speculation.model_copy(update={"drafter": drafter})})
    report = run_against_transformers(config, open_pair(config), load_prompts(None)[:4], 24)
    assert report.mismatches == 0
    assert report.identical + report.near_ties == report.prompts == 4
    assert report.assisted_identical == 4
    assert (report.drafted > 0, report.their_drafted > 0) == (True, True)
    assert abs(report.acceptance - report.their_acceptance) < 0.15
    assert "transformers           4 prompts" in format_transformers(report)
    json.dumps(report.to_dict())


def test_a_wrong_engine_is_a_mismatch(tiny_pair, monkeypatch):
    pair = open_pair(tiny_pair)
    whole = pair.target.logits
    monkeypatch.setattr(pair.target, "logits", lambda tokens, n: np.roll(whole(tokens, n), 1, axis=1))
    report = run_against_transformers(tiny_pair, pair, load_prompts(None)[:2], 8)
    assert report.mismatches == 2
    assert not report.passed
    assert "MISMATCH: prompt 0, draft_len 0, position 0: transformers " in format_transformers(report)
    assert report.to_dict()["divergences"][0]["kind"] == "mismatch"


def test_the_command_runs_every_comparison_and_exits_by_all_of_them(cli, tmp_path, tiny_pair, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"def read_file"\n"class Reader"\n')
    arguments = ("verify", tiny_pair.path, "--prompts", prompts, "--max-tokens", 16, "--sampling", "--draws", 200, "--all-lengths")
    code, out, _ = cli(*arguments, "--against", "transformers", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["draft_lens"] == list(range(1, 9))
    assert (report["passed"], report["sampling"]["passed"], report["transformers"]["passed"]) == (True, True, True)
    assert len(report["position_rates"]) == 4
    monkeypatch.setitem(RULES, "rejection", lambda target, tokens, *_: (len(tokens), int(target[-1].argmax())))
    code, out, _ = cli(*arguments)
    assert code == 1
    assert "mismatches             0" in out
    assert "sampling               DIFFERENT" in out
    assert "DIFFERENT: prompt 0" in out
