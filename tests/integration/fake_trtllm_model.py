"""model.py that stands in for Triton's TensorRT-LLM backend, over FakeRunner: what that backend does as seen from outside.

Written from upstream's contract and sharing no code with specbuild, so that nothing here vouches for itself. It accepts drafts inside,
leaves the end id out of its output, and draws with one generator that starts anew with every request.
"""

import json
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from fake_runner import FakeRunner

INPUTS = (
    "input_ids", "input_lengths", "request_output_len", "draft_input_ids", "draft_logits", "draft_acceptance_threshold", "end_id",
    "runtime_top_k", "runtime_top_p", "temperature", "seed", "beam_width", "return_generation_logits", "exclude_input_in_output", "stop",
    "streaming",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """An engine's limits, its model's parameters, and in what this backend is an odd one."""

    max_seq_len: int
    max_input_len: int
    max_draft_len: int = 0
    exclude_input: bool = False  # where a request does not say
    ignores_exclude: bool = False  # of a request: older ones have no such input
    throws: bool = False  # at a draft beyond the input limit, where newer ones cut it
    fast_logits: bool = False
    faults: dict = field(default_factory=dict)  # first id of a sequence -> "error", "nothing", "too long", "no draft"


class RefusedError(Exception):
    """What the client reads."""


def check(condition, message):
    if not condition:
        raise RefusedError(message)


class Sampler:
    """Temperature, then the top k, then the top p; unset, top_k is 1. Draws along the descending probabilities."""

    def __init__(self, values):
        self.temperature = values.get("temperature", 1.0)
        self.top_k, self.top_p = values.get("runtime_top_k", 1), values.get("runtime_top_p", 1.0)
        check(self.temperature > 0, f"[TensorRT-LLM][ERROR] Requirement violated: temperature > 0, got {self.temperature}")
        if self.top_p <= 0:  # unset
            self.top_k, self.top_p = self.top_k or 1, 1.0
        self.uniform = np.random.default_rng(values.get("seed", 0)).random

    def probs(self, row):
        order = np.argsort(-row, kind="stable")[: self.top_k or None]
        mass = softmax(row[order].astype(np.float64) / self.temperature)
        kept = np.cumsum(mass) - mass < self.top_p
        result = np.zeros(len(row))
        result[order[kept]] = mass[kept] / mass[kept].sum()
        return result

    def draw(self, weights):
        order = np.argsort(-weights, kind="stable")
        edges = np.cumsum(weights[order])
        return int(order[min(np.searchsorted(edges, self.uniform() * edges[-1], side="right"), len(order) - 1)])


def softmax(rows):
    powers = np.exp(rows - rows.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class Backend:
    """One engine. `links` is where fast logits wait for the target: {number: logits}."""

    def __init__(self, runner, settings, links, warn=print):
        self.runner, self.settings, self.links, self.warn, self.numbers = runner, settings, links, warn, count(1)

    def run(self, values):
        """Answer one request ({input: array without the batch dimension}) with output_ids (beam, length) and so on."""
        if values.get("stop"):
            return {}
        check(not values.get("streaming"), "Streaming is only supported if model is deployed using decoupled mode.")
        tokens = values["input_ids"].tolist()[: values["input_lengths"]]
        draft, odds = self.read_draft(values)
        check(len(tokens) <= self.settings.max_input_len, (
            f"Prompt length ({len(tokens)}) exceeds maximum input length ({self.settings.max_input_len}). Set log level to info and check "
            "TRTGptModel logs for how maximum input length is set"
        ))  # fmt: skip
        draft = self.cut_draft(tokens, draft)
        asked = self.cut_output(tokens, draft, values["request_output_len"])
        sampler, end_id = Sampler(values), values.get("end_id", -1)
        if draft:
            new, rows = self.verify(tokens, draft, odds, sampler, end_id)
        else:
            new, rows = self.generate(tokens, asked, sampler, end_id)
        new = self.spoil(tokens, new[: max(0, asked)], asked)
        return self.make_answer(values, tokens, new, rows)

    def read_draft(self, values):
        """The draft, and the distributions to judge it by: the plain softmax of its logits."""
        draft, logits = values.get("draft_input_ids"), values.get("draft_logits")
        if draft is None:
            check(logits is None, "Draft tokens must be specified when draft logits are given.")
            return [], None
        check(draft.size, "[TensorRT-LLM][ERROR] Assertion failed: !mTokens.empty()")
        check(values.get("beam_width", 1) == 1, "Can't use speculative decoding with beam search.")
        check(len(draft) <= self.settings.max_draft_len, (
            f"Draft tokens length ({len(draft)}) exceeds maximum draft tokens length ({self.settings.max_draft_len})."
        ))  # fmt: skip
        threshold = values.get("draft_acceptance_threshold", 1.0)
        check(0 < threshold <= 1, "[TensorRT-LLM][ERROR] Assertion failed: acceptanceThreshold > 0.f && acceptanceThreshold <= 1.f")
        if logits is None:
            return draft.tolist(), None
        check(logits.ndim == 2, "[TensorRT-LLM][ERROR] Assertion failed: Expected 2D logits")
        if self.settings.fast_logits:
            check(logits.shape == (1, 4), "[TensorRT-LLM][ERROR] Assertion failed: draft logits are no SpeculativeDecodingFastLogitsInfo")
            logits = self.links.pop(int(logits.view(np.uint64)[0, 0]))
        check(len(logits) == len(draft), f"[TensorRT-LLM][ERROR] Assertion failed: {len(logits)} rows of draft logits, {len(draft)} tokens")
        check(logits.shape[1] == self.runner.vocab_size, "Incompatible buffer sizes")
        return draft.tolist(), softmax(logits.astype(np.float64))

    def cut_draft(self, tokens, draft):
        """A draft that does not fit behind the prompt is an error to older backends; newer ones cut it with a warning."""
        limit, size = self.settings.max_input_len, len(draft)
        if len(tokens) + size <= limit:
            return draft
        message = f"Prompt length + number of draft tokens ({len(tokens)} + {size}) exceeds maximum input length ({limit})."
        check(not self.settings.throws, message)
        self.warn(f"{message} Number of draft tokens has been reduced to {limit - len(tokens)}.")
        return draft[: limit - len(tokens)]

    def cut_output(self, tokens, draft, asked):
        """Room for a whole draft is reserved, drafted or not."""
        reserved = len(draft) or self.settings.max_draft_len
        room = self.settings.max_seq_len - len(tokens) - reserved
        if asked > room:
            self.warn(f"Number of requested output tokens has been reduced from {asked} to {room}.")
        return min(asked, room)

    def generate(self, tokens, asked, sampler, end_id):
        new, rows = [], []
        while len(new) < asked:
            rows.append(self.runner.logits_batch([([*tokens, *new], 1)])[0][0])
            token = sampler.draw(sampler.probs(rows[-1]))
            if token == end_id:
                break
            new.append(token)
        return new, rows

    def verify(self, tokens, draft, odds, sampler, end_id):
        """The accepted drafted tokens and one of the target's own: what it drew instead, or the residual's, or a bonus."""
        rows = self.runner.logits_batch([([*tokens, *draft], len(draft) + 1)])[0]
        new = []
        for i, row in enumerate(rows):
            target, guess = sampler.probs(row), draft[i] if i < len(draft) else None
            if guess is None or odds is None:
                token = sampler.draw(target)
            elif target[guess] >= sampler.uniform() * odds[i, guess]:
                token = guess
            else:
                token = sampler.draw(np.maximum(target - odds[i], 0))
            if token == end_id:
                break
            new.append(token)
            if token != guess:
                break
        return new, rows

    def make_answer(self, values, tokens, new, rows):
        exclude = self.settings.exclude_input
        if not self.settings.ignores_exclude:
            exclude = values.get("exclude_input_in_output", exclude)
        ids = new if exclude else [*tokens, *new]
        padded = np.full((1, len(ids) + 3), -1, np.int32)
        padded[0, : len(ids)] = ids
        answer = {"output_ids": padded, "sequence_length": np.array([len(ids)], np.int32)}
        if values.get("return_generation_logits"):
            logits = np.stack(rows)
            if self.settings.fast_logits:
                # The high half of the number makes a signalling NaN of the second float: whoever does sums with it breaks it.
                number = next(self.numbers) | 0x7F800001 << 32
                self.links[number] = logits
                logits = np.array([[number, 1]], np.uint64).view(np.float32)
            answer["generation_logits"] = logits[None]
        return answer

    def spoil(self, tokens, new, asked):
        """What a sick engine answers."""
        fault = self.settings.faults.get(tokens[0])
        check(fault != "error" or len(tokens) < 12, (
            "[TensorRT-LLM][ERROR] Encountered an error in forwardAsync function: CUDA error: an illegal memory access was encountered "
            "(/src/runtime.cpp:97)\n1 0x7f0a in libtensorrt_llm.so"
        ))  # fmt: skip
        junk = [(token + 50) % 200 + 50 for token in range(asked + 2)]
        return {"nothing": [], "too long": junk, "no draft": junk[:asked]}.get(fault, new)


class LinkFiles:
    """Fast logits on their way from one process to another."""

    def __init__(self, directory):
        self.directory = Path(directory)

    def __setitem__(self, number, logits):
        np.save(self.directory / "part.npy", logits)
        (self.directory / "part.npy").replace(self.directory / f"{number}.npy")

    def pop(self, number):
        path = self.directory / f"{number}.npy"
        check(path.is_file(), f"[TensorRT-LLM][ERROR] no draft logits under {number:x}")
        logits = np.load(path)
        path.unlink()
        return logits


def respond(pb_utils, backend, request):
    """Make the response to one Triton request."""
    tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in INPUTS}
    arrays = {name: tensor.as_numpy()[0] for name, tensor in tensors.items() if tensor is not None}
    vectors = ("input_ids", "draft_input_ids", "draft_logits")
    values = {name: array if name in vectors else array.reshape(-1)[0].item() for name, array in arrays.items()}
    try:
        answer = backend.run(values)
    except RefusedError as error:
        return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.ascontiguousarray(array[None])) for name, array in answer.items()])


class TritonPythonModel:
    def initialize(self, args):
        """Limits come from the engine's config.json, oddities from the parameter `mock`."""
        import triton_python_backend_utils as pb_utils

        self.pb_utils = pb_utils
        parameters = {key: value["string_value"] for key, value in json.loads(args["model_config"])["parameters"].items()}
        config = json.loads((Path(args["model_repository"]) / args["model_version"] / "engine" / "config.json").read_text())["build_config"]
        limits = {key: config[key] for key in ("max_seq_len", "max_input_len", "max_draft_len")}
        mock = json.loads(parameters["mock"])
        mock["faults"] = {int(first): fault for first, fault in mock.get("faults", {}).items()}
        links = LinkFiles(mock.pop("link_dir", "."))
        runner = FakeRunner(twist=mock.pop("twist"), seconds=0.001)
        exclude = parameters.get("exclude_input_in_output", "false") == "true"
        fast = parameters.get("speculative_decoding_fast_logits", "false") == "true"
        settings = Settings(**limits, exclude_input=exclude, fast_logits=fast, **mock)
        self.backend = Backend(runner, settings, links, pb_utils.Logger.log_warn)

    def execute(self, requests):
        return [respond(self.pb_utils, self.backend, request) for request in requests]
