"""specbuild quantize."""

from __future__ import annotations

from pathlib import Path

import click

from specbuild.check import check_names
from specbuild.cli.options import config_argument, force_option, only_option, roles_of
from specbuild.config import Role, load_config
from specbuild.quantize import run_quantize


@click.command("quantize")
@config_argument
@only_option
@force_option
def command(config: Path, only: Role | None, force: bool) -> None:
    """Quantize both checkpoints.

    \b
    specbuild quantize configs/demo.yaml --only draft
    """
    pair = load_config(config)
    check_names(pair)
    for role in roles_of(only):
        run_quantize(pair, role, force)
