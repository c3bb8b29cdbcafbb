"""Which masks a decoder's layers need: what the onnx-cpu graph and its runner must agree on."""

from __future__ import annotations

from specbuild.shape import ModelShape


def mask_names(shape: ModelShape) -> tuple[str, ...]:
    """Return the mask inputs that some layer reads: "mask" sees all positions, "local_mask" the window."""
    kinds = {shape.windowed(layer) for layer in range(shape.layers)}
    return tuple(name for name, windowed in (("mask", False), ("local_mask", True)) if windowed in kinds)
