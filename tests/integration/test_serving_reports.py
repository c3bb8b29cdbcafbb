"""What hit people who served a pair and who called it, on a real tritonserver. Names begin with a row's id.

Engines without weights: a prompt of one scripted character is continued by its script, any other one at random.
"""

import json
import queue
import shutil
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from fake_serving import CONTEXT, VOCAB, Kind, Served, find_ports, write_tokenizer
from test_triton_fake import read_metric
from tritonclient.utils import InferenceServerException

from specbuild.errors import ServingError
from specbuild.spec.sampling import Sampling
from specbuild.tokenizer import load_tokenizer
from specbuild.triton.client import stream_generate
from specbuild.triton.contract import PUBLIC
from specbuild.triton.pbtxt import format_config, make_model
from specbuild.triton.repository import PairServing, check_repository, write_repository
from specbuild.triton.server import Server, find_installation

pytestmark = pytest.mark.triton
HERE = Path(__file__).parent
END_IDS = (7, 260)  # no special tokens: what keeps them out of the text is that they end it
SCRIPTS = {"E": [*b"hi.", 260], "S": b"xx ab yy", "U": [*"a€b日".encode(), 0xFF, 260], "L": b"on and on ", "Z": b"slowly "}
SLOW = "Z"  # 0.3 s for each pass of an engine

AUDIT = """import os, sys
log = open({path!r}, "a", buffering=1)
log.write("watched\\n")
def hook(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        log.write(f"{{event}} {{arguments[-1]}}\\n")
sys.addaudithook(hook)
"""

UNARY = """import triton_python_backend_utils as pb_utils
from specbuild.triton.contract import PUBLIC
from specbuild.triton.wire import make_tensors
class TritonPythonModel:
    def execute(self, requests):
        values = {"text_output": "whole", "finish_reason": "stop", "num_input_tokens": 1, "num_output_tokens": 2,
                  "total_draft_tokens": 0, "total_accepted_draft_tokens": 0, "rounds": 2, "output_ids": [4, 5]}
        return [pb_utils.InferenceResponse(make_tensors(pb_utils, PUBLIC.outputs, values)) for _ in requests]
"""


def write_pair(base):
    """Write a repository over scripted engines, move it away from all that it was made of, and add a model that is not decoupled."""
    (base / "sources" / "engine").mkdir(parents=True)
    (base / "sources" / "engine" / "config.json").write_text("{}")
    write_tokenizer(base / "sources" / "tokenizer.json")
    engine = base / "sources" / "engine"
    write_repository(base / "written", PairServing(
        name="scripted", target_engine=engine, draft_engine=engine, tokenizer_dir=base / "sources", draft_len=4, max_draft_len=8,
        rule="rejection", drafter="model", max_batch_size=8, context=CONTEXT, draft_context=CONTEXT, end_ids=END_IDS, pad_id=0,
        vocab_size=VOCAB,
    ))  # fmt: skip
    repository = base / "moved"
    shutil.move(base / "written", repository)
    shutil.rmtree(base / "sources")
    check_repository(repository)
    tokenizer = load_tokenizer(repository / "preprocessing" / "1")
    scripts = {tokenizer.token_to_id(prompt): to_ids(tokenizer, script) for prompt, script in SCRIPTS.items()}
    for role in ("target", "draft"):
        shutil.copy(HERE / "fake_runner.py", repository / role / "1")
        shutil.copy(HERE / "scripted_engine_model.py", repository / role / "1" / "model.py")
        values = {"scripts": scripts, "slow": tokenizer.token_to_id(SLOW)}
        (repository / role / "1" / "scripts.json").write_text(json.dumps(values))
    (repository / "unary" / "1").mkdir(parents=True)
    (repository / "unary" / "config.pbtxt").write_text(format_config(make_model("unary", PUBLIC, max_batch_size=1)))
    (repository / "unary" / "1" / "model.py").write_text(UNARY)
    return repository, tokenizer


def to_ids(tokenizer, script):
    """One token for each byte; larger numbers are ids already."""
    ascii_ids = {byte: tokenizer.token_to_id(piece) for byte, piece in enumerate(byte_pieces())}
    return [ascii_ids.get(part, part) for part in script]


def byte_pieces():
    """The characters by which byte-level BPE writes the 256 bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A running server, whose models log every look-up of a name and every connection that they try."""
    try:
        find_installation()
    except ServingError as error:
        pytest.skip(str(error))
    base = tmp_path_factory.mktemp("reports")
    repository, tokenizer = write_pair(base)
    for path in repository.glob("*/1/model.py"):
        path.write_text(AUDIT.format(path=str(base / "network.txt")) + path.read_text())
    with (base / "log.txt").open("w") as log, pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_HOME"):  # a server has none of them
            patch.delenv(name, raising=False)
        with Server(repository, find_ports(), log=log) as server:
            server.wait_until_ready(60)
            served = Served(server.ports, tokenizer, Kind("onnx-cpu", "rejection"), base / "log.txt")
            served.repository, served.network = repository, base / "network.txt"
            yield served
            assert server.is_running()
    assert "Signal (11)" not in (base / "log.txt").read_text()


def ask(served, prompt, **options):
    """Chunks of a greedy answer."""
    return list(stream_generate(served.url, prompt, timeout=20, **{"max_tokens": 20, **options}))


def join(chunks):
    """Text, ids and reason of an answer."""
    return "".join(chunk.text for chunk in chunks), [i for chunk in chunks for i in chunk.token_ids], chunks[-1].finish_reason


def script_of(served, prompt, length):
    script = to_ids(served.tokenizer, SCRIPTS[prompt])
    return [script[i % len(script)] for i in range(length)]


def post(served, model, endpoint, **body):
    """Body of an HTTP call to any model."""
    url = f"http://127.0.0.1:{served.ports.http}/v2/models/{model}/{endpoint}"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=20) as response:
        return response.read().decode()


def assert_served(served):
    """The next request is fine."""
    assert join(ask(served, "L", max_tokens=9))[0] == "on and on"


def assert_idle(served, within):
    """No model is at work, after so many seconds at most: not in 0.8 s, in which a slow engine makes two passes."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        before = read_metric(served, "nv_inference_count")
        time.sleep(0.8)
        if read_metric(served, "nv_inference_count") == before:
            return
    pytest.fail(f"the server was still at work after {within} s")


# --- t-01 and t-02: what Triton makes of the repository


def test_t01_and_t02_every_written_model_loads_and_nothing_else_is_taken_for_one(served):
    with triton.InferenceServerClient(served.url) as client:
        index = client.get_model_repository_index().models
    assert {(model.name, model.state) for model in index} == {(path.name, "READY") for path in served.repository.iterdir()}
    assert len(index) == 6


def test_t02_a_moved_repository_is_served_without_its_sources_and_without_a_network(served):
    assert join(ask(served, "L", max_tokens=9))[0] == "on and on"
    lines = served.network.read_text().splitlines()
    assert lines.count("watched") == 5  # each in a process of its own: preprocessing, the loop, both engines, "unary"
    assert set(lines) == {"watched"}


# --- t-04: decoupled or not


@pytest.mark.parametrize(("model", "text"), [("ensemble", "on and on"), ("unary", "whole")])
def test_t04_the_client_takes_streamed_and_whole_answers_of_both_kinds_of_model(served, model, text):
    for stream in (True, False):
        chunks = ask(served, "L", max_tokens=9, model=model, stream=stream)
        assert join(chunks)[0] == text
        assert (len(chunks) > 1) == (stream and model == "ensemble")
    for endpoint, streams in (("generate", [False]), ("generate_stream", [False, True])):
        for stream in streams:
            body = post(served, model, endpoint, text_input="L", max_tokens=9, stream=stream)
            events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line]
            assert "".join(event["text_output"] for event in events) == text


def test_t04_the_wrong_call_is_an_error_that_names_the_right_one(served):
    _, body = served.post("generate", text_input="L", max_tokens=9, stream=True)
    assert "use generate stream" in json.loads(body)["error"]
    with triton.InferenceServerClient(served.url) as client, pytest.raises(InferenceServerException, match="decoupled transaction policy"):
        client.infer("ensemble", make_inputs([1, 1]), client_timeout=10)
    assert_served(served)


# --- t-06 to t-09: where an answer ends, and its text


@pytest.mark.parametrize("draft_len", [0, 1, 4, 8])
def test_t06_the_second_of_two_end_ids_ends_an_answer_and_is_not_in_its_text(served, draft_len):
    for stream in (True, False):
        chunks = ask(served, "E", draft_len=draft_len, stream=stream)
        assert join(chunks) == ("hi.", script_of(served, "E", 4), "stop")
    _, body = served.post("generate", text_input="E", max_tokens=20, num_draft_tokens=draft_len)
    assert json.loads(body)["num_output_tokens"] == 4


@pytest.mark.parametrize("draft_len", [0, 1, 4, 8])
def test_t07_a_stop_string_over_two_tokens_cuts_the_text_with_and_without_speculation(served, draft_len):
    for stop, text, length in (("ab", "xx ", 5), (" ab", "xx", 5), ("b y", "xx a", 7)):
        for stream in (True, False):
            chunks = ask(served, "S", draft_len=draft_len, stop=("never", stop), stream=stream)
            assert join(chunks) == (text, script_of(served, "S", length), "stop")


@pytest.mark.parametrize("draft_len", [0, 1, 2, 3, 4])
def test_t08_characters_of_several_tokens_come_whole_and_a_broken_one_at_the_end(served, draft_len):
    streamed = ask(served, "U", draft_len=draft_len)
    assert (
        join(streamed) == join(ask(served, "U", draft_len=draft_len, stream=False)) == ("a€b日\ufffd", script_of(served, "U", 10), "stop")
    )
    assert not any("\ufffd" in chunk.text for chunk in streamed[:-1])


# --- t-10 and t-11: many clients, and those that leave


def test_t10_sixteen_requests_at_once_streamed_and_not_equal_their_solo_results(served):
    samplings = [Sampling(), Sampling(0.8, seed=5), Sampling(1.3, top_k=20, top_p=0.9, seed=9)]
    prompts = ["L", "U", "hello", "a longer prompt of several words ", "x"]
    jobs = [(prompts[i % 5] * (1 + i // 5), samplings[i % 3], 4 + 3 * i, i % 9, i % 2 == 0) for i in range(16)]

    def answer(job):
        return served.remote(*job[:4], stream=job[4])

    solo = [answer(job) for job in jobs]
    assert len({ids for _, ids, _, _ in solo}) == 16
    with ThreadPoolExecutor(16) as pool:
        for _ in range(2):
            assert list(pool.map(answer, jobs)) == solo


def test_t11_a_client_that_leaves_after_one_chunk_stops_its_request(served):
    stream = stream_generate(served.url, SLOW, max_tokens=200, draft_len=0)
    next(stream)
    start = time.monotonic()
    stream.close()
    assert time.monotonic() - start < 3
    assert_served(served)
    assert_idle(served, 3)


@pytest.mark.parametrize(("model", "length"), [("speculative_decoding", 200), ("ensemble", 12)])
def test_t11_a_connection_that_breaks_harms_nobody_and_the_loop_notices_where_triton_does(served, model, length):
    """Triton 2.51 does not tell a running step of an ensemble that its client has gone: such a request goes on to its max_tokens."""
    with triton.InferenceServerClient(served.url) as client:
        answers = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        inputs = make_inputs([1, 1], SLOW, max_tokens=length, stream=True, num_draft_tokens=0)
        if model == "speculative_decoding":
            inputs.append(make_input("input_ids", np.array([[served.tokenizer.token_to_id(SLOW)]], np.int32)))
        client.async_stream_infer(model, inputs)
        result, error = answers.get(timeout=10)
        assert error is None
        assert result.as_numpy("num_output_tokens").item() == 1
        client.stop_stream(cancel_requests=True)
    assert_served(served)
    assert_idle(served, 3 if model == "speculative_decoding" else 0.3 * length + 3)


# --- t-12: words that must not come


@pytest.mark.parametrize(("body", "message"), [({"bad_words": ["on"]}, "bad_words ['on']"), ({"embedding_bias": "on"}, "'embedding_bias'")])
def test_t12_bad_words_and_a_bias_are_refused_by_name(served, body, message):
    status, answer = served.post("generate", text_input="L", max_tokens=9, **body)
    assert status == 400
    assert f"Cannot honour {message}" in json.loads(answer)["error"]
    assert_served(served)


# --- k-01: shapes


def make_input(name, array):
    dtype = {"int32": "INT32", "bool": "BOOL", "object": "BYTES"}[str(array.dtype)]
    tensor = triton.InferInput(name, array.shape, dtype)
    tensor.set_data_from_numpy(array)
    return tensor


def make_inputs(shape, prompt="L", **values):
    """The required inputs in a shape, and others of one element."""
    values = {"max_tokens": 9, **values}
    single = [make_input(name, np.array([[value]], bool if isinstance(value, bool) else np.int32)) for name, value in values.items()]
    return [make_input("text_input", np.full(shape, prompt.encode(), object)), *single]


def test_k01_one_prompt_of_the_command_line_is_answered(cli, served):
    code, out, err = cli("call", "--url", served.url, "--prompt", "L", "--max-tokens", 9, "--stop", "never", "--stop", "no")
    assert (code, out) == (0, "on and on\n"), err


def test_k01_an_empty_prompt_is_one_clear_line_before_and_behind_the_wire(cli, served):
    code, out, err = cli("call", "--url", served.url, "--prompt", "")
    assert (code, out) == (1, "")
    assert "empty prompt" in err
    with pytest.raises(ServingError, match=r"refused the request: .*empty prompt.*Give a prompt"):
        ask(served, "")


@pytest.mark.parametrize(
    ("shape", "message"), [([1], r"text_input.*Expected \[-1,1\], got \[1\]"), ([1, 2], r"got \[1,2\]"), ([2, 1], "batch size|batch-size")]
)
def test_k01_two_prompts_or_no_batch_dimension_are_refused(served, shape, message):
    with triton.InferenceServerClient(served.url) as client:
        answers = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("ensemble", make_inputs(shape))
        result, error = answers.get(timeout=10)
        client.stop_stream()
    assert result is None
    with pytest.raises(InferenceServerException, match=message):
        raise error
    assert_served(served)


def test_k01_generate_takes_scalars_and_lists_of_one_and_refuses_two_prompts(served):
    for body in ({"text_input": "S", "stop_words": "b"}, {"text_input": ["S"], "max_tokens": [20], "stop_words": ["never", "b"]}):
        status, answer = served.post("generate", **{"max_tokens": 20, **body})
        assert (status, json.loads(answer)["text_output"]) == (200, "xx a")
    status, answer = served.post("generate", text_input=["S", "L"], max_tokens=9)
    assert (status, "batch size" in json.loads(answer)["error"]) == (400, True)


# --- k-02: streams that do not end


def test_k02_a_stream_whose_last_chunk_is_empty_ends(served):
    start = time.monotonic()
    chunks = ask(served, "E", draft_len=0)
    assert [chunk.text for chunk in chunks] == ["h", "i", ".", ""]
    assert chunks[-1].finish_reason == "stop"
    assert time.monotonic() - start < 3


def test_k02_a_silent_server_is_given_up_and_its_request_stopped(served):
    start = time.monotonic()
    with pytest.raises(ServingError, match=r"sent nothing for 0.1 s"):
        list(stream_generate(served.url, SLOW, max_tokens=200, draft_len=0, timeout=0.1))
    assert time.monotonic() - start < 3
    assert_served(served)
    assert_idle(served, 3)
