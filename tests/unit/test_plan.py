"""The planner against published and recomputed figures (shared/reference/oracles.md), and what hit people who planned nothing.

Names of tests that begin with s17, s18 and s20 are rows of the field reports.
"""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from specbuild.artifacts import TllmCheckpoint
from specbuild.check import load_shape
from specbuild.compilers import Limits
from specbuild.config import ModelConfig, QuantizeConfig, load_config
from specbuild.errors import ConfigError, EngineError
from specbuild.families import FAMILIES
from specbuild.plan import run_plan
from specbuild.planning.formula import (
    alpha_from_tau,
    conditional_rates,
    expected_tokens,
    find_best,
    make_table,
    operations_factor,
    speedup,
    tokens_from_speedup,
)
from specbuild.planning.hardware import GPUS
from specbuild.planning.measured import Measured, load_measured
from specbuild.planning.memory import HEADROOM, Part, cached_positions, model_memory, plan_memory, weight_bytes
from specbuild.planning.speed import pass_cost, verify_cost
from specbuild.spec.stats import SpecStats

GOLDEN = Path(__file__).parents[1] / "golden"
LENGTHS = (1, 2, 3, 4, 5, 7, 10)


def gain(alpha, length, cost):
    return speedup(expected_tokens((alpha,), length), length, cost)


# oracles.md 1.2: Leviathan, table 1
@pytest.mark.parametrize(
    ("alpha", "length", "operations", "speed"),
    [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71), (0.9, 10, 1.60, 6.86)],
)
def test_leviathan_table_1(alpha, length, operations, speed):
    assert round(operations_factor(alpha, length), 2) == operations
    assert round(gain(alpha, length, 0), 2) == speed


# oracles.md 1.3: T5-XXL; EXP of the paper to 0.1, the formula on its rounded alpha to 3 digits
@pytest.mark.parametrize(
    ("length", "alpha", "cost", "expected", "formula"),
    [
        (7, 0.75, 0.02, 3.2, 3.157), (7, 0.80, 0.04, 3.3, 3.251), (7, 0.82, 0.11, 2.5, 2.497), (7, 0.62, 0.02, 2.3, 2.258),
        (5, 0.68, 0.04, 2.4, 2.347), (3, 0.71, 0.11, 2.0, 1.934), (5, 0.65, 0.02, 2.4, 2.402), (5, 0.73, 0.04, 2.6, 2.619),
        (3, 0.74, 0.11, 2.0, 2.025), (5, 0.53, 0.02, 1.9, 1.891), (3, 0.55, 0.04, 1.8, 1.803), (3, 0.56, 0.11, 1.6, 1.541),
    ],
)  # fmt: skip
def test_leviathan_expected_speedups(length, alpha, cost, expected, formula):
    assert abs(gain(alpha, length, cost) - expected) <= 0.1
    assert round(gain(alpha, length, cost), 3) == formula


def test_a_small_draft_wins_over_a_more_accurate_large_one():
    small, base, large = (find_best(make_table((alpha,), cost)) for alpha, cost in ((0.75, 0.02), (0.80, 0.04), (0.82, 0.11)))
    assert max(small.speedup, base.speedup) > large.speedup


# oracles.md 1.4: grids of 4 digits, over LENGTHS
TAU = {
    0.3: (1.3, 1.39, 1.417, 1.4251, 1.4275, 1.4285, 1.4286), 0.5: (1.5, 1.75, 1.875, 1.9375, 1.9688, 1.9922, 1.999),
    0.6: (1.6, 1.96, 2.176, 2.3056, 2.3834, 2.458, 2.4909), 0.7: (1.7, 2.19, 2.533, 2.7731, 2.9412, 3.1412, 3.2674),
    0.8: (1.8, 2.44, 2.952, 3.3616, 3.6893, 4.1611, 4.5705), 0.9: (1.9, 2.71, 3.439, 4.0951, 4.6856, 5.6953, 6.8619),
    1.0: (2, 3, 4, 5, 6, 8, 11),
}  # fmt: skip
SPEEDUPS = {
    0.05: {
        0.5: (1.4286, 1.5909, 1.6304, 1.6146, 1.575, 1.4757, 1.3327), 0.6: (1.5238, 1.7818, 1.8922, 1.9213, 1.9067, 1.8207, 1.6606),
        0.7: (1.619, 1.9909, 2.2026, 2.3109, 2.3529, 2.3268, 2.1783), 0.8: (1.7143, 2.2182, 2.567, 2.8013, 2.9514, 3.0823, 3.047),
        0.9: (1.8095, 2.4636, 2.9904, 3.4126, 3.7485, 4.2188, 4.5746),
    },
    0.2: {
        0.5: (1.25, 1.25, 1.1719, 1.0764, 0.9844, 0.8301, 0.6663), 0.6: (1.3333, 1.4, 1.36, 1.2809, 1.1917, 1.0242, 0.8303),
        0.7: (1.4167, 1.5643, 1.5831, 1.5406, 1.4706, 1.3088, 1.0891), 0.8: (1.5, 1.7429, 1.845, 1.8676, 1.8446, 1.7338, 1.5235),
        0.9: (1.5833, 1.9357, 2.1494, 2.2751, 2.3428, 2.3731, 2.2873),
    },
}  # fmt: skip
BEST = {
    0.01: ((5, 1.8750), (7, 2.2972), (9, 2.9717), (14, 4.2316), (24, 7.4856), (32, 12.3632)),
    0.02: ((4, 1.7940), (6, 2.1697), (8, 2.7576), (11, 3.8167), (19, 6.3654), (31, 9.9542)),
    0.05: ((3, 1.6304), (4, 1.9213), (6, 2.3529), (8, 3.0921), (13, 4.6741), (21, 6.5997)),
    0.10: ((2, 1.4583), (3, 1.6738), (4, 1.9808), (6, 2.4696), (10, 3.4309), (15, 4.4790)),
    0.20: ((1, 1.2500), (2, 1.4000), (3, 1.5831), (4, 1.8676), (7, 2.3731), (10, 2.8747)),
}
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@pytest.mark.parametrize(
    ("alpha", "length", "tokens"), [(a, k, tau) for a, row in TAU.items() for k, tau in zip(LENGTHS, row, strict=True)]
)
def test_tokens_per_round(alpha, length, tokens):
    assert expected_tokens((alpha,), length) == pytest.approx(tokens, abs=5.001e-5)


@pytest.mark.parametrize(
    ("cost", "alpha", "length", "expected"),
    [(c, a, k, s) for c, grid in SPEEDUPS.items() for a, row in grid.items() for k, s in zip(LENGTHS, row, strict=True)],
)
def test_speedups(cost, alpha, length, expected):
    assert gain(alpha, length, cost) == pytest.approx(expected, abs=5.001e-5)


@pytest.mark.parametrize(("cost", "alpha", "best"), [(c, a, best) for c, row in BEST.items() for a, best in zip(ALPHAS, row, strict=True)])
def test_best_draft_length_with_its_tie_and_its_cap(cli, cost, alpha, best):
    code, out, _ = cli("plan", "--alpha", alpha, "--cost-ratio", cost, "--json")
    answer = json.loads(out)
    assert (code, answer["best_draft_len"]) == (0, best[0])
    assert answer["speedup"] == pytest.approx(best[1], abs=5.001e-5)
    assert [row["draft_len"] for row in answer["table"]] == list(range(33))
    assert set(answer["table"][0]) == {"draft_len", "tokens_per_round", "speedup"}


# oracles.md 1.5: Chen et al., K = 4, a draft step of 1.8 ms beside 14.1 ms
@pytest.mark.parametrize(("measured", "tokens", "alpha"), [(14.1 / 7.52, 2.83, 0.71), (2.01, 3.04, 0.75), (2.46, 3.72, 0.85)])
def test_chen_inverted(measured, tokens, alpha):
    cost = round(1.8 / 14.1, 3)
    assert cost == 0.128
    found = tokens_from_speedup(measured, 4, cost)
    assert round(found, 2) == tokens
    assert round(alpha_from_tau(found, 4), 2) == alpha


@given(st.floats(0.001, 1), st.integers(1, 32))
def test_alpha_from_tau_inverts_expected_tokens(alpha, length):
    tokens = expected_tokens((alpha,), length)
    assert expected_tokens((alpha_from_tau(tokens, length),), length) == pytest.approx(tokens, abs=1e-6)


@pytest.mark.parametrize(("tokens", "length"), [(0.9, 4), (5.1, 4), (1.5, 0), (float("nan"), 4)])
def test_tokens_that_no_alpha_gives_are_refused(tokens, length):
    with pytest.raises(ConfigError, match=r"expected 1 to k \+ 1"):
        alpha_from_tau(tokens, length)


@given(st.floats(0.01, 0.99), st.floats(0.001, 2))
def test_there_is_a_gain_exactly_where_alpha_is_above_c(alpha, cost):
    best = find_best(make_table((alpha,), cost))
    if alpha > cost * (1 + 1e-6):
        assert best.speedup >= (1 + alpha) / (1 + cost) * (1 - 1e-9)
    elif alpha < cost * (1 - 1e-6):
        assert (best.draft_len, best.speedup) == (0, 1.0)


# oracles.md 1.7: bookkeeping; vLLM PR #26498, a vLLM log, llama.cpp's and Hugging Face's documentation
def histogram(rounds, drafted, accepted_rounds):
    """A histogram in which `accepted_rounds[i]` rounds accepted draft position i."""
    counts = [*accepted_rounds, 0]
    exact = [rounds - counts[0], *(counts[i] - counts[i + 1] for i in range(len(accepted_rounds)))]
    return SpecStats(Counter({(drafted, accepted): n for accepted, n in enumerate(exact)}))


POSITIONS = (0.74, 0.54, 0.41, 0.30, 0.22, 0.16, 0.12, 0.08, 0.05, 0.02)


def test_vllm_log_of_ten_drafted_tokens():
    assert (46870 / 4687, round(1 + 12368 / 4687, 2), round(1 + 48266 / 20468, 2)) == (10, 3.64, 3.36)
    assert round(sum(POSITIONS), 2) == round(12368 / 4687, 2) == 2.64
    stats = histogram(4687, 10, [round(rate * 4687) for rate in POSITIONS])
    assert (stats.rounds, stats.drafted) == (4687, 46870)
    assert stats.acceptance_length == pytest.approx(3.64, abs=0.005)
    assert [round(rate, 2) for rate in stats.position_rates] == list(POSITIONS)
    assert expected_tokens(conditional_rates(stats.position_rates), 10) == pytest.approx(stats.acceptance_length)


def test_vllm_log_of_two_drafted_tokens():
    stats = histogram(96, 2, [85, 71])
    assert (stats.drafted, stats.accepted) == (192, 156)
    assert (100 * stats.acceptance_rate, stats.acceptance_length) == (81.25, 2.625)
    assert [round(rate, 3) for rate in stats.position_rates] == [0.885, 0.740]
    assert expected_tokens(conditional_rates(stats.position_rates), 2) == pytest.approx(2.625)


@pytest.mark.parametrize(("accepted", "drafted", "rate"), [(171, 297, 0.57576), (90, 128, 0.70312)])
def test_llama_cpp_rates(accepted, drafted, rate):
    stats = SpecStats(Counter({(1, 1): accepted, (1, 0): drafted - accepted}))
    assert stats.acceptance_rate == pytest.approx(rate, abs=5.001e-6)


@pytest.mark.parametrize(("target", "draft", "length"), [(38, 192, 5), (27, 129, None)])
def test_hugging_face_passes(target, draft, length):
    """One text of MBPP: fixed drafts of 5 cannot take more passes than rounds allow, and the ideal takes fewer of both."""
    assert draft <= target * (length or 5) + 2
    assert length is not None or (target < 38 and draft < 192)


# The field reports
def test_s17_a_draft_of_two_fifths_with_a_growing_pass_is_not_worth_it():
    table = make_table((0.5,), 0.4, lambda tokens: 1 + 0.15 * (tokens - 1), 8)
    assert find_best(table).draft_len == 0
    assert all(row.speedup < 1 for row in table[1:])


@pytest.fixture
def pair(tmp_path):
    """Return pair(target, draft, **changes): the path of a YAML of two public shapes."""

    def write(target="Llama-3.1-8B", draft="Llama-3.2-1B", schemes=("int4_awq", "int8_wo"), tp=1, **changes):
        section = {
            role: {
                "model": str(GOLDEN / "shapes" / name),
                "dtype": "bfloat16",
                "tp": tp if role == "target" else 1,
                "quantize": {"scheme": scheme},
            }
            for role, name, scheme in zip(("target", "draft"), (target, draft), schemes, strict=True)
        }
        build = {"compiler": "tensorrt", "max_batch_size": 8, "max_seq_len": 1024, **changes}
        path = tmp_path / "pair.yaml"
        path.write_text(yaml.safe_dump({"name": "pair", **section, "build": build}))
        return path

    return write


def test_s17_a_draft_as_large_as_the_target_is_said_not_to_pay_before_anything_is_built(cli, pair):
    code, out, _ = cli("plan", pair(draft="Llama-3.1-8B"), "--gpu", "h100", "--batch", "1", "--alpha", 0.9)
    assert code == 0
    assert "batch 1: speculation does not pay, plain decoding is faster (draft length 0)" in out
    assert "note: speculation does not pay at batch 1: plain decoding is faster" in out


def test_s18_the_draft_length_falls_with_the_batch_to_nothing(cli, pair):
    path = pair(max_batch_size=256, max_seq_len=256)
    command = ("plan", path, "--gpu", "h100", "--batch", "1,32,256", "--alpha", 0.5)
    code, out, _ = cli(*command, "--json")
    assert code == 0
    lengths = [each["best_draft_len"] for each in json.loads(out)["batches"]]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0] > 0, lengths[-1]) == (True, 0)
    _, text, _ = cli(*command)
    assert "S, batch 1" in text
    assert "S, batch 256" in text
    assert "speculation does not pay at batch 256" in text


@pytest.mark.parametrize("growth", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_s18_the_best_length_falls_as_wide_passes_cost_more(growth):
    lengths = [find_best(make_table((0.7,), 0.1, lambda n, g=g: 1 + g * (n - 1), 8)).draft_len for g in (growth, growth + 0.3)]
    assert lengths[0] >= lengths[1]


def test_s20_both_models_on_one_80_gb_gpu_at_default_settings(pair):
    path = pair()
    values = yaml.safe_load(path.read_text())
    del values["build"]
    path.write_text(yaml.safe_dump(values))
    plan = run_plan(load_config(path), GPUS["h100"])
    target, draft = plan.memory.models["target"], plan.memory.models["draft"]
    assert 0 < target.fraction + draft.fraction < 1
    assert plan.memory.needed < plan.memory.usable < 80e9
    assert draft.cache < target.cache / 3  # by its own shape
    # Each fraction, taken of what is free when that model loads, holds the cache that the limits need, and both fit together.
    free = 80e9 - (target.total - target.cache)
    assert target.cache <= target.fraction * free <= target.cache + 0.001 * free
    free = free * (1 - target.fraction) - (draft.total - draft.cache)
    assert draft.cache <= draft.fraction * free < free


def test_s20_what_does_not_fit_is_refused_with_every_single_way_out(cli, pair):
    path = pair("Llama-3.1-70B", schemes=("full_prec", "full_prec"), max_seq_len=8192, max_batch_size=64)
    code, out, err = cli("plan", path, "--gpu", "h100")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("Error: Cannot fit this pair on NVIDIA H100 SXM 80 GB: it needs ")
    assert "tp 8 for the target" in err


@pytest.mark.parametrize("cure", ["max_batch_size", "max_seq_len", "int8_wo", "tp 2", "--gpu h200"])
def test_s20_each_way_out_that_is_named_is_enough(cli, pair, cure):
    settings = {"schemes": ("full_prec", "int8_wo"), "max_seq_len": 8192, "max_batch_size": 45}
    code, _, err = cli("plan", pair(**settings), "--gpu", "h100")
    assert code == 1
    assert cure in err
    words = err.split()
    gpu = "h100"
    if cure.startswith("max_"):
        settings[cure] = int(words[words.index(cure) + 1].rstrip(",."))
    elif cure == "int8_wo":
        settings["schemes"] = ("int8_wo", "int8_wo")
    elif cure == "tp 2":
        settings["tp"] = 2
    else:
        gpu = "h200"
    assert cli("plan", pair(**settings), "--gpu", gpu)[0] == 0


# Memory
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(("scheme", "stage"), [("full_prec", "checkpoint"), ("int4_awq", "quantized")])
def test_planned_weights_are_those_of_a_checkpoint(tiny_pair, role, scheme, stage):
    if (role, stage) == ("draft", "quantized"):
        pytest.skip("int8_wo keeps plain weights in the checkpoint; the engine's integers are half of them")
    model = tiny_pair.model_of(role)
    model = model.model_copy(update={"quantize": model.quantize.model_copy(update={"scheme": scheme})})
    checkpoint = TllmCheckpoint.open(tiny_pair.dir_of(role, stage))
    stored = sum(entry.nbytes for entry in checkpoint.entries().values())
    planned = weight_bytes(Part(role, checkpoint.shape, model, Limits(1, 64, 0, "")))
    assert stored - planned == checkpoint.shape.hidden * 2  # the final norm


def part(name="Llama-3.1-8B", scheme="full_prec", limits=None, **model):
    values = json.loads((GOLDEN / "shapes" / name / "config.json").read_text())
    shape = FAMILIES[values["architectures"][0]].read_shape(values)
    return Part("target", shape, ModelConfig(model=name, quantize=QuantizeConfig(scheme=scheme), **model), limits or Limits(8, 1024, 8, ""))


def test_weights_of_a_known_model():
    assert weight_bytes(part()) == pytest.approx(8.03e9 * 2, rel=0.001)
    whole, eighth = part("Llama-3.1-70B", tp=1), part("Llama-3.1-70B", tp=8)
    assert weight_bytes(whole) == pytest.approx(70.55e9 * 2, rel=0.001)
    replicated = whole.shape.vocab * whole.shape.hidden * 2  # the embedding is on every rank
    assert weight_bytes(eighth) == pytest.approx((weight_bytes(whole) - replicated) / 8 + replicated, rel=0.001)
    halves = [weight_bytes(part("Llama-3.1-70B", pp=pp)) for pp in (1, 2)]
    assert 0.5 <= halves[1] / halves[0] < 0.51


def test_lm_head_is_smaller_only_where_it_is_quantized():
    plain = part(scheme="int4_awq")
    settings = plain.model.quantize.model_copy(update={"lm_head": True})
    with_head = replace(plain, model=plain.model.model_copy(update={"quantize": settings}))
    assert weight_bytes(plain) - weight_bytes(with_head) == pytest.approx(128256 * 4096 * (2 - 0.5 - 4 / 128), rel=0.01)


def test_the_cache_holds_drafted_tokens_too_and_a_rank_s_own_heads():
    memory = model_memory(part(limits=Limits(8, 1024, 8, "")))
    assert memory.cache == 8 * 1088 * 32 * 2 * 8 * 128 * 2  # 1024 + 8 in blocks of 64
    assert memory.cache_tokens == 8 * 1088
    assert model_memory(part(limits=Limits(8, 1024, 0, ""))).cache == 8 * 1024 * 32 * 2 * 8 * 128 * 2
    assert model_memory(part(tp=4)).cache * 4 == memory.cache
    assert model_memory(part(tp=16)).cache * 8 == memory.cache  # heads are repeated


def test_windowed_layers_hold_their_window():
    shape = replace(part().shape, layers=6, window=512, full_every=3)
    assert cached_positions(shape, 4096) == 4 * 512 + 2 * 4096
    assert cached_positions(shape, 256) == 6 * 256
    assert cached_positions(shape, 4096, pp=2) == 2 * 512 + 4096


@given(st.integers(1, 64), st.integers(2, 8192))
def test_what_fits_is_within_the_gpu_and_concurrency_is_at_least_the_batch(batch, length):
    limits = Limits(batch, length, 8, "")
    plan = plan_memory([part(scheme="int4_awq", limits=limits), replace(part("Llama-3.2-1B", limits=limits), role="draft")], GPUS["h100"])
    assert plan.left == pytest.approx(80e9 - plan.needed)
    if plan.fits:
        assert plan.needed <= 80e9 * (1 - HEADROOM)
        assert plan.max_concurrency >= batch
        assert all(0 <= model.fraction < 1 for model in plan.models.values())


@pytest.mark.parametrize("scheme", ["int4_awq", "int4_wo", "int8_wo"])
def test_integers_on_b200_are_refused_by_the_compiler_s_own_rule(pair, scheme):
    with pytest.raises(EngineError, match=f"Cannot build {scheme} for NVIDIA B200 180 GB .SM 100.: TensorRT-LLM refuses"):
        run_plan(load_config(pair(schemes=(scheme, "full_prec"))), GPUS["b200"])
    assert run_plan(load_config(pair(schemes=("full_prec", "full_prec"))), GPUS["b200"]).memory.fits


def test_a_cpu_has_no_fractions_and_says_that_its_speed_is_assumed(cli):
    code, out, _ = cli("plan", Path(__file__).parents[2] / "configs" / "demo.yaml", "--gpu", "cpu", "--json")
    plan = json.loads(out)
    assert code == 0
    assert [model["fraction"] for model in plan["memory"]["models"].values()] == [None, None]
    assert any("assumptions" in note for note in plan["notes"])


# Speed
def test_a_pass_is_bound_by_memory_then_by_arithmetic():
    cost = pass_cost(part(scheme="int4_awq"), GPUS["h100"])
    v = verify_cost(cost, 1)
    assert [v(1), v(2)] == [1, pytest.approx(1, abs=0.01)]
    costs = [verify_cost(cost, 64)(tokens) for tokens in range(1, 17)]
    assert costs == sorted(costs)
    assert costs[15] > 4
    assert pass_cost(part(), GPUS["h100"]).seconds(1) > cost.seconds(1)
    assert pass_cost(part(), GPUS["h200"]).seconds(1) < pass_cost(part(), GPUS["h100"]).seconds(1)


def test_weight_only_kernels_compute_in_16_bits_and_smoothquant_in_8():
    peaks = {name: pass_cost(part(scheme=name), GPUS["a100-80"]).peak for name in ("full_prec", "int4_awq", "int8_wo", "int8_sq")}
    assert peaks == {"full_prec": 312e12, "int4_awq": 312e12, "int8_wo": 312e12, "int8_sq": 624e12}


def test_ngram_drafts_for_nothing_and_takes_no_memory(pair):
    path = pair()
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "speculation": {"drafter": "ngram"}}))
    plan = run_plan(load_config(path), GPUS["h100"], (1,))
    assert list(plan.memory.models) == ["target"]
    assert plan.batches[0].cost_ratio == 0
    assert plan.batches[0].best.draft_len == 8


# Measurements
def write(path, values):
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("values", "acceptance"),
    [
        ({"acceptance": 0.6}, (0.6,)),
        ({"acceptance_by_position": [0.8, 0.7], "acceptance": 0.1}, (0.8, 0.7)),
        ({"position_rates": [0.8, 0.4, 0.0, 0.0]}, (0.8, 0.5, 0.0, 0.0)),
        ({"acceptance": 0.6, "acceptance_by_draft_len": {"1": 0.8, "2": 0.6}, "acceptance_by_position": [0.8, 0.4]}, (0.8, 0.5)),
    ],
)
def test_reports_give_acceptance_by_position(tmp_path, values, acceptance):
    assert load_measured(write(tmp_path / "report.json", values)).acceptance == pytest.approx(acceptance)


def test_verify_s_rates_by_draft_length_are_met_again(tmp_path):
    rates = {1: 0.828, 2: 0.749, 4: 0.637, 8: 0.445}
    found = load_measured(write(tmp_path / "report.json", {"acceptance": 0.6369, "acceptance_by_draft_len": rates})).acceptance
    assert len(found) == 8
    assert {k: round((expected_tokens(found, k) - 1) / k, 3) for k in rates} == rates


def test_measured_c_and_v_stand_in_place_of_the_roofline_at_their_batch(tmp_path, pair):
    known = load_measured(write(tmp_path / "r.json", {"acceptance": 0.7, "c": 0.4, "v": {"1": 2.0, "2": 2.4, "4": 4.0}}))
    assert [known.verify_cost(n) for n in (1, 2, 3, 4, 6)] == pytest.approx([1, 1.2, 1.6, 2, 2.8])
    first, other = run_plan(load_config(pair()), GPUS["h100"], (1, 4), known).batches
    assert first.cost_ratio == 0.4
    assert first.table[1].speedup == pytest.approx(1.7 / (0.4 + 1.2))
    assert other.cost_ratio != 0.4
    look_up = load_measured(write(tmp_path / "r.json", {"acceptance": 0.7, "c": 0, "v": None, "batch": 1}))
    assert (look_up.cost_ratio, look_up.verify_costs) == (0, ())


def test_what_verify_writes_is_taken(tmp_path, cli, pair, tiny_pair):
    """Today's keys of the report itself, whatever else it holds."""
    from specbuild.pair import open_pair
    from specbuild.verify import run_verify

    report = run_verify(open_pair(tiny_pair), ["def read"], 8, (1, 2)).to_dict()
    path = write(tmp_path / "verify.json", report)
    code, _, err = cli("plan", pair(), "--gpu", "h100", "--measured", path)
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    "values",
    ["", "[]", "{}", {"acceptance": 2}, {"acceptance": "0.5"}, {"acceptance": None}, {"acceptance": True}, {"acceptance_by_position": []},
     {"acceptance_by_position": 0.5}, {"acceptance_by_position": "0.5"}, {"acceptance_by_position": [float("nan")]},
     {"acceptance_by_draft_len": {}}, {"acceptance_by_draft_len": [1]}, {"acceptance_by_draft_len": {"a": 0.5}},
     {"acceptance": 0.5, "c": -1},
     {"acceptance": 0.5, "v": {"2": 1.5}}, {"acceptance": 0.5, "v": [1, 2]}, {"acceptance": 0.5, "v": {"1": -1}},
     {"acceptance": 0.5, "batch": 0}],
)  # fmt: skip
def test_anything_else_is_one_line(tmp_path, cli, pair, values):
    code, out, err = cli("plan", pair(), "--gpu", "h100", "--measured", write(tmp_path / "report.json", values))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("Error: Cannot ")


def test_a_report_that_is_not_there_is_one_line(tmp_path, cli, pair):
    code, _, err = cli("plan", pair(), "--gpu", "h100", "--measured", tmp_path / "none.json")
    assert (code, err.count("\n")) == (1, 1)


# The command line
@pytest.mark.parametrize(
    "arguments",
    [("--alpha", "1.5", "--cost-ratio", ".1"), ("--alpha", "-0.1", "--cost-ratio", ".1"), ("--alpha", "nan", "--cost-ratio", ".1"),
     ("--alpha", ".5", "--cost-ratio", "0"), ("--alpha", ".5", "--cost-ratio", "-1"), ("--alpha", ".5", "--cost-ratio", "inf"),
     ("--alpha", ".5", "--cost-ratio", "nan"), ("--alpha", ".5", "--cost-ratio", ".1", "--max-draft-len", "-1"),
     ("--alpha", ".5", "--cost-ratio", ".1", "--max-draft-len", "9999999")],
)  # fmt: skip
def test_bad_values_are_one_line(cli, arguments):
    code, out, err = cli("plan", *arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize(
    "arguments",
    [(), ("--alpha", ".5"), ("--cost-ratio", ".5"), ("pair.yaml",), ("pair.yaml", "--gpu", "none"),
     ("pair.yaml", "--gpu", "h100", "--cost-ratio", ".1"), ("pair.yaml", "--gpu", "h100", "--max-draft-len", "4"),
     ("pair.yaml", "--gpu", "h100", "--alpha", ".5", "--measured", "x"), ("pair.yaml", "--gpu", "h100", "--batch", "0"),
     ("pair.yaml", "--gpu", "h100", "--batch", "1,,2"), ("pair.yaml", "--gpu", "h100", "--batch", "x"),
     ("--alpha", "x", "--cost-ratio", "1"),
     ("--alpha", ".5", "--cost-ratio", ".1", "--gpu", "h100")],
)  # fmt: skip
def test_usage_mistakes_exit_with_2(cli, arguments):
    assert cli("plan", *arguments)[0] == 2


def test_the_table_is_marked_and_bounded(cli):
    code, out, _ = cli("plan", "--alpha", 0.5, "--cost-ratio", 0.2, "--max-draft-len", 2)
    assert code == 0
    assert out.splitlines()[2].split() == ["1", "1.5000", "1.2500", "best"]  # the shorter of two equal ones
    assert len(out.splitlines()) == 5


def test_alpha_one_and_nothing(cli):
    assert json.loads(cli("plan", "--alpha", 1, "--cost-ratio", 0.1, "--json")[1])["best_draft_len"] == 32
    assert json.loads(cli("plan", "--alpha", 0, "--cost-ratio", 0.1, "--json")[1])["best_draft_len"] == 0


def test_a_picture_with_and_without_a_pair(cli, tmp_path, pair):
    for number, arguments in enumerate([("--alpha", 0.7, "--cost-ratio", 0.1), (pair(), "--gpu", "h100")]):
        path = tmp_path / f"{number}.png"
        assert cli("plan", *arguments, "--plot", path)[0] == 0
        assert path.read_bytes().startswith(b"\x89PNG")
    assert cli("plan", "--alpha", 0.7, "--cost-ratio", 0.1, "--plot", tmp_path / "none" / "x.png")[0] == 1


def test_a_picture_without_matplotlib_is_one_line(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("specbuild.planning.picture.find_spec", lambda name: None)
    code, _, err = cli("plan", "--alpha", 0.7, "--cost-ratio", 0.1, "--plot", tmp_path / "x.png")
    assert (code, err.count("\n")) == (1, 1)
    assert "matplotlib" in err


def test_planning_imports_no_torch(pair):
    code = (
        "import sys\nfrom specbuild.cli import cli\n"
        f"cli.main(['plan', {str(pair())!r}, '--gpu', 'h100', '--json'], standalone_mode=False)\n"
        "print([m for m in ('torch', 'transformers', 'onnxruntime', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_published_table_is_made_of_the_planner_s_own_constants():
    script = Path(__file__).parents[2] / "scripts" / "plan_published.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.count("\n| ") >= 15
    assert "median relative error" in done.stdout


def test_shapes_are_read_by_their_family(pair):
    assert load_shape(load_config(pair()), "target")[2] == part().shape
    assert Measured((0.5,)).batch == 1
