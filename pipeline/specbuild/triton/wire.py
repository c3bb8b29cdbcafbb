"""Between Triton's tensors and plain values, for models that run in Triton's Python backend.

`pb_utils` is `triton_python_backend_utils`, which exists only inside the backend; it is handed in, so that tests can hand in another.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from specbuild.errors import ServingError
from specbuild.triton.contract import TensorSpec

Values: TypeAlias = Mapping[str, NDArray[Any]]
"""The inputs of one request by name, each with its batch dimension of 1."""

DTYPES: dict[str, Any] = {"BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BYTES": np.object_}


def read_tensors(pb_utils: Any, request: Any, tensors: Sequence[TensorSpec]) -> dict[str, NDArray[Any]]:
    """Read the inputs that a request has, each with its batch dimension."""
    found = {spec.name: pb_utils.get_input_tensor_by_name(request, spec.name) for spec in tensors}
    return {name: tensor.as_numpy() for name, tensor in found.items() if tensor is not None}


def read_item(values: Values, name: str, default: Any = None) -> Any:
    """The single element of an input, or the default; raises ServingError when it has none or several."""
    if name not in values:
        return default
    if values[name].size != 1:
        raise ServingError(f"Cannot use {name} with {values[name].size} values: expected one. Send a shape of [1, 1].")
    return values[name].item()


def make_tensors(pb_utils: Any, tensors: Sequence[TensorSpec], values: Mapping[str, Any]) -> list[Any]:
    """Make a tensor of every value, with the type of its spec and a batch dimension of 1 in front; values of None are left out."""
    result = []
    for spec in tensors:
        value = values.get(spec.name)
        if value is not None:
            encoded = value.encode() if isinstance(value, str) else value
            array = np.array(encoded, dtype=DTYPES[spec.dtype])
            shape = (1, *array.shape) if array.ndim else (1, 1)
            result.append(pb_utils.Tensor(spec.name, np.ascontiguousarray(array.reshape(shape))))
    return result


def make_error(pb_utils: Any, error: Exception) -> Any:
    """Make the response that carries one line of error."""
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))


def as_float(value: Any) -> float:
    """The decimal number that a client meant by an FP32 value: 0.8, where float() would give 0.800000011920929."""
    return float(str(np.float32(value)))
