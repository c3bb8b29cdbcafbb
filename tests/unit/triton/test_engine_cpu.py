"""The CPU engine speaks the TensorRT-LLM backend's contract: new tokens, the end id left out, one pass for a batch."""

import numpy as np
import pytest
from fake_triton import TableModel

from specbuild.errors import EngineError, ServingError
from specbuild.spec.accept import accept
from specbuild.spec.loop import Draft
from specbuild.spec.sampling import Sampling, probs
from specbuild.triton.engine_cpu import EngineModel

CHAIN = {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 7}
END = 7


def request(tokens, new, **more):
    """A request's tensors, as Triton hands them over: batch dimension first."""
    values = {
        "input_ids": np.array([tokens], np.int32),
        "input_lengths": np.array([[len(tokens)]], np.int32),
        "request_output_len": np.array([[new]], np.int32),
        "exclude_input_in_output": np.array([[True]]),
    }
    dtypes = {"temperature": np.float32, "runtime_top_p": np.float32, "seed": np.uint64, "draft_logits": np.float32}
    for name, value in more.items():
        array = np.array(value, dtypes.get(name, bool if isinstance(value, bool) else np.int32))
        values[name] = array[None] if array.ndim else array[None, None]
    return values


def engine(role="target", rule="exact", **model):
    return EngineModel(TableModel(**model), role, rule)


def ids(result):
    assert result["sequence_length"] == [result["output_ids"].shape[1]]
    return result["output_ids"][0].tolist()


def test_plain_request_generates_greedily():
    assert ids(engine(chain=CHAIN).run([request([9, 1], 3)])[0]) == [2, 3, 4]


def test_prompt_is_included_unless_excluded():
    assert ids(engine(chain=CHAIN).run([request([9, 1], 2, exclude_input_in_output=False)])[0]) == [9, 1, 2, 3]


def test_input_beyond_its_length_is_padding():
    values = request([9, 1, 0, 0], 1)
    values["input_lengths"][:] = 2
    assert ids(engine(chain=CHAIN).run([values])[0]) == [2]


@pytest.mark.parametrize(
    ("draft", "expected"),
    [([2, 3], [2, 3, 4]), ([2, 9], [2, 3]), ([9], [2]), ([2, 3, 4, 5, 6], [2, 3, 4, 5, 6]), ([2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6])],
)
def test_verification_returns_the_accepted_prefix_and_one_more_but_never_the_end_id(draft, expected):
    result = engine(chain=CHAIN).run([request([1], len(draft) + 1, draft_input_ids=draft, end_id=END)])[0]
    assert ids(result) == expected


def test_end_id_first_gives_nothing():
    assert ids(engine(chain=CHAIN).run([request([6], 4, end_id=END)])[0]) == []


def test_without_end_id_nothing_stops():
    assert ids(engine(chain=CHAIN).run([request([6], 1)])[0]) == [END]


def test_requests_of_different_lengths_share_passes_and_equal_their_solo_answers():
    requests = [
        request([1], 4, temperature=0.9, seed=5),
        request([9, 8, 1], 3, draft_input_ids=[2, 3]),
        request([2, 2], 1),
        request([3], 6, temperature=0.7, seed=8, runtime_top_k=3),
    ]
    model = engine(seed=3)
    together = model.run(requests)
    assert model.runner.passes == [4, 2, 2, 2, 1, 1]
    assert [ids(result) for result in together] == [ids(engine(seed=3).run([one])[0]) for one in requests]


def test_draft_logits_choose_the_rejection_rule_with_their_plain_softmax():
    drafter, target = TableModel(seed=1), TableModel(seed=2)
    accepted = set()
    for seed in range(40):
        sampling, drafted = Sampling(temperature=0.8, seed=seed), (seed % 12, seed * 5 % 12)
        rows = probs(drafter.logits([1, *drafted], 3)[:2], sampling)
        values = request([1], 3, draft_input_ids=drafted, draft_logits=np.log(rows), temperature=0.8, seed=seed)
        stand, token = accept("rejection", target.logits([1, *drafted], 3), Draft(drafted, rows), sampling, 1)
        assert ids(EngineModel(target, "target", "exact").run([values])[0]) == [*drafted[:stand], token]
        accepted.add(stand)
    assert accepted == {0, 1, 2}


def test_generation_logits_only_on_request():
    model = engine(role="draft", chain=CHAIN)
    assert model.run([request([1], 3)])[0]["generation_logits"] is None
    logits = model.run([request([1], 3, return_generation_logits=True)])[0]["generation_logits"]
    assert logits.shape == (1, 3, 12)
    np.testing.assert_array_equal(logits[0], model.runner.table[[1, 2, 3]])


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (request([1], 0), ServingError, "request_output_len >= 1"),
        (request([1] * 70, 1), EngineError, r"Prompt length \(70\) exceeds maximum input length \(64\)"),
        (request([12], 1), EngineError, "token id 12"),
        (request([1], 1, beam_width=2), ServingError, "beam_width 2"),
        (request([1], 1, seed=[1, 2]), ServingError, "seed with 2 values"),
        (request([1], 1) | {"input_ids": np.array([[1], [2]], np.int32)}, ServingError, "2 sequences in one request"),
        (request([1], 1, streaming=True), ServingError, "answers once"),
        (request([1], 2, draft_logits=np.zeros((1, 12))), ServingError, "Draft tokens must be specified"),
        (request([1], 2, draft_input_ids=[2], draft_logits=np.zeros((2, 12))), ServingError, "1 draft tokens with 2 rows"),
    ],
)
def test_a_bad_request_fails_alone(values, error, message):
    good, bad = engine(chain=CHAIN).run([request([1], 2), values])
    assert ids(good) == [2, 3]
    assert isinstance(bad, error)
    with pytest.raises(error, match=message):
        raise bad


def test_a_row_of_nan_fails_alone():
    model = engine(chain=CHAIN)
    model.runner.table[8] = np.nan
    good, bad = model.run([request([1], 1), request([8], 1)])
    assert ids(good) == [2]
    assert isinstance(bad, EngineError)
