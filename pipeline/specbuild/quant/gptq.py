"""GPTQ rounding: each column's rounding error is made good by the columns after it (Frantar et al., arXiv 2210.17323)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DAMPING = 0.01  # of the mean diagonal, added to it: the paper's


def round_gptq(weight: torch.Tensor, gram: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to INT4 with one scale per `group_size` input columns, so that the outputs on the calibration inputs change least.

    weight (out, in) float32; gram (in, in) float32, the inputs' X.T @ X -> q int8 (out, in), scale float32 (out, in / group_size).
    A group's scale is max|W| / 7 once the errors of the columns before it are spread; q is rounded half to even, within -8..7.
    """
    import torch

    weight, gram = weight.float().clone(), gram.float().clone()
    unused = gram.diagonal() == 0  # inputs that are always zero: their columns are free, and rounded as they are
    gram.diagonal()[unused] = 1.0
    gram.diagonal().add_(DAMPING * gram.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram)), upper=True)
    q = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], weight.shape[1] // group_size, device=weight.device)
    for group in range(scales.shape[1]):
        columns = slice(group * group_size, (group + 1) * group_size)
        block, errors = weight[:, columns], torch.zeros_like(weight[:, columns])
        scale = block.abs().amax(dim=1) / 7
        scale.masked_fill_(scale == 0, 1.0)
        factors = inverse[columns, columns]
        for column in range(group_size):
            rounded = (block[:, column] / scale).round_().clamp_(-8, 7)
            q[:, columns.start + column] = rounded.to(torch.int8)
            errors[:, column] = (block[:, column] - rounded * scale) / factors[column, column]
            block[:, column + 1 :] -= errors[:, column, None] * factors[column, column + 1 :]
        scales[:, group] = scale
        weight[:, columns.stop :] -= errors @ inverse[columns, columns.stop :]
    return q, scales
