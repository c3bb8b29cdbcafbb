"""specbuild convert."""

from __future__ import annotations

import os
from pathlib import Path

import click

from specbuild.check import check_names
from specbuild.cli.options import config_argument, force_option, locked_option, only_option, roles_of
from specbuild.config import PairConfig, Role, load_config
from specbuild.convert import run_convert
from specbuild.lock import check_lock


@click.command("convert")
@config_argument
@only_option
@force_option
@locked_option
@click.option("--merge-lora", type=click.Path(path_type=Path), help="Merge this LoRA adapter into the model of --only.")
def command(config: Path, only: Role | None, force: bool, locked: bool, merge_lora: Path | None) -> None:
    """Convert both models to TensorRT-LLM checkpoints.

    \b
    specbuild convert configs/demo.yaml --only draft
    """
    pair = load_config(config)
    if merge_lora is not None:
        if only is None:
            raise click.UsageError("--merge-lora needs --only target or --only draft.")
        pair = with_adapter(pair, only, merge_lora)
    check_names(pair)
    if locked:
        check_lock(pair, ("convert",))
    for role in roles_of(only):
        run_convert(pair, role, force)


def with_adapter(pair: PairConfig, role: Role, adapter: Path) -> PairConfig:
    """Return the configuration with an adapter named as the YAML would name it: relative to the YAML, unless absolute."""
    name = str(adapter) if adapter.is_absolute() else os.path.relpath(adapter.absolute(), pair.path.absolute().parent)
    return pair.model_copy(update={role: pair.model_of(role).model_copy(update={"merge_lora": name})})
