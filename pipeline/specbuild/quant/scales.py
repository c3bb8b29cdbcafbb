"""Scales that a calibration found, as inputs of quantization: read from a file, checked, shared among ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.errors import CheckpointError
from specbuild.shape import ModelShape
from specbuild.tensorfile import FLOATS, TensorSpec, read_header

if TYPE_CHECKING:
    import torch

_PREQUANT, _ACTIVATION = "prequant_scaling_factor", "activation_scaling_factor"


@dataclass(frozen=True)
class LinearScales:
    """One linear layer's scales: the engine computes (x * prequant) @ (W / prequant).T.

    prequant: float32 (in,), above zero. activation: float32 (1,), amax(|x * prequant|) / 127, for schemes with integer activations.
    row_amax: float32 (out,), max|W / prequant| of whole rows where ranks share their columns; None = of the weight at hand.
    rounded: the integers, int8 (out, in), and their scales, float32 (out, groups), where they were chosen with the scales.
    """

    prequant: torch.Tensor
    activation: torch.Tensor | None = None
    row_amax: torch.Tensor | None = None
    rounded: tuple[torch.Tensor, torch.Tensor] | None = None

    def of_rows(self, rows: slice) -> LinearScales:
        """Return the scales of some rows of the weight."""
        amax = None if self.row_amax is None else self.row_amax[rows]
        return replace(self, row_amax=amax, rounded=None if self.rounded is None else (self.rounded[0][rows], self.rounded[1][rows]))


Scales = Mapping[str, LinearScales]
"""By the whole model's TensorRT-LLM name: `transformer.layers.<layer>.<part>`, q, k and v as one attention.qkv."""


def plan_rounded(shape: ModelShape, group_size: int) -> list[TensorSpec]:
    """Return what a file of RoundedScales holds: every linear layer's integers and their scales."""
    plan = []
    for layer in range(shape.layers):
        for part, (rows, columns) in shape.linears().items():
            name = f"transformer.layers.{layer}.{part}"
            plan += [TensorSpec(f"{name}.q", "I8", (rows, columns)), TensorSpec(f"{name}.scale", "F32", (rows, columns // group_size))]
    return plan


class RoundedScales(Mapping[str, LinearScales]):
    """Integers and scales of a whole model in a file, by linear layer: those asked for are in memory, and no others."""

    def __init__(self, path: Path) -> None:
        self._entries = read_header(path)

    def __getitem__(self, linear: str) -> LinearScales:
        import torch

        q, scale = self._entries[f"{linear}.q"].load(), self._entries[f"{linear}.scale"].load()
        return LinearScales(torch.ones(q.shape[1]), rounded=(q, scale))

    def __iter__(self) -> Iterator[str]:
        return (name.removesuffix(".q") for name in self._entries if name.endswith(".q"))

    def __len__(self) -> int:
        return len(self._entries) // 2


def load_scales(path: Path) -> dict[str, LinearScales]:
    """Read a safetensors file of `<linear>.prequant_scaling_factor` and, for int8_sq, `<linear>.activation_scaling_factor`."""
    entries = read_header(path)
    for name, entry in entries.items():
        if name.rsplit(".", 1)[-1] not in (_PREQUANT, _ACTIVATION) or entry.dtype not in FLOATS:
            raise CheckpointError(
                f"Cannot use scales in {path}: {name} is {entry.dtype}, expected floats named *.{_PREQUANT} or *.{_ACTIVATION}. "
                "Remove it, or calibrate again."
            )
    linears = {name.rsplit(".", 1)[0] for name in entries}
    scales = {}
    for linear in sorted(linears):
        if f"{linear}.{_PREQUANT}" not in entries:
            raise CheckpointError(f"Cannot use scales in {path}: {linear} has no {_PREQUANT}. Calibrate again.")
        activation = entries.get(f"{linear}.{_ACTIVATION}")
        prequant = entries[f"{linear}.{_PREQUANT}"].load().float()
        scales[linear] = LinearScales(prequant, None if activation is None else activation.load().float().reshape(-1))
    return scales


def check_scales(scales: Scales, shape: ModelShape, dtype: torch.dtype, activations: bool) -> None:
    """Raise CheckpointError unless every linear layer of the model, and nothing else, has scales that fit and that `dtype` can hold."""
    widths = {f"transformer.layers.{i}.{part}": columns for i in range(shape.layers) for part, (_, columns) in shape.linears().items()}
    if different := sorted(widths.keys() ^ scales.keys()):
        kind = "missing" if different[0] in widths else "unexpected"
        raise CheckpointError(
            f"Cannot use these scales: {len(different)} linear layers differ from the model's {len(widths)}, first {different[0]} "
            f"({kind}). Calibrate this model."
        )
    for name, columns in widths.items():
        found = scales[name]
        if tuple(found.prequant.shape) != (columns,):
            raise CheckpointError(
                f"Cannot use these scales: {name} has {tuple(found.prequant.shape)} prequant scales, expected ({columns},). "
                "Calibrate this model."
            )
        if activations and (found.activation is None or found.activation.numel() != 1):
            raise CheckpointError(f"Cannot use these scales: {name} has no single activation scale. Calibrate with an int8_sq recipe.")
        for kind, values in (("prequant", found.prequant), ("activation", found.activation)):
            cast = None if values is None else (values.to(dtype) if kind == "prequant" else values)
            if cast is not None and not bool(((cast > 0) & cast.isfinite()).all()):
                raise CheckpointError(
                    f"Cannot use these scales: the {kind} scale of {name} is somewhere zero, negative or not finite as "
                    f"{str(dtype).removeprefix('torch.')}. Calibrate again, or use another dtype."
                )
    if activations:
        _check_shared(scales, shape.layers)


def _check_shared(scales: Scales, layers: int) -> None:
    """Raise CheckpointError unless fc and gate, which read the same integers, have the same scales."""
    for layer in range(layers):
        fc = scales[f"transformer.layers.{layer}.mlp.fc"]
        gate = scales.get(f"transformer.layers.{layer}.mlp.gate", fc)
        if not bool((fc.prequant == gate.prequant).all()) or fc.activation != gate.activation:
            raise CheckpointError(
                f"Cannot use these scales: mlp.fc and mlp.gate of layer {layer} differ, expected the same. Calibrate them together."
            )
