"""The same comparisons through a running server: what it sends at any draft length against what it sends without a draft."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from specbuild.pair import Pair
from specbuild.spec.loop import Step
from specbuild.spec.sampling import Sampling
from specbuild.spec.stats import SpecStats
from specbuild.tokenizer import encode_prompt
from specbuild.triton.client import Chunk, stream_generate
from specbuild.verify import (
    Divergence,
    Report,
    choose_lengths,
    compare_lengths,
    decode_greedily,
    find_divergence,
    first_difference,
    make_report,
)
from specbuild.verify_sampling import DRAWS, PROMPTS, TOKENS, SamplingReport, judge_sampling, make_expect


def run_served(
    url: str, prompts: Sequence[str], max_tokens: int, draft_lens: Sequence[int], packaged_len: int, pair: Pair | None = None
) -> Report:
    """Ask the server for every prompt, plainly and at each draft length; where a pair is open here, compare its plain answers too."""
    encoded = [] if pair is None else [encode_prompt(pair.tokenizer, text) for text in prompts]

    def decode(index: int, draft_len: int, stats: SpecStats) -> list[int]:
        ids: list[int] = []
        for step in read_steps(stream_generate(url, prompts[index], max_tokens=max_tokens, draft_len=draft_len)):
            stats.add(step)
            ids += step.tokens
        return ids

    def locate(index: int, draft_len: int, plain: list[int], answer: list[int]) -> Divergence:
        if pair is not None:
            return find_divergence(pair, encoded[index], plain, answer, index, draft_len)
        position, ids = first_difference(plain, answer)
        return Divergence(index, draft_len, position, *ids)

    stats, divergences, answers = compare_lengths(decode, locate, len(prompts), choose_lengths(draft_lens))
    report = replace(make_report(len(prompts), max_tokens, stats, divergences, packaged_len, SpecStats()), url=url)
    if pair is None:
        return report
    own = [decode_greedily(pair, prompt, max_tokens, 0, SpecStats()) for prompt in encoded]
    return replace(report, served_differently=sum(here != there for here, there in zip(own, answers, strict=True)))


def run_served_sampling(
    url: str, prompts: Sequence[str], draft_len: int, pair: Pair | None = None, draws: int = DRAWS, seed: int = 0
) -> SamplingReport:
    """Draw from the server; test against the probabilities of the target that is open here, else against its own plain draws."""
    texts = prompts[:PROMPTS]
    expect = None if pair is None else make_expect(pair, [encode_prompt(pair.tokenizer, text) for text in texts])

    def draw(index: int, sampling: Sampling, length: int) -> tuple[int, ...]:
        chunks = stream_generate(url, texts[index], max_tokens=TOKENS, sampling=sampling, draft_len=length, stream=False)
        return tuple(token for chunk in chunks for token in chunk.token_ids)

    return judge_sampling(draw, expect, len(texts), draft_len, draws, seed)


def read_steps(chunks: Iterable[Chunk]) -> Iterator[Step]:
    """Return the rounds that a stream's chunks, one a round, stand for: their counts are totals so far."""
    drafted = accepted = 0
    for chunk in chunks:
        yield Step(chunk.token_ids, chunk.accepted - accepted, chunk.drafted - drafted, chunk.finish_reason)
        drafted, accepted = chunk.drafted, chunk.accepted


def cut_text(tokenizer: Tokenizer, text: str, length: int) -> str:
    """Return the beginning of a text that is at most `length` tokens long."""
    offsets = tokenizer.encode(text).offsets
    return text if len(offsets) <= length else text[: offsets[length - 1][1]]
