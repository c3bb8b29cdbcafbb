"""The rules by which Triton accepts an ensemble, applied to configs on disk (triton-inference-server/core: ensemble_utils.cc,
model_config_utils.cc)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from specbuild.errors import ServingError

FORBIDDEN = ("backend", "instance_group", "optimization", "model_warmup")


@dataclass(frozen=True)
class Tensor:
    """A tensor between steps: the input or output that defines it, and the index of the last decoupled step before it, if any."""

    definition: Any
    batched: bool
    origin: int | None


def check_ensemble(ensemble: ModelConfig, models: Mapping[str, ModelConfig]) -> None:
    """Raise ServingError for the first rule that `ensemble` breaks; `models` holds every config of the repository by name."""
    _check_form(ensemble, models)
    known = {tensor.name: Tensor(tensor, ensemble.max_batch_size > 0, None) for tensor in ensemble.input}
    waiting = list(enumerate(ensemble.ensemble_scheduling.step))
    while waiting:  # steps may stand in any order
        ready = [(index, step) for index, step in waiting if all(source in known for source in step.input_map.values())]
        if not ready:
            raise _unconnected(ensemble, waiting[0][1], known)
        for index, step in ready:
            _check_step(ensemble, index, models[step.model_name], known)
        waiting = [pair for pair in waiting if pair not in ready]
    _check_use(ensemble, known)
    for output in ensemble.output:
        if output.name not in known:
            raise ServingError(f"Cannot serve {ensemble.name}: its output {output.name!r} is not written by any step. Map it.")
        _check_match(ensemble, Tensor(output, ensemble.max_batch_size > 0, None), known[output.name])


def _check_form(ensemble: ModelConfig, models: Mapping[str, ModelConfig]) -> None:
    """Check what can be seen without following a tensor: the ensemble's own fields, and those of each step."""
    if ensemble.platform != "ensemble":
        raise ServingError(f"Cannot serve {ensemble.name}: it has steps, but platform {ensemble.platform!r}. Expected 'ensemble'.")
    for field, _ in ensemble.ListFields():
        if field.name in FORBIDDEN:
            raise ServingError(
                f"Cannot serve {ensemble.name}: an ensemble has neither backend nor instance_group, optimization or model_warmup, it has "
                f"{field.name}. Remove it."
            )
    if not ensemble.ensemble_scheduling.step:
        raise ServingError(f"Cannot serve {ensemble.name}: it has no steps. Expected at least one.")
    for index, step in enumerate(ensemble.ensemble_scheduling.step):
        for field_name in ("model_name", "input_map", "output_map"):
            if not getattr(step, field_name):
                raise ServingError(f"Cannot serve {ensemble.name}: step {index} ({step.model_name!r}) has no {field_name}. Give it one.")
        if step.model_name not in models:
            raise ServingError(
                f"Cannot serve {ensemble.name}: step {step.model_name!r} is not a model of this repository. Write it, or drop the step."
            )


def _unconnected(ensemble: ModelConfig, step: Any, known: Mapping[str, Tensor]) -> ServingError:
    """Make the error of a step that can never run."""
    source = next(name for name in step.input_map.values() if name not in known)
    return ServingError(
        f"Cannot serve {ensemble.name}: {source!r}, read by step {step.model_name!r}, is written by no step that can run before it. Map it."
    )


def _check_step(ensemble: ModelConfig, index: int, model: ModelConfig, known: dict[str, Tensor]) -> None:
    """Check one step against its model, and add what it writes to `known` (by the name that the ensemble gives it)."""
    step, batched = ensemble.ensemble_scheduling.step[index], model.max_batch_size > 0
    if 0 < model.max_batch_size < ensemble.max_batch_size:
        raise ServingError(
            f"Cannot serve {ensemble.name}: its max_batch_size {ensemble.max_batch_size} exceeds that of step "
            f"{model.name!r}, {model.max_batch_size}."
        )
    inputs, outputs = _by_name(model.input), _by_name(model.output)
    _check_names(ensemble, model, "input", step.input_map, inputs)
    _check_names(ensemble, model, "output", step.output_map, outputs)
    for name, source in step.input_map.items():
        _check_match(ensemble, Tensor(inputs[name], batched, None), known[source])
    for name, tensor in inputs.items():
        if not tensor.optional and name not in step.input_map:
            raise ServingError(f"Cannot serve {ensemble.name}: step {model.name!r} needs input {name!r}, which its input_map lacks.")
    origins = {known[source].origin for source in step.input_map.values()}
    if len(origins) > 1:
        raise ServingError(
            f"Cannot serve {ensemble.name}: step {model.name!r} reads tensors from before and after a decoupled step, which answers more "
            "than once. Read from one side only."
        )
    origin = index if model.model_transaction_policy.decoupled else origins.pop()
    for name, written in step.output_map.items():
        if written in known:
            raise ServingError(f"Cannot serve {ensemble.name}: tensor {written!r} has two writers. Expected one.")
        known[written] = Tensor(outputs[name], batched, origin)


def _check_names(ensemble: ModelConfig, model: ModelConfig, kind: str, names: Mapping[str, str], declared: Mapping[str, Any]) -> None:
    """Check that a step maps what its model has."""
    for name in names:
        if name not in declared:
            raise ServingError(
                f"Cannot serve {ensemble.name}: step {model.name!r} has no {kind} {name!r}. Expected one of {sorted(declared)}."
            )


def _by_name(tensors: Sequence[Any]) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in tensors}


def _check_use(ensemble: ModelConfig, known: Mapping[str, Tensor]) -> None:
    """Every input must be read by a step, and every tensor between steps by a step or by the outside."""
    steps = ensemble.ensemble_scheduling.step
    reads = {source for step in steps for source in step.input_map.values()} | {output.name for output in ensemble.output}
    for name in known:
        if name not in reads:
            raise ServingError(f"Cannot serve {ensemble.name}: tensor {name!r} is used by nothing. Map it to a step, or remove it.")
    twice = [name for name, count in Counter(tensor.name for tensor in (*ensemble.input, *ensemble.output)).items() if count > 1]
    if twice:
        raise ServingError(f"Cannot serve {ensemble.name}: tensor {twice[0]!r} is listed twice. Expected once.")


def _check_match(ensemble: ModelConfig, left: Tensor, right: Tensor) -> None:
    """Two ends of one tensor must agree in type and shape, where -1 agrees with anything."""
    name, ends = left.definition.name, (left, right)
    if left.definition.data_type != right.definition.data_type:
        types = [DataType.Name(end.definition.data_type) for end in ends]
        raise ServingError(f"Cannot serve {ensemble.name}: tensor {name!r} is {types[0]} at one end and {types[1]} at the other.")
    dims = [list(end.definition.dims) for end in ends]
    if left.batched != right.batched:  # an unbatched model declares the batch dimension that Triton adds elsewhere
        dims = [[-1, *sizes] if end.batched else sizes for sizes, end in zip(dims, ends, strict=True)]
    if len(dims[0]) != len(dims[1]) or any(a != b and -1 not in (a, b) for a, b in zip(*dims, strict=True)):
        raise ServingError(f"Cannot serve {ensemble.name}: tensor {name!r} has dims {dims[0]} at one end and {dims[1]} at the other.")


def check_batching(config: ModelConfig) -> None:
    """Raise ServingError when a model prefers batches that it cannot take."""
    for size in config.dynamic_batching.preferred_batch_size:
        if not 0 < size <= config.max_batch_size:
            raise ServingError(
                f"Cannot serve {config.name}: preferred_batch_size {size} is not from 1 to its max_batch_size {config.max_batch_size}."
            )
