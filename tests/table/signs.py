"""One bit for each element: signsgd, signum, efsignsgd, onebit."""

import math

import numpy as np

from table.row import ANY, Row, by_block, count, cut, hexes


def efsignsgd(block, golden=None):
    """One bit for each element, one scale for each block."""
    return Row(
        {"compressor": "efsignsgd", "block_size": block},
        cut(block),
        lambda x: math.ceil(x.size / 8) + 4 * count(x.size, block),
        lambda x, where: by_block(x, block, lambda b, _: np.where(b >= 0, 1, -1) * abs(b.astype(np.float64)).mean()),
        contraction=lambda n: 1 / min(n, block or n),
        golden=golden,
    )


def onebit(block, golden=None):
    """One bit for each element, two means for each block."""

    def means(b, _):
        b = b.astype(np.float64)
        low, rest = b[b < 0], b[b >= 0]
        return np.where(b < 0, low.mean() if len(low) else 0.0, rest.mean() if len(rest) else 0.0)

    return Row(
        {"compressor": "onebit", "block_size": block},
        cut(block),
        lambda x: math.ceil(x.size / 8) + 8 * count(x.size, block),
        lambda x, where: by_block(x, block, means),
        contraction=lambda n: 1 / min(n, block or n),
        golden=golden,
    )


def sign(x, where):
    return np.where(x >= 0, 1, -1).astype(np.float32)


def flagged(x):
    """One bit for each element, one byte for each 8192."""
    return math.ceil(x.size / 8) + math.ceil(x.size / 8192)


ROWS = [
    efsignsgd(0, golden=("ad", hexes(0.765625, dtype="f4"))),
    efsignsgd(64),
    onebit(0, golden=("52", hexes(-0.625, 0.85, dtype="f4"))),
    onebit(64),
    Row({"compressor": "signsgd"}, (*ANY, "twostage"), flagged, sign, golden=("ad", "00")),
    Row({"compressor": "signum"}, (*ANY, "twostage"), flagged, sign, golden=("ad", "00")),
    Row(
        {"compressor": "signsgd", "packed": False},
        ("allreduce", *ANY, "twostage"),
        lambda x: x.size + math.ceil(x.size / 8192),
        sign,
        golden=("01ff0101ff01ff01", "00"),
    ),
]
