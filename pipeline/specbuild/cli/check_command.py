"""specbuild check."""

from pathlib import Path

import click

from specbuild.check import ModelReport, PairReport, check_pair
from specbuild.cli.options import config_argument, echo_json, json_option, locked_option
from specbuild.config import load_config
from specbuild.lock import check_lock
from specbuild.placement import check_placement


@click.command("check")
@config_argument
@locked_option
@json_option
def command(config: Path, locked: bool, as_json: bool) -> None:
    """Check a pair without reading weights.

    Files, shapes, schemes, tokenizers, limits, GPUs: the first thing that cannot work is one error. --locked reads weights, for digests.

    \b
    specbuild check configs/demo.yaml
    """
    pair = load_config(config)
    if locked:
        check_lock(pair)
    report = check_pair(pair)
    if pair.build.compiler == "tensorrt":
        check_placement(pair)
    if as_json:
        echo_json(report.to_dict())
    else:
        click.echo(format_report(report))


def format_report(report: PairReport) -> str:
    """Return a table with a row per property and a column per model."""
    rows = [("", "target", "draft")] + [(name, _show(report.target, name), _show(report.draft, name)) for name in vars(report.target)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    remarks = [f"warning: {text}" for text in (*report.warnings, *report.differences)] + [f"note: {text}" for text in report.notes]
    return "\n".join([*lines, *remarks, "The pair fits together."])


def _show(report: ModelReport, name: str) -> str:
    value = getattr(report, name)
    if name == "parameters":
        return f"{value / 1e6:,.1f} M"
    if name == "end_ids":
        return ", ".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
