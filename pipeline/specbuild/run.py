"""All stages in order, skipping what is up to date."""

from __future__ import annotations

from specbuild.build import check_machine, run_build
from specbuild.check import check_pair
from specbuild.config import ROLES, PairConfig
from specbuild.convert import run_convert
from specbuild.package import run_package
from specbuild.pair import open_pair
from specbuild.quantize import run_quantize
from specbuild.verify import Report, load_prompts, run_verify

SHORT_PROMPTS = 4
SHORT_TOKENS = 32


def run_all(config: PairConfig, force: bool = False) -> Report | None:
    """Run check, convert, quantize, build and package, then a short verify; return its report, or None where build is the last stage."""
    check_pair(config)
    check_machine(config)
    for stage in (run_convert, run_quantize, run_build):
        for role in ROLES:
            stage(config, role, force)
    if config.build.compiler == "tensorrt":
        return None  # packaging and serving these engines is not there yet
    run_package(config, force)
    return run_verify(open_pair(config), load_prompts(None)[:SHORT_PROMPTS], SHORT_TOKENS, (config.speculation.draft_len,), cut=True)
