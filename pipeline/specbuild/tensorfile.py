"""Safetensors files read and written tensor by tensor, so that memory holds one tensor and not the model."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.errors import CheckpointError

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
              "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
_LFS_MAGIC = b"version https://git-lfs"
_MAX_HEADER = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class TensorEntry(TensorSpec):
    """Where a tensor lies: its file and the absolute offset of its first byte."""

    path: Path
    offset: int

    def load(self) -> torch.Tensor:
        """Read this tensor alone."""
        import numpy as np
        import torch

        raw = np.fromfile(self.path, dtype=np.uint8, count=self.nbytes, offset=self.offset)
        if raw.size != self.nbytes:
            raise CheckpointError(
                f"Cannot read tensor {self.name} in {self.path}: it ends after {raw.size} of {self.nbytes} bytes. Fetch it again."
            )
        return torch.from_numpy(raw).view(torch_dtype(self.dtype)).reshape(self.shape)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype name."""
    import torch

    names = {"F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
             "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip
    if name not in names:
        raise CheckpointError(f"Cannot read tensors of dtype {name}: expected one of {', '.join(names)}.")
    return names[name]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read what a safetensors file holds, without its data; raise CheckpointError when it is damaged or only a pointer."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(len(_LFS_MAGIC))
        if head == _LFS_MAGIC:
            raise CheckpointError(
                f"Cannot read weights in {path}: it is a Git LFS pointer of {size} bytes, not the file. Run `git lfs pull` there."
            )
        length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else -1
        if not 0 <= length <= min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"Cannot read weights in {path}: its {size} bytes hold no whole safetensors header. Fetch the file again."
            )
        file.seek(8)
        raw = file.read(length)
    try:
        items = {name: item for name, item in json.loads(raw).items() if name != "__metadata__"}
        entries = {
            name: TensorEntry(name, item["dtype"], tuple(item["shape"]), path, 8 + length + item["data_offsets"][0])
            for name, item in items.items()
        }
        for name, entry in entries.items():
            start, stop = items[name]["data_offsets"]
            if start < 0 or (entry.dtype in ITEM_BYTES and stop - start != entry.nbytes):
                raise ValueError(f"tensor {name} has bytes {start} to {stop} for {entry.dtype} {entry.shape}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"Cannot read weights in {path}: its header is not valid safetensors ({error}). Fetch the file again."
        ) from None
    end = 8 + length + max((item["data_offsets"][1] for item in items.values()), default=0)
    if size < end:
        raise CheckpointError(
            f"Cannot read weights in {path}: it has {size} bytes but its header promises {end}. It is truncated; fetch it again."
        )
    return entries


class TensorWriter:
    """Write the given tensors to one safetensors file, in any order, one at a time.

    Wider dtypes come first so that every tensor is aligned. close() fails when a promised tensor was not written.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        ordered = sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        self._places: dict[str, tuple[TensorSpec, int]] = {}
        position = 0
        for spec in ordered:
            header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, position + spec.nbytes]}
            self._places[spec.name] = (spec, position)
            position += spec.nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._start = 8 + len(raw)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(raw)) + raw)
        self._file.truncate(self._start + position)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; its dtype and shape must be the promised ones."""
        import torch

        spec, position = self._places.pop(name)
        if tensor.dtype != torch_dtype(spec.dtype) or tuple(tensor.shape) != spec.shape:
            raise CheckpointError(
                f"Cannot write tensor {name}: it is {tensor.dtype} {tuple(tensor.shape)}, planned was {spec.dtype} {spec.shape}."
            )
        self._file.seek(self._start + position)
        tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tofile(self._file)

    def close(self) -> None:
        """Flush to disk; raise CheckpointError when a promised tensor is missing."""
        with self._file:
            if self._places:
                raise CheckpointError(f"Cannot finish {self._file.name}: tensor {next(iter(self._places))} was never written.")
            self._file.flush()
            os.fsync(self._file.fileno())

    def abort(self) -> None:
        """Close the file as it is, after an error elsewhere."""
        self._file.close()
