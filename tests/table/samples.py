"""Elements chosen by a sample, by chance or by bins: dgc, adaptive_random, wangni, adacomp, adaq,
variance."""

import math

import numpy as np

from table.row import ANY, Row, Where, hexes, share
from table.selections import coded, masked


def counted(positions):
    """How many elements of a gradient of any shape the first worker sends at its first step."""
    return lambda x: len(positions(x.reshape(-1), Where()))


def sampled(ratio):
    """The positions above 1.03 ** j times the sample's threshold; j makes their number nearest to k."""

    def positions(x, where):
        n, size, k = len(x), abs(x), share(ratio, len(x))
        sample = max(100, math.ceil(32 / ratio), math.ceil(n / 100))
        if sample >= n:
            largest = np.argsort(-size, kind="stable")[:k]
            return np.sort(largest[size[largest] > 0])
        seen = sorted(size[(where.words("sample", sample) & 0x7FFFFFFF) % n])
        threshold = seen[-math.ceil(ratio * sample)]
        most = math.ceil(1.3 * k)
        best, chosen = None, None
        for j in range(32, -33, -1):
            bound = threshold * np.float32(1.03**j)
            found = np.flatnonzero(size > bound)
            miss = abs(min(len(found), most) - k)
            if best is None or miss < best:
                best, chosen, above = miss, found, np.flatnonzero(size > threshold * np.float32(1.03 ** (j + 1)))
        if len(chosen) > most:  # ties: fill up with the first elements between the last two thresholds
            if len(above) > most:
                return chosen[:most]
            band = np.setdiff1d(chosen, above)[: most - len(above)]
            return np.sort(np.concatenate([above, band]))
        return chosen

    return positions


def dgc(ratio, coding="int32", golden=None, random=True):
    found = sampled(ratio)
    return Row(
        {"compressor": "dgc", "compress_ratio": ratio, "index_coding": coding, "memory": "residual"},
        ANY,
        lambda x: 4 * counted(found)(x) + coded(coding, x.size, counted(found)(x)),
        masked(found),
        ragged=True,
        mask=True,
        random=random,
        golden=golden,
    )


def sides(ratio, x):
    """The positions of the largest positive and of the largest negative elements."""
    found = []
    for side in (x, -x):
        own = np.flatnonzero(side > 0)
        found.append(own[np.argsort(-side[own], kind="stable")[: math.ceil(ratio * len(own))]])
    return found


def adaq(ratio, golden=None):
    """Two means, and positions."""

    def formula(x, where):
        sent = np.zeros(len(x))
        for chosen in sides(ratio, x):
            if len(chosen):
                sent[chosen] = x[chosen].astype(np.float64).mean()
        return sent

    return Row(
        {"compressor": "adaq", "compress_ratio": ratio},
        ANY,
        lambda x: 8 + 4 * sum(len(side) for side in sides(ratio, x.reshape(-1))),
        formula,
        ragged=True,
        contraction=lambda n: 1 / n,
        golden=golden,
    )


def chances(x, ratio, iterations):
    """The probability with which each element is sent."""
    wanted, size = ratio * len(x), abs(x.astype(np.float64))
    p = np.minimum(wanted * size / (size.sum() or 1), 1)
    for _ in range(iterations):
        free = p < 1
        if not p[free].sum():
            break
        factor = (wanted - len(x) + free.sum()) / p[free].sum()
        if factor <= 1:
            break
        p[free] = np.minimum(factor * p[free], 1)
    return p


def wangni(ratio, iterations, golden=None):
    """Elements with probability 1 are always sent, others by chance."""

    def drawn(x, where):
        p = chances(x, ratio, iterations)
        return p, np.flatnonzero(where.uniform("keep", len(x)) < p)

    def formula(x, where):
        p, chosen = drawn(x, where)
        sent = np.zeros(len(x))
        sent[chosen] = x[chosen] / p[chosen]
        return sent

    def nbytes(x):
        p, chosen = drawn(x.reshape(-1), Where())
        return 4 + 4 * len(chosen) + 4 * (p[chosen] == 1).sum()

    return Row(
        {"compressor": "wangni", "compress_ratio": ratio, "iterations": iterations},
        ANY,
        nbytes,
        formula,
        ragged=True,
        random=True,
        variance=lambda n: 1 / ratio,
        golden=golden,
    )


def adaptive_random(ratio, unbiased=False, golden=None):
    """Draws with chances in proportion to magnitudes."""

    def times(x, where):
        n, size = len(x), abs(x).astype(np.float64)
        found = np.zeros(n)
        if size.any():
            # Words are compared as signed numbers, so flip the sign bit.
            words = where.words("draw", share(ratio, n)) ^ np.uint32(1 << 31)
            np.add.at(found, np.searchsorted(size.cumsum(), (words + 0.5) / 2**32 * size.sum()), 1)
        return found

    def formula(x, where):
        found = times(x, where)
        if unbiased:
            return np.sign(x) * found * (abs(x).sum(dtype=np.float64) / max(1, share(ratio, len(x))))
        return np.where(found > 0, x, 0)

    return Row(
        {"compressor": "adaptive_random", "compress_ratio": ratio, "unbiased": unbiased},
        ANY,
        lambda x: 8 * np.count_nonzero(times(x.reshape(-1), Where())),
        formula,
        ragged=True,
        mask=not unbiased,
        random=True,
        contraction=None if unbiased else lambda n: 1 / n,
        variance=(lambda n: (n - 1) / share(ratio, n)) if unbiased else None,
        golden=golden,
    )


def first_of_bins(size):
    """The first step, without a residual: sends the elements of at least half of their bin's largest magnitude."""

    def positions(x):
        found = []
        for start in range(0, len(x), size):
            part = abs(x[start : start + size])
            found += [start + i for i in np.flatnonzero((2 * part >= part.max()) & (part.max() > 0))]
        return found

    return positions


def adacomp(size, golden=None):
    return Row(
        {"compressor": "adacomp", "bin_size": size},
        ANY,
        lambda x: math.ceil(x.size / size) + 4 + len(first_of_bins(size)(x.reshape(-1))),
        ragged=True,
        state=("residual",),
        golden=golden,
    )


def variance(alpha, zeta, golden=None):
    """``alpha`` is below 1: the first step sends all elements within 2**-7 of the largest, rounded to powers of two."""

    def count(x):
        exponent = np.frexp(x[x != 0])[1]
        up = abs(x[x != 0]) >= 1.5 * 2.0 ** (exponent - 1)
        return np.sum(exponent + up >= exponent.max(initial=-149) - 7)

    return Row(
        {"compressor": "variance", "alpha": alpha, "zeta": zeta},
        ANY,
        lambda x: 4 + 4 * int(count(x.reshape(-1))),
        ragged=True,
        state=("residual", "squares"),
        largest=1e15,
        golden=golden,
    )


ROWS = [
    dgc(0.25, golden=(hexes(2, 1.5, dtype="f4"), hexes(5, 7, dtype="i4"))),
    dgc(0.15, "bitmap"),
    dgc(0.002, random=False),
    adaq(0.5, golden=(hexes(1.75, -0.875, dtype="f4"), hexes(~1, 5, ~6, 7, dtype="i4"))),
    adaq(0.01),
    # p = |x| / 3.0625; only the random numbers 0.65 and 0.24 are below their p.
    wangni(0.25, 2, golden=("", "", hexes(5, ~6, dtype="i4"), hexes(3.0625, dtype="f4"))),
    wangni(0.05, 2),
    wangni(0.3, 0),
    # Cumulative magnitudes .5 1.5 1.75 1.75 1.875 3.875 4.625 6.125; the random draws are .68 and .28 of the total.
    adaptive_random(0.25, golden=(hexes(0.25, -0.75, dtype="f4"), hexes(2, 6, dtype="i4"))),
    adaptive_random(0.25, unbiased=True, golden=(hexes(3.0625, -3.0625, dtype="f4"), hexes(2, 6, dtype="i4"))),
    adaptive_random(0.001),
    # Bins 0.5 -1 0.25 0 and -0.125 2 -0.75 1.5: elements are sent where twice their magnitude reaches 1 and 2.
    adacomp(4, golden=("0202", "00810103", hexes(1.5, dtype="f4"))),
    adacomp(50),
    # Powers of two 2**1 / 2**d nearest to X, 0.75 and 1.5 rounded up: d = 2 1 3 - 4 0 1 0.
    variance(0.5, 0.9, golden=(hexes(2, ~9, 19, ~36, 40, ~49, 56, dtype="i4"), hexes(2, dtype="f4"))),
]
