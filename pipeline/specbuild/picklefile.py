"""PyTorch's own weight files (`pytorch_model.bin`), read without running any code that they hold."""

from __future__ import annotations

import pickle
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.errors import CheckpointError
from specbuild.tensorfile import TensorSpec, check_no_pointer, dtype_name

if TYPE_CHECKING:
    import torch

_DAMAGED = (pickle.UnpicklingError, zipfile.BadZipFile, struct.error, RuntimeError, EOFError, OSError, LookupError, ValueError, TypeError,
            AttributeError, AssertionError, ImportError, ArithmeticError)  # fmt: skip


@dataclass(frozen=True)
class PickledTensor(TensorSpec):
    """A tensor of a .bin file. Where the file is a zip archive it is a map of the file: its pages are read when used."""

    path: Path
    tensor: torch.Tensor

    def load(self) -> torch.Tensor:
        """Return the tensor."""
        return self.tensor


def read_pickle(path: Path) -> dict[str, PickledTensor]:
    """Read what a .bin file holds; raise CheckpointError when it is damaged or holds anything but tensors."""
    import torch

    check_no_pointer(path)
    try:
        found = torch.load(str(path), map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _DAMAGED as error:
        if (unsafe := re.search(r"GLOBAL ([\w.]+)", str(error))) is not None:
            raise CheckpointError(
                f"Cannot read weights in {path}: it holds {unsafe[1]}, expected tensors alone. Loading it could run code; save "
                "the model as "
                "safetensors."
            ) from None
        raise CheckpointError(
            f"Cannot read weights in {path}: it is not a PyTorch file of tensors, or it is damaged "
            f"({type(error).__name__}). Fetch it again."
        ) from None
    if not isinstance(found, dict):
        raise CheckpointError(
            f"Cannot read weights in {path}: it holds a {type(found).__name__}, expected tensors by name. Save the model as safetensors."
        )
    return {str(name): _entry(path, str(name), tensor) for name, tensor in found.items()}


def _entry(path: Path, name: str, tensor: object) -> PickledTensor:
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise CheckpointError(
            f"Cannot read weights in {path}: {name} is no plain tensor ({type(tensor).__name__}). Save the model as safetensors."
        )
    return PickledTensor(name, dtype_name(tensor.dtype, f"{name} in {path}"), tuple(tensor.shape), path, tensor.detach())
