"""Few levels for each element: qsgd, terngrad, natural at random, also damped; geometric; and codebooks: dettmers8."""

import math

import numpy as np

from table.row import Row, by_block, count, cut, hexes, packed


def qsgd(levels, bucket, bits, everywhere=True, golden=None):
    """``bits`` is the width of one code."""

    def variance(n):
        n = min(n, bucket or n)
        return min(n / levels**2, math.sqrt(n) / levels)

    def formula(x, where):
        u = where.noise("round", len(x)).astype(np.float32)

        def of_block(b, start):
            norm = np.float32(np.sqrt((b.astype(np.float64) ** 2).sum()))
            level = (abs(b) / norm * np.float32(levels)).astype(np.float32) if norm else np.zeros_like(b)
            return np.sign(b) * np.minimum(np.floor(level + u[start : start + len(b)]), levels) * norm / levels

        return by_block(x, bucket, of_block)

    return Row(
        {"compressor": "qsgd", "quantum_num": levels, "bucket_size": bucket},
        cut(bucket),
        lambda x: packed(bits, x.size) + 4 * count(x.size, bucket),
        formula,
        random=True,
        variance=variance,
        everywhere=everywhere,
        golden=golden,
    )


def terngrad(block, clip=0.0, golden=None):
    """Two bits for each element, one scale for each block."""

    def formula(x, where):
        u = where.uniform("round", len(x))

        def of_block(b, start):
            top = abs(b).max(initial=0)
            if clip and top:
                top = min(top, clip * math.sqrt((b.astype(np.float64) ** 2).mean()))
            return np.where(u[start : start + len(b)] * top < abs(b), np.sign(b), 0) * np.float32(top)

        return by_block(x, block, of_block)

    return Row(
        {"compressor": "terngrad", "block_size": block, "clip": clip},
        cut(block),
        lambda x: math.ceil(x.size / 4) + 4 * count(x.size, block),
        formula,
        random=True,
        variance=None if clip else lambda n: (math.sqrt(min(n, block or n)) - 1) / 2,
        golden=golden,
    )


def natural(golden=None, **settings):
    """The neighbouring powers of two."""

    def formula(x, where):
        fraction, exponent = np.frexp(abs(x).astype(np.float64))  # fraction in [1/2, 1)
        draw = np.float64(0.5 - 2**-24)
        if settings.get("stochastic", True):
            draw = (where.words("round", len(x)) >> 9) / 2**23
        return np.where(x == 0, 0, np.sign(x) * 2.0 ** (exponent - 1 + (2 * fraction - 1 > draw))).astype(np.float32)

    grace = settings.get("window") == "grace"
    stochastic = settings.get("stochastic", True)
    return Row(
        {"compressor": "natural", **settings},
        cut(settings.get("block_size", 0)),
        lambda x: x.size + 4 * count(x.size, settings.get("block_size", 0)),
        formula,
        random=stochastic,
        variance=(lambda n: 1 / 8) if stochastic and not grace else None,
        contraction=(lambda n: 8 / 9) if not stochastic and not grace else None,
        largest=1e5 if grace else 1e30,
        golden=golden,
    )


def geometric(beta, block=0, golden=None):
    """The nearest power of a base, of the 127 below the largest, or zero."""

    def of_block(b, _):
        size = abs(b).astype(np.float64)
        low = np.floor(np.log(np.where(size > 0, size, 1)) / math.log(beta) + 1e-9)
        exponent = low + (size > ((beta**low + beta ** (low + 1)) / 2).astype(np.float32))
        seen = size >= 2.0**-126
        top = exponent[seen].max(initial=-1000)
        return np.where(seen & (exponent > top - 127), np.sign(b) * beta**exponent, 0)

    return Row(
        {"compressor": "geometric", "beta": beta, "block_size": block},
        cut(block),
        lambda x: x.size + 4 * count(x.size, block),
        lambda x, where: by_block(x, block, of_block),
        contraction=lambda n: 1 - ((beta - 1) / (beta + 1)) ** 2 - (min(n, block or n) - 1) / beta**252,
        golden=golden,
    )


def damped(row, method, golden=None, **settings):
    """An unbiased row, scaled by 1 / (1 + variance), with the variance of a whole block."""
    block = row.params.get("bucket_size") or row.params.get("block_size")

    def factor(n):
        return 1 / (1 + row.variance(block or n))

    return Row(
        {"compressor": "damped", "method": method, **settings},
        row.communicators,
        row.nbytes,
        lambda x, where: row.formula(x, where) * factor(len(x)),
        ragged=row.ragged,
        random=True,
        contraction=factor,
        golden=golden,
    )


def dynamic(decade):
    """The positive values of one decade of the dynamic table: equal steps, fewer in lower decades."""
    edges = np.linspace(0.1, 1.0, 2 ** (6 - decade) + 1)
    return (edges[:-1] + edges[1:]) / 2 * 10.0**-decade


def both_signs(magnitudes, *others):
    return np.sort(np.concatenate([magnitudes, np.negative(magnitudes), others]))


CODEBOOKS = {
    "dynamic8": both_signs(np.concatenate([dynamic(decade) for decade in range(7)]), 0, 1),
    "linear8": np.arange(-127, 128) / 127,
    "nf4": np.array(
        [
            *(-1, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.09105, 0),
            *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.562617, 0.7229568, 1),
        ]
    ),
    # The positive magnitudes of 4-bit floats.
    "fp4": both_signs(np.array([0.5, 1, 1.5, 2, 3, 4, 6]) / 6, 0),
}


def dettmers8(table, block, bits, worst, golden=None):
    """A codebook; ``worst``: the error of the largest element, relative to it."""
    values = CODEBOOKS[table]
    # Boundaries between neighbouring entries. They are rounded to float32 once, as all numbers here: the tables do not
    # define to which side a tie goes.
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)

    def of_block(b, _):
        top = abs(b).max(initial=0)
        return values[((b / (top or np.float32(1)))[:, None] > middles).sum(1)] * top

    return Row(
        {"compressor": "dettmers8", "table": table, "block_size": block},
        cut(block),
        lambda x: packed(bits, x.size) + 4 * count(x.size, block),
        lambda x, where: by_block(x, block, of_block),
        contraction=lambda n: (1 - worst**2) / min(n, block or n),
        golden=golden,
    )


ROWS = [
    # floor(|x| / norm * 127 + u) = 22 45 11 0 5 89 33 67, with the sign in the top bit.
    qsgd(127, 512, 8, golden=("16ad0b008659a143", hexes(8.140625**0.5, dtype="f4"))),
    # The same formula with 7 levels, in four bits: 1 3 0 0 0 5 2 4.
    qsgd(7, 0, 4, golden=("b100584a", hexes(8.140625**0.5, dtype="f4"))),
    qsgd(1, 8, 2),
    qsgd(2, 24, 3, everywhere=False),
    qsgd(15, 64, 5, everywhere=False),
    qsgd(31, 512, 6, everywhere=False),
    qsgd(63, 0, 7, everywhere=False),
    # Trits 1 0 1 0 0 1 -1 0, stored plus 1.
    terngrad(0, golden=("6649", hexes(2, dtype="f4"))),
    terngrad(512),
    terngrad(0, clip=2.5),
    # The largest power is 2**1, whose exponent field 128 becomes the code 127.
    natural((bytes([125, 254, 124, 0, 251, 127, 254, 126]).hex(), hexes(128, dtype="i4"))),
    natural(("6ced6b00ea6eed6d", hexes(145, dtype="i4")), window="grace"),
    natural((bytes([125, 254, 124, 0, 251, 127, 254, 127]).hex(), hexes(128, dtype="i4")), stochastic=False),
    natural(block_size=64),
    natural(block_size=8, stochastic=False),
    # Exponents -1 0 -2 - -3 1 -1 0 (- for zero), stored plus 126; ties round down.
    geometric(2.0, golden=(bytes([125, 254, 124, 0, 251, 127, 253, 126]).hex(), hexes(1, dtype="i4"))),
    geometric(1.5, 64),
    geometric(4.0),
    damped(qsgd(7, 512, 4), "qsgd", ("b100584a", hexes(8.140625**0.5, dtype="f4")), quantum_num=7, bucket_size=512),
    damped(qsgd(1, 8, 2), "qsgd", quantum_num=1, bucket_size=8),
    dettmers8(
        "dynamic8",
        4096,
        8,
        0.5 * 0.9 / 64,
        golden=(bytes([201, 35, 192, 127, 77, 255, 44, 237]).hex(), hexes(2, dtype="f4")),
    ),
    dettmers8("linear8", 0, 8, 0.0),
    # Nearest to 0.25 -0.5 0.125 0 -0.0625 1 -0.375 0.75 are the entries 10 2 9 7 6 15 3 14.
    dettmers8("nf4", 64, 4, 0.0, golden=("2a79f6e3", hexes(2, dtype="f4"))),
    dettmers8("fp4", 64, 4, 0.0),
]
