"""Elements that the workers agree on: gtopk, cltk, arctopk, sketch_sgd."""

import math

import numpy as np

from table.row import Row, hexes, share


def top(size, k):
    """The positions of the k largest, ascending."""
    return np.sort(np.argsort(-size, kind="stable")[:k])


def at(x, positions):
    """x at these positions, and zero elsewhere."""
    found = np.zeros_like(x)
    found[positions] = x[positions]
    return found


def mean_of(xs):
    return np.mean(np.asarray(xs, np.float64), 0)


def agreeing(positions):
    """The formula of workers that average their elements at ``positions(xs, where)``."""

    def agreed(xs, where):
        chosen = positions(xs, where)
        return at(mean_of(xs), chosen), [at(x, chosen) for x in xs]

    return agreed


def gtopk(ratio, golden=None):
    def agreed(xs, where):
        k = share(ratio, len(xs[0]))
        own = [at(x, top(abs(x), k)) for x in xs]
        total = np.zeros(len(xs[0]), np.float32)
        for each in own:
            total = total + each
        chosen = top(abs(total), k)
        return at(mean_of(own), chosen), [at(each, chosen) for each in own]

    return Row(
        {"compressor": "gtopk", "compress_ratio": ratio},
        ("allreduce",),
        lambda x: 8 * share(ratio, x.size),
        agreed=agreed,
        mask=True,
        golden=golden,
    )


def cltk(ratio, golden=None):
    return Row(
        {"compressor": "cltk", "compress_ratio": ratio, "memory": "residual"},
        ("allreduce",),
        lambda x: 8 * share(ratio, x.size),
        agreed=agreeing(lambda xs, where: top(abs(xs[where.step % len(xs)]), share(ratio, len(xs[0])))),
        mask=True,
        golden=golden,
    )


def arctopk(ratio, size, sketch, golden=None):
    def positions(xs, where):
        n = len(xs[0])
        m = math.ceil(n / size)
        rows = np.zeros(m * size)
        rows[:n] = mean_of(xs)
        signs = np.where(where.shared_words("signs", sketch * size) >> 31, -1, 1).reshape(sketch, size)
        products = rows.reshape(m, size) @ signs.T
        chosen = top((products**2).sum(1), share(ratio, m))
        found = (chosen[:, None] * size + np.arange(size)).reshape(-1)
        return found[found < n]

    def nbytes(x):
        m = math.ceil(x.size / size)
        return 4 * m * sketch + 4 * size * share(ratio, m)

    return Row(
        {"compressor": "arctopk", "compress_ratio": ratio, "row_size": size, "sketch_size": sketch},
        ("allreduce",),
        nbytes,
        agreed=agreeing(positions),
        mask=True,
        random=True,
        golden=golden,
    )


def width(ratio, n, columns):
    return columns or 2 ** math.ceil(math.log2(10 * share(ratio, n)))


def sketched(ratio, rows, columns, candidates):
    """The elements of the mean with the largest estimates from a count sketch."""

    def positions(xs, where):
        x, n = mean_of(xs), len(xs[0])
        wide, k = width(ratio, n, columns), share(ratio, n)
        estimates = np.zeros((rows, n))
        for row in range(rows):
            group = min(256, wide)
            words = where.shared_words(f"hash{row}", group + -(-n // group))
            place, own = np.arange(n) % group, words[group + np.arange(n) // group]
            column, sign = (own + place) % wide, np.where((own ^ words[place]) >> 31, -1, 1)
            estimates[row] = sign * np.bincount(column, sign * x, wide)[column]
        seen = top(abs(np.median(estimates, 0)), min(n, candidates * k))
        return seen[top(abs(x[seen]), k)]

    return positions


def sketch_sgd(ratio, rows=5, columns=0, candidates=4, golden=None):
    return Row(
        {
            "compressor": "sketch_sgd",
            "compress_ratio": ratio,
            "rows": rows,
            "columns": columns,
            "candidates": candidates,
        },
        ("allreduce",),
        lambda x: 4 * rows * width(ratio, x.size, columns) + 4 * min(x.size, candidates * share(ratio, x.size)),
        agreed=agreeing(sketched(ratio, rows, columns, candidates)),
        mask=True,
        random=candidates * ratio < 1,  # with a larger ratio, all elements are candidates
        golden=golden,
    )


PAIR = (hexes(2, 1.5, dtype="f4"), hexes(5, 7, dtype="i4"))
ROWS = [
    gtopk(0.25, golden=(*PAIR, PAIR[1])),
    gtopk(0.01),
    cltk(0.25, golden=PAIR),
    cltk(0.01),
    # Random signs + - + + and + + + -: products 1.75 and -0.25 of the first row, -1.375 and -0.375 of the second.
    arctopk(0.5, 4, 2, golden=(hexes(0.5, -1, 0.25, 0, dtype="f4"), hexes(0, dtype="i4"))),
    arctopk(0.1, 16, 4),
    sketch_sgd(0.25, golden=PAIR),
    sketch_sgd(0.02, rows=3, columns=64, candidates=2),
    sketch_sgd(0.02, rows=1, columns=16, candidates=1),
]
