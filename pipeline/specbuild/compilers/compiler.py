"""What a compiler is: it checks a pair and its models, builds an engine from a checkpoint, and may run one in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specbuild.artifacts import Engine, TllmCheckpoint
from specbuild.config import PairConfig, Role
from specbuild.quant import QuantScheme
from specbuild.shape import ModelShape


@dataclass(frozen=True)
class Limits:
    """What an engine is built for. max_draft_len > 0 only on the target."""

    max_batch_size: int
    max_seq_len: int
    max_draft_len: int
    kernels: str
    gather_logits: bool = False  # answers can carry the logits they were drawn from: what acceptance by rejection needs


class Runner(Protocol):
    """An open engine: logits of token sequences, stateless for the caller."""

    vocab_size: int
    max_seq_len: int

    def logits(self, tokens: Sequence[int], n: int) -> np.ndarray[Any, Any]:
        """Return the logits (n, vocab) of the last n positions."""
        ...

    def logits_batch(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[np.ndarray[Any, Any]]:
        """Return the logits of several sequences, each as `logits` would."""
        ...

    def reset(self) -> None:
        """Forget every cached sequence."""


class Compiler(Protocol):
    """A module of this package that turns a checkpoint into an engine directory."""

    ENGINES: bool  # whether it builds any; without, the models' own files are packaged
    PACKAGES: tuple[str, ...]
    GROUPS: tuple[int, ...]  # group sizes to offer, widest first
    LIMITS: tuple[str, ...]  # the fields of Limits that its engines depend on

    def check(self, shape: ModelShape, scheme: QuantScheme, group_size: int, tp: int, pp: int) -> None:
        """Raise EngineError when this compiler cannot build such a model."""

    def check_pair(self, config: PairConfig, shapes: Mapping[Role, ModelShape]) -> None:
        """Raise EngineError when this compiler cannot build the models for decoding together."""

    def check_machine(self, scheme: QuantScheme) -> Mapping[str, str]:
        """Return what an engine depends on in this machine; raise EngineError when it cannot be built here."""
        ...

    def describe(self, checkpoint_dir: Path, limits: Limits, out: Path, world_size: int) -> list[str]:
        """Return the lines that say what `build` would run, and write."""
        ...

    def build(self, checkpoint: TllmCheckpoint, limits: Limits, out: Path, label: str) -> None:
        """Write an engine directory."""

    def check_serving(self, engine: Engine) -> None:
        """Raise EngineError when an engine cannot be served on this machine."""

    def open_runner(self, engine_dir: Path, max_slots: int = 8, threads: int = 0, vocab_size: int = 0) -> Runner:
        """Open an engine for running in this process."""
        ...
