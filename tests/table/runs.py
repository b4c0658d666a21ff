"""Codes whose number depends on the values, or on where they lie among the others: 3lc, inceptionn, sketch."""

import math

import numpy as np

from table.row import ANY, Row, by_block, count, cut, hexes, packed


def threelc(sparsity=1.0, zero_run=True, block=0, golden=None):
    """Trits, five in a byte, and runs of zero bytes."""

    def trits(b):
        top = abs(b).max(initial=0) * np.float32(sparsity)
        return np.rint(b / (top or np.float32(1))), top

    def nbytes(x):
        if not zero_run:
            return math.ceil(x.size / 5) + 4 * count(x.size, block)
        found = trits(x.reshape(-1))[0]
        total, run = 4, 0
        for start in range(0, x.size, 5):
            if found[start : start + 5].any():
                total, run = total + 1, 0
            else:  # up to 14 zero bytes become one byte
                total, run = total + (run % 14 == 0), run + 1
        return total

    return Row(
        {"compressor": "3lc", "sparsity": sparsity, "zero_run": zero_run, "block_size": block},
        cut(block),
        nbytes,
        lambda x, where: by_block(x, block, lambda b, _: np.multiply(*trits(b))),
        ragged=zero_run,
        contraction=lambda n: sparsity * (2 - sparsity) / min(n, block or n),
        golden=golden,
    )


def inceptionn(bound, lowest, middle, everywhere=True, golden=None):
    """Elements with at least the exponent ``lowest`` have 8 bits, from ``middle`` on 16."""

    def classes(x):
        exponent = np.frexp(x)[1] - 1
        exponent[x == 0] = -200
        return exponent < lowest, (lowest <= exponent) & (exponent < middle), (middle <= exponent) & (exponent < 0)

    def formula(x, where):
        none, narrow, wide = classes(x)
        found = np.where(wide, np.trunc(x * 2.0**15) / 2.0**15, x)
        found = np.where(narrow, np.trunc(x * 2.0 ** (7 - middle)) / 2.0 ** (7 - middle), found)
        return np.where(none, 0, found).astype(np.float32)

    def nbytes(x):
        none, narrow, wide = (int(each.sum()) for each in classes(x.reshape(-1)))
        return math.ceil(x.size / 4) + narrow + 2 * wide + 4 * (x.size - none - narrow - wide)

    return Row(
        {"compressor": "inceptionn", "error_bound": bound},
        ANY,
        nbytes,
        formula,
        ragged=True,
        everywhere=everywhere,
        golden=golden,
    )


def sketch(quantiles, everywhere=True, golden=None):
    """Each element becomes the mean of its quantile."""

    def formula(x, where):
        found = np.zeros(len(x))
        for members in np.split(np.argsort(x), [i * len(x) // quantiles for i in range(1, quantiles)]):
            found[members] = x[members].astype(np.float64).mean() if len(members) else 0
        return found.astype(np.float32)

    def nbytes(x):
        q = min(quantiles, x.size)
        return packed(max(1, math.ceil(math.log2(q))), x.size) + 4 * q

    return Row(
        {"compressor": "sketch", "quantiles": quantiles}, ANY, nbytes, formula, everywhere=everywhere, golden=golden
    )


ROWS = [
    # Codes 0 0 0 0 0 and 1 0 1.
    threelc(golden=("7983", hexes(2, dtype="f4"))),
    threelc(1.75),
    threelc(zero_run=False),
    # With scale 2.5, codes 0 0 0 0 0 and 1 0 1.
    threelc(1.25, zero_run=False, block=40, golden=("7983", hexes(2.5, dtype="f4"))),
    # 16-bit magnitudes 16384 8192 4096 24576; the last two numbers are negative.
    inceptionn(2**-10, -10, -5, golden=("2eee", hexes(-1, 2, 1.5, dtype="f4"), "00400020" + "009000e0", "")),
    inceptionn(0.003, -8, -4),
    inceptionn(2**-5, -5, -2, everywhere=False),
    # Eight elements in eight buckets: 5 0 4 3 2 7 1 6.
    sketch(64, golden=("05a7c7", hexes(-1, -0.75, -0.125, 0, 0.25, 0.5, 1.5, 2, dtype="f4"))),
    sketch(2, golden=("a5", hexes(-0.46875, 1.0625, dtype="f4"))),
    sketch(200, everywhere=False),
]
