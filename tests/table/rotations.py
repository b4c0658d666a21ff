"""Blocks that are rotated at random first: eden, kashin."""

import math

import numpy as np

from table.row import ANY, Row, hexes

HALF_SETS = {
    1: [1],
    2: [0.45278, 1.5104176],
    3: [0.2450942, 0.7560052, 1.3439093, 2.1519457],
    4: [0.128395, 0.3880482, 0.656759, 0.9423403, 1.2562309, 1.6180461, 2.0690167, 2.7325888],
}


def transform(x):
    """Walsh-Hadamard transform of the last axis by its recursion, in x's precision: codes depend on the last bit."""
    if x.shape[-1] == 1:
        return x
    a, b = np.split(x, 2, -1)
    a, b = transform(a), transform(b)
    return np.concatenate([a + b, a - b], -1)


def wide(n, block, offset=0):
    """The number of elements in a block on the wire."""
    d = 8
    while d < min(n, block):
        d *= 2
    return block if offset else d


def sent(n, block):
    """The number of elements on the wire, and of blocks."""
    d = wide(n, block)
    return math.ceil(n / d) * d, math.ceil(n / d)


def turned(x, where, stream, block):
    """For each block: its length, its rotated elements (times sqrt(d)), and the random signs."""
    d = wide(len(x), block, where.offset)
    total = math.ceil(len(x) / d) * d
    sigma = 1 - 2 * ((where.shared_words("rotation", total) >> np.uint32(31 - stream)) & 1).astype(np.float32)
    for start in range(0, len(x), d):
        part = np.zeros(d, np.float32)
        part[: len(x[start : start + d])] = x[start : start + d]
        yield len(x[start : start + d]), part, sigma[start : start + d]


def eden(bits, block, biased=False, golden=None):
    """``bits`` for each element of a whole block, one scale and one byte for each block."""
    half = np.array(HALF_SETS[bits], np.float32)
    table = np.concatenate([-half[::-1], half])
    exact = np.concatenate([np.negative(HALF_SETS[bits][::-1]), HALF_SETS[bits]])
    middles = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)

    def total(x):
        return np.float32(x.sum(dtype=np.float64))

    def formula(x, where):
        found = [np.zeros(0)]
        for length, part, sigma in turned(x, where, where.rank % 32, block):
            d, top = len(part), abs(part).max() or np.float32(1)
            r = transform(part / top * sigma)
            square, root = total((part / top) ** 2), np.float32(math.sqrt(d))
            y = r / (np.sqrt(square) or np.float32(1))
            c = table[(y[:, None] > middles).sum(1)] if bits > 1 else np.where(r >= 0, 1, -1).astype(np.float32)
            # In the second stage a 0 is a sum of levels that cancel, so round here exactly as the compressor does.
            scale = total(abs(r)) / np.float32(d**1.5) if biased else square / (total(r * c) or 1) * root
            found.append((sigma * transform(c) * (scale * top / root))[:length])
        return np.concatenate(found).astype(np.float32)

    return Row(
        {"compressor": "eden", "bits": bits, "block_size": block, "biased": biased},
        (*ANY, "twostage"),
        lambda x: sent(x.size, block)[0] * bits // 8 + 5 * sent(x.size, block)[1],
        formula,
        random=True,
        contraction=(lambda n: 1 / wide(n, block)) if biased else None,
        golden=golden,
        loose=1e-5,
    )


def kashin_frame(n, d, where, m):
    """The chosen rows of the Hadamard matrix, and the signs of each block's elements."""
    drawn = where._replace(offset=0).shared_words("rows", d)
    rows = np.sort(np.argsort(drawn, kind="stable")[:n])
    signs = 1 - 2 * (where.shared_words("signs", m * n) >> np.uint32(31)).astype(np.float32)
    return rows, signs.reshape(m, n)


def kashin_coefficients(x, rows, d, passes, eta, delta):
    """For each row of x, coefficients a with U a = x by the paper's loop; U: rows of the transform over sqrt(d)."""
    kind = x.dtype.type
    root = kind(math.sqrt(d))

    def analysis(r):
        full = np.zeros((len(r), d), kind)
        full[:, rows] = r
        return transform(full) / root

    bound = np.sqrt((x * x).sum(1, dtype=np.float64, keepdims=True).astype(kind)) / kind(math.sqrt(delta * d))
    b = plain = analysis(x)
    a = np.zeros_like(b)
    for _ in range(passes - 1):
        c = np.clip(b, -bound, bound)
        a, x, bound = a + c, x - (transform(c) / root)[:, rows], bound * kind(eta)
        b = analysis(x)
    a = a + b
    smaller = abs(a).max(1, keepdims=True) < abs(plain).max(1, keepdims=True)
    return np.where(smaller, a, plain)


def kashin(bits, block=512, redundancy=2.0, golden=None, **loop):
    """``bits`` for each of d coefficients, one scale for each block of n elements."""
    top = 2**bits - 1

    def sizes(n, offset=0):
        n = min(block, wide(n, block, offset))
        d = 1
        while d < redundancy * n:
            d *= 2
        return n, d

    def formula(x, where):
        n, d = sizes(len(x), where.offset)
        m = math.ceil(len(x) / n)
        rows, signs = kashin_frame(n, d, where, m)
        u = where._replace(offset=where.offset // n * d).noise("round", m * d)
        parts = np.zeros((m, n), np.float32)
        parts.reshape(-1)[: len(x)] = x
        largest = abs(parts).max(1, keepdims=True)
        settings = {"passes": 6, "eta": 0.7, "delta": 1.0, **loop}
        a = kashin_coefficients(parts / np.where(largest > 0, largest, 1) * signs, rows, d, **settings)
        scale = abs(a).max(1, keepdims=True)
        steps = (a / np.where(scale > 0, scale, 1) + np.float32(1)) * np.float32(top / 2)
        whole = np.floor(steps)
        codes = np.minimum(whole + ((steps - whole) + u.reshape(m, d).astype(np.float32) >= 1), top)
        back = transform(codes.astype(np.float64) / top * 2 - 1)[:, rows] / math.sqrt(d)
        back *= signs * (scale.astype(np.float64) * largest)
        return back.reshape(-1)[: len(x)].astype(np.float32)

    def variance(size):
        n, d = sizes(size)
        square = min(n, 2 + 2 * math.log(2 * d))
        return n / d * (square - 1) if bits == 1 else n / d * square / top**2

    return Row(
        {
            "compressor": "kashin",
            "bits": bits,
            "block_size": block,
            "redundancy": redundancy,
            **{{"passes": "iterations"}.get(key, key): value for key, value in loop.items()},
        },
        (*ANY, "twostage"),
        lambda x: math.ceil(x.size / sizes(x.size)[0]) * (sizes(x.size)[1] * bits // 8 + 4),
        formula,
        random=True,
        variance=variance,
        golden=golden,
        loose=1e-5,
    )


ROWS = [
    # Signs + - + + + + + -; r = .486 -.575 1.900 -1.282 .751 .398 -1.016 .751.
    eden(1, 4096, golden=("b5", hexes(1.1370452, dtype="f4"), "00")),
    eden(1, 64, biased=True),
    # Levels 2 1 3 0 2 2 0 2 and 9 5 14 3 10 9 4 10.
    eden(2, 64, golden=("368a", hexes(1.0596883, dtype="f4"), "00")),
    eden(3, 1024),
    eden(4, 64, golden=("593e9aa4", hexes(0.99192485, dtype="f4"), "00")),
    # Rows 0 2 4 6 8 9 13 14; steps 9.9 5.0 12.3 7.4 15.0 7.7 7.7 0 12.4 14.3 1.9 6.7 2.1 13.5 3.6 13.8.
    kashin(4, 64, golden=("5a8c8f08ec72e2d4", hexes(1.1321306, dtype="f4"))),
    kashin(1, 120, 4.0, passes=2, eta=0.9),
]
