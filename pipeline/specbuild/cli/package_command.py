"""specbuild package."""

from pathlib import Path

import click

from specbuild.check import check_names
from specbuild.cli.options import config_argument, force_option, locked_option
from specbuild.config import load_config
from specbuild.lock import check_lock
from specbuild.package import run_package


@click.command("package")
@config_argument
@force_option
@locked_option
def command(config: Path, force: bool, locked: bool) -> None:
    """Write the Triton model repository.

    \b
    specbuild package configs/demo.yaml
    """
    pair = load_config(config)
    check_names(pair)
    if locked:
        check_lock(pair, ("package",))
    run_package(pair, force)
