"""Low-rank factors of a matrix: one definition, so that all toolkits get the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


def svd_factor(matrix: Any, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return u[rank, n] and v[m, rank] whose product v @ u is the best approximation of matrix[m, n] of this rank.

    From W = Q S R^T: v = Q_r S_r^(1/2), u = S_r^(1/2) R_r^T, so that v^T v = u u^T = S_r (Wang et al., "Pufferfish",
    MLSys 2021, arXiv:2103.03936, section 2.3). An SVD does not determine signs: the entry of largest magnitude in each
    column of v is made positive. The factors are float32, or float64 for a float64 matrix. Raises ValueError if the
    matrix is not finite.
    """
    matrix = np.asarray(matrix)
    if matrix.dtype != np.float64:
        matrix = matrix.astype(np.float32)
    if not np.isfinite(matrix).all():
        raise ValueError("the weights are not finite: training diverged before the switch")
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    left, right = left[:, :rank], right[:rank]
    signs = np.sign(left[np.abs(left).argmax(axis=0), np.arange(rank)])
    root = np.sqrt(values[:rank]) * signs
    return root[:, None] * right, left * root
