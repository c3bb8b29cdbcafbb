"""The rules by which Triton accepts an ensemble, applied to configs on disk (triton-inference-server/core, ensemble_utils.cc)."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from specbuild.errors import ServingError


def check_ensemble(ensemble: ModelConfig, models: Mapping[str, ModelConfig]) -> None:
    """Raise ServingError for the first rule that `ensemble` breaks; `models` holds every config of the repository by name."""
    if ensemble.backend or ensemble.instance_group:
        raise ServingError(f"Cannot serve {ensemble.name}: an ensemble has neither backend nor instance_group. Remove them.")
    known = {tensor.name: tensor for tensor in ensemble.input}
    for step in ensemble.ensemble_scheduling.step:
        if step.model_name not in models:
            raise ServingError(
                f"Cannot serve {ensemble.name}: step {step.model_name!r} is not a model of this repository. Write it, or drop the step."
            )
        _check_step(ensemble, step, models[step.model_name], known)
    _check_use(ensemble, known)
    for output in ensemble.output:
        if output.name not in known:
            raise ServingError(f"Cannot serve {ensemble.name}: its output {output.name!r} is not written by any step. Map it.")
        _check_match(ensemble, output, known[output.name], batched=True)


def _check_step(ensemble: ModelConfig, step: ModelConfig, model: ModelConfig, known: dict[str, ModelConfig]) -> None:
    """Check one step against its model, and add what it writes to `known` (ensemble tensor name -> the tensor that defines it)."""
    if not step.input_map or not step.output_map:
        raise ServingError(f"Cannot serve {ensemble.name}: step {model.name!r} needs an input_map and an output_map.")
    if 0 < model.max_batch_size < ensemble.max_batch_size:
        raise ServingError(
            f"Cannot serve {ensemble.name}: its max_batch_size {ensemble.max_batch_size} exceeds that of step "
            f"{model.name!r}, {model.max_batch_size}."
        )
    inputs, outputs = _by_name(model.input), _by_name(model.output)
    for name, source in step.input_map.items():
        if name not in inputs:
            raise ServingError(
                f"Cannot serve {ensemble.name}: step {model.name!r} has no input {name!r}. Expected one of {sorted(inputs)}."
            )
        if source not in known:
            raise ServingError(f"Cannot serve {ensemble.name}: {source!r}, read by step {model.name!r}, is written by no earlier step.")
        _check_match(ensemble, inputs[name], known[source], batched=model.max_batch_size > 0)
    for name, tensor in inputs.items():
        if not tensor.optional and name not in step.input_map:
            raise ServingError(f"Cannot serve {ensemble.name}: step {model.name!r} needs input {name!r}, which its input_map lacks.")
    for name, written in step.output_map.items():
        if name not in outputs:
            raise ServingError(
                f"Cannot serve {ensemble.name}: step {model.name!r} has no output {name!r}. Expected one of {sorted(outputs)}."
            )
        if written in known:
            raise ServingError(f"Cannot serve {ensemble.name}: tensor {written!r} has two writers. Expected one.")
        known[written] = outputs[name]


def _by_name(tensors: Sequence[ModelConfig]) -> dict[str, ModelConfig]:
    return {tensor.name: tensor for tensor in tensors}


def _check_use(ensemble: ModelConfig, known: Mapping[str, ModelConfig]) -> None:
    """Every input must be read by a step, and every tensor between steps by a step or by the outside."""
    steps = ensemble.ensemble_scheduling.step
    reads = {source for step in steps for source in step.input_map.values()} | {output.name for output in ensemble.output}
    for name in known:
        if name not in reads:
            raise ServingError(f"Cannot serve {ensemble.name}: tensor {name!r} is used by nothing. Map it to a step, or remove it.")
    twice = [name for name, count in Counter(tensor.name for tensor in (*ensemble.input, *ensemble.output)).items() if count > 1]
    if twice:
        raise ServingError(f"Cannot serve {ensemble.name}: tensor {twice[0]!r} is listed twice. Expected once.")


def _check_match(ensemble: ModelConfig, left: ModelConfig, right: ModelConfig, *, batched: bool) -> None:
    """Two ends of one tensor must agree in type and shape, where -1 agrees with anything."""
    if left.data_type != right.data_type:
        types = [DataType.Name(tensor.data_type) for tensor in (left, right)]
        raise ServingError(f"Cannot serve {ensemble.name}: tensor {left.name!r} is {types[0]} at one end and {types[1]} at the other.")
    dims = [list(left.dims), list(right.dims)]
    # An unbatched model declares the batch dimension that Triton adds elsewhere.
    if batched is False and ensemble.max_batch_size > 0:
        dims[1] = [-1, *dims[1]]
    if len(dims[0]) != len(dims[1]) or any(a != b and -1 not in (a, b) for a, b in zip(*dims, strict=True)):
        raise ServingError(f"Cannot serve {ensemble.name}: tensor {left.name!r} has dims {dims[0]} at one end and {dims[1]} at the other.")
