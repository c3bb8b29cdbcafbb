"""What the onnx-cpu graph and its runner must agree on: its version, how it attends, and which masks a decoder's layers need."""

from __future__ import annotations

from specbuild.shape import ModelShape

GRAPH = 3  # raised whenever inputs, outputs or caches of the graph change: a runner runs the engines of its own number


def is_fused(shape: ModelShape, kernels: str) -> bool:
    """Tell whether layers attend by GroupQueryAttention: rotary positions, cache and mask inside, no more read than a sequence has.

    It takes several new tokens of one sequence only, so sequences share a pass where each has one new token: `fast` alone uses it.
    """
    return kernels == "fast" and shape.attn_softcap is None and shape.head_dim % 16 == 0 and shape.rotary_dim % 16 == 0


def mask_names(shape: ModelShape) -> tuple[str, ...]:
    """Return the mask inputs that some layer reads: "mask" sees all positions, "local_mask" the window."""
    kinds = {shape.windowed(layer) for layer in range(shape.layers)}
    return tuple(name for name, windowed in (("mask", False), ("local_mask", True)) if windowed in kinds)
