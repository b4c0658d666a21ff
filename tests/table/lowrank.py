"""Factors of a matrix: powersgd."""

import math

from table.row import Row


def sides(row_rank, shape):
    """Rows, columns and rank of the matrix that a shape is seen as: cut where rows + columns are fewest."""
    a, b = min(((math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))), key=sum)
    return a, b, min(row_rank, a, b)


def powersgd(rank, **settings):
    def nbytes(x):
        a, b, r = sides(rank, x.shape)
        return 4 * r * (a + b)

    return Row(
        {"compressor": "powersgd", **settings, "min_rate": 1.0}, ("allreduce",), nbytes, matrix=True, state=("q",)
    )


ROWS = [powersgd(1, compress_rank=1), powersgd(4)]
