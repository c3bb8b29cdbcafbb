"""Calls of engines: what is sent, and what is made of answers, however the engine words them."""

from types import SimpleNamespace

import fake_triton
import numpy as np
import pytest

from specbuild.errors import ServingError
from specbuild.spec.loop import Draft
from specbuild.spec.sampling import Sampling
from specbuild.triton.bls import BlsDrafter, BlsVerifier, EngineClient, LinkedDraft, make_models
from specbuild.triton.request import LoopSettings

WARM = Sampling(0.7, top_k=5, top_p=0.9, seed=11)
LINK = np.array([[0x7F80_0001_0000_0007, 3]], np.uint64).view(np.float32)  # its second float is a signalling NaN


class ScriptedTriton:
    """triton_python_backend_utils whose engines give the same answer to every request; keeps the requests."""

    Tensor = fake_triton.Tensor
    get_output_tensor_by_name = staticmethod(fake_triton.get_output_tensor_by_name)

    def __init__(self, *answers, error=None):
        self.answers, self.error, self.requests = list(answers), error, []

    def InferenceRequest(self, model_name, requested_output_names, inputs, request_id):  # noqa: N802 - Triton's name
        self.requests.append({tensor.name(): tensor.as_numpy() for tensor in inputs})
        return SimpleNamespace(exec=self._answer)

    def _answer(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        tensors = [fake_triton.Tensor(name, np.asarray(value)) for name, value in answer.items()]
        return fake_triton.InferenceResponse(tensors, self.error and fake_triton.TritonError(self.error))


def reply(ids, **more):
    """An answer as TensorRT-LLM words it: beam first, padded with -1."""
    return {"output_ids": np.array([[[*ids, -1, -1]]], np.int32), "sequence_length": np.array([[len(ids)]], np.int32), **more}


def make_client(*answers, **options):
    return EngineClient(ScriptedTriton(*answers, **options), "target", "id")


@pytest.mark.parametrize(
    ("answers", "asked", "new"),
    [
        ([[7, 8]], 2, [7, 8]),
        ([[7]], 2, [7]),
        ([[]], 2, []),
        ([[4, 5, 7, 8]], 2, [7, 8]),  # the input included
        ([[4, 5, 7]], 2, [7]),
        ([[4, 5, 4, 5]], 2, [4, 5]),
        ([[4, 5], [9]], 2, [4, 5]),  # new ids that look like the input: asked for one token, the engine gives one
        ([[4, 5], [4, 5, 9]], 2, []),  # the input and nothing else
        ([[4, 5, 7], [9]], 3, [4, 5, 7]),
        ([[4, 5, 7], [4, 5, 7]], 3, [7]),
    ],
)
def test_new_ids_are_found_with_and_without_the_input(answers, asked, new):
    client = make_client(*map(reply, answers))
    assert client.call([4, 5], asked, Sampling())[0] == new
    assert len(client.pb_utils.requests) == len(answers)
    assert client.pb_utils.requests[-1].get("end_id") is None  # so that the one token cannot be left out


@pytest.mark.parametrize("ids", [[7, 8, 9], [4, 7, 8], [4, 5, 7, 8, 9]])
def test_anything_longer_is_one_clear_error(ids):
    with pytest.raises(ServingError, match=r"The target engine returned 3 tokens where 2 were asked for.*exclude_input_in_output"):
        make_client(reply(ids)).call([4, 5], 2, Sampling())


def test_only_the_first_line_of_an_engines_error_is_passed_on():
    with pytest.raises(ServingError, match=r"^The target engine failed: \[TensorRT-LLM\]\[ERROR\] Assertion failed: x$"):
        make_client(reply([]), error="[TensorRT-LLM][ERROR] Assertion failed: x\n1  0x7f in libtensorrt_llm.so").call([4], 1, WARM)


@pytest.mark.parametrize("name", ["output_ids", "sequence_length", "generation_logits"])
def test_a_missing_output_is_named(name):
    answer = {key: value for key, value in reply([7], generation_logits=np.zeros((1, 1, 1, 9), np.float32)).items() if key != name}
    with pytest.raises(ServingError, match=f"The target engine returned no {name}"):
        make_client(answer).call([4, 5], 1, WARM, return_generation_logits=True)


@pytest.mark.parametrize("ids", [[9, 8, 7], [4, 8, 7], [9, 8], [9, 5]])
def test_b01_an_answer_that_does_not_follow_the_draft_is_an_error(ids):
    """As of an engine built without a draft length that did not refuse the draft."""
    with pytest.raises(ServingError, match=r"for the draft \[4, 5\]: expected it to follow the draft.*max_draft_len"):
        BlsVerifier(make_client(reply(ids))).verify([1], Draft((4, 5)), Sampling(end_ids=frozenset({2})), 9)


def test_an_empty_draft_is_never_sent():
    nothing = BlsDrafter(make_client(reply([], generation_logits=np.zeros((1, 1, 0, 9)))), with_probs=True).propose([1], 3, WARM)
    client = make_client(reply([7]))
    for draft in (nothing, Draft(()), LinkedDraft((), link=LINK)):
        assert BlsVerifier(client).verify([1], draft, WARM, 9).tokens == (7,)
    for request in client.pb_utils.requests:
        assert request["request_output_len"] == 1
        assert not {"draft_input_ids", "draft_logits"} & set(request)


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
def test_without_odds_a_draft_goes_alone(sampling):
    """To a certain draft the engine's own draws do the same as odds would."""
    client = make_client(reply([4, 9]))
    BlsVerifier(client).verify([1], Draft((4, 5)), sampling, 9)
    assert client.pb_utils.requests[0]["draft_input_ids"].tolist() == [[4, 5]]
    assert "draft_logits" not in client.pb_utils.requests[0]


def test_odds_are_sent_as_logits_whose_softmax_they_are():
    odds, client = np.array([[0.75, 0.25, 0.0], [0.0, 1.0, 0.0]]), make_client(reply([0, 2]))
    BlsVerifier(client).verify([1], Draft((0, 1), odds), WARM, 9)
    logits = client.pb_utils.requests[0]["draft_logits"]
    assert (logits.shape, logits.dtype) == ((1, 2, 3), np.float32)
    np.testing.assert_allclose(np.exp(logits[0]) / np.exp(logits[0]).sum(axis=1, keepdims=True), odds, atol=1e-7)


def test_fast_logits_go_back_bit_by_bit_with_all_their_tokens():
    drafter = BlsDrafter(make_client(reply([4, 2, 5], generation_logits=LINK[None, None])), with_probs=True, fast_logits=True)
    draft = drafter.propose([1], 3, Sampling(0.7, seed=1, end_ids=frozenset({2})))
    assert (draft.tokens, draft.probs) == ((4, 2, 5), None)
    client = make_client(reply([4]))
    BlsVerifier(client).verify([1], draft, Sampling(0.7, end_ids=frozenset({2})), 9)
    assert client.pb_utils.requests[0]["draft_logits"].shape == (1, 1, 4)
    assert client.pb_utils.requests[0]["draft_logits"].tobytes() == LINK.tobytes()


@pytest.mark.parametrize("fast_logits", [True, False])
def test_what_the_target_judges_by_is_what_the_draft_was_drawn_from(fast_logits):
    """It takes the softmax of fast logits as they are: no temperature, no top-k and no top-p may come between."""
    logits = LINK[None, None] if fast_logits else np.zeros((1, 1, 1, 9), np.float32)
    client = make_client(reply([4], generation_logits=logits))
    BlsDrafter(client, True, fast_logits).propose([1], 1, WARM)
    [request] = client.pb_utils.requests
    values = [request[name].item() for name in ("temperature", "runtime_top_k", "runtime_top_p")]
    assert values == ([1.0, 0, 1.0] if fast_logits else [pytest.approx(0.7), 5, pytest.approx(0.9)])


def test_greedy_asks_for_no_logits():
    client = make_client(reply([4]))
    assert BlsDrafter(client, True, True).propose([1], 1, Sampling()) == Draft((4,))
    assert "return_generation_logits" not in client.pb_utils.requests[0]


@pytest.mark.parametrize(
    ("rule", "own", "same_in_all_requests", "same_for_both"),
    [("exact", True, False, True), ("rejection", True, False, False), ("exact", False, True, True), ("rejection", False, True, True)],
)
def test_engines_whose_numbers_start_anew_get_a_seed_for_each_request(rule, own, same_in_all_requests, same_for_both):
    triton = ScriptedTriton(reply([4], generation_logits=np.zeros((1, 1, 1, 9), np.float32)))
    settings = LoopSettings(1, 1, rule, "model", 9, 9, frozenset(), 1, seed_per_request=own)
    drafter, verifier = make_models(triton, settings, "")
    for tokens in ([1], [1, 2], [1, 2, 3]):
        drafter.propose(tokens, 1, WARM)
        verifier.verify(tokens, Draft(()), WARM, 9)
    seeds = [request["seed"].item() for request in triton.requests]
    drafts, targets = seeds[::2], seeds[1::2]
    assert len(set(targets)) == len(set(drafts)) == (1 if same_in_all_requests else 3)
    assert (drafts == targets) is same_for_both
    assert (11 in seeds) is not own


def test_a_top_k_that_the_engine_would_clip_is_refused():
    client = EngineClient(ScriptedTriton(reply([7])), "target", "id", seed_stream=0)
    assert client.call([4], 1, Sampling(1.0, top_k=1024))[0] == [7]
    with pytest.raises(ServingError, match="top_k 1025: these engines support up to 1024"):
        client.call([4], 1, Sampling(1.0, top_k=1025))
