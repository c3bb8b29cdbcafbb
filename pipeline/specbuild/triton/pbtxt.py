"""config.pbtxt as protobuf messages: made from the tables of contract.py, printed and parsed as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from specbuild.errors import ServingError
from specbuild.triton.contract import ModelSpec, TensorSpec


@dataclass(frozen=True)
class EnsembleStep:
    """One model of an ensemble; tensors keep their own names, so a map is the list of names that pass."""

    model_name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def _data_type(tensor: TensorSpec) -> int:
    return int(pb.DataType.Value("TYPE_STRING" if tensor.dtype == "BYTES" else f"TYPE_{tensor.dtype}"))


def _add_tensors(config: pb.ModelConfig, spec: ModelSpec) -> None:
    """Fill in `input` and `output`."""
    for tensor in spec.inputs:
        entry = config.input.add(name=tensor.name, data_type=_data_type(tensor), dims=tensor.dims)
        entry.optional, entry.allow_ragged_batch = tensor.optional, tensor.ragged
        if tensor.scalar:
            entry.reshape.SetInParent()
    for tensor in spec.outputs:
        config.output.add(name=tensor.name, data_type=_data_type(tensor), dims=tensor.dims)


def make_model(
    name: str,
    spec: ModelSpec,
    *,
    max_batch_size: int,
    backend: str = "python",
    decoupled: bool = False,
    batching: bool = False,
    parameters: Mapping[str, str] | None = None,
) -> pb.ModelConfig:
    """Make the config of a model of one instance, which Triton keeps off the GPUs; `batching` lets requests that wait share one call."""
    config = pb.ModelConfig(name=name, backend=backend, max_batch_size=max_batch_size)
    _add_tensors(config, spec)
    config.instance_group.add(count=1, kind=pb.ModelInstanceGroup.KIND_CPU)
    config.model_transaction_policy.decoupled = decoupled
    if batching:
        config.dynamic_batching.SetInParent()
    for key, value in (parameters or {}).items():
        config.parameters[key].string_value = value
    return config


def make_ensemble(name: str, spec: ModelSpec, steps: Sequence[EnsembleStep], *, max_batch_size: int) -> pb.ModelConfig:
    """Make the config of an ensemble whose tensors have the same name in every step."""
    config = pb.ModelConfig(name=name, platform="ensemble", max_batch_size=max_batch_size)
    _add_tensors(config, spec)
    for step in steps:
        entry = config.ensemble_scheduling.step.add(model_name=step.model_name, model_version=-1)
        entry.input_map.update({tensor: tensor for tensor in step.inputs})
        entry.output_map.update({tensor: tensor for tensor in step.outputs})
    return config


def format_config(config: pb.ModelConfig) -> str:
    """Print a config as Triton reads it."""
    return str(text_format.MessageToString(config))


def load_config(path: Path) -> pb.ModelConfig:
    """Read one config.pbtxt; raises ServingError naming the file and the line that does not parse."""
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())
    except text_format.ParseError as error:
        raise ServingError(f"Cannot read {path}: line {error}. Expected a Triton ModelConfig; run `specbuild package --force`.") from error
    except OSError as error:
        raise ServingError(f"Cannot read {path}: {error.strerror}. Expected a model directory; run `specbuild package --force`.") from error
