"""Factors of a matrix: powersgd, acpsgd, gradzip, atomo, dion. Principal components of slices: gradiveq."""

import math

from table.row import ANY, Row, X, hexes


def sides(rank, shape):
    """Rows, columns and rank of the matrix for a shape: split where rows + columns are fewest."""
    a, b = min(((math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))), key=sum)
    return a, b, min(rank, a, b)


def factors(name, rank, state, sent, **settings):
    """``sent``: how many numbers a worker sends for a matrix of a rows, b columns and rank r."""
    return Row(
        {"compressor": name, "compress_rank": rank, "min_rate": 1.0, **settings},
        ("allreduce",),
        lambda x: 4 * sent(*sides(rank, x.shape)),
        matrix=True,
        state=state,
    )


def drawn(leading):
    """``leading``: how many singular values are computed; 0: all."""
    return Row(
        {"compressor": "atomo", "compress_rank": 2, "min_rate": 1.0, "leading": leading},
        ANY,
        None,  # the number of sent vectors is random
        matrix=True,
        ragged=True,
        random=True,
        variance=lambda n: max(0, (math.sqrt(n) + (leading if leading < math.sqrt(n) else 0)) / 2 - 1),
    )


def orthonormal(fraction, **settings):
    def nbytes(x):
        a, b, _ = sides(1, x.shape)
        return 4 * math.ceil(fraction * min(a, b)) * (a + b)

    params = {"compressor": "dion", "rank_fraction": fraction, **settings}
    return Row(params, ("allreduce",), nbytes, matrix=True, state=("q",))


def sliced(size, ratio, train, compressed, everywhere=True, golden=None):
    """The first step is uncompressed: it sends each element, and keeps what it sent."""
    params = {"slice_size": size, "compress_ratio": ratio, "train_steps": train, "compressed_steps": compressed}
    return Row(
        {"compressor": "gradiveq", **params},
        ("allreduce",),
        lambda x: 4 * x.size,
        state=("moments", "frame"),
        largest=1e15,
        everywhere=everywhere,
        golden=golden,
    )


ROWS = [
    factors("powersgd", 1, ("q",), lambda a, b, r: r * (a + b)),
    factors("powersgd", 4, ("q",), lambda a, b, r: r * (a + b)),
    factors("acpsgd", 4, ("p", "q"), lambda a, b, r: r * a),  # in even steps
    factors("gradzip", 4, ("q",), lambda a, b, r: r * (a + b)),
    drawn(0),
    drawn(3),
    orthonormal(0.25),
    orthonormal(0.1, output_axis=-1),
    sliced(8, 0.25, 2, 3, golden=(hexes(*X, dtype="f4"), hexes(*X, dtype="f4"))),
    sliced(33, 0.1, 3, 2, everywhere=False),
]
