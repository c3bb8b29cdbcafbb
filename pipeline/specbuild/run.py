"""All stages in order, skipping what is up to date."""

from __future__ import annotations

from specbuild.build import check_machine, run_build
from specbuild.check import check_pair
from specbuild.compilers import find_compiler
from specbuild.compilers.trtllm_machine import find_machine
from specbuild.config import ROLES, PairConfig
from specbuild.convert import run_convert
from specbuild.package import run_package
from specbuild.pair import open_pair
from specbuild.placement import plan_places
from specbuild.quantize import run_quantize
from specbuild.verify import Report, load_prompts, run_verify

SHORT_PROMPTS = 4
SHORT_TOKENS = 32


def run_all(config: PairConfig, force: bool = False) -> Report | None:
    """Run check, convert, quantize, build and package, then a short verify; return its report, None where engines run in Triton only."""
    check_pair(config)
    if not find_compiler(config.build.compiler).ENGINES:
        run_package(config, force)
        return None
    check_machine(config)
    on_gpus = config.build.compiler == "tensorrt"
    if on_gpus:
        plan_places(config, find_machine().gpu)  # what packaging would refuse after hours of building
    for stage in (run_convert, run_quantize, run_build):
        for role in ROLES:
            stage(config, role, force)
    run_package(config, force)
    if on_gpus:
        return None
    return run_verify(open_pair(config), load_prompts(None)[:SHORT_PROMPTS], SHORT_TOKENS, (config.speculation.draft_len,), cut=True)
