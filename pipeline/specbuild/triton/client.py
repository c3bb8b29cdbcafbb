"""Calls the served pair through tritonclient: one streaming request, chunk by chunk."""

import queue
import uuid
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from specbuild.errors import ConfigError, ServingError
from specbuild.spec.sampling import Sampling
from specbuild.triton.contract import ENSEMBLE, PUBLIC, TensorSpec
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
    return _generate(url, values, timeout, model)


def _generate(url: str, values: Mapping[str, Any], timeout: float, model: str) -> Generator[Chunk, None, None]:
    """The chunks of one request; leaving before the last one, or not waiting any longer, stops it on the server."""
    stream = _Stream(url, model)
    try:
        stream.open()
        stream.send(values)
        while stream.pending:
            chunk = read_chunk(stream.receive(timeout))
            if chunk is not None:
                yield chunk
    except (GeneratorExit, KeyboardInterrupt, ServingError):
        stream.stop_request()
        raise
    finally:
        stream.close()


class _Stream:
    """A gRPC stream to one model, for one request and perhaps its stop."""

    def __init__(self, url: str, model: str) -> None:
        self.pending = 0  # requests without a final response
        self._url, self._model, self._request_id = url, model, uuid.uuid4().hex
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = triton.InferenceServerClient(url)

    def open(self) -> None:
        """Open the stream; raises ServingError unless the server answers and serves the model."""
        try:
            ready = self._client.is_model_ready(self._model, client_timeout=10)
        except InferenceServerException as error:
            raise ServingError(
                f"Cannot reach Triton at {self._url}: {first_line(error)}. Start it with `specbuild serve CONFIG`, or give its "
                "address with --url."
            ) from error
        if not ready:
            raise ServingError(f"Cannot call {self._model} at {self._url}: it is not served there. Start it with `specbuild serve CONFIG`.")
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))

    def send(self, values: Mapping[str, Any]) -> None:
        """Send a request; values of None are left out."""
        inputs = [make_input(spec, values[spec.name]) for spec in PUBLIC.inputs if values.get(spec.name) is not None]
        self._client.async_stream_infer(self._model, inputs, request_id=self._request_id, enable_empty_final_response=True)
        self.pending += 1

    def receive(self, timeout: float) -> Any:
        """The next response; raises ServingError for an error or a silent server."""
        try:
            result, error = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise ServingError(f"Triton at {self._url} sent nothing for {timeout:g} s. Look at its log, or allow more time.") from None
        self.pending -= error is not None or is_final(result)
        if error is not None:
            raise ServingError(f"Triton at {self._url} refused the request: {first_line(error)}")
        return result

    def stop_request(self) -> None:
        """Stop the request, if it still runs, and wait until it has ended: cancelling the stream does not reach through an ensemble."""
        if not self.pending:
            return
        with suppress(ServingError, InferenceServerException):  # the stream may have broken
            self.send({"text_input": "stop", "max_tokens": 1, "stop": True})
            while self.pending:
                self.receive(STOP_SECONDS)

    def close(self) -> None:
        """Close the stream. With nothing pending it is not cancelled: that would leak the request in the server's ensemble (2.51)."""
        self._client.stop_stream(cancel_requests=self.pending > 0)
        self._client.close()


def make_input(spec: TensorSpec, value: Any) -> Any:
    """Make the tensor of one public input, a batch of 1."""
    check_range(spec, value)
    items = [item.encode() if isinstance(item, str) else item for item in (value if isinstance(value, list) else [value])]
    tensor = triton.InferInput(spec.name, [1, len(items)], spec.dtype)
    tensor.set_data_from_numpy(np.array([items], DTYPES[spec.dtype]))
    return tensor


def check_range(spec: TensorSpec, value: Any) -> None:
    """Raise ConfigError for a number that its tensor cannot hold: it would wrap around without a word."""
    if spec.dtype == "INT32" and not -(2**31) <= value < 2**31:
        raise ConfigError(f"Cannot send {spec.name}={value}: expected a number below 2^31. Send a smaller one.")
    if spec.dtype == "FP32" and value and not np.finfo(np.float32).tiny <= abs(value) <= np.finfo(np.float32).max:
        raise ConfigError(f"Cannot send {spec.name}={value}: expected a number that float32 can hold. Send one closer to 1.")


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
