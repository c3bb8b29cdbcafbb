"""The served loop, over a Triton of plain Python: same ids, counts and text as the loop in one process."""

import fake_triton
import numpy as np
import pytest
from fake_triton import TableModel
from tokenizers import Tokenizer, decoders, models

from specbuild.errors import ServingError
from specbuild.spec.accept import ModelVerifier
from specbuild.spec.drafters import DRAFTERS
from specbuild.spec.loop import Draft, speculate
from specbuild.spec.sampling import Sampling
from specbuild.spec.stats import SpecStats
from specbuild.triton.bls import read_verified
from specbuild.triton.engine_cpu import EngineModel
from specbuild.triton.speculative import SpeculativeModel

DTYPES = {"max_tokens": np.int32, "num_draft_tokens": np.int32, "top_k": np.int32, "end_id": np.int32, "seed": np.uint64}


@pytest.fixture
def served(tmp_path):
    """Make a served loop; arguments change its parameters."""
    tokenizer = Tokenizer(models.WordLevel({chr(97 + i): i for i in range(12)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = []

    def make(rule="rejection", drafter="model", end_ids="7,3", target=None, draft=None):
        parameters = {
            "draft_len": 3, "max_draft_len": 6, "rule": rule, "drafter": drafter, "context": 64, "draft_context": 60, "vocab_size": 12,
            "end_ids": end_ids, "max_running": 16,
        }  # fmt: skip
        fake_triton.ENGINES["target"] = EngineModel(target or TableModel(seed=1), "target", rule)
        fake_triton.ENGINES["draft"] = EngineModel(draft or TableModel(seed=2), "draft", rule)
        model = SpeculativeModel(fake_triton, tmp_path, {key: {"string_value": str(value)} for key, value in parameters.items()})
        opened.append(model)
        return model

    fake_triton.CALLS.clear()
    yield make
    for model in opened:
        model.close()


def ask(model, prompt=(1, 4), request_id="", parameters="{}", wait=True, **values):
    values = {"max_tokens": 20, "return_token_ids": True, **values}
    tensors = {"input_ids": np.array([prompt], np.int32), "text_input": np.array([[b"be"]], object)}
    for name, value in values.items():
        dtype = bool if isinstance(value, bool) else object if isinstance(value, list) else DTYPES.get(name, np.float32)
        tensors[name] = np.array([value if isinstance(value, list) else [value]], dtype)
    request = fake_triton.Request(tensors, request_id, parameters)
    model.submit(request)
    assert not wait or request.done.wait(20)
    return request


def tokens_of(request):
    return tuple(i for response in request.responses for i in response.values()["output_ids"].reshape(-1).tolist())


@pytest.mark.parametrize("rule", ["exact", "rejection"])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9}, {"temperature": 1.2, "top_k": 4, "top_p": 0.8}])
@pytest.mark.parametrize("draft_len", [0, 1, 5])
def test_served_equals_in_process(served, rule, drafter, sampling, draft_len):
    model = served(rule, drafter)
    local_drafter = DRAFTERS[drafter](TableModel(seed=2))
    for seed in range(12):
        steps = speculate(
            local_drafter, ModelVerifier(TableModel(seed=1), rule), (1, 4),
            sampling=Sampling(**sampling, seed=seed, end_ids=frozenset({3, 7})), max_tokens=20, draft_len=draft_len, context=64,
            draft_context=60,
        )  # fmt: skip
        stats = SpecStats()
        ids = []
        for step in steps:
            stats.add(step)
            ids += step.tokens
        request = ask(model, seed=seed, num_draft_tokens=draft_len, stream=True, **sampling)
        last = request.responses[-1].values()
        assert tokens_of(request) == tuple(ids)
        counts = [last[name].item() for name in ("rounds", "total_draft_tokens", "total_accepted_draft_tokens")]
        assert counts == [stats.rounds, stats.drafted, stats.accepted]
        assert last["finish_reason"].item() == step.finish_reason.encode()


def test_one_response_or_one_per_round_with_the_same_text(served):
    model = served(end_ids="")
    whole, parts = ask(model, seed=1), ask(model, seed=1, stream=True)
    assert len(whole.responses) == 1
    assert len(parts.responses) == parts.responses[-1].values()["rounds"].item() > 1
    texts = [b"".join(r.values()["text_output"].item() for r in request.responses) for request in (whole, parts)]
    assert texts[0] == texts[1] != b""
    counted = sum(response.values()["num_output_tokens"].item() for response in parts.responses)
    assert counted == len(tokens_of(parts)) == 20
    assert [("prompt_ids" in r.values(), "finish_reason" in r.values()) for r in parts.responses][:2] == [(True, False), (False, False)]


def test_stop_word_ends_and_cuts(served):
    model = served(end_ids="")
    text = ask(model).responses[0].values()["text_output"].item().decode()
    stopped = ask(model, stop_words=[text[4:6].encode(), b""]).responses[0].values()
    assert stopped["text_output"].item().decode() == text[: text.index(text[4:6])]
    assert stopped["finish_reason"].item() == b"stop"


def test_echo_and_ids_only_on_request(served):
    values = ask(served(), exclude_input_in_output=False, return_token_ids=False).responses[0].values()
    assert values["text_output"].item().startswith(b"be")
    assert not {"output_ids", "prompt_ids"} & set(values)


def test_greedy_sends_no_distributions(served):
    ask(served("rejection"))
    assert not any("draft_logits" in values or "temperature" in values for _, values in fake_triton.CALLS)
    assert all("draft_input_ids" not in values or values["draft_input_ids"].size for _, values in fake_triton.CALLS)


class Slow(TableModel):
    """A target that another thread can hold up."""

    def __init__(self, gate):
        super().__init__(seed=1)
        self.gate = gate

    def logits_batch(self, requests):
        assert self.gate.wait(10)
        return super().logits_batch(requests)


@pytest.mark.parametrize("how", ["stop request", "cancelled", "unload"])
def test_t11_a_running_request_can_be_stopped(served, how):
    gate = fake_triton.threading.Event()
    model = served(end_ids="", target=Slow(gate))
    request = ask(model, request_id="r1", wait=False, stream=True)
    if how == "stop request":
        stop = ask(model, request_id="r1", stop=True)
        assert stop.responses == []
    elif how == "cancelled":
        request.cancelled = True
    else:
        model._running.stop_all()
    gate.set()
    assert request.done.wait(10)
    assert request.responses[-1].values()["finish_reason"].item() == b"cancelled"
    assert len(tokens_of(request)) < 20
    assert ask(model).responses[-1].values()["finish_reason"].item() == b"length"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens >= 1"),
        ({"prompt": [1] * 64}, "context of 64"),
        ({"num_draft_tokens": 7}, "from 0 to 6"),
        ({"num_draft_tokens": -1}, "from 0 to 6"),
        ({"temperature": -1.0}, "temperature -1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"repetition_penalty": 1.3}, "repetition_penalty=1.3"),
        ({"bad_words": [b"x"]}, "bad_words"),
        ({"stop": True}, "request ID is not provided"),
        ({"parameters": '{"temprature": 1}'}, "Did you mean temperature"),
        ({"parameters": '{"id": "7", "zzz": 1}'}, "Cannot honour 'zzz'"),
    ],
)
def test_bad_requests_get_one_line(served, values, message):
    request = ask(served(), **values)
    assert request.done.is_set()
    [response] = request.responses
    assert message in response.error().message()
    assert "\n" not in response.error().message()


def test_neutral_values_are_accepted(served):
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "min_length": 0.0, "bad_words": [b""], "top_p": 0.0}
    assert not ask(served(), **neutral).responses[0].has_error()


def test_an_engine_error_reaches_the_client(served):
    target = TableModel()
    target.table[:] = np.nan
    [response] = ask(served(target=target)).responses
    assert "target engine failed: Cannot choose a token" in response.error().message()


def test_end_id_of_a_request_replaces_the_packaged_ones(served):
    chain = TableModel(chain={4: 7, 7: 5, 5: 9})
    model = served(target=chain, draft=chain)
    assert tokens_of(ask(model)) == (7,)
    assert tokens_of(ask(model, end_id=9)) == (7, 5, 9)
    assert len(tokens_of(ask(model, end_id=-1))) == 20


def test_metrics_count_what_was_answered(served):
    before, model = dict(fake_triton.MetricFamily.totals), served()
    last = ask(model).responses[-1].values()
    model.close()  # counted after the last response
    grown = {name: value - before.get(name, 0) for name, value in fake_triton.MetricFamily.totals.items()}
    assert grown == {
        "specbuild_rounds_total": last["rounds"].item(),
        "specbuild_draft_tokens_total": last["total_draft_tokens"].item(),
        "specbuild_accepted_draft_tokens_total": last["total_accepted_draft_tokens"].item(),
        "specbuild_output_tokens_total": last["num_output_tokens"].item(),
    }


@pytest.mark.parametrize(
    ("ids", "draft", "expected"),
    [
        ([4, 5, 9], (4, 5), ((4, 5, 9), 2, 2, None)),  # all accepted and the bonus token
        ([4, 9], (4, 5), ((4, 9), 1, 2, None)),  # recovered at the second
        ([9], (), ((9,), 0, 0, None)),  # no draft
        ([], (), ((7,), 0, 0, "stop")),  # the end id at once
        ([4], (4, 5), ((4, 7), 1, 2, "stop")),  # the end id instead of a drafted token
        ([4], (4, 7), ((4, 7), 2, 2, "stop")),  # the end id was drafted, and accepted
        ([4, 5], (4, 5), ((4, 5, 7), 2, 2, "stop")),  # the end id as the bonus token
        ([4, 3], (4, 5), ((4, 3), 1, 2, "stop")),  # another end id, which the engine does not know
        ([3, 5, 9], (3, 5), ((3,), 1, 1, "stop")),  # another end id inside the draft
    ],
)
def test_reading_an_answer_that_does_not_say_why_it_ended(ids, draft, expected):
    verified = read_verified(ids, Draft(draft), Sampling(end_ids=frozenset({3, 7})), 10, 7)
    assert (verified.tokens, verified.accepted, verified.judged, verified.finish_reason) == expected


def test_an_answer_that_is_too_short_without_an_end_id_is_an_error():
    with pytest.raises(ServingError, match="1 tokens for 2 drafted"):
        read_verified([4], Draft((4, 5)), Sampling(), 10, -1)
