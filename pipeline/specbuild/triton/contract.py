"""Every tensor of every model in the repository: one list, from which config.pbtxt files, models and the client are made.

Names, types and shapes are upstream's (TensorRT-LLM's `inflight_batcher_llm`, genai-perf, Triton's OpenAI front end); shapes leave
out the batch dimension. `OURS` below marks what upstream does not have.
"""

from dataclasses import dataclass

ENSEMBLE, PREPROCESSING, LOOP, TARGET, DRAFT = "ensemble", "preprocessing", "speculative_decoding", "target", "draft"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. `ragged`: requests of one batch may differ in length. `scalar`: the model sees no inner dimension."""

    name: str
    dtype: str  # as in tritonclient: BOOL, INT32, UINT64, FP32, BYTES
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    ragged: bool = False
    scalar: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """The tensors of one model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def optional(dtype: str, *names: str, dims: tuple[int, ...] = (1,)) -> tuple[TensorSpec, ...]:
    """Return inputs of one type that a request may leave out."""
    return tuple(TensorSpec(name, dtype, dims, optional=True) for name in names)


def _engine_optional(dtype: str, *names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, dtype, optional=True, scalar=True) for name in names)


TEXT_INPUT = TensorSpec("text_input", "BYTES")
INPUT_IDS = TensorSpec("input_ids", "INT32", (-1,))

REQUEST = (
    TensorSpec("max_tokens", "INT32"),
    *optional("BYTES", "stop_words", "bad_words", dims=(-1,)),
    *optional("BOOL", "stream", "stop", "exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens"),
    *optional("BOOL", "return_perf_metrics", "return_log_probs", "return_context_logits", "return_generation_logits"),
    *optional("BOOL", "return_token_ids"),  # OURS: adds output_ids and prompt_ids to the answer
    *optional("INT32", "num_draft_tokens", "top_k", "end_id", "pad_id", "beam_width", "num_return_sequences"),
    *optional("INT32", "min_tokens", "min_length"),  # genai-perf still sends the older name
    *optional("FP32", "temperature", "top_p", "length_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *optional("UINT64", "seed"),
)
"""What a request may say besides its text."""

ANSWER = (
    TensorSpec("text_output", "BYTES"),  # the text of this chunk
    TensorSpec("finish_reason", "BYTES"),  # OURS, last chunk only: "stop", "length" or "cancelled"
    TensorSpec("num_input_tokens", "INT32"),
    TensorSpec("num_output_tokens", "INT32"),  # of this chunk: clients add them up
    TensorSpec("total_draft_tokens", "INT32"),  # so far
    TensorSpec("total_accepted_draft_tokens", "INT32"),  # so far
    TensorSpec("rounds", "INT32"),  # OURS: calls of the target so far
    TensorSpec("output_ids", "INT32", (-1,)),  # OURS, on return_token_ids: ids of this chunk, the end id included
    TensorSpec("prompt_ids", "INT32", (-1,)),  # OURS, on return_token_ids, first chunk only
)
"""What each chunk of an answer may hold."""

NEUTRAL: dict[str, float] = {
    "beam_width": 1,
    "num_return_sequences": 1,
    "length_penalty": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "min_length": 0,
    "return_log_probs": 0,
    "return_context_logits": 0,
    "return_generation_logits": 0,
}
"""Inputs that standard clients send but that are not implemented: this value is accepted, any other is refused by name."""

PUBLIC = ModelSpec(inputs=(TEXT_INPUT, *REQUEST), outputs=ANSWER)
"""The ensemble. The loop itself takes the same, and the prompt's ids."""

MODELS = {
    ENSEMBLE: PUBLIC,
    PREPROCESSING: ModelSpec(inputs=(TEXT_INPUT,), outputs=(INPUT_IDS,)),
    LOOP: ModelSpec(inputs=(INPUT_IDS, TEXT_INPUT, *REQUEST), outputs=ANSWER),
}

ENGINE = ModelSpec(
    inputs=(
        TensorSpec("input_ids", "INT32", (-1,), ragged=True),
        TensorSpec("input_lengths", "INT32", scalar=True),
        TensorSpec("request_output_len", "INT32", scalar=True),
        TensorSpec("draft_input_ids", "INT32", (-1,), optional=True, ragged=True),
        TensorSpec("draft_logits", "FP32", (-1, -1), optional=True, ragged=True),
        *_engine_optional("INT32", "end_id", "pad_id", "runtime_top_k", "beam_width"),
        *_engine_optional("FP32", "runtime_top_p", "temperature"),
        *_engine_optional("UINT64", "seed"),
        *_engine_optional("BOOL", "return_generation_logits", "exclude_input_in_output", "stop", "streaming"),
    ),
    outputs=(
        TensorSpec("output_ids", "INT32", (-1, -1)),  # (1, length): beam first
        TensorSpec("sequence_length", "INT32", (-1,)),
        TensorSpec("generation_logits", "FP32", (-1, -1, -1)),  # (1, new tokens, vocabulary)
    ),
)
"""Target and draft: the part of the TensorRT-LLM backend's contract that the loop uses."""
