"""llmapi: no engine; TensorRT-LLM 1.3 and later load Hugging Face checkpoints themselves, through their LLM API.

The engine path was removed there. `package` writes a Triton repository over the models' own files; what the runtime's draft-target
decoding does not know is refused here by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specbuild.artifacts import Engine, TllmCheckpoint
from specbuild.compilers.compiler import Limits, Runner
from specbuild.config import ROLES, PairConfig, Role
from specbuild.errors import EngineError
from specbuild.quant import QuantScheme
from specbuild.shape import ModelShape

ENGINES = False
PACKAGES = ()
GROUPS = (128, 64)
LIMITS = ()
OLDEST = "1.3"  # of TensorRT-LLM


def check(shape: ModelShape, scheme: QuantScheme, group_size: int, tp: int, pp: int) -> None:  # noqa: ARG001
    """Raise EngineError for a scheme: the runtime takes the checkpoint as it is."""
    if scheme.bits != 16:
        raise EngineError(
            f"Cannot serve {shape.architecture} as {scheme.name} with llmapi: it loads the Hugging Face checkpoint as it is, expected "
            "scheme full_prec. Set it, or use compiler tensorrt."
        )


def check_pair(config: PairConfig, shapes: Mapping[Role, ModelShape]) -> None:  # noqa: ARG001
    """Raise EngineError for what the runtime's draft-target decoding would pass over."""
    speculation, target, draft = config.speculation, config.target, config.draft
    if speculation.drafter != "model":
        raise EngineError(f"Cannot serve drafter {speculation.drafter!r} with llmapi: its draft-target decoding has a model. Use 'model'.")
    if speculation.acceptance != "exact":
        raise EngineError(
            f"Cannot serve acceptance {speculation.acceptance!r} with llmapi: its runtime accepts what equals the target's own token. Set "
            "speculation.acceptance: exact."
        )
    if (draft.tp, draft.pp) not in ((1, 1), (target.tp, target.pp)):
        raise EngineError(
            f"Cannot serve the draft with tp {draft.tp}, pp {draft.pp} with llmapi: it runs on the target's ranks, tp {target.tp}, pp "
            f"{target.pp}. Leave the draft's out."
        )
    if given := sorted(config.serving.model_fields_set):
        raise EngineError(
            f"Cannot serve with serving.{given[0]} and llmapi: its runtime places models and caches itself. Remove it; "
            "CUDA_VISIBLE_DEVICES chooses GPUs."
        )
    for role in ROLES:
        model = config.model_of(role)
        if model.merge_lora is not None or model.dequantize:
            raise EngineError(
                f"Cannot serve the {role} with llmapi: merge_lora and dequantize change weights, and it loads them as they are. Remove "
                "them, or use compiler tensorrt."
            )


def check_machine(scheme: QuantScheme) -> Mapping[str, str]:  # noqa: ARG001
    """Return nothing: a repository can be written anywhere."""
    return {}


def check_serving(engine: Engine) -> None:
    """Raise nothing: there is no engine that could be another machine's."""


def describe(checkpoint_dir: Path, limits: Limits, out: Path, world_size: int) -> list[str]:  # noqa: ARG001
    """Return the line that says that nothing is built."""
    return [f"# llmapi builds nothing: TensorRT-LLM {OLDEST} and later load the Hugging Face checkpoint. Run `specbuild package`."]


def build(checkpoint: TllmCheckpoint, limits: Limits, out: Path, label: str) -> None:
    """Build nothing; the build stage asks ENGINES first."""


def open_runner(engine_dir: Path, max_slots: int = 8, threads: int = 0, vocab_size: int = 0) -> Runner:  # noqa: ARG001
    """Raise EngineError: the models run in Triton only."""
    raise EngineError(f"Cannot run {engine_dir} in this process: llmapi runs in Triton only. Set compiler: onnx-cpu and build.")
