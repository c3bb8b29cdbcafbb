"""The speculation loop as a decoupled Triton model: requests run side by side, each answer goes out chunk by chunk."""

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbuild.errors import ServingError
from specbuild.spec.loop import speculate
from specbuild.spec.stats import SpecStats
from specbuild.text import TextStep, TextStream, generate_text
from specbuild.tokenizer import load_tokenizer
from specbuild.triton.bls import make_models
from specbuild.triton.contract import LOOP, MODELS
from specbuild.triton.request import LoopSettings, TextRequest, refuse_parameters
from specbuild.triton.wire import make_error, make_tensors, read_item, read_tensors


class RunningRequests:
    """Which requests run, by id, so that another request can stop them. Clients may share an id: a stop ends all that do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: defaultdict[str, list[threading.Event]] = defaultdict(list)

    def add(self, request_id: str) -> threading.Event:
        """Register a request; the event is set when it has to stop."""
        event = threading.Event()
        with self._lock:
            self._events[request_id].append(event)
        return event

    def remove(self, request_id: str, event: threading.Event) -> None:
        """Forget a request that has ended."""
        with self._lock:
            self._events[request_id].remove(event)
            if not self._events[request_id]:
                del self._events[request_id]

    def stop(self, request_id: str) -> None:
        """Stop what runs under an id, if anything does; raises ServingError without an id."""
        if not request_id:
            raise ServingError("Trying to stop a request but request ID is not provided. Send the id of the request to stop.")
        with self._lock:
            for event in self._events.get(request_id, ()):
                event.set()

    def stop_all(self) -> None:
        """Stop everything: the model is being unloaded."""
        with self._lock:
            for events in self._events.values():
                for event in events:
                    event.set()


class SpeculativeModel:
    """Runs `spec.loop` over the two engines of the repository, for every request that arrives."""

    def __init__(self, pb_utils: Any, version_dir: Path, parameters: dict[str, Any]) -> None:
        self._pb_utils = pb_utils
        self._settings = LoopSettings.from_parameters(parameters)
        self._tokenizer = load_tokenizer(version_dir)
        self._running = RunningRequests()
        self._pool = ThreadPoolExecutor(self._settings.max_running, thread_name_prefix="request")
        self._counters = Counters(pb_utils)

    def submit(self, request: Any) -> None:
        """Begin a request and return at once; its answer goes through its response sender."""
        sender, request_id = request.get_response_sender(), str(request.request_id())
        with self._reporting(sender):
            values = read_tensors(self._pb_utils, request, MODELS[LOOP].inputs)
            if read_item(values, "stop", False):
                self._running.stop(request_id)
                sender.send(flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return
            refuse_parameters(json.loads(request.parameters() or "{}"))
            parsed = TextRequest.parse(values, self._settings)
            event = self._running.add(request_id)
            self._pool.submit(self._run, parsed, request_id, sender, event)

    def close(self) -> None:
        """Stop every request and wait for its thread."""
        self._running.stop_all()
        self._pool.shutdown()

    def _run(self, request: TextRequest, request_id: str, sender: Any, event: threading.Event) -> None:
        """One request in its thread, from the first round to the final response."""
        stats = SpecStats()
        try:
            with self._reporting(sender):
                steps = self._generate(request, request_id, lambda: event.is_set() or bool(sender.is_cancelled()))
                for values, final in make_chunks(request, steps, stats):
                    flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
                    sender.send(self._pb_utils.InferenceResponse(make_tensors(self._pb_utils, MODELS[LOOP].outputs, values)), flags)
        finally:
            self._running.remove(request_id, event)
            self._counters.add(stats)

    def _generate(self, request: TextRequest, request_id: str, cancelled: Callable[[], bool]) -> Generator[TextStep, None, None]:
        """The steps of a request, with their text."""
        settings = self._settings
        drafter, verifier = make_models(self._pb_utils, settings, request_id)
        steps = speculate(
            drafter,
            verifier,
            request.prompt_ids,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            draft_len=request.draft_len,
            context=settings.context,
            draft_context=settings.draft_context,
            cancelled=cancelled,
        )
        return generate_text(steps, TextStream(self._tokenizer, request.prompt_ids, request.stop_words))

    @contextmanager
    def _reporting(self, sender: Any) -> Iterator[None]:
        """Turn any error into the request's final response: without one its client would wait for ever."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self._pb_utils.Logger.log_warn(f"request failed: {type(error).__name__}: {error}")
            sender.send(make_error(self._pb_utils, error), flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def make_chunks(request: TextRequest, steps: Iterable[TextStep], stats: SpecStats) -> Iterator[tuple[dict[str, Any], bool]]:
    """Make the output values of each response, and whether it is the last: one per round when streaming, else one in all."""
    first, waiting = True, []
    for step in steps:
        stats.add(step)
        waiting.append(step)
        final = step.finish_reason is not None
        if final or request.stream:
            yield make_answer(request, waiting, stats, first=first), final
            first, waiting = False, []


def make_answer(request: TextRequest, steps: list[TextStep], stats: SpecStats, *, first: bool) -> dict[str, Any]:
    """Output values of one response; what a chunk leaves out is None."""
    tokens = [token for step in steps for token in step.tokens]
    text = "".join(step.text for step in steps)
    return {
        "text_output": request.prompt + text if first and request.echo else text,
        "finish_reason": steps[-1].finish_reason,
        "num_input_tokens": len(request.prompt_ids),
        "num_output_tokens": len(tokens),
        "total_draft_tokens": stats.drafted,
        "total_accepted_draft_tokens": stats.accepted,
        "rounds": stats.rounds,
        "output_ids": tokens if request.return_token_ids else None,
        "prompt_ids": request.prompt_ids if request.return_token_ids and first else None,
    }


class Counters:
    """Triton metrics, which `/metrics` shows beside the server's own.

    Two threads that increment one metric at the same time crash the server (seen on 2.51: the object has one message buffer).
    """

    def __init__(self, pb_utils: Any) -> None:
        described = {
            "rounds": "Passes of the target",
            "draft_tokens": "Drafted tokens that the target judged",
            "accepted_draft_tokens": "Drafted tokens that were committed",
            "output_tokens": "Tokens generated",
        }
        make = pb_utils.MetricFamily
        # A family must outlive its metrics.
        self._families = [make(name=f"specbuild_{name}_total", description=text, kind=make.COUNTER) for name, text in described.items()]
        self._lock = threading.Lock()
        self._metrics = [family.Metric(labels={"model": LOOP}) for family in self._families]

    def add(self, stats: SpecStats) -> None:
        """Count a request that has ended."""
        with self._lock:
            for metric, value in zip(self._metrics, (stats.rounds, stats.drafted, stats.accepted, stats.tokens), strict=True):
                metric.increment(value)
