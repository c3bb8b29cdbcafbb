"""Is what was built what the YAML says now? Asked before an engine is run, packaged or served."""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.artifacts import TllmCheckpoint
from specbuild.build import build_parameters, check_sources
from specbuild.config import PairConfig, Role
from specbuild.provenance import check_parameters


def check_built(config: PairConfig, roles: Sequence[Role]) -> None:
    """Raise ConfigError when a stage's output was made from other values than those of the YAML. What is absent is passed over."""
    for role in roles:
        check_sources(config, role)
        if (config.dir_of(role, "quantized") / "config.json").exists():
            shape = TllmCheckpoint.open(config.dir_of(role, "quantized")).shape
            check_parameters(config.dir_of(role, "engine"), build_parameters(config, role, shape), config.path)
