"""Coefficients of a cosine transform: demo."""

import numpy as np

from table.row import ANY, Row


def dct(size):
    """The orthonormal DCT-II, from the angles of its definition."""
    j, i = np.meshgrid(np.arange(size), np.arange(size))
    return np.where(i == 0, np.sqrt(1 / size), np.sqrt(2 / size)) * np.cos(np.pi * i * (2 * j + 1) / (2 * size))


def demo(chunk, k, golden=None):
    """Vectors: chunks of one row."""

    def nbytes(x):
        a, b = (x.shape[0], x.size // x.shape[0]) if x.ndim > 1 else (1, x.size)
        rows, columns = min(chunk, a), min(chunk, b)
        sent = -(-a // rows) * -(-b // columns) * min(k, rows * columns)
        upper = max(0, (rows * columns - 1).bit_length() - 8)
        return 5 * sent + (-(-sent * upper // 8) if upper in (0, 1, 2, 4) else -(-sent // 8) * upper)

    def formula(x, where):
        columns = min(chunk, len(x))
        rows = np.zeros((-(-len(x) // columns), columns))
        rows.reshape(-1)[: len(x)] = x
        found = rows @ dct(columns).T
        for row in found:
            row[np.argsort(-abs(row), kind="stable")[k:]] = 0
        return (found @ dct(columns)).reshape(-1)[: len(x)]

    return Row(
        {"compressor": "demo", "chunk": chunk, "chunk_k": k, "memory": "residual"},
        ANY,
        nbytes,
        formula,
        contraction=lambda n: min(k, n, chunk**2) / min(n, chunk**2),
        golden=golden,
    )


ROWS = [demo(64, 8), demo(4, 2)]
