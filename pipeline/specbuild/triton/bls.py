"""Drafter and verifier over calls from one Triton model to another (BLS), for any backend that speaks contract.ENGINE."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.errors import ServingError
from specbuild.spec.drafters import DRAFTERS
from specbuild.spec.loop import Draft, Drafter, Verified, Verifier, commit
from specbuild.spec.sampling import Sampling, probs
from specbuild.triton.contract import DRAFT, ENGINE, TARGET
from specbuild.triton.request import LoopSettings
from specbuild.triton.wire import make_tensors

NEVER = np.finfo(np.float32).min
"""The logit of an id that was not drawn from: its softmax is 0, and unlike -inf it never makes a NaN."""

MAX_TOP_K = 1024
"""What TensorRT-LLM's sampling kernels support (TOP_K_MAX); a larger top_k they clip, which only their log tells."""


@dataclass(frozen=True)
class LinkedDraft(Draft):
    """A draft whose distributions stay in the backend; `link` (1, m) is what the target finds them by, and nobody else reads."""

    link: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class EngineClient:
    """Calls one engine model; stateless, so the whole sequence goes along each time.

    `seed_stream` is for engines that draw with a generator of their own, which starts anew with each request: every request then gets
    a seed of its own, from the request's seed, its length and this number. With None the seed goes along as it is.
    """

    pb_utils: Any
    model_name: str
    request_id: str
    seed_stream: int | None = None

    def call(self, tokens: Sequence[int], new_tokens: int, sampling: Sampling, **more: Any) -> tuple[list[int], NDArray[np.float32] | None]:
        """Ask for new ids, and for the logits (n, V) if `return_generation_logits`; raises ServingError with the engine's own line."""
        values = {**_request(tokens, new_tokens, self._seeded(sampling, len(tokens))), **more}
        names = ["output_ids", "sequence_length"] + ["generation_logits"] * bool(more.get("return_generation_logits"))
        outputs = self._send(values, names)
        length = int(outputs["sequence_length"].reshape(-1)[0])
        ids = self._find_new(outputs["output_ids"].reshape(-1)[:length].tolist(), tokens, new_tokens)
        return ids, outputs["generation_logits"][0, 0] if len(names) == 3 else None

    def _seeded(self, sampling: Sampling, position: int) -> Sampling:
        """The sampling of one request; raises ServingError for one that such an engine would quietly change."""
        if self.seed_stream is None or sampling.greedy:
            return sampling
        if sampling.top_k > MAX_TOP_K:
            raise ServingError(
                f"Cannot sample with top_k {sampling.top_k}: these engines support up to {MAX_TOP_K}. Send less, or 0 for all."
            )
        seed = np.random.SeedSequence(sampling.seed, spawn_key=(self.seed_stream, position)).generate_state(1, np.uint64)
        return replace(sampling, seed=int(seed[0]))

    def _find_new(self, ids: list[int], tokens: Sequence[int], asked: int) -> list[int]:
        """The new ids of an answer; some backends put the input in front of them whatever they are told.

        Where a sequence is so short that new ids could also look like that, the engine is asked for one token without an end:
        a second one in the answer is the input's.
        """
        if ids[: len(tokens)] == list(tokens):
            one = _request(tokens, 1, Sampling())
            if len(ids) > asked or self._send(one, ["output_ids", "sequence_length"])["sequence_length"].max() > 1:
                ids = ids[len(tokens) :]
        if len(ids) > asked:
            raise ServingError(
                f"The {self.model_name} engine returned {len(ids)} tokens where {asked} were asked for: expected new tokens, alone or "
                "behind the whole input. Check its exclude_input_in_output and its model version."
            )
        return ids

    def _send(self, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Make the call; returns the outputs of these names."""
        request = self.pb_utils.InferenceRequest(
            model_name=self.model_name,
            requested_output_names=list(names),
            inputs=make_tensors(self.pb_utils, ENGINE.inputs, values),
            request_id=self.request_id,
        )
        response = request.exec()
        if response.has_error():
            line = response.error().message().strip().partition("\n")[0]  # upstream's errors go on with a stack
            raise ServingError(f"The {self.model_name} engine failed: {line}")
        tensors = {name: self.pb_utils.get_output_tensor_by_name(response, name) for name in names}
        for name, tensor in tensors.items():
            if tensor is None:
                raise ServingError(f"The {self.model_name} engine returned no {name}. Expected the outputs of contract.ENGINE.")
        return {name: tensor.as_numpy() for name, tensor in tensors.items()}


def make_models(pb_utils: Any, settings: LoopSettings, request_id: str) -> tuple[Drafter, Verifier]:
    """Make what drafts and what verifies one request, as the repository says."""
    rejection = settings.rule == "rejection"

    def make_client(model_name: str) -> EngineClient:
        # To judge by odds takes other random numbers than the draft was drawn with; by exact match, the same ones serve best.
        stream = int(rejection and model_name == DRAFT) if settings.seed_per_request else None
        return EngineClient(pb_utils, model_name, request_id, stream)

    verifier = BlsVerifier(make_client(TARGET))
    if settings.drafter == "model":
        return BlsDrafter(make_client(DRAFT), rejection, settings.fast_logits), verifier
    return DRAFTERS[settings.drafter](None), verifier


def _request(tokens: Sequence[int], new_tokens: int, sampling: Sampling) -> dict[str, Any]:
    """The inputs that every request has."""
    counts = {"input_lengths": len(tokens), "request_output_len": new_tokens}
    return {"input_ids": tokens, **counts, "exclude_input_in_output": True, **engine_sampling(sampling)}


def engine_sampling(sampling: Sampling) -> dict[str, Any]:
    """Sampling as an engine takes it; greedy is top_k 1, since upstream refuses a temperature of 0."""
    if sampling.greedy:
        return {"runtime_top_k": 1}
    return {
        "temperature": sampling.temperature,
        "runtime_top_k": sampling.top_k,
        "runtime_top_p": sampling.top_p,
        "seed": sampling.seed,
    }


@dataclass(frozen=True)
class BlsDrafter:
    """Drafts with the draft engine: k tokens in one call. `fast_logits`: its distributions go to the target inside the backend."""

    client: EngineClient
    with_probs: bool
    fast_logits: bool = False

    def propose(self, tokens: Sequence[int], k: int, sampling: Sampling) -> Draft:
        """See `Drafter`. No end id is sent: the engine would drop it, and an end that was guessed is worth verifying."""
        if not self.with_probs or sampling.greedy:
            return Draft(self._until_end(self.client.call(tokens, k, sampling)[0], sampling))
        if self.fast_logits:
            # The target takes the softmax of the draft's logits as they are, so that has to be what is drawn from. All tokens
            # go along, even behind an end: the rows that the target fetches are one for each.
            ids, link = self.client.call(tokens, k, replace(sampling, temperature=1.0, top_k=0, top_p=1.0), return_generation_logits=True)
            return LinkedDraft(tuple(ids), link=link)
        ids, logits = self.client.call(tokens, k, sampling, return_generation_logits=True)
        drafted = self._until_end(ids, sampling)
        return Draft(drafted, probs(logits[: len(drafted)], sampling) if drafted and logits is not None else None)

    @staticmethod
    def _until_end(ids: Sequence[int], sampling: Sampling) -> tuple[int, ...]:
        """Cut a draft behind its first end id."""
        end = next((i + 1 for i, token in enumerate(ids) if token in sampling.end_ids), len(ids))
        return tuple(ids[:end])


@dataclass(frozen=True)
class BlsVerifier:
    """Verifies with the target engine: by the draft's distributions where it has them, else by exact match."""

    client: EngineClient

    def verify(self, tokens: Sequence[int], draft: Draft, sampling: Sampling, limit: int) -> Verified:
        """See `Verifier`. Upstream's backend does not say why it stopped: see `read_verified`."""
        more: dict[str, Any] = {}
        if draft.tokens:  # upstream refuses an empty draft
            more = {"draft_input_ids": draft.tokens, "draft_logits": find_logits(draft)}
        end_id = min(sampling.end_ids, default=-1)
        ids, _ = self.client.call(tokens, len(draft.tokens) + 1, sampling, end_id=end_id, **more)
        return read_verified(ids, draft, sampling, limit, end_id)


def find_logits(draft: Draft) -> NDArray[np.float32] | None:
    """What a target needs to judge by odds: the link, or log-probabilities (k, V), whose plain softmax is what was drawn from.

    None for a draft that was certain: to accept it by its odds is to draw from the target and compare.
    """
    if isinstance(draft, LinkedDraft):
        return draft.link
    if draft.probs is None:
        return None
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(draft.probs), NEVER).astype(np.float32)


def read_verified(ids: Sequence[int], draft: Draft, sampling: Sampling, limit: int, end_id: int) -> Verified:
    """Tell what a target's answer means, and put back the end id that engines leave out.

    An answer goes on to the first token that differs from the draft, or one past it; one that is a prefix of the draft
    was therefore ended, by the end id. Only one can be sent; `commit` looks for the others. An engine that cut the draft short at its
    limit would look the same: the loop's `context` keeps drafts away from there.
    """
    n = len(ids)
    if tuple(ids[:-1]) != draft.tokens[: max(0, n - 1)]:
        raise ServingError(
            f"The target returned {list(ids)} for the draft {list(draft.tokens)}: expected it to follow the draft up to its last token. "
            "Build the target with a max_draft_len."
        )
    if n > len(draft.tokens) or tuple(ids) != draft.tokens[:n]:
        return commit(draft, n - 1, ids[-1], sampling, limit)
    if end_id < 0:
        raise ServingError(f"The target returned {n} tokens for {len(draft.tokens)} drafted ones and no end id was set: expected one more.")
    drafted_end = n < len(draft.tokens) and draft.tokens[n] == end_id
    return commit(draft, n + 1 if drafted_end else n, end_id, sampling, limit)
