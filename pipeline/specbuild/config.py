"""The YAML that names a pair, as frozen models; unknown keys are errors that name the nearest legal one."""

from __future__ import annotations

import difflib
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specbuild.errors import ConfigError

Role = Literal["target", "draft"]
ROLES: tuple[Role, ...] = ("target", "draft")


PRINTABLE = r"^[^\x00-\x1f]+$"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CalibrationConfig(_Section):
    """The text that scales are calibrated on, and that the quality of the result is measured on."""

    data: Annotated[str, Field(pattern=PRINTABLE)] = Field("builtin", description="a .jsonl or .txt file, a directory of them, or builtin")
    samples: Annotated[int, Field(ge=1)] = Field(128, description="sequences to calibrate on")
    max_length: Annotated[int, Field(ge=8)] = Field(512, description="most tokens of a sequence; longer texts are cut into several")


class QualityConfig(_Section):
    """What quantization may cost, measured on held-out text; a limit that is missed fails the stage."""

    max_kl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(None, description="most mean KL divergence, nats per token")
    min_top1: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="least share of positions with the same likeliest token")
    data: Annotated[str, Field(pattern=PRINTABLE)] | None = Field(
        None, description="text to measure on; default: a part of the calibration's that it is not calibrated on"
    )
    samples: Annotated[int, Field(ge=0)] = Field(16, description="held-out sequences to measure on; 0 = measure nothing")


class QuantizeConfig(_Section):
    """How a model is quantized."""

    scheme: str = Field("full_prec", description="one of SCHEMES")
    group_size: Annotated[int, Field(ge=1)] = Field(128, description="input columns that share a scale, where the scheme has groups")
    calibration: CalibrationConfig | None = Field(None, description="null: round to nearest, with prequant scales of one")
    rounding: Literal["nearest", "gptq"] = Field("nearest", description="gptq: int4_awq's integers by GPTQ, with prequant scales of one")
    lm_head: bool = Field(False, description="quantize lm_head too, by rounding to nearest; it is left out otherwise")
    quality: QualityConfig = QualityConfig()
    kv_cache: Literal["int8", "fp8"] | None = Field(None, description="only null, the model's dtype: drafted tokens need it")


class ModelConfig(_Section):
    """A model and how it is stored."""

    model: Annotated[str, Field(pattern=PRINTABLE)] = Field(description="a directory, relative to the YAML file, or a hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="dtype of the checkpoint")
    tp: Annotated[int, Field(ge=1)] = Field(1, description="tensor parallel ranks")
    pp: Annotated[int, Field(ge=1)] = Field(1, description="pipeline parallel ranks")
    merge_lora: Annotated[str, Field(pattern=PRINTABLE)] | None = Field(
        None, description="directory of a LoRA adapter that is merged while converting, relative to the YAML file"
    )
    dequantize: bool = Field(
        False, description="expand a model that is already quantized, so that `quantize` can start from full precision"
    )
    quantize: QuantizeConfig = QuantizeConfig()


class SpeculationConfig(_Section):
    """How the pair speculates."""

    draft_len: Annotated[int, Field(ge=0, le=64)] = Field(4, description="tokens drafted per round; 0 = plain decoding")
    acceptance: str = Field("rejection", description="one of RULES")
    drafter: str = Field("model", description="one of DRAFTERS")


class BuildConfig(_Section):
    """What the engines are built for."""

    compiler: str = Field("onnx-cpu", description="one of COMPILERS")
    max_batch_size: Annotated[int, Field(ge=1, le=1024)] = Field(8, description="sequences in one pass")
    max_seq_len: Annotated[int, Field(ge=2)] = Field(1024, description="prompt and output tokens together")
    max_beam_width: Annotated[int, Field(ge=1)] = Field(1, description="only 1: drafted tokens are verified along one beam")
    max_draft_len: Annotated[int, Field(ge=0, le=64)] | None = Field(
        None, description="most drafted tokens a request may ask for; default 8, or draft_len"
    )
    kernels: Literal["width-independent", "fast"] = Field(
        "width-independent", description="onnx-cpu: rows that round alike in every pass, or no padding for it"
    )


Devices = tuple[Annotated[int, Field(ge=0)], ...]


class ServingConfig(_Section):
    """Where TensorRT engines run in Triton; onnx-cpu has no use for it."""

    gpu: str | None = Field(None, description="the GPUs whose memory the caches share, one of GPUS; default: those that built the engines")
    target_gpus: Devices | None = Field(None, strict=False, description="device of each target rank; default 0, 1, ...")
    draft_gpus: Devices | None = Field(
        None, strict=False, description="device of each draft rank; default 0, 1, ...: shared with the target"
    )
    fast_logits: bool = Field(False, description="hand the draft's logits to the target inside the backend (acceptance: rejection)")


class PairConfig(_Section):
    """The whole YAML, and where it was read."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    workdir: Annotated[str, Field(pattern=PRINTABLE)] | None = Field(
        None, description="relative to the current directory, or absolute; default build/<name>"
    )
    target: ModelConfig
    draft: ModelConfig
    speculation: SpeculationConfig = SpeculationConfig()
    build: BuildConfig = BuildConfig()
    serving: ServingConfig = ServingConfig()
    path: Path = Field(exclude=True, strict=False)

    @property
    def work_dir(self) -> Path:
        return Path(os.path.expanduser(self.workdir or f"build/{self.name}"))  # noqa: PTH111  Path.expanduser raises for an unknown user

    def model_of(self, role: Role) -> ModelConfig:
        return self.target if role == "target" else self.draft

    def dir_of(self, role: Role, stage: Literal["checkpoint", "quantized", "engine"]) -> Path:
        return self.work_dir / role / stage

    @property
    def max_draft_len(self) -> int:
        return max(8, self.speculation.draft_len) if self.build.max_draft_len is None else self.build.max_draft_len

    @property
    def repository_dir(self) -> Path:
        return self.work_dir / "model_repository"


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error: the last one would win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for index, key in enumerate(keys) if key in keys[:index]]
        if twice:
            raise yaml.constructor.ConstructorError(problem=f"key {twice[0]!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def roles_needed(config: PairConfig) -> tuple[Role, ...]:
    """Return the models that decoding needs: the draft only where the drafter is a model."""
    return ROLES if config.speculation.drafter == "model" else ("target",)


def load_config(path: Path) -> PairConfig:
    """Read and check a YAML file; raise ConfigError with one line that names the first wrong key or value."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"Cannot read config {path}: {error.strerror}. Give the path of a YAML file.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"Cannot read config {path}: not valid YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(values, dict):
        raise ConfigError(f"Cannot use config {path}: expected a mapping with name, target and draft, found {type(values).__name__}.")
    if "path" in values:
        raise ConfigError(_unknown_key(path, ("path",), PairConfig))
    try:
        return PairConfig(**values, path=path)
    except ValidationError as error:
        raise ConfigError(_first_problem(path, error)) from None
    except TypeError as error:
        raise ConfigError(f"Cannot use config {path}: keys must be words ({error}).") from None


def _first_problem(path: Path, error: ValidationError) -> str:
    problem = error.errors()[0]
    where = tuple(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        section: Any = PairConfig
        for part in where[:-1]:
            annotation = section.model_fields[part].annotation
            section = next(each for each in (*get_args(annotation), annotation) if hasattr(each, "model_fields"))
        return _unknown_key(path, where, section)
    if problem["type"] == "missing":
        return f"Cannot use config {path}: key {'.'.join(where)} is missing. Add it."
    if problem["type"] == "model_type":
        problem["msg"] = "Expected a mapping" + (" with data, samples and max_length, or null" if where[-1] == "calibration" else "")
    return f"Cannot use config {path}: {'.'.join(where)} is {problem['input']!r}. {problem['msg']}."


def _unknown_key(path: Path, where: tuple[str, ...], section: type[BaseModel]) -> str:
    legal = [name for name in section.model_fields if name != "path"]
    near = difflib.get_close_matches(where[-1], legal, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"Cannot use config {path}: unknown key {'.'.join(where)}.{hint} Legal here: {', '.join(legal)}."
