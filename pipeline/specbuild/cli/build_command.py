"""specbuild build."""

from __future__ import annotations

from pathlib import Path

import click

from specbuild.build import check_build, describe_build, run_build
from specbuild.check import check_names
from specbuild.cli.options import config_argument, force_option, locked_option, only_option, roles_of
from specbuild.config import Role, load_config
from specbuild.lock import check_lock


@click.command("build")
@config_argument
@only_option
@force_option
@locked_option
@click.option("--dry-run", is_flag=True, help="Print what would be run and written, on any machine; needs each model's config.json only.")
def command(config: Path, only: Role | None, force: bool, locked: bool, dry_run: bool) -> None:
    """Build both engines.

    Each is made from its quantized checkpoint.

    \b
    specbuild build configs/demo.yaml --only draft
    specbuild build configs/demo.yaml --dry-run
    """
    pair = load_config(config)
    check_names(pair)
    if locked:
        check_lock(pair, ("build",))
    roles = roles_of(only)
    if dry_run:
        click.echo(describe_build(pair, roles))
        return
    for role in roles:
        check_build(pair, role)
    for role in roles:
        run_build(pair, role, force)
