"""Linear weights that are stored as integers: what a format says of them, and one weight made of its packed parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbuild.artifacts import HFCheckpoint
from specbuild.errors import CheckpointError
from specbuild.tensorfile import LoadableTensor

if TYPE_CHECKING:
    import torch

Parts = Mapping[str, LoadableTensor]
ORDERS = ("g_idx", "weight_g_idx")  # parts that give each input column's group


@dataclass(frozen=True)
class Format:
    """How a quant_method stores a linear layer X as parts X.<part>; W[o, i] = (code - zero) * scale, of the column's group.

    codes: uint8 (out, in). zeros: int16 (out, groups), None where no part has them: the middle. scales: float32 (out, groups).
    """

    method: str
    needed: tuple[str, ...]  # the first marks a packed layer
    optional: tuple[str, ...]
    read_shape: Callable[[Parts, Packing], tuple[int, int]]
    part_shapes: Callable[[tuple[int, int], Packing], Mapping[str, tuple[int, ...]]]
    codes: Callable[[Parts, Packing], torch.Tensor]
    zeros: Callable[[Parts, Packing], torch.Tensor | None]
    scales: Callable[[Parts], torch.Tensor]


@dataclass(frozen=True)
class Packing:
    """What a config.json says of a model's packed weights. group_size: input columns that share a scale; None = all."""

    format: Format
    bits: int
    group_size: int | None
    act_order: bool = False  # columns of a group do not lie side by side
    stored_less: int = 0  # zero points are stored this much less than they are

    def groups(self, columns: int) -> int:
        """Return the number of scales of an output row."""
        return 1 if self.group_size is None else -(-columns // self.group_size)

    def __str__(self) -> str:
        return f"{self.format.method}, {self.bits} bit, {f'group {self.group_size}' if self.group_size else 'one scale per output row'}"


@dataclass(frozen=True)
class PackedWeight:
    """A linear layer's weight (out, in), made of its parts when it is asked for."""

    name: str
    shape: tuple[int, int]
    parts: Parts
    packing: Packing
    dtype: str = "F32"  # what load() gives: products of small integers and half-precision scales are exact in it

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def scale_dtype(self) -> str:
        return next(self.parts[part].dtype for part in self.packing.format.needed if "scale" in part)

    def load(self) -> torch.Tensor:
        """Return the weight in float32: (code - zero) * scale."""
        import torch

        packing = self.packing
        codes = packing.format.codes(self.parts, packing).short()
        zeros, scales = packing.format.zeros(self.parts, packing), packing.format.scales(self.parts)
        order = self.find_order()
        if order is None:
            order = torch.arange(self.shape[1]) // (packing.group_size or self.shape[1])
        codes -= 2 ** (packing.bits - 1) if zeros is None else zeros[:, order]
        return codes.float() * scales[:, order]

    def levels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the integers, int8 (out, in), and their scales, float32 (out, groups): of a weight without problem()."""
        import torch

        codes = self.packing.format.codes(self.parts, self.packing)
        return (codes - 2 ** (self.packing.bits - 1)).view(torch.int8), self.packing.format.scales(self.parts)  # uint8 wraps around

    def problem(self) -> str | None:
        """Say what cannot be said with integers around zero and one scale per group of neighbours; reads the small parts only."""
        import torch

        zeros = self.packing.format.zeros(self.parts, self.packing)
        middle = 2 ** (self.packing.bits - 1)
        if zeros is not None and bool((zeros != middle).any()):
            return f"zero point {int(zeros[zeros != middle][0])}, expected {middle} everywhere"
        order = self.find_order()
        if order is not None and not torch.equal(order, torch.arange(self.shape[1]) // (self.packing.group_size or self.shape[1])):
            return "columns grouped by activation order (g_idx), expected groups of neighbours"
        return None

    def find_order(self) -> torch.Tensor | None:
        """Return the group of each input column, int64 (in,); None where neighbours form groups."""
        found = next((self.parts[part].load().long() for part in ORDERS if part in self.parts), None)
        if found is None or bool((found < 0).all()):  # compressed-tensors' -1: not set
            return None
        if int(found.min()) < 0 or int(found.max()) >= self.packing.groups(self.shape[1]):
            raise CheckpointError(f"Cannot read {self.name}: its g_idx names group {int(found.max())}, which has no scale. Fetch it again.")
        return found


@dataclass(frozen=True)
class PackedCheckpoint(HFCheckpoint):
    """A Hugging Face checkpoint with packed weights, seen as one with plain ones."""

    packing: Packing

    @property
    def packed(self) -> dict[str, PackedWeight]:
        return {name: entry for name, entry in self.entries.items() if isinstance(entry, PackedWeight)}


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as it was before quantization."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def open_packed(source: HFCheckpoint, packing: Packing) -> PackedCheckpoint:
    """Return a view in which each group of packed parts is one weight; raise CheckpointError for parts that are missing or do not fit."""
    marker, entries = packing.format.needed[0], dict(source.entries)
    linears = [name.removesuffix(f".{marker}") for name in entries if name.endswith(f".{marker}")]
    if not linears:
        raise CheckpointError(
            f"Cannot convert {source.directory}: config.json says {packing}, but no tensor is named *.{marker}. Mend quantization_config."
        )
    for linear in linears:
        names = (*packing.format.needed, *packing.format.optional)
        parts = {part: entries.pop(f"{linear}.{part}") for part in names if f"{linear}.{part}" in entries}
        weight = f"{linear}.weight"
        if weight in entries:
            raise CheckpointError(f"Cannot convert {source.directory}: {linear} has both {marker} and weight. Remove one.")
        entries[weight] = make_packed_weight(weight, parts, packing)
    return PackedCheckpoint(source.directory, plain_config(source.config), entries, source.weight_files, packing)


def make_packed_weight(name: str, parts: Parts, packing: Packing) -> PackedWeight:
    """Return a weight made of its parts; raise CheckpointError when one is missing or has another shape than the others say."""
    if missing := [part for part in packing.format.needed if part not in parts]:
        raise CheckpointError(f"Cannot read {name} ({packing}): {', '.join(missing)} is missing. Fetch the model again.")
    shape = packing.format.read_shape(parts, packing)
    expected = {**packing.format.part_shapes(shape, packing), **dict.fromkeys(ORDERS, (shape[1],))}
    for part, entry in parts.items():
        if part in expected and entry.shape != expected[part]:
            raise CheckpointError(
                f"Cannot read {name} ({packing}): {part} is {entry.shape}, expected {expected[part]} for {shape}. Mend "
                "quantization_config, or fetch the model again."
            )
        if entry.dtype not in (("F16", "BF16", "F32") if "scale" in part else ("I32", "I64")):
            raise CheckpointError(f"Cannot read {name} ({packing}): {part} is {entry.dtype}, of another format. Mend quantization_config.")
    return PackedWeight(name, shape, parts, packing)


def read_whole(values: Mapping[str, Any], key: str, method: str) -> int:
    """Return a whole number of a quantization_config."""
    value = values.get(key)
    if type(value) is not int or value < -1 or value == 0:
        raise CheckpointError(f"Cannot read {method} weights: {key} is {value!r}, expected a whole number. Mend quantization_config.")
    return value


def refuse(method: str, key: str, value: object, expected: str) -> CheckpointError:
    """Return the error for a setting that this version does not read."""
    return CheckpointError(f"Cannot read {method} weights with {key} {value!r}: expected {expected}. Convert the unquantized model.")


def unpack_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Take integers of 4 or 8 bits out of int32 (rows, n), low bits first: uint8 (rows, n * 32 / bits)."""
    import torch

    raw = packed.contiguous().view(torch.uint8)  # little-endian, as safetensors are
    return raw if bits == 8 else torch.stack((raw & 15, raw >> 4), dim=-1).reshape(raw.shape[0], -1)


def packed_width(columns: int, bits: int) -> int:
    """Return the number of int32 that hold so many integers."""
    return math.ceil(columns * bits / 32)
