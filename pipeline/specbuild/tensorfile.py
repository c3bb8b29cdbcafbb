"""Safetensors files read and written tensor by tensor, so that memory holds a few tensors and not the model."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol, TypeVar

from specbuild.errors import CheckpointError

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
              "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
_LFS_MAGIC = b"version https://git-lfs"
_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_MAPPED = 1 << 20  # tensors from this size on are mapped, smaller ones read
_BLOCK = 1 << 19  # elements worked on at once: few enough to stay in a core's cache, in memory that is used again
_WRITE = 1 << 19  # bytes written at once: larger writes take larger pages, which are the last that a virtual machine's host backs
_FLUSH = 32 << 20  # bytes after which a file is flushed to the disk in the background, so that its end waits for little
Item = TypeVar("Item")
Result = TypeVar("Result")


class LoadableTensor(Protocol):
    """A tensor that can be loaded: one of a file, or one that is made of several when it is asked for."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...  # safetensors' name
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    def load(self) -> torch.Tensor: ...


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
        """Read this tensor alone. A large one is a private map of its file: its pages are read when used, and can be dropped again."""
        import numpy as np
        import torch

        found = max(0, self.path.stat().st_size - self.offset)
        if found < self.nbytes:
            raise CheckpointError(
                f"Cannot read tensor {self.name} in {self.path}: it ends after {found} of {self.nbytes} bytes. Fetch it again."
            )
        if self.nbytes < _MAPPED or self.offset % ITEM_BYTES[self.dtype]:
            raw = np.fromfile(self.path, dtype=np.uint8, count=self.nbytes, offset=self.offset)
        else:
            start = self.offset % mmap.ALLOCATIONGRANULARITY
            with self.path.open("rb") as file:
                data = mmap.mmap(file.fileno(), start + self.nbytes, access=mmap.ACCESS_COPY, offset=self.offset - start)
            data.madvise(mmap.MADV_WILLNEED)
            raw = np.frombuffer(data, dtype=np.uint8, count=self.nbytes, offset=start)
        return torch.from_numpy(raw).view(torch_dtype(self.dtype)).reshape(self.shape)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype name."""
    names = _dtypes()
    if name not in names:
        raise CheckpointError(f"Cannot read tensors of dtype {name}: expected one of {', '.join(names)}.")
    return names[name]


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """Return the safetensors name of a torch dtype."""
    names = _dtypes()
    for name, known in names.items():
        if known == dtype:
            return name
    raise CheckpointError(f"Cannot read {what}: it is {dtype}, expected one of {', '.join(names)}.")


def _dtypes() -> dict[str, torch.dtype]:
    import torch

    return {"F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
            "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}  # fmt: skip


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield slices of rows, an even number of rows each (but the last), that together are a tensor."""
    step = max(1, _BLOCK // max(1, math.prod(shape[1:])) // 2) * 2
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def find_not_finite(tensor: torch.Tensor) -> int | None:
    """Return the first row of a float tensor that holds NaN or infinity, by the bits of its exponents: many times faster than isfinite."""
    import torch

    bits, magnitude, infinity = {
        torch.bfloat16: (torch.int16, 0x7FFF, 0x7F80),
        torch.float16: (torch.int16, 0x7FFF, 0x7C00),
        torch.float32: (torch.int32, 0x7FFFFFFF, 0x7F800000),
    }[tensor.dtype]
    for rows in row_blocks(tuple(tensor.shape)):
        block = tensor[rows]
        if block.numel() and int((block.contiguous().view(bits) & magnitude).max()) >= infinity:
            return int(rows.start) + int((~block.isfinite()).reshape(block.shape[0], -1).any(dim=1).nonzero()[0])
    return None


def run_each(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield work(item) in order, done on a few threads with every operator on one core; the first error ends it.

    Operators of blocks this small lose more to their own threads than they gain.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    workers = min(4, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(workers)
    begun: deque[Future[Result]] = deque()
    try:
        for item in items:
            begun.append(pool.submit(work, item))
            if len(begun) > 2 * workers:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def check_no_pointer(path: Path) -> None:
    """Raise CheckpointError for a file that only stands for one in Git LFS."""
    with path.open("rb") as file:
        if file.read(len(_LFS_MAGIC)) == _LFS_MAGIC:
            raise CheckpointError(
                f"Cannot read weights in {path}: it is a Git LFS pointer of {path.stat().st_size} bytes, not the file. "
                "Run `git lfs pull` there."
            )


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read what a safetensors file holds, without its data; raise CheckpointError when it is damaged or only a pointer."""
    check_no_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 <= length <= min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"Cannot read weights in {path}: its {size} bytes hold no whole safetensors header. Fetch the file again."
            )
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
    """Write the given tensors to one safetensors file, in any order, by any thread.

    Wider dtypes come first so that every tensor is aligned. close() fails when a promised tensor was not written.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        ordered = sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        self._places: dict[str, tuple[TensorSpec, int]] = {}
        self._rows_left: dict[str, int] = {}
        position = 0
        for spec in ordered:
            header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, position + spec.nbytes]}
            self._places[spec.name] = (spec, position)
            self._rows_left[spec.name] = spec.shape[0] if spec.shape else 1
            position += spec.nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._start = 8 + len(raw)
        self._lock = Lock()
        self._flusher = ThreadPoolExecutor(1)
        self._unflushed = 0
        self._file = path.open("wb", buffering=0)
        self._file.write(struct.pack("<Q", len(raw)) + raw)
        self._file.truncate(self._start + position)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; its dtype and shape must be the promised ones."""
        spec = self._places[name][0]
        if tuple(tensor.shape) != spec.shape:
            raise CheckpointError(
                f"Cannot write tensor {name}: it is {tensor.dtype} {tuple(tensor.shape)}, planned was {spec.dtype} {spec.shape}."
            )
        self.write_rows(name, 0, tensor)

    def write_rows(self, name: str, row: int, tensor: torch.Tensor) -> None:
        """Write some rows of a tensor, the first of them at `row`; every row is to be written once."""
        spec, position = self._places[name]
        rows = tensor.shape[0] if spec.shape else 1
        if tensor.dtype != torch_dtype(spec.dtype) or tuple(tensor.shape[1:]) != spec.shape[1:] or rows > self._rows_left[name]:
            raise CheckpointError(
                f"Cannot write tensor {name}: rows from {row} are {tensor.dtype} {tuple(tensor.shape)}, planned was {spec.dtype} "
                f"{spec.shape}, {self._rows_left[name]} rows of it still to come."
            )
        self._rows_left[name] -= rows
        position += self._start + (spec.nbytes // spec.shape[0] * row if row else 0)
        if tensor.is_contiguous():
            self._put(position, tensor)
        else:
            for block in map(tensor.__getitem__, row_blocks(tuple(tensor.shape))):
                self._put(position, block.contiguous())
                position += block.nbytes

    def _put(self, position: int, tensor: torch.Tensor) -> None:
        import torch

        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        with self._lock:  # the kernel writes one at a time too, but lets the others spin
            while data:
                written = os.pwrite(self._file.fileno(), data[:_WRITE], position)
                data, position = data[written:], position + written
                self._unflushed += written
            if self._unflushed >= _FLUSH:
                self._unflushed = 0
                self._flusher.submit(os.fdatasync, self._file.fileno())

    def close(self) -> None:
        """Flush to disk; raise CheckpointError when a promised tensor is missing."""
        self._flusher.shutdown()
        with self._file:
            if missing := [name for name, rows in self._rows_left.items() if rows]:
                raise CheckpointError(f"Cannot finish {self._file.name}: tensor {missing[0]} was never written.")
            os.fsync(self._file.fileno())

    def abort(self) -> None:
        """Close the file as it is, after an error elsewhere."""
        self._flusher.shutdown(cancel_futures=True)
        self._file.close()
