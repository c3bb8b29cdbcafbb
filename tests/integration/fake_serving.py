"""Pairs of engines without weights on a real tritonserver, and the same generated in this process."""

import dataclasses
import json
import shutil
import socket
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import fake_triton
import fake_trtllm_model
import pytest
from fake_runner import FakeRunner
from fake_trtllm_model import Backend, Settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specbuild.errors import ServingError
from specbuild.spec.accept import ModelVerifier
from specbuild.spec.drafters import DRAFTERS
from specbuild.spec.loop import speculate
from specbuild.spec.sampling import Sampling
from specbuild.spec.stats import SpecStats
from specbuild.text import TextStream, generate_text
from specbuild.tokenizer import encode_prompt, load_tokenizer
from specbuild.triton.bls import make_models
from specbuild.triton.client import stream_generate
from specbuild.triton.pbtxt import format_config, load_config
from specbuild.triton.repository import PairServing, check_repository, write_repository
from specbuild.triton.request import LoopSettings
from specbuild.triton.server import Ports, Server, find_installation
from specbuild.triton.trtllm_model import Place

HERE = Path(__file__).parent
END, VOCAB, CONTEXT, MAX_DRAFT = 2, 300, 256, 8


def write_tokenizer(path):
    """Bytes as tokens, and some longer ones."""
    pieces = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"zz{i}" for i in range(VOCAB - len(pieces))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(pieces[:3])
    tokenizer.save(str(path))


def find_ports():
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    numbers = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return Ports(*numbers)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Which engines a server has, and in what they are odd: `mock` holds fields of fake_trtllm_model.Settings, those but faults."""

    compiler: str
    rule: str = "exact"
    drafter: str = "model"
    mock: dict = dataclasses.field(default_factory=dict)
    faults: dict = dataclasses.field(default_factory=dict)  # of the target

    @property
    def fast_logits(self):
        return self.mock.get("fast_logits", False)

    def settings(self, role):
        """The mock's settings for one engine: as tight as the loop's bounds allow, so that one token more would show."""
        draft_len = MAX_DRAFT if role == "target" else 0
        faults = self.faults if role == "target" else {}
        return Settings(CONTEXT + draft_len, CONTEXT - 1, draft_len, faults=faults, **self.mock)


def write_pair(base, kind):
    """Write the repository of a pair of engines without weights; returns its directory, moved once."""
    for role in ("target", "draft"):
        settings = dataclasses.asdict(kind.settings(role))
        limits = {key: settings.pop(key) for key in ("max_seq_len", "max_input_len", "max_draft_len")}
        (base / role).mkdir()
        (base / role / "config.json").write_text(json.dumps({"build_config": limits}))
        (base / role / "rank0.engine").write_text("")
    write_tokenizer(base / "tokenizer.json")
    place = Place(devices=(0,), participants=(), cache_tokens=4096, cache_fraction=0.4)
    write_repository(base / "written", PairServing(
        name="fake", target_engine=base / "target", draft_engine=base / "draft", tokenizer_dir=base, draft_len=4, max_draft_len=MAX_DRAFT,
        rule=kind.rule, drafter=kind.drafter, max_batch_size=8, context=CONTEXT, draft_context=CONTEXT, end_ids=(END,), pad_id=0,
        vocab_size=VOCAB, compiler=kind.compiler, places={"target": place, "draft": place}, fast_logits=kind.fast_logits,
    ))  # fmt: skip
    repository = base / "moved"
    shutil.move(base / "written", repository)
    check_repository(repository)
    model = "fake_engine_model.py" if kind.compiler == "onnx-cpu" else "fake_trtllm_model.py"
    for role in ("target", "draft"):
        shutil.copy(HERE / "fake_runner.py", repository / role / "1")
        shutil.copy(HERE / model, repository / role / "1" / "model.py")
        if kind.compiler == "tensorrt":
            write_mock_config(repository / role / "config.pbtxt", kind.settings(role), base)
    return repository


def write_mock_config(path, settings, link_dir):
    """Let the Python backend run what was written for TensorRT-LLM's, and leave everything else in the config as it is."""
    config = load_config(path)
    config.backend = "python"
    config.parameters["exclude_input_in_output"].string_value = str(settings.exclude_input).lower()
    mock = {key: getattr(settings, key) for key in ("ignores_exclude", "throws", "faults")}
    mock |= {"twist": 0.0 if settings.max_draft_len else 1.0, "link_dir": str(link_dir)}
    config.parameters["mock"].string_value = json.dumps(mock)
    path.write_text(format_config(config))


@contextmanager
def run_pair(base, kind):
    """Serve a pair; yields what calls it, and what generates the same in this process."""
    try:
        find_installation()
    except ServingError as error:
        pytest.skip(str(error))
    repository = write_pair(base, kind)
    with (base / "log.txt").open("w") as log:
        server = Server(repository, find_ports(), log=log)
        with server:
            server.wait_until_ready(60)
            yield Served(server.ports, load_tokenizer(base), kind, base / "log.txt")
            assert server.is_running()
    text = (base / "log.txt").read_text()
    assert "Signal (11)" not in text
    assert "successfully unloaded 'ensemble'" in text  # nothing leaked
    assert not list(base.glob("*.npy"))  # every draft's logits were fetched


class DirectTriton:
    """triton_python_backend_utils over mock engines in this process. Keeps what they were asked: (model, inputs)."""

    Tensor, InferenceResponse, TritonError = fake_triton.Tensor, fake_triton.InferenceResponse, fake_triton.TritonError
    get_input_tensor_by_name = staticmethod(fake_triton.get_input_tensor_by_name)
    get_output_tensor_by_name = staticmethod(fake_triton.get_output_tensor_by_name)

    def __init__(self, backends):
        self.backends, self.calls = backends, []

    def InferenceRequest(self, model_name, requested_output_names, inputs, request_id):  # noqa: N802 - Triton's name
        request = fake_triton.Request({tensor.name(): tensor.as_numpy() for tensor in inputs}, request_id)
        self.calls.append((model_name, {tensor.name(): tensor.as_numpy() for tensor in inputs}))
        return SimpleNamespace(exec=lambda: fake_trtllm_model.respond(self, self.backends[model_name], request))


def make_direct(kind, warnings, runners=None):
    """The mock engines of a pair, in this process."""
    links, runners = {}, runners or {"target": FakeRunner(), "draft": FakeRunner(twist=1.0)}
    return DirectTriton({role: Backend(runners[role], kind.settings(role), links, warnings.append) for role in runners})


def make_settings(kind, **more):
    """The loop's parameters, as the repository has them."""
    values = {
        "draft_len": 4, "max_draft_len": MAX_DRAFT, "rule": kind.rule, "drafter": kind.drafter, "context": CONTEXT,
        "draft_context": CONTEXT, "end_ids": frozenset({END}), "max_running": 8, "fast_logits": kind.fast_logits,
        "seed_per_request": kind.compiler == "tensorrt",
    }  # fmt: skip
    return LoopSettings(**{**values, **more})


class Served:
    """A running server. `local` generates what it should: by the loop over the models themselves, or, where the engines are mocks
    that sample, over mocks in this process: their random numbers are their own."""

    def __init__(self, ports, tokenizer, kind, log):
        self.ports, self.tokenizer, self.kind, self.log, self.warnings = ports, tokenizer, kind, log, []

    @property
    def url(self):
        return f"127.0.0.1:{self.ports.grpc}"

    def models(self, sampling):
        """What drafts and what verifies here."""
        if self.kind.compiler == "tensorrt" and not sampling.greedy:
            return make_models(make_direct(self.kind, self.warnings), make_settings(self.kind), "")
        drafter = DRAFTERS[self.kind.drafter](FakeRunner(twist=1.0))
        return drafter, ModelVerifier(FakeRunner(), self.kind.rule)

    def local(self, prompt, sampling, max_tokens=30, draft_len=4):
        """Text, ids, counts and reason, as this process generates them."""
        ids = encode_prompt(self.tokenizer, prompt)
        sampling = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, frozenset({END}))
        steps = speculate(
            *self.models(sampling), ids, sampling=sampling, max_tokens=max_tokens, draft_len=draft_len, context=CONTEXT,
            draft_context=CONTEXT,
        )  # fmt: skip
        stats, texts = SpecStats(), []
        for step in generate_text(steps, TextStream(self.tokenizer, ids)):
            stats.add(step)
            texts.append((step.text, step.tokens))
        tokens = tuple(token for _, part in texts for token in part)
        return "".join(text for text, _ in texts), tokens, (stats.rounds, stats.drafted, stats.accepted), step.finish_reason

    def remote(self, prompt, sampling, max_tokens=30, draft_len=4, **more):
        """The same from the server."""
        chunks = list(stream_generate(self.url, prompt, max_tokens=max_tokens, sampling=sampling, draft_len=draft_len, timeout=30, **more))
        last, tokens = chunks[-1], tuple(token for chunk in chunks for token in chunk.token_ids)
        return "".join(chunk.text for chunk in chunks), tokens, (last.rounds, last.drafted, last.accepted), last.finish_reason

    def post(self, endpoint, **body):
        """Status and body of an HTTP call to the public model."""
        url = f"http://127.0.0.1:{self.ports.http}/v2/models/ensemble/{endpoint}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
