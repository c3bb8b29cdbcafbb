"""Drafter and verifier over calls from one Triton model to another (BLS), for any backend that speaks contract.ENGINE."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbuild.errors import ServingError
from specbuild.spec.loop import Draft, Verified, commit
from specbuild.spec.sampling import Sampling, probs
from specbuild.triton.contract import ENGINE
from specbuild.triton.wire import make_tensors

NEVER = np.finfo(np.float32).min
"""The logit of an id that was not drawn from: its softmax is 0, and unlike -inf it never makes a NaN."""


@dataclass(frozen=True)
class EngineClient:
    """Calls one engine model; stateless, so the whole sequence goes along each time."""

    pb_utils: Any
    model_name: str
    request_id: str

    def call(self, tokens: Sequence[int], new_tokens: int, sampling: Sampling, **more: Any) -> tuple[list[int], NDArray[np.float32] | None]:
        """Ask for new ids, and for the logits (n, V) if `return_generation_logits`; raises ServingError with the engine's own line."""
        values = {
            "input_ids": tokens,
            "input_lengths": len(tokens),
            "request_output_len": new_tokens,
            "exclude_input_in_output": True,
            **engine_sampling(sampling),
            **more,
        }
        outputs = ["output_ids", "sequence_length"] + ["generation_logits"] * bool(more.get("return_generation_logits"))
        request = self.pb_utils.InferenceRequest(
            model_name=self.model_name,
            requested_output_names=outputs,
            inputs=make_tensors(self.pb_utils, ENGINE.inputs, values),
            request_id=self.request_id,
        )
        response = request.exec()
        if response.has_error():
            raise ServingError(f"The {self.model_name} engine failed: {response.error().message()}")
        length = int(self._read(response, "sequence_length").reshape(-1)[0])
        ids = self._read(response, "output_ids").reshape(-1)[:length].tolist()
        return ids, self._read(response, "generation_logits")[0, 0] if len(outputs) == 3 else None

    def _read(self, response: Any, name: str) -> NDArray[Any]:
        tensor = self.pb_utils.get_output_tensor_by_name(response, name)
        if tensor is None:
            raise ServingError(f"The {self.model_name} engine returned no {name}. Expected the outputs of contract.ENGINE.")
        array: NDArray[Any] = tensor.as_numpy()
        return array


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
    """Drafts with the draft engine: k tokens in one call."""

    client: EngineClient
    with_probs: bool

    def propose(self, tokens: Sequence[int], k: int, sampling: Sampling) -> Draft:
        """See `Drafter`. No end id is sent: the engine would drop it, and an end that was guessed is worth verifying."""
        wanted = self.with_probs and not sampling.greedy
        ids, logits = self.client.call(tokens, k, sampling, return_generation_logits=wanted)
        end = next((i + 1 for i, token in enumerate(ids) if token in sampling.end_ids), len(ids))
        return Draft(tuple(ids[:end]), None if logits is None or not end else probs(logits[:end], sampling))


@dataclass(frozen=True)
class BlsVerifier:
    """Verifies with the target engine, by exact match or, if `rejection`, against the draft's distributions."""

    client: EngineClient
    rejection: bool
    vocab_size: int

    def verify(self, tokens: Sequence[int], draft: Draft, sampling: Sampling, limit: int) -> Verified:
        """See `Verifier`. Upstream's backend does not say why it stopped: see `read_verified`."""
        more: dict[str, Any] = {"draft_input_ids": draft.tokens or None}
        if draft.tokens and self.rejection and not sampling.greedy:
            more["draft_logits"] = draft_logits(draft, self.vocab_size)
        end_id = min(sampling.end_ids, default=-1)
        ids, _ = self.client.call(tokens, len(draft.tokens) + 1, sampling, end_id=end_id, **more)
        return read_verified(ids, draft, sampling, limit, end_id)


def read_verified(ids: Sequence[int], draft: Draft, sampling: Sampling, limit: int, end_id: int) -> Verified:
    """Tell what a target's answer means, and put back the end id that engines leave out.

    An answer goes on to the first token that differs from the draft, or one past it; one that is a prefix of the draft
    was therefore ended, by the end id. Only one can be sent; `commit` looks for the others.
    """
    n = len(ids)
    if n > len(draft.tokens) or tuple(ids) != draft.tokens[:n]:
        return commit(draft, n - 1, ids[-1], sampling, limit)
    if end_id < 0:
        raise ServingError(f"The target returned {n} tokens for {len(draft.tokens)} drafted ones and no end id was set: expected one more.")
    drafted_end = n < len(draft.tokens) and draft.tokens[n] == end_id
    return commit(draft, n + 1 if drafted_end else n, end_id, sampling, limit)


def draft_logits(draft: Draft, vocab_size: int) -> NDArray[np.float32]:
    """Log-probabilities (k, V), whose plain softmax is the distribution drawn from; one-hot for a draft that was certain."""
    if draft.probs is None:
        rows = np.full((len(draft.tokens), vocab_size), NEVER, np.float32)
        rows[np.arange(len(draft.tokens)), list(draft.tokens)] = 0.0
        return rows
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(draft.probs), NEVER).astype(np.float32)
