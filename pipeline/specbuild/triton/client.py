"""Calls the served pair through tritonclient: one streaming request, chunk by chunk."""

import queue
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from specbuild.errors import ServingError
from specbuild.spec.sampling import Sampling
from specbuild.triton.contract import ENSEMBLE, PUBLIC
from specbuild.triton.wire import DTYPES

STOP_SECONDS = 5.0
"""How long a client that leaves early waits for the server to confirm."""


@dataclass(frozen=True)
class Chunk:
    """One response: its own text and ids, and counts so far. `prompt_token_ids` comes with the first, `finish_reason` with the last."""

    text: str
    token_ids: tuple[int, ...]
    rounds: int
    drafted: int
    accepted: int
    finish_reason: str | None = None
    prompt_token_ids: tuple[int, ...] = ()


def stream_generate(
    url: str,
    prompt: str,
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    draft_len: int | None = None,
    stop: tuple[str, ...] = (),
    stream: bool = True,
    timeout: float = 120.0,
    model: str = ENSEMBLE,
) -> Generator[Chunk, None, None]:
    """Stream the answer to one prompt from the server at `url` (host:port, gRPC); `draft_len` None is the packaged number.

    End ids are the server's: those of `sampling` are not sent. Closing the generator early stops the request on the server.
    Raises ServingError with one line when the server cannot be reached, refuses the request, or is silent for `timeout` seconds.
    """
    sampling = sampling or Sampling()
    values = {
        "text_input": prompt,
        "max_tokens": max_tokens,
        "stream": stream,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "num_draft_tokens": draft_len,
        "stop_words": list(stop) or None,
        "return_token_ids": True,
    }
    return _stream(url, values, timeout, model)


def _stream(url: str, values: Mapping[str, Any], timeout: float, model: str) -> Generator[Chunk, None, None]:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    request_id, done = uuid.uuid4().hex, False
    client = triton.InferenceServerClient(url)
    try:
        _check_ready(client, url, model)
        client.start_stream(lambda result, error: answers.put((result, error)))
        _send(client, model, values, request_id)
        while not done:
            result = _next(answers, url, timeout)
            done = is_final(result)
            if (chunk := read_chunk(result)) is not None:
                yield chunk
    except ServingError:
        done = True
        raise
    finally:
        if not done:
            _stop(client, model, request_id, answers)
        # Cancelling returns at once; a plain stop waits for every response, for ever if the server hangs.
        client.stop_stream(cancel_requests=True)
        client.close()


def _check_ready(client: Any, url: str, model: str) -> None:
    """Raise ServingError unless the server answers and serves the model."""
    try:
        ready = client.is_model_ready(model, client_timeout=10)
    except InferenceServerException as error:
        raise ServingError(
            f"Cannot reach Triton at {url}: {first_line(error)}. Start it with `specbuild serve CONFIG`, or give its address with --url."
        ) from error
    if not ready:
        raise ServingError(f"Cannot call {model} at {url}: that server does not serve it. Start it with `specbuild serve CONFIG`.")


def _send(client: Any, model: str, values: Mapping[str, Any], request_id: str) -> None:
    """Send a request on the open stream; values of None are left out."""
    inputs = []
    for spec in PUBLIC.inputs:
        value = values.get(spec.name)
        if value is not None:
            items = [item.encode() if isinstance(item, str) else item for item in (value if isinstance(value, list) else [value])]
            tensor = triton.InferInput(spec.name, [1, len(items)], spec.dtype)
            tensor.set_data_from_numpy(np.array([items], DTYPES[spec.dtype]))
            inputs.append(tensor)
    client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)


def _next(answers: "queue.Queue[tuple[Any, Any]]", url: str, timeout: float) -> Any:
    """The next response; raises ServingError for an error or a silent server."""
    try:
        result, error = answers.get(timeout=timeout)
    except queue.Empty:
        raise ServingError(f"Triton at {url} sent nothing for {timeout:g} s. Look at its log, or allow more time.") from None
    if error is not None:
        raise ServingError(f"Triton at {url} refused the request: {first_line(error)}")
    return result


def _stop(client: Any, model: str, request_id: str, answers: "queue.Queue[tuple[Any, Any]]") -> None:
    """Tell the server to stop a request, and wait until it has: cancelling the stream does not reach through an ensemble."""
    _send(client, model, {"text_input": "stop", "max_tokens": 1, "stop": True}, request_id)
    for _ in iter(lambda: _is_last(answers), True):
        continue


def _is_last(answers: "queue.Queue[tuple[Any, Any]]") -> bool:
    """Whether the next response, dropped here, ends the stopped request."""
    try:
        result, error = answers.get(timeout=STOP_SECONDS)
    except queue.Empty:
        return True
    return error is not None or is_final(result)


def is_final(result: Any) -> bool:
    """Whether nothing follows a response."""
    parameters = result.get_response().parameters
    return "triton_final_response" in parameters and bool(parameters["triton_final_response"].bool_param)


def read_chunk(result: Any) -> Chunk | None:
    """Read one response; None for the empty one that only ends a stream."""
    text = result.as_numpy("text_output")
    if text is None:
        return None
    reason = result.as_numpy("finish_reason")
    return Chunk(
        text=text.item().decode(),
        token_ids=_read_ids(result, "output_ids"),
        rounds=int(result.as_numpy("rounds").item()),
        drafted=int(result.as_numpy("total_draft_tokens").item()),
        accepted=int(result.as_numpy("total_accepted_draft_tokens").item()),
        finish_reason=None if reason is None else reason.item().decode(),
        prompt_token_ids=_read_ids(result, "prompt_ids"),
    )


def _read_ids(result: Any, name: str) -> tuple[int, ...]:
    ids = result.as_numpy(name)
    return () if ids is None else tuple(ids.reshape(-1).tolist())


def first_line(error: InferenceServerException) -> str:
    """The message of an error without what gRPC wraps around it."""
    return str(error.message()).strip().splitlines()[0]
