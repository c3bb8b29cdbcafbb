"""How tensor parallel ranks share a tensor: one rank's piece of a whole, and the whole from all pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from specbuild.shape import ModelShape

if TYPE_CHECKING:
    import torch

# none = on every rank; rows, columns = cut along that axis (a vector of input columns along its only one); qkv = q, k and v rows cut
# apart, then joined again; halves = the same for the two halves of a fused mlp.fc; vocab = rows, zero-padded to a multiple of the ranks.
Split = Literal["none", "rows", "columns", "qkv", "halves", "vocab"]


def split_shape(full: tuple[int, ...], split: Split, shape: ModelShape, tp: int) -> tuple[int, ...]:
    """Return the shape of one rank's piece."""
    if split in ("rows", "halves"):
        return (full[0] // tp, *full[1:])
    if split == "columns":
        return (*full[:-1], full[-1] // tp)
    if split == "vocab":
        return (-(-full[0] // tp), *full[1:])
    if split == "qkv":
        return ((shape.heads // tp + 2 * max(1, shape.kv_heads // tp)) * shape.head_dim, *full[1:])
    return full


def split_tensor(whole: torch.Tensor, split: Split, shape: ModelShape, tp: int, rank: int) -> torch.Tensor:
    """Return one rank's piece. Key-value heads are repeated where there are fewer than ranks."""
    import torch

    if tp == 1 or split == "none":
        return whole
    if split == "columns":
        return whole.chunk(tp, dim=-1)[rank]
    if split == "qkv":
        parts = torch.split(whole, [shape.q_rows, shape.kv_rows, shape.kv_rows])
        return torch.cat([_take_heads(part, shape.head_dim, tp, rank) for part in parts])
    if split == "halves":
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    if split == "vocab" and whole.shape[0] % tp:
        whole = torch.nn.functional.pad(whole, (0, 0, 0, -whole.shape[0] % tp))
    return whole.chunk(tp)[rank]


def join_tensor(pieces: Sequence[torch.Tensor], split: Split, shape: ModelShape) -> torch.Tensor:
    """Return the whole of all ranks' pieces: undo split_tensor."""
    import torch

    tp = len(pieces)
    if tp == 1 or split == "none":
        return pieces[0]
    if split == "columns":
        return torch.cat(list(pieces), dim=-1)
    if split == "qkv":
        kv_rows = max(1, shape.kv_heads // tp) * shape.head_dim
        parts = zip(*(torch.split(piece, [shape.q_rows // tp, kv_rows, kv_rows]) for piece in pieces), strict=True)
        query, key, value = (torch.cat(part) for part in parts)
        return torch.cat([query, *(_drop_repeated(part, shape, tp) for part in (key, value))])
    if split == "halves":
        return torch.cat([torch.cat(halves) for halves in zip(*(piece.chunk(2) for piece in pieces), strict=True)])
    whole = torch.cat(list(pieces))
    return whole[: shape.vocab] if split == "vocab" else whole


def _take_heads(part: torch.Tensor, head_dim: int, tp: int, rank: int) -> torch.Tensor:
    heads = part.reshape(-1, head_dim, *part.shape[1:])
    if heads.shape[0] < tp:
        heads = heads.repeat_interleave(tp // heads.shape[0], dim=0)
    return heads.chunk(tp, dim=0)[rank].reshape(-1, *part.shape[1:])


def _drop_repeated(part: torch.Tensor, shape: ModelShape, tp: int) -> torch.Tensor:
    heads = part.reshape(-1, shape.head_dim, *part.shape[1:])
    return heads[:: max(1, tp // shape.kv_heads)].reshape(-1, *part.shape[1:])
