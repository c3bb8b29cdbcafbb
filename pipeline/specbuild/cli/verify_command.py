"""specbuild verify."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import click

from specbuild.cli.options import config_argument, echo_json, json_option
from specbuild.config import PairConfig, load_config
from specbuild.errors import EngineError
from specbuild.pair import Pair, open_pair
from specbuild.progress import log
from specbuild.verify import ALL_DRAFT_LENS, DRAFT_LENS, Report, format_report, load_prompts, run_verify, standard_lengths
from specbuild.verify_sampling import DRAWS, format_sampling, run_sampling


class Outcome(Protocol):
    """A report of any kind."""

    @property
    def passed(self) -> bool: ...
    def to_dict(self) -> dict[str, Any]: ...


@click.command("verify")
@config_argument
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="JSON lines, each a string or an object with `prompt`.  [default: 20 shipped ones]"
)
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens per answer.")
@click.option(
    "--draft-len", type=click.IntRange(1), multiple=True, help=f"Draft lengths; repeatable.  [default: {', '.join(map(str, DRAFT_LENS))}]"
)
@click.option("--all-lengths", is_flag=True, help="Every draft length from 1 to 8.")
@click.option("--sampling", is_flag=True, help="Also test the distribution of sampled tokens.")
@click.option("--draws", type=click.IntRange(100), default=DRAWS, show_default=True, help="Draws per prompt and sampling, with --sampling.")
@click.option("--seed", type=click.IntRange(0, 2**62), default=0, show_default=True, help="Of the first draw.")
@click.option("--url", help="Ask the server at this gRPC address, host:port, instead of decoding in this process.")
@click.option("--against", type=click.Choice(["transformers"]), help="Also compare with transformers on the dequantized models.")
@json_option
def command(
    config: Path, prompts: Path | None, max_tokens: int, draft_len: tuple[int, ...], all_lengths: bool, sampling: bool, draws: int,
    seed: int, url: str | None, against: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Compare speculative with plain decoding.

    Token by token, on a set of prompts, in this process or on a running server; also sampled tokens by their distribution, and
    transformers' answers. A mismatch exits with 1.

    \b
    specbuild verify configs/demo.yaml
    specbuild verify configs/demo.yaml --all-lengths --sampling --against transformers
    specbuild verify configs/demo.yaml --url localhost:8001 --sampling
    """
    values, texts = load_config(config), load_prompts(prompts)
    if all_lengths:
        draft_len = tuple(length for length in ALL_DRAFT_LENS if length <= values.max_draft_len)
    if url is not None:
        pair = open_pair(values) if against else find_pair(values)
        report, more = ask_server(url, values, pair, texts, max_tokens, draft_len, prompts is None, draws if sampling else 0, seed)
    else:
        pair = open_pair(values)
        report = run_verify(pair, texts, max_tokens, draft_len, cut=prompts is None)
        more = {"sampling": (sampled := run_sampling(pair, texts, draws, seed), format_sampling(sampled))} if sampling else {}
    if against and pair is not None:
        from specbuild.verify_transformers import format_transformers, run_against_transformers

        compared = run_against_transformers(values, pair, texts, max_tokens)
        more[against] = compared, format_transformers(compared)
    echo_report(report, as_json, more)


def ask_server(
    url: str, config: PairConfig, pair: Pair | None, texts: Sequence[str], max_tokens: int, draft_len: Sequence[int], cut: bool,
    draws: int, seed: int,
) -> tuple[Report, dict[str, tuple[Outcome, str]]]:  # fmt: skip
    """Run the comparisons through a server; `pair` is what is built here, None if nothing is."""
    from specbuild.verify_served import cut_text, run_served, run_served_sampling

    if cut and pair is not None:
        texts = [cut_text(pair.tokenizer, text, pair.target.max_seq_len // 2) for text in texts]
    packaged = config.speculation.draft_len
    lengths = draft_len or standard_lengths(packaged, config.max_draft_len)
    report = run_served(url, texts, max_tokens, lengths, packaged, pair)
    if not draws:
        return report, {}
    sampled = run_served_sampling(url, texts, packaged, pair, draws, seed)
    return report, {"sampling": (sampled, format_sampling(sampled))}


def find_pair(config: PairConfig) -> Pair | None:
    """Open the pair if its engines are built here and run here."""
    try:
        return open_pair(config)
    except EngineError as error:
        log(f"only the server is asked: {error}")
        return None


def echo_report(report: Report, as_json: bool, more: dict[str, tuple[Outcome, str]] | None = None) -> None:
    """Print a report and, by their names, further ones with their text; one that did not pass exits with 1."""
    more = more or {}
    if as_json:
        echo_json({**report.to_dict(), **{name: each.to_dict() for name, (each, _) in more.items()}})
    else:
        click.echo("\n".join([format_report(report), *(text for _, text in more.values())]))
    if not all(each.passed for each in (report, *(each for each, _ in more.values()))):
        raise SystemExit(1)
