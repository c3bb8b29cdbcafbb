"""GPTQ as its paper derives it (optimal brain surgeon, a column at a time): the inverse Hessian of what is left is kept explicitly.

Float64 and no Cholesky factor: slow, and independent of how the package computes it.
"""

import numpy as np


def round_columns(weight, inputs, group_size, damping=0.01):
    """Return integers (out, in) and scales (out, groups) of weight (out, in) for inputs (tokens, in)."""
    weight = weight.astype(np.float64).copy()
    hessian = inputs.astype(np.float64).T @ inputs.astype(np.float64)
    dead = np.diag(hessian) == 0
    hessian[dead, dead] = 1.0
    hessian += np.eye(len(hessian)) * damping * np.diag(hessian).mean()
    inverse = np.linalg.inv(hessian)
    q, scales = np.zeros(weight.shape, np.int64), []
    for column in range(weight.shape[1]):
        if column % group_size == 0:
            scale = np.abs(weight[:, column : column + group_size]).max(axis=1) / 7
            scales.append(np.where(scale == 0, 1.0, scale))
        q[:, column] = np.clip(np.round(weight[:, column] / scales[-1]), -8, 7)
        error = (weight[:, column] - q[:, column] * scales[-1]) / inverse[column, column]
        weight[:, column:] -= error[:, None] * inverse[column, column:]
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return q, np.stack(scales, axis=1)
