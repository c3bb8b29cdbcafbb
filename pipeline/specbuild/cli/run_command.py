"""specbuild run."""

from pathlib import Path

import click

from specbuild.cli.options import config_argument, force_option, json_option, locked_option
from specbuild.cli.verify_command import echo_report
from specbuild.compilers import find_compiler
from specbuild.config import load_config
from specbuild.lock import check_lock
from specbuild.progress import log
from specbuild.run import run_all


@click.command("run")
@config_argument
@force_option
@locked_option
@json_option
def command(config: Path, force: bool, locked: bool, as_json: bool) -> None:
    """Run all stages in order, then a short verify.

    Check, convert, quantize, build and package; what is up to date is skipped.

    \b
    specbuild run configs/demo.yaml
    """
    pair = load_config(config)
    if locked:
        check_lock(pair)
    report = run_all(pair, force)
    if report is None:
        if find_compiler(pair.build.compiler).ENGINES:
            log("packaged, not verified: tensorrt engines run in Triton only; `specbuild serve`, then `specbuild verify --url`")
        else:
            log("packaged, not verified: `specbuild serve` in a container of TensorRT-LLM 1.3 or later; the model is tensorrt_llm")
        return
    echo_report(report, as_json)
