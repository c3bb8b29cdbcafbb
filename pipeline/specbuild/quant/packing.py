"""INT4 packing along the output rows, and its exact inverse."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def pack_rows(q: torch.Tensor) -> torch.Tensor:
    """Pack int8 (out, in) of values -8..7 to int8 (out / 2, in): row 2j in the low nibble of row j, row 2j + 1 in the high one."""
    import torch

    if q.dtype != torch.int8 or q.shape[0] % 2:
        raise ValueError(f"expected int8 with an even number of rows, got {q.dtype} {tuple(q.shape)}")
    nibbles = q.view(torch.uint8) & 15
    return (nibbles[0::2] | (nibbles[1::2] << 4)).view(torch.int8)


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """Undo pack_rows: int8 (out / 2, in) to int8 (out, in) of values -8..7."""
    import torch

    low = (packed << 4) >> 4  # arithmetic shifts carry the sign
    return torch.stack((low, packed >> 4), dim=1).reshape(-1, packed.shape[1])
