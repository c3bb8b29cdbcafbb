"""specbuild bench."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from specbuild.bench import Settings, run_bench
from specbuild.bench_report import check_drawable, draw_speedup, format_report, make_html, make_svg
from specbuild.cli.options import config_argument, echo_json, json_option
from specbuild.config import PairConfig, load_config
from specbuild.errors import ConfigError

BATCHES = (1, 2, 4, 8)
LONGEST = 8


@click.command("bench")
@config_argument
@click.option("--url", help="Measure the server at this gRPC address, host:port.  [default: in this process]")
@click.option(
    "--prompts", type=click.Path(path_type=Path), help="JSON lines, objects with `prompt` and perhaps `kind`.  [default: 16 shipped ones]"
)
@click.option("--max-tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens per answer.")
@click.option(
    "--draft-len", "draft_lens", type=click.IntRange(0), multiple=True, help=f"Draft lengths; repeatable.  [default: 0 to {LONGEST}]"
)
@click.option("--batch", "batches", help="Requests at once, a list; in this process only predicted.  [default: 1,2,4,8]")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Paired runs behind the first one.")
@json_option
@click.option("--html", type=click.Path(path_type=Path), help="Write the report with plots into this one file.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the speedup against the draft length into this SVG file.")
def command(
    config: Path, url: str | None, prompts: Path | None, max_tokens: int, draft_lens: tuple[int, ...], batches: str | None, runs: int,
    as_json: bool, html: Path | None, plot: Path | None,
) -> None:  # fmt: skip
    """Measure speculative against plain decoding.

    Greedy, in paired runs: speed, latency, acceptance, and what a draft step and a pass over several tokens cost.

    \b
    specbuild bench configs/demo.yaml --html bench.html
    specbuild bench configs/demo.yaml --url localhost:8001
    """
    for path in (html, plot):
        if path is not None:
            check_drawable(path)
    pair_config = load_config(config)
    settings = Settings(
        max_tokens, choose_lengths(pair_config, draft_lens), choose_batches(pair_config, batches), runs, pair_config.speculation.draft_len
    )
    report = run_bench(pair_config, settings, prompts, url, shlex.join(["specbuild", *sys.argv[1:]]))
    if html is not None:
        html.write_text(make_html(report), encoding="utf-8")
    if plot is not None:
        plot.write_bytes(make_svg(report, draw_speedup))
    if as_json:
        echo_json(report.to_dict())
    else:
        click.echo(format_report(report))


def choose_lengths(config: PairConfig, asked: tuple[int, ...]) -> tuple[int, ...]:
    """Return the draft lengths in order, plain decoding first."""
    most = config.max_draft_len
    if asked and max(asked) > most:
        raise ConfigError(
            f"Cannot draft {max(asked)} tokens: the target is built for 0 to {most}. Raise build.max_draft_len and build again."
        )
    return tuple(sorted({0, *(asked or range(min(LONGEST, most) + 1))}))


def choose_batches(config: PairConfig, asked: str | None) -> tuple[int, ...]:
    """Return the batches in order, 1 first."""
    words = [word.strip() for word in (asked or ",".join(map(str, BATCHES))).split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{asked!r} is not a list of whole numbers above 0, like 1,4,8.", param_hint="'--batch'")
    most = config.build.max_batch_size
    if asked and max(map(int, words)) > most:
        raise ConfigError(
            f"Cannot measure a batch of {max(map(int, words))}: build.max_batch_size is {most}. Raise it, or give smaller ones."
        )
    return tuple(sorted({1, *(int(word) for word in words if int(word) <= most)}))
