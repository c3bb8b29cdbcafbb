"""Runs onnx-cpu engines: stateless requests over cache slots, so a request costs only the tokens that no slot has seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from specbuild.artifacts import Engine
from specbuild.compilers.graph_interface import GRAPH, is_fused, mask_names
from specbuild.compilers.huge_pages import huge_pages
from specbuild.errors import EngineError

Array = np.ndarray[Any, Any]
CAPACITY = 128  # positions a slot holds at first, and by which it grows; by a quarter from 1024 on
CHUNK = 256  # new tokens in one pass at most: attention scores grow with new tokens times capacity
REWIND = 64  # a slot may lose this many tokens to a request (a rejected draft); more is copied to another slot
BINDINGS = 32  # shapes of passes whose arrays are kept
KEPT = 128 << 20  # bytes of them in all, or one pass: masks grow with the capacity, logits with the vocabulary
PREPACK = {"session.prepack.enable_parallel": "1"}  # loads in half the time, and leaves packed weights side by side
SMALL = 32 << 20  # bytes of weights below which a second thread costs more than it saves, and huge pages save nothing


@dataclass
class Slot:
    """The tokens whose keys and values a cache row holds, and when it was last used."""

    tokens: list[int] = field(default_factory=list)
    used: int = 0


@dataclass(frozen=True)
class Job:
    """A sequence in its slot: tokens from `start` on are new, logits of the last `wanted` positions are returned."""

    slot: int
    tokens: list[int]
    start: int
    wanted: int

    @property
    def new(self) -> int:
        return len(self.tokens) - self.start


@dataclass(frozen=True)
class Bound:
    """Arrays of a pass's inputs and logits, and the binding that holds their addresses."""

    binding: Any
    arrays: dict[str, Array]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class OrtRunner:
    """An open engine. logits() may be called from several threads; passes run one at a time."""

    def __init__(self, engine_dir: Path, max_slots: int = 8, threads: int = 0, vocab_size: int = 0) -> None:
        engine = Engine.open(engine_dir)
        if engine.config["specbuild"].get("graph") != GRAPH:
            raise EngineError(
                f"Cannot open engine {engine_dir}: its graph is of another version of specbuild "
                f"({engine.config['specbuild'].get('graph', 1)}, expected {GRAPH}). Run `specbuild build` again."
            )
        self.shape = engine.shape
        self._fused = is_fused(engine.shape, engine.config["specbuild"]["kernels"])
        self._masks = () if self._fused else mask_names(engine.shape)
        self.vocab_size = vocab_size or engine.shape.vocab  # ids beyond the tokenizer's are padding and never returned
        self.max_seq_len = engine.max_seq_len
        self._last_position = engine.max_seq_len + engine.max_draft_len - 1  # padding beyond it has no rotary row
        self.tokens_computed = 0
        options = ort.SessionOptions()
        small = (engine_dir / "weights.bin").stat().st_size < SMALL
        options.intra_op_num_threads = threads or (1 if small else 0)
        options.log_severity_level = 3
        for key, value in {**spinning(), **PREPACK}.items():
            options.add_session_config_entry(key, value)
        try:
            with nullcontext() if small else huge_pages():
                self._session = ort.InferenceSession(str(engine_dir / "model.onnx"), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001  onnxruntime raises bare pybind exceptions
            raise EngineError(f"Cannot open engine {engine_dir}: {str(error).splitlines()[0]}. Build it again on this machine.") from None
        self._slots = [Slot() for _ in range(max_slots)]
        self._exact = engine.config["specbuild"]["kernels"] == "width-independent"
        self._clock = 0
        self._lock = threading.Lock()
        self._caches: dict[str, Array] = {}
        self._capacity = 0
        self._bindings: dict[tuple[int, int, int, int], Bound] = {}
        self._resize(CAPACITY)

    def reset(self) -> None:
        """Forget every cached sequence."""
        with self._lock:
            self._slots = [Slot() for _ in self._slots]

    def logits(self, tokens: Sequence[int], n: int) -> Array:
        """Return float32 logits (n, vocab) of the last n positions of a sequence."""
        return self.logits_batch([(tokens, n)])[0]

    def logits_batch(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Array]:
        """Return each sequence's logits as `logits` would, sharing passes where lengths are alike."""
        for tokens, n in requests:
            if not 1 <= n <= len(tokens) or len(tokens) > self.max_seq_len:
                raise EngineError(
                    f"Cannot run {len(tokens)} tokens for {n} logits: expected 1 to {self.max_seq_len} tokens and at least as many "
                    "as logits."
                )
        results: list[Array] = []
        with self._lock:
            for i in range(0, len(requests), len(self._slots)):
                results += self._run(requests[i : i + len(self._slots)])
        return results

    def _run(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Array]:
        """Run at most as many requests as there are slots."""
        jobs: list[Job] = []
        for tokens, n in requests:
            jobs.append(self._place(list(tokens), n, {job.slot for job in jobs}))
        jobs = [self._ingest(job) for job in jobs]
        results: dict[int, Array] = {}
        for group in group_jobs(jobs, widest=1 if self._fused else None):
            for job, logits in zip(group, self._pass(group), strict=True):
                results[job.slot] = logits
        return [results[job.slot] for job in jobs]

    def _place(self, tokens: list[int], wanted: int, taken: set[int]) -> Job:
        """Choose a slot: the one that shares the longest prefix; if too much of it would be lost, the oldest with that prefix copied."""
        self._clock += 1
        free = [i for i in range(len(self._slots)) if i not in taken]
        shared = {i: common_prefix(self._slots[i].tokens, tokens) for i in free}
        best = max(free, key=lambda i: (shared[i], -len(self._slots[i].tokens), -i))
        start = min(shared[best], len(tokens) - wanted)
        if len(self._slots[best].tokens) - start > REWIND:
            oldest = min(free, key=lambda i: (self._slots[i].used, i))
            if oldest != best:
                for cache in self._caches.values():
                    cache[oldest, :, :start] = cache[best, :, :start]
                best = oldest
        self._slots[best] = Slot(tokens[:start], self._clock)
        return Job(best, tokens, start, wanted)

    def _ingest(self, job: Job) -> Job:
        """Run all but the last chunk of a long sequence, without logits."""
        while job.new > max(CHUNK, job.wanted):
            end = min(job.start + CHUNK, len(job.tokens) - job.wanted)
            self._pass([Job(job.slot, job.tokens[:end], job.start, 1)])
            job = Job(job.slot, job.tokens, end, job.wanted)
        return job

    def _pass(self, jobs: Sequence[Job]) -> list[Array]:
        """Run jobs of neighbouring slots in one pass; shorter ones are padded, and the padding is overwritten later."""
        width = self._padded(len(jobs), max(job.new for job in jobs))
        wanted = self._padded(len(jobs), max(job.wanted for job in jobs))
        self._resize(max(job.start for job in jobs) + width)
        bound = self._bind(jobs[0].slot, jobs[-1].slot + 1, width, wanted)
        arrays = bound.arrays
        for i, job in enumerate(jobs):
            arrays["input_ids"][i, : job.new] = job.tokens[job.start :]
            arrays["rows"][i, :, 0] = [max(row, 0) for row in range(job.new - wanted, job.new)]
        if self._fused:
            lengths = [job.start + width for job in jobs]
            arrays["last"][:] = [length - 1 for length in lengths]
            arrays["total"][...] = max(lengths)
        else:
            positions = np.array([[job.start] for job in jobs]) + np.arange(width)
            np.minimum(positions, self._last_position, out=arrays["positions"])
            arrays["cells"][..., 2] = positions[:, :, None]
            for name in self._masks:
                arrays[name][:, 0] = self._mask(positions, self.shape.window if name == "local_mask" else None)
        self._session.run_with_iobinding(bound.binding)
        for job in jobs:
            self._slots[job.slot].tokens = job.tokens
        self.tokens_computed += sum(job.new for job in jobs)
        return [arrays["logits"][i, wanted - job.wanted :, : self.vocab_size].copy() for i, job in enumerate(jobs)]

    def _padded(self, sequences: int, width: int) -> int:
        """Return the width of a pass; where its bits must not depend on it, one that makes an even number of rows.

        Kernels take rows in pairs, and one without a partner by other instructions, which round otherwise.
        """
        alone = sequences * width % 2 or width * self.shape.heads == self.shape.kv_heads  # of all products, or of one head's attention
        return width + 1 if self._exact and alone else width

    def _mask(self, positions: Array, window: int | None) -> Array:
        """Return (B, S * G, T), 0 or minus infinity: each new token sees itself and what came before, within the window."""
        columns, last = np.arange(self._capacity), np.repeat(positions, self.shape.heads // self.shape.kv_heads, axis=1)[:, :, None]
        hidden: Array = columns > last
        if window is not None:
            hidden |= columns <= last - window
        return np.where(hidden, np.float32(-np.inf), np.float32(0))

    def _resize(self, needed: int) -> None:
        """Make every cache hold `needed` positions or more; what is cached is kept."""
        if self._caches and needed <= self._capacity:
            return
        self._capacity = self._capacity or CAPACITY
        while self._capacity < needed:
            self._capacity += max(CAPACITY, self._capacity // (4 * CAPACITY) * CAPACITY)
        dims = (len(self._slots), self.shape.kv_heads, self._capacity, self.shape.head_dim)
        for name in [f"{kind}_{layer}" for layer in range(self.shape.layers) for kind in ("key", "value")]:
            old, new = self._caches.get(name), np.zeros(dims, np.float32)
            if old is not None:
                new[:, :, : old.shape[2]] = old
            self._caches[name] = new
        self._bindings.clear()

    def _bind(self, low: int, high: int, width: int, wanted: int) -> Bound:
        """Return what a pass of `width` new tokens over slots low..high-1 runs with, bound once and used again."""
        key = (low, high, width, wanted)
        if key not in self._bindings:
            bound = self._make_bound(low, high, width, wanted)
            if len(self._bindings) >= BINDINGS or bound.nbytes + sum(each.nbytes for each in self._bindings.values()) > KEPT:
                self._bindings.clear()
            self._bindings[key] = bound
        return self._bindings[key]

    def _make_bound(self, low: int, high: int, width: int, wanted: int) -> Bound:
        shape, count, binding = self.shape, high - low, self._session.io_binding()
        for name, cache in self._caches.items():  # input and output at once, so that they are written in place
            bind(binding.bind_input, f"past_{name}", cache[low:high])
            bind(binding.bind_output, f"present_{name}", cache[low:high])
        arrays: dict[str, Array] = {"input_ids": np.zeros((count, width), np.int64), "rows": np.empty((count, wanted, 1), np.int64)}
        if self._fused:
            arrays |= {"last": np.empty(count, np.int32), "total": np.empty((), np.int32)}
        else:
            cells = np.empty((count, width, shape.kv_heads, 3), np.int64)
            cells[..., 0] = np.arange(count)[:, None, None]
            cells[..., 1] = np.arange(shape.kv_heads)
            masks = (count, 1, width * shape.heads // shape.kv_heads, self._capacity)
            arrays |= {"positions": np.empty((count, width), np.int64), "cells": cells}
            arrays |= {name: np.empty(masks, np.float32) for name in self._masks}
        for name, array in arrays.items():
            bind(binding.bind_input, name, array)
        arrays["logits"] = np.empty((count, wanted, shape.vocab), np.float32)
        bind(binding.bind_output, "logits", arrays["logits"])
        return Bound(binding, arrays)


def bind(method: Callable[..., None], name: str, array: Array) -> None:
    """Bind an array by its address."""
    method(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def spinning() -> dict[str, str]:
    """Return how idle threads wait for work: by spinning, because a product takes 50 microseconds and waking a thread as long.

    Only for so long, though: two engines share the cores, and before 1.26 ONNX Runtime cannot bound it.
    """
    if tuple(int(part) for part in ort.__version__.split(".")[:2]) < (1, 26):
        return {"session.intra_op.allow_spinning": "0"}
    return {"session.intra_op.allow_spinning": "1", "session.intra_op.spin_duration_us": "50"}


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many leading tokens two sequences share."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # they differ first at low or between it and high
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low


def group_jobs(jobs: Sequence[Job], widest: int | None = None) -> list[list[Job]]:
    """Group jobs into passes: neighbouring slots, and no job padded to more than twice its new tokens (or 8).

    Jobs of more than `widest` new tokens get a pass of their own.
    """
    groups: list[list[Job]] = []
    for job in sorted(jobs, key=lambda job: job.slot):
        if groups and groups[-1][-1].slot + 1 == job.slot:
            widths = [other.new for other in groups[-1]] + [job.new]
            if max(widths) <= (max(8, 2 * min(widths)) if widest is None else widest):
                groups[-1].append(job)
                continue
        groups.append([job])
    return groups
