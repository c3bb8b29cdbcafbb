"""Is speculative sampling the target's own sampling? A likelihood-ratio test of what is drawn, with a stated false-alarm rate."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specbuild.pair import Pair
from specbuild.progress import bar
from specbuild.spec.fit import Fit, combine, fit_distribution, fit_samples
from specbuild.spec.sampling import Probs, Sampling, probs
from specbuild.tokenizer import encode_prompt

FALSE_ALARMS = 1e-4  # that an honest pair fails any of its tests
PROMPTS = 4
DRAWS = 1000
TOKENS = 3
LEAST_DRAWS = 30  # behind the same tokens, for these to be a context of their own
SAMPLINGS = (Sampling(1.0), Sampling(0.7, top_k=20, top_p=0.95))
WHOLE, PLAIN = "the target's own probabilities", "plain sampling"

Draw = Callable[[int, Sampling, int], tuple[int, ...]]
"""(index of the prompt, sampling, draft length) -> at most TOKENS ids."""
Expect = Callable[[int, Sampling, tuple[int, ...]], Probs]
"""(index of the prompt, sampling, ids so far) -> the target's distribution (V,) of the next id."""
Counts = dict[tuple[int, ...], Counter[int]]


@dataclass(frozen=True)
class SamplingTest:
    """The tokens at one position behind one prompt: of all contexts that were drawn often enough, together."""

    prompt: int
    temperature: float
    top_k: int
    top_p: float
    position: int
    draws: int
    statistic: float
    degrees: int
    p_value: float
    different: bool


@dataclass(frozen=True)
class SamplingReport:
    """What the tests of sampling found. Fixed seeds: the same engines give the same report."""

    against: str
    draft_len: int
    tokens: int
    draws: int  # per prompt and sampling
    seed: int
    false_alarms: float
    tests: tuple[SamplingTest, ...]

    @property
    def passed(self) -> bool:
        return not any(test.different for test in self.tests)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def run_sampling(pair: Pair, prompts: Sequence[str], draws: int = DRAWS, seed: int = 0) -> SamplingReport:
    """Draw from the pair as packaged and test against the target's own probabilities, which a cold pass over the context gives."""
    encoded = [encode_prompt(pair.tokenizer, text)[: pair.target.max_seq_len // 2] for text in prompts[:PROMPTS]]

    def draw(index: int, sampling: Sampling, draft_len: int) -> tuple[int, ...]:
        steps = pair.steps(encoded[index], replace(sampling, end_ids=pair.end_ids), TOKENS, draft_len)
        return tuple(token for step in steps for token in step.tokens)

    pair.reset()
    return judge_sampling(draw, make_expect(pair, encoded), len(encoded), pair.draft_len, draws, seed)


def make_expect(pair: Pair, prompts: Sequence[Sequence[int]]) -> Expect:
    """Return the target's distributions behind these prompts."""

    def expect(index: int, sampling: Sampling, prefix: tuple[int, ...]) -> Probs:
        pair.target.reset()
        row: Probs = probs(pair.target.logits([*prompts[index], *prefix], 1), sampling)[0]
        return row

    return expect


def judge_sampling(draw: Draw, expect: Expect | None, prompts: int, draft_len: int, draws: int, seed: int) -> SamplingReport:
    """Test every prompt, sampling and position; without `expect` against plain draws with other seeds."""
    fits: list[tuple[int, Sampling, int, Fit]] = []
    first = seed
    with bar("sample", prompts * len(SAMPLINGS) * draws, "draw") as progress:
        for index in range(prompts):
            for sampling in SAMPLINGS:
                found = count_draws(draw, index, sampling, draft_len, draws, seed)
                plain = None if expect is not None else count_draws(draw, index, sampling, 0, draws, seed + draws)
                seed += draws * (1 if plain is None else 2)
                fits += [(index, sampling, *each) for each in fit_positions(found, plain, index, sampling, expect)]
                progress.update(draws)
    limit = FALSE_ALARMS / max(1, len(fits))
    tests = tuple(
        SamplingTest(
            index, sampling.temperature, sampling.top_k, sampling.top_p, position, fit.draws, fit.statistic, fit.degrees, fit.p_value,
            fit.p_value < limit,
        )
        for index, sampling, position, fit in fits
    )  # fmt: skip
    return SamplingReport(WHOLE if expect is not None else PLAIN, draft_len, TOKENS, draws, first, FALSE_ALARMS, tests)


def count_draws(draw: Draw, index: int, sampling: Sampling, draft_len: int, draws: int, seed: int) -> Counts:
    """Draw with seeds from `seed` on; count the next token of every context."""
    counts: Counts = defaultdict(Counter)
    for number in range(seed, seed + draws):
        tokens = draw(index, replace(sampling, seed=number), draft_len)
        for position, token in enumerate(tokens):
            counts[tokens[:position]][token] += 1
    return counts


def fit_positions(found: Counts, plain: Counts | None, index: int, sampling: Sampling, expect: Expect | None) -> list[tuple[int, Fit]]:
    """Test each position, of which the contexts are independent tests in one."""
    fits: dict[int, list[Fit]] = defaultdict(list)
    for prefix, counts in sorted(found.items()):
        if counts.total() < LEAST_DRAWS:
            continue
        if expect is not None:
            fits[len(prefix)].append(fit_distribution(counts, expect(index, sampling, prefix)))
        elif plain is not None and plain[prefix].total() >= LEAST_DRAWS:
            fits[len(prefix)].append(fit_samples(counts, plain[prefix]))
    return [(position, combine(parts)) for position, parts in sorted(fits.items())]


def format_sampling(report: SamplingReport) -> str:
    """Return the report as text: one line of result, then every test that failed."""
    drawn = sum(test.draws for test in report.tests if test.position == 0)
    smallest = min((test.p_value for test in report.tests), default=1.0)
    result, limit = "ok" if report.passed else "DIFFERENT", report.false_alarms / max(1, len(report.tests))
    lines = [
        f"sampling               {result} against {report.against}: {len(report.tests)} G-tests, {drawn} draws of {report.tokens} tokens "
        f"(seed {report.seed}), draft_len {report.draft_len}",
        f"                       smallest p {smallest:.1e}, DIFFERENT below {limit:.1e}: {report.false_alarms:.0e} false alarms in all",
    ]
    for test in report.tests:
        if test.different:
            lines.append(
                f"DIFFERENT: prompt {test.prompt}, temperature {test.temperature}, top_k {test.top_k}, top_p {test.top_p}, position "
                f"{test.position}: p {test.p_value:.1e} (G {test.statistic:.1f}, {test.degrees} degrees of freedom, {test.draws} draws)"
            )
    return "\n".join(lines)
