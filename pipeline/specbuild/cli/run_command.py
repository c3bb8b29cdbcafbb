"""specbuild run."""

from pathlib import Path

import click

from specbuild.cli.options import config_argument, force_option, json_option
from specbuild.cli.verify_command import echo_report
from specbuild.config import load_config
from specbuild.progress import log
from specbuild.run import run_all


@click.command("run")
@config_argument
@force_option
@json_option
def command(config: Path, force: bool, as_json: bool) -> None:
    """Run all stages in order, then a short verify.

    Check, convert, quantize, build and package; what is up to date is skipped.

    \b
    specbuild run configs/demo.yaml
    """
    pair = load_config(config)
    report = run_all(pair, force)
    if report is None:
        log(f"built, not packaged: this version does not serve {pair.build.compiler} engines yet")
        return
    echo_report(report, as_json)
