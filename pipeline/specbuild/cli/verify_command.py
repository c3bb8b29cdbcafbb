"""specbuild verify."""

from __future__ import annotations

from pathlib import Path

import click

from specbuild.cli.options import config_argument, echo_json, json_option
from specbuild.config import load_config
from specbuild.pair import open_pair
from specbuild.verify import DRAFT_LENS, Report, format_report, load_prompts, run_verify


@click.command("verify")
@config_argument
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="JSON lines, each a string or an object with `prompt`.  [default: 20 shipped ones]"
)
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens per answer.")
@click.option(
    "--draft-len", type=click.IntRange(1), multiple=True, help=f"Draft lengths; repeatable.  [default: {', '.join(map(str, DRAFT_LENS))}]"
)
@json_option
def command(config: Path, prompts: Path | None, max_tokens: int, draft_len: tuple[int, ...], as_json: bool) -> None:
    """Compare speculative with plain decoding.

    Token by token, on a set of prompts. A mismatch exits with 1.

    \b
    specbuild verify configs/demo.yaml
    """
    echo_report(run_verify(open_pair(load_config(config)), load_prompts(prompts), max_tokens, draft_len, cut=prompts is None), as_json)


def echo_report(report: Report, as_json: bool) -> None:
    """Print a report; one that did not pass exits with 1."""
    if as_json:
        echo_json(report.to_dict())
    else:
        click.echo(format_report(report))
    if not report.passed:
        raise SystemExit(1)
