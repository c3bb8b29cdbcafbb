"""What the onnx-cpu graph and its runner must agree on: its version, and which masks a decoder's layers need."""

from __future__ import annotations

from specbuild.shape import ModelShape

GRAPH = 2  # raised whenever inputs, outputs or caches of the graph change: a runner runs the engines of its own number


def mask_names(shape: ModelShape) -> tuple[str, ...]:
    """Return the mask inputs that some layer reads: "mask" sees all positions, "local_mask" the window."""
    kinds = {shape.windowed(layer) for layer in range(shape.layers)}
    return tuple(name for name, windowed in (("mask", False), ("local_mask", True)) if windowed in kinds)
