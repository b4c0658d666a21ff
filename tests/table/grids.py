"""Fixed grids below the largest element of a block: fp8, blockint, natural_dithering."""

import math

import numpy as np

from table.row import Row, by_block, count, cut, hexes, packed


def drawn(x, u):
    """x rounded to the integer above with the chance of its fraction."""
    return np.floor(x.astype(np.float64) + u)


FLOATS = {"e4m3": (-6, 3, 448), "e5m2": (-14, 2, 57344)}
"""Exponent of the smallest normal number, bits of mantissa, largest number."""


def fp8(kind, block, rounding="nearest", golden=None):
    """Eight bits for each element, one scale for each block."""
    lowest, mantissa, largest = FLOATS[kind]

    def formula(x, where):
        u = where.noise("round", len(x))

        def of_block(b, start):
            scale = abs(b).max(initial=0) * np.float32(1 / largest)
            y = b / (scale or np.float32(1))
            exponent = np.maximum(np.frexp(y)[1] - 1, lowest)
            steps = abs(y) / 2.0 ** (exponent - mantissa)
            steps = np.rint(steps) if rounding == "nearest" else drawn(steps, u[start : start + len(b)])
            return np.sign(y) * np.minimum(steps * 2.0 ** (exponent - mantissa), largest) * scale

        return by_block(x, block, of_block)

    def error(n):
        return (2.0**-mantissa / 2) ** 2 + min(n, block or n) * (2.0 ** (lowest - mantissa) / largest / 2) ** 2

    nearest = rounding == "nearest"
    return Row(
        {"compressor": "fp8", "format": kind, "block_size": block, "rounding": rounding},
        cut(block),
        lambda x: x.size + 4 * count(x.size, block),
        formula,
        random=not nearest,
        contraction=(lambda n: 1 - error(n)) if nearest else None,
        variance=None if nearest else error,
        golden=golden,
    )


def blockint(bits, block, rounding="nearest", golden=None):
    """Equal steps from minus the largest magnitude to plus it."""
    top = 2 ** (bits - 1) - 1

    def formula(x, where):
        u = where.noise("round", len(x))

        def of_block(b, start):
            scale = abs(b).max(initial=0)
            steps = b / (scale or np.float32(1)) * np.float32(top)
            return (np.rint(steps) if rounding == "nearest" else drawn(steps, u[start : start + len(b)])) * scale / top

        return by_block(x, block, of_block)

    def variance(n):
        # The worst case: one element of ``top`` steps, and all others the same fraction of a step.
        n = min(n, block or n)
        part = top / (math.sqrt(top**2 + n - 1) + top)
        return (n - 1) * part * (1 - part) / (top**2 + (n - 1) * part**2)

    def contraction(n):
        n = min(n, block or n)
        return max(1 / n, 1 - (n - 1) / (4 * top**2))

    nearest = rounding == "nearest"
    return Row(
        {"compressor": "blockint", "bits": bits, "block_size": block, "rounding": rounding},
        cut(block),
        lambda x: packed(bits, x.size) + 4 * count(x.size, block),
        formula,
        random=not nearest,
        contraction=contraction if nearest else None,
        variance=None if nearest else variance,
        golden=golden,
    )


def natural_dithering(s, block, bits, everywhere=True, golden=None, **settings):
    """Powers of a base, 1 the largest, relative to the largest magnitude or the 2-norm; ``bits``: width of one code."""
    b, euclidean = settings.get("base", 2.0), settings.get("norm") == "l2"
    levels = np.array([0, *b ** np.arange(1.0 - s, 1)])

    def formula(x, where):
        u = where.uniform("round", len(x))

        def of_block(b, start):
            top = np.float32(np.sqrt((b.astype(np.float64) ** 2).sum())) if euclidean else abs(b).max(initial=0)
            y = (abs(b) / (top or np.float32(1))).astype(np.float64)
            lower = np.minimum(np.searchsorted(levels, y, side="right") - 1, s - 1)
            low, high = levels[lower], levels[lower + 1]
            return np.sign(b) * np.where(u[start : start + len(b)] < (y - low) / (high - low), high, low) * top

        return by_block(x, block, of_block)

    def variance(n):
        n = min(n, block or n)
        if not euclidean:
            return max((b - 1) ** 2 / b / 4, (math.sqrt(1 + (n - 1) * (b * b) ** (1 - s)) - 1) / 2)
        # t² of |x|² = 1 lies in equal elements r below the lowest level l, each with variance r (l - r); the rest lies
        # at the worst place between two levels.
        t = np.linspace(0, 1, 10_001)
        return (levels[1] * math.sqrt(n) * t - t**2 + (b - 1) ** 2 / b / 4 * (1 - t**2)).max()

    return Row(
        {"compressor": "natural_dithering", "s": s, "block_size": block, **settings},
        cut(block),
        lambda x: packed(bits, x.size) + 4 * count(x.size, block),
        formula,
        random=True,
        variance=variance,
        everywhere=everywhere,
        golden=golden,
    )


ROWS = [
    fp8("e4m3", 128, golden=(bytes([110, 246, 102, 0, 222, 126, 242, 122]).hex(), hexes(2 / 448, dtype="f4"))),
    # 2 is scaled to 57344 = 7 * 2**13; so 0.75 is 2.625 and 1.5 is 5.25 times a power of 2: in 2.5 .. 3 and 5 .. 6.
    fp8("e5m2", 0, golden=(bytes([115, 247, 111, 0, 235, 123, 245, 121]).hex(), hexes(2 / 57344, dtype="f4"))),
    # Only -0.75 and 1.5 are between two codes, both at 10.5 on the steps from 8 to 16; their noise u is .20 and .78.
    fp8("e4m3", 0, "stochastic", (bytes([110, 246, 102, 0, 222, 126, 242, 123]).hex(), hexes(2 / 448, dtype="f4"))),
    fp8("e5m2", 128, "stochastic"),
    # Codes 2 -4 1 0 0 7 -3 5.
    blockint(4, 512, golden=("c201705d", hexes(2, dtype="f4"))),
    blockint(8, 0),
    blockint(2, 64),
    # Codes 1 -3 0 0 -1 7 -3 6.
    blockint(4, 64, "stochastic", golden=("d201706d", hexes(2, dtype="f4"))),
    blockint(8, 512, "stochastic"),
    blockint(2, 0, "stochastic"),
    # Codes 5 -6 4 0 -3 7 -6 6, with the sign in the top bit.
    natural_dithering(7, 512, 4, golden=("e5047b6e", hexes(2, dtype="f4"))),
    natural_dithering(1, 0, 2),
    natural_dithering(3, 64, 3),
    natural_dithering(40, 0, 7, everywhere=False),
    natural_dithering(15, 64, 5, base=1.5),
    natural_dithering(3, 0, 3, everywhere=False, base=4.0),
    # |X|² = 8.140625. Levels below: 4 5 3 0 2 6 5 6, by .402 (the last two .051) of the way to the next; the draws .18,
    # .09 and .27 round up: 5 -5 4 0 -3 6 -5 6.
    natural_dithering(7, 512, 4, norm="l2", golden=("d5046b6d", hexes(8.140625**0.5, dtype="f4"))),
    natural_dithering(3, 0, 3, everywhere=False, norm="l2"),
]
