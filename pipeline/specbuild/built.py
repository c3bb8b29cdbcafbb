"""Is what was built what the YAML says now? Asked before an engine is run, packaged or served."""

from __future__ import annotations

from collections.abc import Sequence

from specbuild.artifacts import TllmCheckpoint
from specbuild.build import build_parameters
from specbuild.config import ROLES, PairConfig, Role
from specbuild.convert import convert_parameters
from specbuild.provenance import check_parameters
from specbuild.quantize import quantize_parameters


def roles_needed(config: PairConfig) -> tuple[Role, ...]:
    """Return the models that decoding needs: the draft only where the drafter is a model."""
    return ROLES if config.speculation.drafter == "model" else ("target",)


def check_built(config: PairConfig, roles: Sequence[Role]) -> None:
    """Raise ConfigError when a stage's output was made from other values than those of the YAML. What is absent is passed over."""
    for role in roles:
        model = config.model_of(role)
        wanted = {"checkpoint": convert_parameters(model), "quantized": quantize_parameters(model.quantize)}
        if (config.dir_of(role, "quantized") / "config.json").exists():
            shape = TllmCheckpoint.open(config.dir_of(role, "quantized")).shape
            wanted["engine"] = build_parameters(config, role, shape)
        for stage, parameters in wanted.items():
            check_parameters(config.work_dir / role / stage, parameters, config.path)
