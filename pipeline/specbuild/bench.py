"""The bench stage: what speculation gains over plain decoding, measured in paired runs and predicted from acceptance and costs.

A run decodes all prompts plainly, then at each draft length in turn, so the ratio of two passes of one run survives a noisy machine.
The first run is reported by itself; medians and ranges are of the runs behind it. Caches are emptied before each prompt (cold);
one more pass per draft length decodes every prompt again with full caches, and is reported as warm, never as the result.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from specbuild.artifacts import find_model_dir
from specbuild.bench_costs import Costs, find_acceptance, measure_costs, predict
from specbuild.bench_passes import Sample, run_pass, split_round
from specbuild.bench_sources import Clock, InProcess, Served, Source
from specbuild.config import PairConfig
from specbuild.errors import ConfigError, SpecbuildError
from specbuild.pair import Pair, open_pair
from specbuild.progress import bar
from specbuild.provenance import find_version
from specbuild.tokenizer import encode_prompt, load_tokenizer
from specbuild.verify import load_prompts

ACCEPTANCE_FLOOR = 0.05  # below it the draft model is hardly a weak one: something is wrong with it
DRAFTED_FLOOR = 0.25  # of what the draft length allows; below it acceptance says little
PACKAGES = ("specbuild", "onnxruntime", "numpy", "tritonclient", "nvidia-pytriton")


@dataclass(frozen=True)
class Prompt:
    """A prompt and the kind of text that it begins."""

    kind: str
    text: str


@dataclass(frozen=True)
class Settings:
    """What is measured. The draft lengths hold 0, plain decoding, first; batches begin with 1."""

    max_tokens: int
    draft_lens: tuple[int, ...]
    batches: tuple[int, ...]
    runs: int
    packaged: int  # the draft length that the pair is packaged with


@dataclass(frozen=True)
class Spread:
    """A value over the runs."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One draft length at one batch, cold. Speedups are over plain decoding in the same run; decode_speedup leaves the first round out.

    Counts are of one run; inter_token is of all runs. split_seconds is of one round behind the first.
    """

    draft_len: int
    batch: int
    tokens_per_second: Spread
    speedup: Spread
    decode_speedup: Spread
    predicted_speedup: float | None
    first_token_seconds: float
    inter_token_seconds: dict[str, float]
    first_run: dict[str, float]
    warm: dict[str, float] | None
    split_seconds: dict[str, float] | None
    counts: dict[str, Any]
    acceptance_by_position: list[float]


@dataclass(frozen=True)
class Report:
    """What bench found; `to_dict` adds at the top what `specbuild plan --measured` reads."""

    command: str
    config: str
    place: str
    prompts: dict[str, int]  # by kind
    settings: Settings
    rows: tuple[Row, ...]
    kinds: dict[str, tuple[Row, ...]]
    costs: tuple[Costs, ...]
    predictions: dict[int, dict[int, float | None]]  # batch -> draft length -> speedup
    warnings: tuple[str, ...]
    hardware: dict[str, Any]
    versions: dict[str, str]

    @property
    def single(self) -> list[Row]:
        return [row for row in self.rows if row.batch == 1]

    @property
    def best(self) -> Row:
        """The fastest draft length for one request at a time; of equal ones the shortest."""
        return max(self.single, key=lambda row: (row.speedup.median, -row.draft_len))

    @property
    def longest(self) -> Row:
        return max(self.single, key=lambda row: row.draft_len)

    def to_dict(self) -> dict[str, Any]:
        costs = self.costs[0] if self.costs else None
        return {
            "acceptance": self.longest.counts["acceptance_rate"],
            "acceptance_by_position": self.longest.acceptance_by_position,
            "c": costs and costs.c,
            "v": costs and costs.v,
            "batch": 1,
            "best_draft_len": self.best.draft_len,
            **asdict(self),
        }


def load_bench_prompts(path: Path | None) -> list[Prompt]:
    """Return the prompts of a file like those of verify, each perhaps with a `kind`; None = the set that is shipped."""
    source = path or Path(str(resources.files("specbuild") / "bench_prompts.jsonl"))
    texts = load_prompts(source)
    values = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    kinds = [value.get("kind", "all") if isinstance(value, dict) else "all" for value in values]
    if not all(isinstance(kind, str) and kind for kind in kinds):
        raise ConfigError(
            f"Cannot use prompts from {path}: a kind is not a word. Expected objects like {{'kind': 'code', 'prompt': '...'}}."
        )
    return [Prompt(kind, text) for kind, text in zip(kinds, texts, strict=True)]


def run_bench(
    config: PairConfig, settings: Settings, prompts_path: Path | None, url: str | None, command: str, clock: Clock = time.perf_counter
) -> Report:
    """Measure a built pair in this process, or the server at `url` and, where the pair is built here, the costs of its passes."""
    prompts = load_bench_prompts(prompts_path)
    tokenizer = load_tokenizer(find_model_dir(config.target, config.path, weights=False))
    if prompts_path is None:  # they were not written for this pair
        half = config.build.max_seq_len // 2
        cut = [tokenizer.decode(ids[:half]) if len(ids := encode_prompt(tokenizer, each.text)) > half else each.text for each in prompts]
        prompts = [replace(each, text=text) for each, text in zip(prompts, cut, strict=True)]
    warnings: list[str] = []
    if url is None:
        here = open_pair(config, slots=max(settings.batches))
        source: Source = InProcess(here, settings.max_tokens, clock)
        pair: Pair | None = here
    else:
        if len(prompts) < settings.batches[-1]:
            raise ConfigError(f"Cannot send {settings.batches[-1]} requests at once: there are {len(prompts)} prompts. Give --batch.")
        slots = config.build.max_batch_size if config.build.compiler == "onnx-cpu" else 0
        source = Served(url, settings.max_tokens, slots, tokenizer)
        pair = find_pair(config, settings, warnings)
    ids = [token for each in prompts for token in encode_prompt(tokenizer, each.text)]
    costs = measure_costs(pair, ids, settings.batches, settings.draft_lens, settings.runs, clock) if pair else ()
    return measure(source, prompts, settings, costs, clock, config=config.name, command=command, warnings=warnings)


def find_pair(config: PairConfig, settings: Settings, warnings: list[str]) -> Pair | None:
    """Open the pair whose server is measured; None, and a warning, where its engines are not here."""
    try:
        return open_pair(config, slots=max(settings.batches))
    except SpecbuildError as error:
        warnings.append(f"c and v were not measured, so nothing is predicted: {error}")
        return None


def measure(
    source: Source, prompts: Sequence[Prompt], settings: Settings, costs: Sequence[Costs], clock: Clock, *, config: str = "",
    command: str = "", warnings: Sequence[str] = (),
) -> Report:  # fmt: skip
    """Decode every prompt in every run at every draft length and batch, and put the report together."""
    batches = settings.batches if isinstance(source, Served) else (1,)
    cells = [(batch, length) for batch in batches for length in settings.draft_lens]
    texts = [prompt.text for prompt in prompts]
    samples: dict[tuple[int, int], list[Sample]] = {cell: [] for cell in cells}
    with bar("bench", (settings.runs + 1) * len(cells) + len(settings.draft_lens), "pass") as progress:
        for _ in range(settings.runs + 1):
            for batch, length in cells:
                samples[batch, length].append(run_pass(source, texts, length, batch, clock))
                progress.update(1)
        warm = {}
        for length in settings.draft_lens:
            warm[length] = run_pass(source, texts, length, 1, clock, warm=True)
            progress.update(1)
    at = {each.batch: each for each in costs}
    rows = tuple(make_row(samples[cell], samples[cell[0], 0], cell, at.get(cell[0]), (warm[cell[1]], warm[0])) for cell in cells)
    kinds = {kind: [i for i, prompt in enumerate(prompts) if prompt.kind == kind] for kind in dict.fromkeys(p.kind for p in prompts)}
    rates = {row.draft_len: row.acceptance_by_position for row in rows if row.batch == 1}
    return Report(
        command=command, config=config, place=source.place, prompts={kind: len(indices) for kind, indices in kinds.items()},
        settings=settings, rows=rows, kinds={kind: make_kind(samples, indices, at.get(1)) for kind, indices in kinds.items()},
        costs=tuple(costs), predictions={each.batch: {k: predict(rates[k], k, each) for k in settings.draft_lens} for each in costs},
        warnings=(*warnings, *find_warnings(rows, settings, samples)), hardware=describe_machine(),
        versions={"python": platform.python_version(), **{name: find_version(name) for name in PACKAGES}},
    )  # fmt: skip


def make_kind(samples: dict[tuple[int, int], list[Sample]], indices: Sequence[int], costs: Costs | None) -> tuple[Row, ...]:
    """Return the rows of one kind of prompt, one request at a time."""
    chosen = {cell: [each.only(indices) for each in found] for cell, found in samples.items() if cell[0] == 1}
    return tuple(make_row(found, chosen[1, 0], cell, costs) for cell, found in chosen.items())


def make_row(
    samples: Sequence[Sample], plain: Sequence[Sample], cell: tuple[int, int], costs: Costs | None,
    warm: tuple[Sample, Sample] | None = None,
) -> Row:  # fmt: skip
    """Summarize the passes of one (batch, draft length) beside the plain ones of the same runs; the first run stands alone."""
    batch, draft_len = cell
    first, *later = samples
    pairs = list(zip(later, plain[1:], strict=True))
    stats = later[-1].stats()
    acceptance = find_acceptance(stats)
    gaps = [gap for sample in later for answer in sample.answers for gap in answer.gaps] or [0.0]
    return Row(
        draft_len, batch, Spread.of([sample.rate() for sample in later]), Spread.of([one.rate() / other.rate() for one, other in pairs]),
        Spread.of([one.decode_rate() / (other.decode_rate() or 1.0) for one, other in pairs]),
        predict(acceptance, draft_len, costs) if costs else None,
        statistics.median(answer.arrivals[0] for sample in later for answer in sample.answers),
        {"p50": float(np.percentile(gaps, 50)), "p99": float(np.percentile(gaps, 99)), "mean": statistics.fmean(gaps)},
        {"tokens_per_second": first.rate(), "speedup": first.rate() / plain[0].rate()},
        {"tokens_per_second": warm[0].rate(), "speedup": warm[0].rate() / warm[1].rate()} if warm and batch == 1 else None,
        split_round(later), stats.to_dict(), acceptance,
    )  # fmt: skip


def find_warnings(rows: Sequence[Row], settings: Settings, samples: dict[tuple[int, int], list[Sample]]) -> list[str]:
    """Return what a reader must not overlook."""
    drafting = [row for row in rows if row.batch == 1 and row.draft_len]
    warnings = []
    for row in drafting[-1:]:
        counts = row.counts
        made = (
            f"{counts['accepted']} of {counts['drafted']} drafted tokens accepted in {counts['rounds']} rounds, {counts['tokens']} tokens"
        )
        if counts["drafted"] < DRAFTED_FLOOR * row.draft_len * counts["rounds"]:
            warnings.append(f"hardly anything was drafted at draft_len {row.draft_len} ({made}): its acceptance says little")
        if counts["drafted"] and drafting[0].counts["acceptance_rate"] < ACCEPTANCE_FLOOR:
            warnings.append(f"the draft hardly ever agrees ({made}): is its lm_head right, and its tokenizer the target's?")
    for length in settings.draft_lens[1:]:
        answers = [[answer.tokens for answer in samples[1, each][-1].answers] for each in (0, length)]
        different = sum(one != other for one, other in zip(*answers, strict=True))
        if different:
            warnings.append(f"{different} answers at draft_len {length} are not the plain ones: run `specbuild verify`")
    if drafting and max(row.speedup.median for row in drafting) < 1:
        best = max(drafting, key=lambda row: row.speedup.median)
        warnings.append(
            f"speculation is slower than plain decoding at every draft length (best {best.speedup.median:.2f} at {best.draft_len}): "
            "draft_len 0 is faster here; a smaller draft or a larger target would change that"
        )
    elif packaged := [row for row in drafting if row.draft_len == settings.packaged and row.speedup.median < 1]:
        warnings.append(f"the packaged draft_len {settings.packaged} is slower than plain decoding ({packaged[0].speedup.median:.2f})")
    return warnings


def describe_machine() -> dict[str, Any]:
    """Return the processor and its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": model, "cores": os.cpu_count()}
