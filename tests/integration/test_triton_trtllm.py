"""The loop over a mock of TensorRT-LLM's backend: what it makes of that backend's answers, limits, errors, and random numbers.

First against the mock in this process, which is fast enough for statistics; then on a real tritonserver. The tests of
test_triton_fake.py run against the mock too.
"""

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pytest
from fake_runner import FakeRunner
from fake_serving import CONTEXT, END, MAX_DRAFT, Kind, make_direct, make_settings, run_pair
from fake_trtllm_model import Backend, RefusedError, Settings

from specbuild.errors import ServingError
from specbuild.spec.accept import ModelVerifier
from specbuild.spec.drafters import ModelDrafter
from specbuild.spec.fit import fit_distribution
from specbuild.spec.loop import speculate
from specbuild.spec.sampling import Sampling, probs
from specbuild.tokenizer import encode_prompt
from specbuild.triton.bls import make_models
from specbuild.triton.client import stream_generate

ANSWERS = {"input left out": {}, "input included": {"ignores_exclude": True}}


class Cached(FakeRunner):
    """FakeRunner that remembers its rows."""

    def __init__(self, **options):
        super().__init__(**options)
        self._row = lru_cache(None)(lambda last: FakeRunner._row(self, last))

    def logits(self, tokens, n):
        return np.stack([self._row(tuple(tokens[max(0, i - 1) : i + 1])) for i in range(len(tokens) - n, len(tokens))])


def run_loop(models, prompt, sampling, **options):
    return list(speculate(*models, prompt, sampling=sampling, **{"context": CONTEXT, "draft_context": CONTEXT, **options}))


def ids_of(steps):
    return tuple(token for step in steps for token in step.tokens)


# The mock itself: it has to be as strict as the backend, or the loop's tests say nothing.

TOKENS = {"input_ids": np.array([5, 6, 7], np.int32), "input_lengths": 3, "request_output_len": 3}
DRAFT = {"draft_input_ids": np.array([8, 9], np.int32)}


def ask_mock(settings=None, **values):
    warnings = []
    settings = settings or Settings(max_seq_len=20, max_input_len=6, max_draft_len=4)
    answer = Backend(FakeRunner(), settings, {}, warnings.append).run({**TOKENS, **values})
    return answer, warnings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"draft_input_ids": np.array([], np.int32)}, "!mTokens.empty()"),
        ({"draft_logits": np.zeros((2, 300), np.float32)}, "Draft tokens must be specified when draft logits are given."),
        ({"draft_input_ids": np.arange(5, dtype=np.int32)}, r"Draft tokens length \(5\) exceeds maximum draft tokens length \(4\)."),
        ({**DRAFT, "beam_width": 2}, "Can't use speculative decoding with beam search."),
        ({**DRAFT, "draft_acceptance_threshold": 0.0}, "acceptanceThreshold > 0"),
        ({**DRAFT, "draft_logits": np.zeros((1, 300), np.float32)}, "1 rows of draft logits, 2 tokens"),
        ({**DRAFT, "draft_logits": np.zeros((2, 299), np.float32)}, "Incompatible buffer sizes"),
        ({"input_ids": np.arange(7), "input_lengths": 7}, r"Prompt length \(7\) exceeds maximum input length \(6\)"),
        ({"temperature": 0.0}, "temperature > 0"),
    ],
)
def test_the_mock_refuses_what_the_backend_refuses(values, message):
    with pytest.raises(RefusedError, match=message):
        ask_mock(**values)


def test_the_mock_cuts_a_draft_at_its_input_limit_or_refuses_it():
    greedy = ask_mock(Settings(20, 19), request_output_len=4)[0]["output_ids"][0, 3:7]
    long = {"draft_input_ids": greedy, "request_output_len": 5, "exclude_input_in_output": True}
    answer, warnings = ask_mock(**long)
    assert answer["sequence_length"] == [4]  # three drafted ones and its own, which is the fourth drafted one
    assert "Number of draft tokens has been reduced to 3." in warnings[0]
    with pytest.raises(RefusedError, match="exceeds maximum input length"):
        ask_mock(Settings(20, 6, 4, throws=True), **long)


@pytest.mark.parametrize(("values", "length"), [({}, 2), (DRAFT, 1)])  # room for 4 drafted tokens is reserved; or for the 2 that there are
def test_the_mock_reserves_room_for_the_draft(values, length):
    settings = Settings(9 if not values else 6, 6, 4)
    answer, warnings = ask_mock(settings, exclude_input_in_output=True, **values)
    assert (answer["sequence_length"], len(warnings)) == ([length], 1)


@pytest.mark.parametrize(("included", "asked", "expected"), [(True, None, 6), (True, True, 3), (False, False, 6), (False, None, 3)])
def test_the_mock_includes_the_input_by_parameter_unless_the_request_says(included, asked, expected):
    values = {} if asked is None else {"exclude_input_in_output": asked}
    answer, _ = ask_mock(Settings(20, 6, 4, exclude_input=not included), **values)
    assert answer["sequence_length"] == [expected]
    assert (answer["output_ids"][0, expected:] == -1).all()


# Greedy decoding over the mock: the ids, counts and reasons of the loop over the models themselves.


def find_end(step):
    """How a round ended."""
    if step.finish_reason != "stop":
        return step.finish_reason
    if step.accepted == len(step.tokens):
        return "end was drafted"
    return "end behind the draft" if step.accepted == step.drafted else "end instead of a drafted token"


@pytest.mark.parametrize("mock", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_s11_greedy_is_the_same_over_the_mock_wherever_the_end_falls(mock, rule):
    target, draft = Cached(), Cached(twist=1.0)
    here = (ModelDrafter(draft), ModelVerifier(target, rule))
    kind, seen, warnings = Kind("tensorrt", rule, mock=mock), Counter(), []
    triton = make_direct(kind, warnings, {"target": target, "draft": draft})
    there = make_models(triton, make_settings(kind), "")
    numbers = random.Random(1)
    for case in range(150):
        prompt = [numbers.randrange(3, 300) for _ in range(1 + case % 12)]
        options = {"sampling": Sampling(end_ids=frozenset({END})), "max_tokens": numbers.choice((1, 2, 9, 40)), "draft_len": case % 9}
        steps = run_loop(there, prompt, **options)
        assert steps == run_loop(here, prompt, **options)
        seen[find_end(steps[-1])] += 1
    assert set(seen) == {"length", "end was drafted", "end behind the draft", "end instead of a drafted token"}
    assert warnings == []
    assert all(values["draft_input_ids"].size for _, values in triton.calls if "draft_input_ids" in values)
    asked = [values for role, values in triton.calls if role == "target"]
    assert all(values["request_output_len"] == values.get("draft_input_ids", np.zeros(0)).size + 1 for values in asked)


@pytest.mark.parametrize("mock", [{}, {"throws": True}], ids=["cuts drafts", "refuses drafts"])
@pytest.mark.parametrize("draft_len", [0, 1, MAX_DRAFT])
def test_s12_nothing_is_cut_near_the_limits_and_every_position_is_used(mock, draft_len):
    """The mock's limits are as tight as they may be: see Kind.settings."""
    target, draft = Cached(), Cached(twist=1.0)
    kind, warnings = Kind("tensorrt", mock=mock), []
    there = make_models(make_direct(kind, warnings, {"target": target, "draft": draft}), make_settings(kind), "")
    for length in range(CONTEXT - 2 * MAX_DRAFT, CONTEXT):
        prompt = [3 + i * i % 290 for i in range(length)]
        options = {"sampling": Sampling(), "max_tokens": 100, "draft_len": draft_len}
        steps = run_loop(there, prompt, **options)
        assert steps == run_loop((ModelDrafter(draft), ModelVerifier(target, "exact")), prompt, **options)
        assert (length + len(ids_of(steps)), steps[-1].finish_reason) == (CONTEXT, "length")
    assert warnings == []


def test_the_test_above_would_see_a_context_that_is_one_too_long():
    kind, warnings = Kind("tensorrt"), []
    there = make_models(make_direct(kind, warnings), make_settings(kind), "")
    steps = run_loop(there, [5] * (CONTEXT - 5), Sampling(end_ids=frozenset({END})), max_tokens=100, draft_len=8, context=CONTEXT + 1)
    assert ids_of(steps)
    assert "reduced" in warnings[0]


# Sampling over the mock, whose random numbers are its own: the answers' distribution is the target's.

SMALL, LENGTH, DRAWS, ALARM = 5, 4, 3000, 1e-6
SOFT = Sampling(1.6, top_k=4, top_p=0.97)


def enumerate_answers(model, sampling, prompt):
    """Every answer of at most LENGTH tokens, and its probability."""
    answers, grown = {}, {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for ids, mass in grown.items():
            for token, p in enumerate(probs(model.logits([*prompt, *ids], 1), sampling)[0]):
                (answers if token == END or len(ids) + 1 == LENGTH else longer)[(*ids, token)] = mass * p
        grown = longer
    return answers


def sample_fit(kind, sampling, draft_len, **settings):
    """The probability of answers as uneven as these, if they had the target's distribution."""
    runners = {"target": Cached(vocab_size=SMALL), "draft": Cached(vocab_size=SMALL, twist=1.0)}
    models = make_models(make_direct(kind, [], runners), make_settings(kind, **settings), "")
    prompt = [3, 0, 3]
    answers = enumerate_answers(runners["target"], sampling, prompt)
    cells = {ids: cell for cell, ids in enumerate(answers)}
    counts = Counter()
    for seed in range(DRAWS):
        asked = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, seed, frozenset({END}))
        counts[cells[ids_of(run_loop(models, prompt, asked, max_tokens=LENGTH, draft_len=draft_len))]] += 1
    return fit_distribution(counts, np.array(list(answers.values()))).p_value


KINDS = {
    "exact": Kind("tensorrt", "exact"),
    "rejection": Kind("tensorrt", "rejection"),
    "rejection, fast logits": Kind("tensorrt", "rejection", mock={"fast_logits": True}),
    "rejection, n-grams": Kind("tensorrt", "rejection", drafter="ngram"),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_s07_s08_sampled_answers_have_the_targets_distribution(kind):
    """Temperature, top-k and top-p at once, up to four rounds. False-alarm rate 1e-6 (seeds are fixed)."""
    assert sample_fit(kind, SOFT, draft_len=2) > ALARM


def test_the_test_above_would_see_one_seed_for_all_requests():
    """Of a generator that starts anew with each request, draft and target would use the same numbers, round after round."""
    assert sample_fit(KINDS["rejection"], SOFT, draft_len=2, seed_per_request=False) < ALARM


def test_fast_logits_reach_the_target_and_change_nothing_greedy():
    kind = KINDS["rejection, fast logits"]
    triton = make_direct(kind, [])
    models = make_models(triton, make_settings(kind), "")
    for sampling in (Sampling(), Sampling(0.7, seed=3)):
        triton.calls.clear()
        run_loop(models, [40, 41], sampling, max_tokens=20, draft_len=4)
        shapes = {values["draft_logits"].shape for _, values in triton.calls if "draft_logits" in values}
        assert shapes == (set() if sampling.greedy else {(1, 1, 4)})
    assert triton.backends["draft"].links == {}  # all fetched


# On a real server.

FAULTS = {"!": "error", '"': "nothing", "#": "too long", "$": "no draft"}
FIRST_IDS = {3: "error", 4: "nothing", 5: "too long", 6: "no draft"}
VARIANTS = {
    "old, exact": Kind("tensorrt", "exact", mock={"ignores_exclude": True, "throws": True}, faults=FIRST_IDS),
    "fast logits": Kind("tensorrt", "rejection", mock={"fast_logits": True}, faults=FIRST_IDS),
}


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS)
def served(request, tmp_path_factory):
    with run_pair(tmp_path_factory.mktemp("trtllm"), request.param) as served:
        yield served


@pytest.mark.triton
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, top_k=30, top_p=0.95, seed=8)], ids=["greedy", "sampled"])
def test_t10_side_by_side_each_equals_what_this_process_generates(served, sampling):
    jobs = [("xyzabcde"[i % 8] * (1 + i % 4), sampling, 25, i % 9) for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda job: served.remote(*job), jobs))
    assert answers == [served.local(*job) for job in jobs]


@pytest.mark.triton
def test_up_to_the_end_of_the_context_nothing_is_cut(served):
    for length in (CONTEXT - 30, CONTEXT - 9, CONTEXT - 1):
        answer = served.remote("ab" * (length // 2), Sampling(), max_tokens=CONTEXT, draft_len=MAX_DRAFT)
        assert answer == served.local("ab" * (length // 2), Sampling(), max_tokens=CONTEXT, draft_len=MAX_DRAFT)
    assert "reduced" not in served.log.read_text()


@pytest.mark.triton
def test_an_engine_that_fails_midway_ends_that_stream_alone(served):
    assert [encode_prompt(served.tokenizer, prompt) for prompt in FAULTS] == [[first] for first in FIRST_IDS]
    sampling, ids = Sampling(0.9, seed=2), served.local("!", Sampling(), max_tokens=60)[1]

    def fail(_):
        tokens = []

        def read():
            for chunk in stream_generate(served.url, "!", max_tokens=60, sampling=Sampling(), draft_len=2, timeout=30):
                tokens.extend(chunk.token_ids)

        with pytest.raises(ServingError, match=r"The target engine failed: .*illegal memory access.*runtime.cpp:97\)$"):
            read()
        assert tuple(tokens) == ids[: len(tokens)]
        return len(tokens)

    with ThreadPoolExecutor(6) as pool:
        failures = pool.map(fail, range(3))
        answers = list(pool.map(lambda prompt: served.remote(prompt, sampling), ("hello", "you", "there")))
        assert min(failures) >= 8  # what came before the failure
    assert answers == [served.local(prompt, sampling) for prompt in ("hello", "you", "there")]


@pytest.mark.triton
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ('"', "The target returned 0 tokens for"),
        ("#", "tokens where"),
        ("$", "expected it to follow the draft up to its last token"),
    ],
)
def test_an_answer_that_means_nothing_is_one_line_and_no_loop(served, prompt, message):
    # Without an end id: an empty answer would stand for it.
    status, body = served.post("generate", text_input=prompt, max_tokens=20, end_id=-1)
    assert status == 400
    assert message in json.loads(body)["error"]
    assert served.post("generate", text_input="x", max_tokens=3)[0] == 200
