"""specbuild lock."""

from __future__ import annotations

from pathlib import Path

import click

from specbuild.check import check_names
from specbuild.cli.options import config_argument
from specbuild.config import load_config
from specbuild.lock import DIGEST_VARIABLE, lock_path, run_lock
from specbuild.progress import log


@click.command("lock")
@config_argument
@click.option(
    "--container-digest", envvar=DIGEST_VARIABLE, show_envvar=True,
    help="Digest of the container's tag, as its registry shows it; kept when the pair is locked again.",
)  # fmt: skip
def command(config: Path, container_digest: str | None) -> None:
    """Pin what a pair is made from.

    Writes CONFIG.lock: SHA-256 of every model file, hub commits, package versions, the container, and every value of the YAML. The
    stages refuse whatever differs from it with --locked.

    \b
    specbuild lock configs/demo.yaml
    specbuild run configs/demo.yaml --locked
    """
    pair = load_config(config)
    check_names(pair)
    for difference in run_lock(pair, container_digest):
        log(difference)
    log(f"{lock_path(pair)} written")
