"""What hit people who served a pair and who called it, each with the smallest input that shows it, without a server.

Names begin with a row's id. What takes a real server is in tests/integration/test_serving_reports.py.
"""

import importlib.util
import json
import shutil

import fake_triton
import numpy as np
import pytest
import tritonclient.grpc as triton
import yaml
from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import serialize_byte_tensor

from specbuild.artifacts import find_end_ids
from specbuild.build import run_build
from specbuild.compilers.ort_runner import OrtRunner
from specbuild.config import ROLES, load_config
from specbuild.convert import run_convert
from specbuild.errors import ConfigError, ServingError
from specbuild.package import run_package
from specbuild.pair import open_pair
from specbuild.quantize import run_quantize
from specbuild.spec.accept import RULES, ModelVerifier
from specbuild.spec.drafters import ModelDrafter
from specbuild.spec.loop import speculate
from specbuild.spec.sampling import Sampling
from specbuild.spec.stats import SpecStats
from specbuild.tokenizer import load_tokenizer
from specbuild.triton import client
from specbuild.triton.client import make_input, stream_generate
from specbuild.triton.contract import ENGINE, MODELS, PUBLIC
from specbuild.triton.engine_cpu import EngineModel
from specbuild.triton.pbtxt import format_config
from specbuild.triton.repository import PairServing, check_repository, write_repository
from specbuild.triton.speculative import SpeculativeModel
from specbuild.triton.trtllm_model import Place
from specbuild.triton.wire import DTYPES

VOCAB, PADDED = 101, 128  # of the tokenizer, and of both models


def favour_padding(directory):
    """Make every id beyond the tokenizer's more likely than all others: the last hidden state is normed to ones along one column."""
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][0] = 500
    tensors["lm_head.weight"][:, 0] = 0
    tensors["lm_head.weight"][VOCAB::2, 0] = 1  # either sign of that column has its winners
    tensors["lm_head.weight"][VOCAB + 1 :: 2, 0] = -1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def packaged(tmp_path_factory, write_pair_yaml, make_model):
    """A packaged pair of padded models whose generation_config.json names two end ids. Do not write into its directories."""
    base = tmp_path_factory.mktemp("packaged")
    for role, options in (("target", {"num_hidden_layers": 2}), ("draft", {"num_hidden_layers": 1, "seed": 1})):
        directory = shutil.copytree(make_model(vocab_size=PADDED, **options), base / role)
        favour_padding(directory)
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    config = load_config(write_pair_yaml(base, **{role: {"model": str(base / role)} for role in ROLES}))
    for stage in (run_convert, run_quantize, run_build):
        for role in ROLES:
            stage(config, role)
    run_package(config)
    return config


def load_pbtxt(path):
    """Parse a config.pbtxt as Triton does: every field has to be one of its own."""
    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


def load_models(repository):
    return {path.name: load_pbtxt(path / "config.pbtxt") for path in repository.iterdir() if path.is_dir()}


def open_model(monkeypatch, repository, name):
    """Initialize a model.py of a repository as Triton's Python backend does."""
    monkeypatch.setitem(__import__("sys").modules, "triton_python_backend_utils", fake_triton)
    spec = importlib.util.spec_from_file_location("model", repository / name / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    config = MessageToDict(load_pbtxt(repository / name / "config.pbtxt"), preserving_proto_field_name=True)
    model.initialize({
        "model_config": json.dumps({"parameters": {}, **config}), "model_repository": str(repository / name), "model_version": "1",
    })  # fmt: skip
    return model


def make_request(spec, **values):
    """A request in the backend, each value with its batch dimension."""
    dtypes = {tensor.name: DTYPES[tensor.dtype] for tensor in spec.inputs}
    arrays = {name: np.array(value, dtypes[name]) for name, value in values.items()}
    return fake_triton.Request({name: array.reshape(1, *(array.shape or (1,))) for name, array in arrays.items()})


@pytest.fixture
def serving(tmp_path):
    """Return serving(**changes): what a repository of files without content would hold."""
    for role in ROLES:
        (tmp_path / role).mkdir()
        (tmp_path / role / "config.json").write_text("{}")
        (tmp_path / role / "rank0.engine").write_text("")
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    values = {
        "name": "pair", "target_engine": tmp_path / "target", "draft_engine": tmp_path / "draft", "tokenizer_dir": tmp_path,
        "draft_len": 4, "max_draft_len": 8, "rule": "rejection", "drafter": "model", "max_batch_size": 4, "context": 64,
        "draft_context": 64, "end_ids": (2, 3), "pad_id": 0, "vocab_size": 10,
        "places": dict.fromkeys(ROLES, Place(devices=(0,), participants=(), cache_tokens=4096, cache_fraction=0.4)),
    }  # fmt: skip
    return lambda **changes: PairServing(**{**values, **changes})


# --- t-01 and t-02: a repository as it is written


@pytest.mark.parametrize("compiler", ["onnx-cpu", "tensorrt"])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_t01_a_repository_without_optional_settings_has_nothing_left_to_fill_in(serving, tmp_path, compiler, drafter):
    changes = {"draft_engine": None} if drafter == "ngram" else {}
    write_repository(tmp_path / "out", serving(compiler=compiler, drafter=drafter, **changes))
    names = {"ensemble", "preprocessing", "speculative_decoding", "target"} | ({"draft"} if drafter == "model" else set())
    assert {name: config.name for name, config in load_models(tmp_path / "out").items()} == {name: name for name in names}
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert [path for path in files if b"${" in path.read_bytes()] == []
    check_repository(tmp_path / "out")


def test_t02_a_tokenizer_from_a_relative_path_lies_in_a_version_folder_and_moves_along(serving, tmp_path, monkeypatch):
    (tmp_path / "hub").mkdir()
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "tokenizer.json", tmp_path / "hub" / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    write_repository(tmp_path / "out", serving(tokenizer_dir=type(tmp_path)("hub")))
    shutil.move("out", "elsewhere/moved")
    for made_of in ("hub", "target", "draft"):
        shutil.rmtree(made_of)
    monkeypatch.chdir("/")
    repository = tmp_path / "elsewhere" / "moved"
    assert all((path / "config.pbtxt").is_file() for path in repository.iterdir())  # a folder that is no model keeps Triton from starting
    found = {path.relative_to(repository).as_posix() for path in repository.rglob("tokenizer*")}
    assert found == {"preprocessing/1/tokenizer.json", "speculative_decoding/1/tokenizer.json"}
    [response] = open_model(monkeypatch, repository, "preprocessing").execute([make_request(MODELS["preprocessing"], text_input=b"b")])
    assert response.values()["input_ids"].tolist() == [[1]]


# --- t-03: one batch size


def test_t03_a_yaml_of_a_larger_batch_than_the_engines_is_refused_before_anything_is_written(packaged, tmp_path):
    values = yaml.safe_load(packaged.path.read_text())
    values["build"]["max_batch_size"] = 8
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(values))
    before = {path: path.stat().st_mtime_ns for path in packaged.repository_dir.rglob("*")}
    with pytest.raises(ConfigError, match=r"Cannot use .* was made for max_batch_size 4, .* says 8"):
        run_package(load_config(tmp_path / "pair.yaml"))
    assert {path: path.stat().st_mtime_ns for path in packaged.repository_dir.rglob("*")} == before


@pytest.mark.parametrize("smaller", ROLES)
def test_t03_engines_of_two_batch_sizes_are_served_with_the_smaller_one_everywhere(packaged, tmp_path, smaller):
    shutil.copytree(packaged.workdir, tmp_path / "work", ignore=shutil.ignore_patterns("model_repository"))
    for role in ROLES:
        path = tmp_path / "work" / role / "engine" / "config.json"
        values = json.loads(path.read_text())
        values["build_config"]["max_batch_size"] = 4 if role == smaller else 8
        path.write_text(json.dumps(values))
    values = yaml.safe_load(packaged.path.read_text()) | {"workdir": str(tmp_path / "work")}
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(values))
    run_package(load_config(tmp_path / "pair.yaml"))
    configs = load_models(tmp_path / "work" / "model_repository")
    assert [configs[role].max_batch_size for role in ROLES] == [4, 4]
    assert configs["speculative_decoding"].parameters["max_running"].string_value == "4"
    # One prompt for each request of the public models: answers differ in length. Requests still share the engines' passes.
    assert {configs[name].max_batch_size for name in ("ensemble", "preprocessing", "speculative_decoding")} == {1}


@pytest.mark.parametrize(
    ("model", "size", "message"),
    [("target", 8, "max_batch_size differs"), ("draft", 2, "max_batch_size differs"), ("ensemble", 8, "max_batch_size 8 exceeds")],
)
def test_t03_a_repository_of_two_batch_sizes_is_refused(serving, tmp_path, model, size, message):
    write_repository(tmp_path / "out", serving())
    config = load_pbtxt(tmp_path / "out" / model / "config.pbtxt")
    config.max_batch_size = size
    (tmp_path / "out" / model / "config.pbtxt").write_text(format_config(config))
    with pytest.raises(ServingError, match=message):
        check_repository(tmp_path / "out")


# --- t-04: decoupled or not


@pytest.mark.parametrize("compiler", ["onnx-cpu", "tensorrt"])
def test_t04_the_loop_alone_is_decoupled_and_its_engines_are_not(serving, tmp_path, compiler):
    write_repository(tmp_path / "out", serving(compiler=compiler))
    decoupled = {name for name, config in load_models(tmp_path / "out").items() if config.model_transaction_policy.decoupled}
    assert decoupled == {"speculative_decoding"}  # Triton derives the ensemble's own from its steps


def test_t04_a_decoupled_model_returns_nothing_and_the_others_one_response_for_each_request(packaged, monkeypatch):
    repository = packaged.repository_dir
    ids = make_request(ENGINE, input_ids=[1, 2], input_lengths=2, request_output_len=1)
    assert len(open_model(monkeypatch, repository, "target").execute([ids, ids])) == 2
    text = make_request(MODELS["preprocessing"], text_input=b"def")
    assert len(open_model(monkeypatch, repository, "preprocessing").execute([text, text])) == 2
    loop = open_model(monkeypatch, repository, "speculative_decoding")
    values = {"input_ids": [[1]], "text_input": [[b"d"]], "max_tokens": [[0]]}
    request = make_request(MODELS["speculative_decoding"], **{name: value[0] for name, value in values.items()})
    assert loop.execute([request]) is None
    assert request.done.wait(20)  # the answer (an error: 0 tokens) went through the sender
    loop.finalize()


def test_t04_an_engine_that_is_asked_to_stream_says_who_does(packaged, monkeypatch):
    request = make_request(ENGINE, input_ids=[1, 2], input_lengths=2, request_output_len=1, streaming=True)
    [response] = open_model(monkeypatch, packaged.repository_dir, "draft").execute([request])
    assert "Send streaming=false; the ensemble streams" in response.error().message()


# --- t-06, t-07 and s-11: the served loop, over engines that follow a script


class Script:
    """Says the tokens of a script behind a prompt of two tokens, then starts anew; a draft errs at every `errs` th position."""

    max_seq_len = 64

    def __init__(self, script, vocab_size, errs=0):
        self.script, self.vocab_size, self.errs = list(script), vocab_size, errs

    def logits_batch(self, requests):
        return [self._logits(len(tokens), n) for tokens, n in requests]

    def _logits(self, length, n):
        rows = np.zeros((n, self.vocab_size), np.float32)
        for row, position in zip(rows, range(length - n, length), strict=True):
            token = self.script[(position - 1) % len(self.script)]
            row[(token + 1) % self.vocab_size if self.errs and position % self.errs == 0 else token] = 20
        return rows


@pytest.fixture
def serve(tmp_path):
    """Return serve(directory of a tokenizer, script, parameters, errs): ask(prompt ids, ...) -> the responses' values."""
    opened = []

    def start(directory, script, parameters, errs=0):
        vocab = load_tokenizer(directory).get_vocab_size()
        for role, every in (("target", 0), ("draft", errs)):
            fake_triton.ENGINES[role] = EngineModel(Script(script, vocab, every), role, parameters["rule"])
        model = SpeculativeModel(fake_triton, directory, {key: {"string_value": value} for key, value in parameters.items()})
        opened.append(model)

        def ask(stream=False, **values):
            values = {"max_tokens": 20, "return_token_ids": True, "stream": stream, **values}
            request = make_request(MODELS["speculative_decoding"], input_ids=[1, 2], text_input=b"?", **values)
            model.submit(request)
            assert request.done.wait(20)
            return [response.values() for response in request.responses]

        return ask

    yield start
    for model in opened:
        model.close()


def join(responses):
    """Text, ids and reason of an answer."""
    text = b"".join(values["text_output"].item() for values in responses).decode()
    return text, [i for values in responses for i in values["output_ids"].reshape(-1).tolist()], responses[-1]["finish_reason"].item()


def loop_parameters(repository):
    parameters = load_pbtxt(repository / "speculative_decoding" / "config.pbtxt").parameters
    return {key: value.string_value for key, value in parameters.items()}


@pytest.mark.parametrize("draft_len", range(6))
@pytest.mark.parametrize("end", [9, 7])
def test_t06_each_end_id_of_generation_config_ends_an_answer_and_is_not_in_its_text(packaged, serve, draft_len, end):
    parameters = loop_parameters(packaged.repository_dir)
    assert (parameters["end_ids"], parameters["pad_id"]) == ("7,9", "7")  # without a pad id of its own, the first end id
    version_dir = packaged.repository_dir / "speculative_decoding" / "1"
    text = load_tokenizer(version_dir).decode([40, 41])
    ask = serve(version_dir, [40, 41, end, 42, 43], parameters)
    for stream in (False, True):
        responses = ask(stream, num_draft_tokens=draft_len)
        assert join(responses) == (text, [40, 41, end], b"stop")
        last = responses[-1]
        drafted = last["total_draft_tokens"].item()
        assert drafted == last["total_accepted_draft_tokens"].item() <= 3  # nothing behind the end is counted


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": [7, 9], "config": 3}, (7, 9)),
        ({"generation_config": 9, "config": 3}, (9,)),
        ({"generation_config": None, "config": [3, 4]}, (3, 4)),
        ({"config": 3}, (3,)),
        ({}, ()),
    ],
)
def test_t06_end_ids_are_those_of_generation_config_and_else_of_config(tmp_path, files, expected):
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": value}))
    assert find_end_ids(tmp_path) == expected


def make_letters(directory):
    """Save a byte-level tokenizer that has "a", "b", " ", and " ab" as one token."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "Ġab"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("Ġ", "a"), ("Ġa", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("draft_len", range(6))
@pytest.mark.parametrize(
    ("pieces", "text", "used"),
    [
        (["x", "x", "a", "b", "y", "y"], "xx", 4),
        (["x", "Ġab", "y", "y"], "x ", 2),
        (["Ġab"], " ", 1),
        (["a", "a", "b", "y"], "a", 3),
        (["x", "Ġa", "b", "y"], "x ", 3),
    ],
)
def test_t07_a_stop_string_is_found_however_it_is_cut_into_tokens_with_and_without_speculation(
    serving, serve, tmp_path, pieces, text, used, draft_len
):
    tokenizer = make_letters(tmp_path)
    parameters = serving(end_ids=(), vocab_size=tokenizer.get_vocab_size()).loop_parameters()
    ids = [tokenizer.token_to_id(piece) for piece in pieces]
    ask = serve(tmp_path, ids, parameters, errs=3)
    for stream in (False, True):
        assert join(ask(stream, num_draft_tokens=draft_len, stop_words=[b"never", b"ab"])) == (text, ids[:used], b"stop")


@pytest.mark.parametrize("rule", RULES)
def test_s11_a_self_draft_whose_third_token_is_the_end_counts_three_everywhere(serving, serve, tmp_path, rule):
    tokenizer = make_letters(tmp_path)
    parameters = serving(end_ids=(5,), rule=rule, vocab_size=tokenizer.get_vocab_size()).loop_parameters()
    ask = serve(tmp_path, [3, 4, 5, 6], parameters)
    for stream in (False, True):
        responses = ask(stream, num_draft_tokens=5)
        last = responses[-1]
        assert join(responses)[1:] == ([3, 4, 5], b"stop")
        assert sum(values["num_output_tokens"].item() for values in responses) == 3  # what a client's usage is made of
        counts = [last[name].item() for name in ("rounds", "total_draft_tokens", "total_accepted_draft_tokens")]
        assert counts == [1, 3, 3]


# --- t-12: padded vocabularies in a served engine


@pytest.mark.parametrize("sampling", [{"runtime_top_k": 1}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("role", ROLES)
def test_t12_a_served_engine_has_the_tokenizer_s_width_and_never_gives_an_id_of_padding(packaged, monkeypatch, role, sampling):
    prompt = [3, 4, 5]
    raw = OrtRunner(packaged.repository_dir / role / "1" / "engine").logits(prompt, 3)
    assert raw.shape == (3, PADDED)
    assert (raw.argmax(axis=1) >= VOCAB).all()  # without a mask, padding would win
    more = {"input_lengths": len(prompt), "request_output_len": 24, "exclude_input_in_output": True, **sampling}
    request = make_request(ENGINE, input_ids=prompt, return_generation_logits=True, **more)
    [response] = open_model(monkeypatch, packaged.repository_dir, role).execute([request])
    values = response.values()
    assert values["generation_logits"].shape == (1, 1, 24, VOCAB)
    assert values["output_ids"].size == 24
    assert values["output_ids"].max() < VOCAB


# --- s-06, s-12 and s-23: budgets and the draft's cache, on built engines


@pytest.fixture
def engines(packaged):
    """The target twice: as itself, and as its own draft."""
    return [OrtRunner(packaged.dir_of("target", "engine"), max_slots=1, vocab_size=VOCAB) for _ in range(2)]


@pytest.mark.parametrize("draft_len", range(1, 9))
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, seed=4)], ids=["greedy", "sampled"])
def test_s06_a_self_draft_is_accepted_whole_and_its_cache_misses_no_token(engines, draft_len, sampling):
    target, draft = engines
    sequence = [1, 2, 3]
    steps = speculate(
        ModelDrafter(draft), ModelVerifier(target, "rejection"), list(sequence), sampling=sampling, max_tokens=200, draft_len=draft_len,
        context=256,
    )  # fmt: skip
    for step in steps:
        sequence += step.tokens
        assert step.accepted == step.drafted == len(step.tokens) - 1
        assert step.drafted == draft_len or step.finish_reason == "length"
        if step.drafted:
            # Neither its last guess nor the target's own token behind it: it reads both at the beginning of the next round.
            assert draft._slots[0].tokens == sequence[:-2]
            assert draft.tokens_computed == len(sequence) - 2  # each once: nothing is rewound
    assert len(sequence) == 3 + 200


@pytest.mark.parametrize("draft_len", range(9))
def test_s12_an_answer_keeps_to_budget_and_context_and_an_end_inside_the_budget_wins(packaged, draft_len):
    pair = open_pair(packaged)

    def ask(prompt, max_tokens, end_ids=()):
        steps = list(pair.steps(prompt, Sampling(end_ids=frozenset(end_ids)), max_tokens, draft_len))
        return [token for step in steps for token in step.tokens], steps[-1].finish_reason, sum(step.drafted for step in steps)

    prompt = np.random.default_rng(0).integers(1, VOCAB, pair.target.max_seq_len - 2).tolist()
    for begin, asked, given in ((prompt[:9], 3, 3), (prompt, 50, 2), (prompt, 1, 1), ([*prompt, 1], 50, 1)):
        tokens, reason, drafted = ask(begin, asked)
        assert (len(tokens), reason) == (given, "length")
        assert drafted <= given
    tokens = ask(prompt[:9], 3)[0]
    assert len(set(tokens)) == 3
    assert ask(prompt[:9], 3, tokens[2:])[:2] == (tokens, "stop")  # the end is the last token that fits
    assert ask(prompt[:9], 2, tokens[2:])[:2] == (tokens[:2], "length")  # the end would be the first that does not
    assert ask(prompt[:9], 3, tokens[1:])[:2] == (tokens[:2], "stop")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, seed=4)], ids=["greedy", "sampled"])
def test_s23_a_draft_that_idled_reads_what_was_committed_and_is_accepted_whole_at_once(engines, sampling):
    target, draft = engines
    schedule = [3, 0, 0, 3, 0, 5, 1, 0, 0, 0, 8]
    steps = speculate(
        ModelDrafter(draft), ModelVerifier(target, "rejection"), [1, 2, 3], sampling=sampling, max_tokens=sum(schedule) + len(schedule),
        draft_len=schedule.__getitem__, context=256,
    )  # fmt: skip
    stats = SpecStats()
    found = []
    for step in steps:
        stats.add(step)
        found.append((step.drafted, step.accepted))
    assert found == [(k, k) for k in schedule]
    assert stats.acceptance_rate == 1.0


# --- k-01 and k-02: the client


@pytest.mark.parametrize(
    ("name", "value", "shape"), [("text_input", "x", [1, 1]), ("max_tokens", 16, [1, 1]), ("stop_words", ["a", "b"], [1, 2])]
)
def test_k01_the_client_puts_the_batch_in_front_of_the_shape_that_the_config_has(name, value, shape):
    spec = next(tensor for tensor in PUBLIC.inputs if tensor.name == name)
    assert make_input(spec, value).shape() == shape
    assert len(shape) == 1 + len(spec.dims)
    assert all(declared in (-1, found) for declared, found in zip(spec.dims, shape[1:], strict=True))


@pytest.mark.parametrize("source", ["option", "file"])
def test_k01_an_empty_prompt_is_refused_before_anything_is_sent(cli, tmp_path, source):
    (tmp_path / "empty.txt").write_text("")
    prompt = ["--prompt", ""] if source == "option" else ["--prompt-file", tmp_path / "empty.txt"]
    code, out, err = cli("call", "--url", "localhost:1", *prompt)  # nobody listens there
    assert (code, out) == (1, "")
    assert err.splitlines() == ["Error: Cannot generate from an empty prompt: expected at least one character. Give a prompt."]


def make_result(text=None, reason=None, final=False):
    """A response as tritonclient hands it over; without a text it only ends a stream."""
    response = service_pb2.ModelInferResponse()
    response.parameters["triton_final_response"].bool_param = final
    values = {} if text is None else {"text_output": text, "rounds": 1, "total_draft_tokens": 0, "total_accepted_draft_tokens": 0}
    for name, value in (values | ({} if reason is None else {"finish_reason": reason})).items():
        array = np.array([[value.encode() if isinstance(value, str) else value]], object if isinstance(value, str) else np.int32)
        response.outputs.add(name=name, datatype="BYTES" if isinstance(value, str) else "INT32", shape=[1, 1])
        response.raw_output_contents.append(serialize_byte_tensor(array).item() if isinstance(value, str) else array.tobytes())
    return triton.InferResult(response)


class Connection:
    """tritonclient's InferenceServerClient over responses that are there at once: some for the request, some for its stop."""

    def __init__(self, answer, stopped=()):
        self.answers, self.sent, self.closed = [answer, stopped], [], []

    def __call__(self, url):
        return self

    def is_model_ready(self, model, client_timeout):
        return True

    def start_stream(self, callback):
        self.callback = callback

    def async_stream_infer(self, model, inputs, **options):
        self.sent.append(({tensor.name() for tensor in inputs}, options))
        for result in self.answers.pop(0):
            self.callback(result, None)

    def stop_stream(self, cancel_requests):
        self.closed.append(cancel_requests)

    def close(self):
        self.closed.append("closed")


@pytest.mark.parametrize(
    "answer",
    [
        [make_result("a"), make_result("b", "stop"), make_result(final=True)],
        [make_result("a"), make_result("b"), make_result("", "stop", final=True)],
        [make_result("ab", "stop", final=True)],
    ],
    ids=["an empty response behind the last", "a last chunk without text", "one response"],
)
def test_k02_a_stream_ends_with_the_flag_that_the_client_asked_for(monkeypatch, answer):
    connection = Connection(answer)
    monkeypatch.setattr(client.triton, "InferenceServerClient", connection)
    chunks = list(stream_generate("here", "x", max_tokens=3, timeout=0.5))
    assert ("".join(chunk.text for chunk in chunks), chunks[-1].finish_reason) == ("ab", "stop")
    assert [options["enable_empty_final_response"] for _, options in connection.sent] == [True]
    assert connection.closed == [False, "closed"]  # nothing to cancel


@pytest.mark.parametrize(("stopped", "cancels"), [([make_result(final=True), make_result(final=True)], False), ([], True)])
def test_k02_a_stream_that_falls_silent_is_given_up_and_its_request_stopped(monkeypatch, stopped, cancels):
    connection = Connection([make_result("a")], stopped)
    monkeypatch.setattr(client.triton, "InferenceServerClient", connection)
    monkeypatch.setattr(client, "STOP_SECONDS", 0.05)
    stream = stream_generate("here", "x", max_tokens=3, timeout=0.05)
    assert next(stream).text == "a"
    with pytest.raises(ServingError, match=r"Triton at here sent nothing for 0.05 s\. Look at its log, or allow more time"):
        next(stream)
    (_, first), (inputs, second) = connection.sent
    assert inputs == {"text_input", "max_tokens", "stop"}
    assert first["request_id"] == second["request_id"] != ""
    assert connection.closed == [cancels, "closed"]


def test_t03_a_repository_edited_beyond_its_engines_is_refused(packaged, tmp_path):
    repository = tmp_path / "repository"
    shutil.copytree(packaged.repository_dir, repository)
    for role in ROLES:
        path = repository / role / "config.pbtxt"
        path.write_text(path.read_text().replace("max_batch_size: 4", "max_batch_size: 8"))
    with pytest.raises(ServingError, match="max_batch_size is 8, but its engine was built for 4"):
        check_repository(repository)


@pytest.mark.parametrize("command", ["generate", "call"])
def test_k01_a_second_prompt_is_refused_not_dropped(cli, command):
    arguments = ["absent.yaml"] if command == "generate" else []
    code, _, err = cli(command, *arguments, "--prompt", "a", "--prompt", "b")
    assert code == 2
    assert "Give --prompt once: a request is one prompt, got 2." in err
