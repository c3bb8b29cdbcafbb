"""The CPU engine as a Triton model: a batch of requests in the TensorRT-LLM backend's terms, answered with shared passes.

A request without a draft generates `request_output_len` tokens; one with a draft verifies it in one pass. The end id stops a
sequence and is not part of `output_ids`, as upstream.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from specbuild.errors import EngineError, ServingError, SpecbuildError
from specbuild.spec.accept import accept
from specbuild.spec.loop import Draft, commit
from specbuild.spec.sampling import DRAW, Logits, Sampling, argmax, draw, probs, uniforms
from specbuild.triton import contract
from specbuild.triton.wire import Values, as_float, make_error, make_tensors, read_item, read_tensors

Pass: TypeAlias = tuple[Sequence[int], int]
"""A sequence, and of how many of its last positions the logits are wanted."""


class Runner(Protocol):
    """An engine that answers several passes at once."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...

    def logits_batch(self, requests: Sequence[Pass]) -> list[Logits]:
        """Logits (n, V) of each request, as if it were alone."""
        ...


@dataclass(frozen=True)
class EngineRequest:
    """One request: the sequence, the draft to judge (perhaps empty), and what is wanted back."""

    tokens: tuple[int, ...]
    draft: Draft
    new_tokens: int
    sampling: Sampling
    rule: str | None  # None: by the engine's own rule
    return_logits: bool
    exclude_input: bool


Job: TypeAlias = Generator[Pass, Logits, dict[str, Any]]
"""A request on its way: asks for passes, gets their logits, returns its output values."""


@dataclass(frozen=True)
class EngineModel:
    """An engine in its role; `rule` is how a target draws its own token, and plays no part in a draft."""

    runner: Runner
    role: str
    rule: str

    def run(self, requests: Sequence[Values]) -> list[dict[str, Any] | SpecbuildError]:
        """Answer requests (name -> value with batch dimension) with output values, or with the error of that request alone."""
        jobs = [self._make_job(values) for values in requests]
        return run_jobs(self.runner, jobs)

    def _make_job(self, values: Values) -> Job | SpecbuildError:
        """Begin one request, or say why not."""
        try:
            request = parse_request(values)
            check_request(request, self.runner)
        except SpecbuildError as error:
            return error
        return self._verify(request) if request.draft.tokens else self._generate(request)

    def _generate(self, request: EngineRequest) -> Job:
        """Draw token after token."""
        sequence, rows = list(request.tokens), []
        for _ in range(request.new_tokens):
            logits = yield sequence, 1
            token = self._draw(logits, request, len(sequence))
            if token in request.sampling.end_ids:
                break
            rows.append(logits)
            sequence.append(token)
        return make_values(request, sequence[len(request.tokens) :], rows)

    def _draw(self, logits: Logits, request: EngineRequest, position: int) -> int:
        """The token at `position`, with the random number that the loop in one process would use there."""
        if self.role == contract.TARGET:
            return accept(self.rule, logits, Draft(()), request.sampling, position)[1]
        if request.sampling.greedy:
            return int(argmax(logits)[0])
        return draw(probs(logits, request.sampling)[0], uniforms(request.sampling.seed, position, 1)[0, DRAW])

    def _verify(self, request: EngineRequest) -> Job:
        """Judge a draft in one pass."""
        draft, sampling = request.draft, request.sampling
        logits = yield (*request.tokens, *draft.tokens), len(draft.tokens) + 1
        accepted, token = accept(request.rule or self.rule, logits, draft, sampling, len(request.tokens))
        verified = commit(draft, accepted, token, sampling, request.new_tokens)
        tokens = verified.tokens[:-1] if verified.finish_reason == "stop" else verified.tokens
        return make_values(request, tokens, [logits[: len(tokens)]])


def run_jobs(runner: Runner, jobs: Sequence[Job | SpecbuildError]) -> list[dict[str, Any] | SpecbuildError]:
    """Run jobs side by side, one shared pass for all that wait; an error takes the place of its job's answer."""
    answers: dict[int, dict[str, Any] | SpecbuildError] = {i: job for i, job in enumerate(jobs) if isinstance(job, SpecbuildError)}
    running = {i: job for i, job in enumerate(jobs) if not isinstance(job, SpecbuildError)}
    wanted = {i: next(job) for i, job in running.items()}
    while wanted:
        batch, wanted = wanted, {}
        try:
            results = runner.logits_batch(list(batch.values()))
        except SpecbuildError as error:
            answers |= dict.fromkeys(batch, error)
            break
        for i, logits in zip(batch, results, strict=True):
            try:
                wanted[i] = running[i].send(logits)
            except StopIteration as done:
                answers[i] = done.value
            except SpecbuildError as error:
                answers[i] = error
    return [answers[i] for i in range(len(jobs))]


def parse_request(values: Values) -> EngineRequest:
    """Read one request's tensors; raises ServingError for what this engine cannot do."""
    if len(values["input_ids"]) != 1:
        raise ServingError(f"Cannot run {len(values['input_ids'])} sequences in one request: expected 1. Send each on its own.")
    if (beams := read_item(values, "beam_width", 1)) != 1:
        raise ServingError(f"Cannot run beam_width {beams}: speculation follows one beam. Send 1, or leave it out.")
    if read_item(values, "streaming", False):
        raise ServingError("Cannot stream from an engine: it answers once. Send streaming=false; the ensemble streams.")
    draft = read_draft(values)
    return EngineRequest(
        tokens=tuple(values["input_ids"].reshape(-1)[: read_item(values, "input_lengths")].tolist()),
        draft=draft,
        new_tokens=int(read_item(values, "request_output_len")),
        sampling=read_sampling(values),
        rule=None if not draft.tokens else "exact" if draft.probs is None else "rejection",
        return_logits=bool(read_item(values, "return_generation_logits", False)),
        exclude_input=bool(read_item(values, "exclude_input_in_output", False)),
    )


def read_draft(values: Values) -> Draft:
    """The draft; its distributions are the plain softmax of `draft_logits` (1, k, V), with no sampling parameter applied to it."""
    tokens = tuple(values["draft_input_ids"].reshape(-1).tolist()) if "draft_input_ids" in values else ()
    if "draft_logits" not in values:
        return Draft(tokens)
    if not tokens:
        raise ServingError("Draft tokens must be specified when draft logits are given. Send draft_input_ids.")
    logits = values["draft_logits"].reshape(-1, values["draft_logits"].shape[-1])
    if len(logits) != len(tokens):
        raise ServingError(f"Cannot verify {len(tokens)} draft tokens with {len(logits)} rows of draft_logits: expected one row each.")
    return Draft(tokens, probs(logits, Sampling(temperature=1.0)))


def read_sampling(values: Values) -> Sampling:
    """Sampling parameters in upstream's terms: greedy without a temperature, `runtime_top_p` <= 0 is unset, `end_id` < 0 is none."""
    top_p, end_id = as_float(read_item(values, "runtime_top_p", 1.0)), int(read_item(values, "end_id", -1))
    return Sampling(
        temperature=as_float(read_item(values, "temperature", 0.0)),
        top_k=int(read_item(values, "runtime_top_k", 0)),
        top_p=top_p if top_p > 0 else 1.0,
        seed=int(read_item(values, "seed", 0)),
        end_ids=frozenset({end_id} if end_id >= 0 else ()),
    )


def check_request(request: EngineRequest, runner: Runner) -> None:
    """Raise before the pass what would otherwise fail every request that shares it."""
    if not request.tokens:
        raise ServingError("Cannot run an empty sequence: expected at least 1 id in input_ids. Send the whole sequence each time.")
    if request.new_tokens < 1:
        raise ServingError(f"Cannot generate {request.new_tokens} tokens: expected request_output_len >= 1. Send the number of new tokens.")
    # The last new token is drawn, not read, so it needs no room.
    length = len(request.tokens) + (len(request.draft.tokens) or request.new_tokens - 1)
    if length > runner.max_seq_len:
        raise EngineError(
            f"Prompt length ({length}) exceeds maximum input length ({runner.max_seq_len}): {len(request.tokens)} tokens and what "
            "follows. Send a shorter sequence, or build with a larger max_seq_len."
        )
    for token in (*request.tokens, *request.draft.tokens):
        if not 0 <= token < runner.vocab_size:
            raise EngineError(f"Cannot run token id {token}: expected 0 to {runner.vocab_size - 1}. Use the tokenizer of this pair.")


def make_values(request: EngineRequest, new: Sequence[int], rows: Sequence[Logits]) -> dict[str, Any]:
    """Output values without the batch dimension: output_ids (1, length), sequence_length (1,), generation_logits (1, n, V)."""
    ids = new if request.exclude_input else (*request.tokens, *new)
    wanted = request.return_logits and len(new) > 0
    return {
        "output_ids": np.array([ids], np.int32).reshape(1, -1),
        "sequence_length": [len(ids)],
        "generation_logits": np.concatenate(rows)[None] if wanted else None,
    }


def answer(pb_utils: Any, model: EngineModel, requests: Sequence[Any]) -> list[Any]:
    """Make the responses to a batch of Triton requests; `stop` has nothing to stop here, and gets an empty answer."""
    spec = contract.ENGINE
    values = [read_tensors(pb_utils, request, spec.inputs) for request in requests]
    stops = [bool(v["stop"].any()) if "stop" in v else False for v in values]
    results = iter(model.run([v for v, stop in zip(values, stops, strict=True) if not stop]))
    responses = []
    for stop in stops:
        result = {} if stop else next(results)
        if isinstance(result, SpecbuildError):
            responses.append(make_error(pb_utils, result))
        else:
            responses.append(pb_utils.InferenceResponse(make_tensors(pb_utils, spec.outputs, result)))
    return responses
