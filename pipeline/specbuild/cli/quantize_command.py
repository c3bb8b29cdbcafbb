"""specbuild quantize."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from specbuild.acceptance import format_acceptance, run_acceptance
from specbuild.check import check_names
from specbuild.cli.options import config_argument, echo_json, force_option, json_option, locked_option, only_option, roles_of
from specbuild.config import Role, load_config
from specbuild.lock import check_lock
from specbuild.quality import format_quality, load_quality
from specbuild.quantize import run_quantize


@click.command("quantize")
@config_argument
@only_option
@force_option
@locked_option
@json_option
def command(config: Path, only: Role | None, force: bool, locked: bool, as_json: bool) -> None:
    """Quantize both checkpoints.

    Ends with what it did to each model, measured on held-out text, and to the draft's acceptance.

    \b
    specbuild quantize configs/demo.yaml --only draft
    """
    pair = load_config(config)
    check_names(pair)
    if locked:
        check_lock(pair, ("quantize",))
    for role in roles_of(only):
        run_quantize(pair, role, force)
    reports = {role: load_quality(pair.dir_of(role, "quantized")) for role in roles_of(only)}
    measured = {role: report for role, report in reports.items() if report is not None}
    acceptance = None if only else run_acceptance(pair, force)
    if as_json:
        values: dict[str, object] = {role: asdict(report) for role, report in measured.items()}
        echo_json({**values, "acceptance": None if acceptance is None else asdict(acceptance)})
        return
    blocks = [format_quality(report, role) for role, report in measured.items()]
    if acceptance is not None:
        blocks.append(format_acceptance(acceptance))
    if blocks:
        click.echo("\n\n".join(blocks))
