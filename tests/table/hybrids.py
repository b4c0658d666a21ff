"""Some elements, in few bits: chain, qsparse, stc."""

import math

import numpy as np

from table.row import ANY, Row, by_block, count, cut, hexes, packed, share
from table.selections import coded


def largest(ratio, x):
    """The positions of the elements of largest magnitude, ascending."""
    return np.sort(np.argsort(-abs(x), kind="stable")[: share(ratio, len(x))])


def noise(levels, k, bucket=0):
    """Variance of k values that are rounded at random to multiples of norm / levels."""
    k = min(k, bucket or k)
    return min(k / levels**2, math.sqrt(k) / levels)


def stage(where):
    """The random stream of the values."""
    return where._replace(name=where.name + "/values")


def rounded(values, levels, bucket, u):
    """Values in buckets of ``bucket``, each rounded at random to a multiple of its bucket's norm / levels."""
    found = np.zeros(len(values))
    for start in range(0, len(values), bucket or max(1, len(values))):
        part = slice(start, start + (bucket or len(values)))
        norm = np.float32(np.sqrt((values[part].astype(np.float64) ** 2).sum()))
        if norm:
            level = (abs(values[part]) / norm * np.float32(levels)).astype(np.float32)
            level = np.minimum(np.floor(level + u[part].astype(np.float32)), levels)
            found[part] = np.sign(values[part]) * level * norm / levels
    return found


def chain(ratio, levels, bucket, bits, golden=None):
    """Top-k, and few levels."""

    def formula(x, where):
        chosen, found = largest(ratio, x), np.zeros(len(x))
        found[chosen] = rounded(x[chosen], levels, bucket, stage(where).noise("round", len(chosen)))
        return found

    def nbytes(x):
        k = share(ratio, x.size)
        return packed(bits, k) + 4 * count(k, bucket) + 4 * k

    return Row(
        {"compressor": "chain", "compress_ratio": ratio, "quantum_num": levels, "bucket_size": bucket},
        ANY,
        nbytes,
        formula,
        random=True,
        contraction=lambda n: share(ratio, n) / n * (1 - noise(levels, share(ratio, n), bucket)),
        golden=golden,
    )


def drawn_chain(ratio, levels):
    """Random positions that are not sent, scaled values in few levels: unbiased."""

    def formula(x, where):
        chosen = np.sort(np.argsort(where.shared_words("positions", len(x)), kind="stable")[: share(ratio, len(x))])
        found, scaled = np.zeros(len(x)), x[chosen] * np.float32(len(x) / len(chosen))
        found[chosen] = rounded(scaled, levels, 512, stage(where).noise("round", len(chosen)))
        return found

    def variance(n):
        one, two = n / share(ratio, n) - 1, noise(levels, share(ratio, n), 512)
        return one + two + one * two

    return Row(
        {
            "compressor": "chain",
            "sparsifier": "randomk",
            "compress_ratio": ratio,
            "unbiased_scale": True,
            "quantum_num": levels,
        },
        ANY,
        lambda x: packed(5, share(ratio, x.size)) + 4 * count(share(ratio, x.size), 512),
        formula,
        random=True,
        variance=variance,
    )


def qsparse(ratio, golden=None):
    """Top-k in fifteen levels, scaled by a factor that compensates for their noise."""

    def formula(x, where):
        chosen, found = largest(ratio, x), np.zeros(len(x))
        values = rounded(x[chosen], 15, 0, stage(where).noise("round", len(chosen)))
        found[chosen] = values / (1 + noise(15, len(chosen)))
        return found

    return Row(
        {"compressor": "qsparse", "compress_ratio": ratio},
        ANY,
        lambda x: packed(5, share(ratio, x.size)) + 4 + 4 * share(ratio, x.size),
        formula,
        random=True,
        contraction=lambda n: share(ratio, n) / (n * (1 + noise(15, share(ratio, n)))),
        golden=golden,
    )


def stc(ratio, golden=None):
    """Top-k: positions, signs and one magnitude."""

    def formula(x, where):
        chosen, found = largest(ratio, x), np.zeros(len(x))
        found[chosen] = np.where(x[chosen] >= 0, 1, -1) * abs(x[chosen].astype(np.float64)).mean()
        return found

    return Row(
        {"compressor": "stc", "compress_ratio": ratio},
        ANY,
        lambda x: math.ceil(share(ratio, x.size) / 8) + 4 + coded("elias_fano", x.size, share(ratio, x.size)),
        formula,
        contraction=lambda n: 1 / n,
        golden=golden,
    )


ROWS = [
    # Values 2 and 1.5, norm 2.5: floor(101.6 + 0.18) and floor(76.2 + 0.78).
    chain(0.25, 127, 512, 8, golden=("654d", hexes(2.5, dtype="f4"), hexes(5, 7, dtype="i4"))),
    chain(0.1, 15, 16, 5),
    drawn_chain(0.25, 15),
    # Levels 12 and 9 of 15, in five bits each.
    qsparse(0.25, golden=("2c01000000", hexes(2.5, dtype="f4"), hexes(5, 7, dtype="i4"))),
    qsparse(0.01),
    stc(0.25, golden=("03", hexes(1.75, dtype="f4"), "0d", "06")),
    stc(0.01),
]


def chunktopk(size, k, golden=None):
    """The largest of each chunk, in two magnitudes."""

    def of_block(b, start):
        chosen, found = np.argsort(-abs(b), kind="stable")[:k], np.zeros(len(b))
        sizes = abs(b[chosen].astype(np.float64))
        high = sizes >= sizes.mean()
        for group in (high, ~high):
            if group.any():
                found[chosen[group]] = np.sign(b[chosen[group]]) * sizes[group].mean()
        return found

    def nbytes(x):
        full, rest = divmod(x.size, size)
        sent, bits = full * k + min(rest, k), max(0, int(math.log2(size)) - 8)
        return sent + (packed(bits, sent) if bits else 0) + packed(2, sent) + 8 * count(x.size, size)

    return Row(
        {"compressor": "chunktopk", "chunk_size": size, "chunk_k": k},
        cut(size),
        nbytes,
        lambda x, where: by_block(x, size, of_block),
        contraction=lambda n: 1 / min(n, size),
        golden=golden,
    )


ROWS += [
    # Magnitudes 0.325 and 1.5 around 0.765625; codes 0 3 0 0 2 1 2 1.
    chunktopk(8, 8, golden=("0001020304050607", "0c66", hexes(0.325, 1.5, dtype="f4"))),
    chunktopk(64, 16),
    chunktopk(1024, 64),
    chunktopk(4096, 64),
]
