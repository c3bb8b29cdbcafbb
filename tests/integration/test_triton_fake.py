"""A real tritonserver over engines without weights: what is served is what one process generates, alone or in a crowd.

Every test runs against both kinds of engines: specbuild's own, and a mock of TensorRT-LLM's backend.
"""

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_serving import Kind, run_pair

from specbuild.errors import ServingError
from specbuild.spec.sampling import Sampling
from specbuild.tokenizer import encode_prompt
from specbuild.triton.client import stream_generate

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module", params=[f"{rule}-{compiler}" for compiler in ("onnx-cpu", "tensorrt") for rule in ("rejection", "exact")])
def served(request, tmp_path_factory):
    """A running server and what is needed to generate the same in this process."""
    rule, compiler = request.param.split("-", 1)
    with run_pair(tmp_path_factory.mktemp("served"), Kind(compiler, rule)) as served:
        yield served


SAMPLINGS = [Sampling(), Sampling(0.8, seed=5), Sampling(1.3, top_k=20, top_p=0.9, seed=2**63)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "warm", "hot"])
@pytest.mark.parametrize("draft_len", [0, 1, 8])
def test_served_equals_in_process_streamed_or_not(served, sampling, draft_len):
    for prompt in ("hello world", "Grüße", "x"):
        local = served.local(prompt, sampling, draft_len=draft_len)
        assert served.remote(prompt, sampling, draft_len=draft_len) == local
        assert served.remote(prompt, sampling, draft_len=draft_len, stream=False) == local


def test_chunks_carry_the_prompt_once_and_the_reason_last(served):
    chunks = list(stream_generate(served.url, "hello", max_tokens=30, sampling=Sampling(seed=1)))
    assert len(chunks) > 2
    assert [bool(chunk.prompt_token_ids) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert chunks[0].prompt_token_ids == tuple(encode_prompt(served.tokenizer, "hello"))
    assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


@pytest.mark.parametrize("n", [8, 16])
def test_requests_side_by_side_equal_their_solo_results(served, n):
    jobs = [(f"prompt {i}" * (1 + i % 3), SAMPLINGS[i % 3], 10 + i, i % 9, i % 2 == 0) for i in range(n)]
    with ThreadPoolExecutor(n) as pool:
        answers = list(pool.map(lambda job: served.remote(*job[:4], stream=job[4]), jobs))
    assert answers == [served.local(*job[:4]) for job in jobs]


def test_stop_string_ends_it(served):
    text = served.local("hello", Sampling(seed=1))[0]
    assert served.remote("hello", Sampling(seed=1), stop=(text[3:5],))[0::3] == (text[: text.index(text[3:5])], "stop")


def test_http_generate_and_generate_stream(served):
    text, tokens, (rounds, drafted, accepted), reason = served.local("hello", Sampling())
    status, body = served.post("generate", text_input="hello", max_tokens=30, stop_words="")
    answer = json.loads(body)
    assert (status, answer["text_output"], answer["finish_reason"]) == (200, text, reason)
    assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (5, len(tokens))
    assert (answer["rounds"], answer["total_draft_tokens"], answer["total_accepted_draft_tokens"]) == (rounds, drafted, accepted)
    status, body = served.post("generate_stream", text_input="hello", max_tokens=30, stream=True)
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]
    assert status == 200
    assert "".join(event["text_output"] for event in events) == text
    assert sum(event["num_output_tokens"] for event in events) == len(tokens)


def read_metric(served, name):
    with urllib.request.urlopen(f"http://127.0.0.1:{served.ports.metrics}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def test_leaving_early_stops_the_request_and_the_next_one_is_fine(served):
    before = read_metric(served, "specbuild_output_tokens_total")
    stream = stream_generate(served.url, "hello", max_tokens=240, sampling=Sampling(1.5, seed=3), draft_len=1)
    first = next(stream)
    start = time.monotonic()
    stream.close()
    assert time.monotonic() - start < 3
    assert served.remote("hello", Sampling(), max_tokens=5) == served.local("hello", Sampling(), max_tokens=5)
    time.sleep(0.3)
    assert len(first.token_ids) <= read_metric(served, "specbuild_output_tokens_total") - before < 240


def test_metrics_count(served):
    names = [f"specbuild_{name}_total" for name in ("rounds", "draft_tokens", "accepted_draft_tokens", "output_tokens")]
    before = [read_metric(served, name) for name in names]
    _, tokens, counts, _ = served.remote("hello", Sampling(seed=4))
    time.sleep(0.3)
    assert [read_metric(served, name) - old for name, old in zip(names, before, strict=True)] == [*counts, len(tokens)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_input": ""}, "empty prompt"),
        ({"max_tokens": 0}, "max_tokens >= 1"),
        ({"text_input": "x" * 400}, "prompt of 400 tokens: the context of 256"),
        ({"num_draft_tokens": 9}, "from 0 to 8"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1: it is not implemented"),
        ({"temprature": 0.5}, "Did you mean temperature?"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"stop": True}, "request ID is not provided"),
    ],
)
def test_bad_requests_get_one_line_and_harm_nothing(served, body, message):
    status, answer = served.post("generate", **{"text_input": "x", "max_tokens": 3, **body})
    assert status == 400
    assert message in json.loads(answer)["error"]
    assert "\n" not in json.loads(answer)["error"]
    assert served.post("generate", text_input="x", max_tokens=3)[0] == 200


def test_refused_request_raises_the_servers_line(served):
    with pytest.raises(ServingError, match=r"refused the request: .*from 0 to 8"):
        served.remote("x", Sampling(), draft_len=9)
    with pytest.raises(ServingError, match="Cannot call nothing at"):
        served.remote("x", Sampling(), model="nothing")
