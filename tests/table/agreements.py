"""Elements that the workers agree on: gtopk, oktopk, cltk, arctopk, sketch_sgd."""

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


class OkTopK:
    """Workers of Ok-Topk, from the paper's algorithms 1 and 2 on dense vectors, with this project's bounds of traffic.

    After `step`, ``traffic`` has the 4-byte words of values and positions that each worker has sent and received,
    int64[2, workers]; ``handed`` has the bytes of everything that worker 0 has handed over.
    """

    def __init__(self, ratio, size, n, thresholds_every=32, regions_every=64):
        self.size, self.k = size, share(ratio, n)
        self.periods = thresholds_every, regions_every
        self.local, self.all = np.zeros(size, np.float32), np.float32(0)
        self.bounds = np.array([n * r // size - 1 for r in range(1, size)])

    def quota(self, index):
        """The part of 3k/2 elements that has this number: the parts of ``size`` consecutive numbers make 3k/2."""
        most, i = 3 * self.k // 2, index % self.size
        return most * (i + 1) // self.size - most * i // self.size

    def selected(self, x, rank, renew):
        if renew:
            self.local[rank] = np.sort(abs(x))[-self.k]
        found = np.flatnonzero((abs(x) >= self.local[rank]) & (x != 0))
        found = found if len(found) else top(abs(x), 1)
        return found[top(abs(x[found]), self.k)]

    def move_regions(self, chosen):
        ends = [[mine[max(len(mine) * r // self.size - 1, 0)] for r in range(1, self.size)] for mine in chosen]
        self.bounds = np.array(ends, np.float64).mean(0).astype(int)

    def step(self, xs, step):
        """The mean of xs, and what of each worker's x is in it."""
        size, renew = self.size, step % self.periods[0] == 0
        words, self.traffic = np.zeros((2, size, size), int), np.zeros((2, size), int)
        chosen = [self.selected(x, rank, renew) for rank, x in enumerate(xs)]
        self.handed = 8
        if step % self.periods[1] == 0 and size > 1:
            self.move_regions(chosen)
            self.handed += 4 * (size - 1)

        # Split and reduce.
        sent, sums = [[] for _ in xs], np.zeros((size, len(xs[0])), np.float32)
        for rank, x in enumerate(xs):
            region = np.searchsorted(self.bounds, chosen[rank])
            for owner in range(size):
                part = chosen[rank][region == owner]
                part = part[top(abs(x[part]), self.quota(owner - rank + step))]
                sums[owner, part] += x[part]
                sent[rank].append(part)
                words[0, rank, owner] = 2 * len(part)
        self.handed += 4 * words[0, 0].sum()

        # The elements of each region above the threshold of all workers; with a new threshold, the largest ones.
        most = 3 * self.k // 2 if renew else self.k
        parts = [np.flatnonzero(total) for total in sums]
        if renew:
            parts = [part[top(abs(sums[r, part]), self.quota(r + step))] for r, part in enumerate(parts)]
        else:
            parts = [part[abs(sums[r, part]) >= self.all] for r, part in enumerate(parts)]
        ends = np.cumsum([0, *map(len, parts)])
        count = min(ends[-1], most)
        ends = ends * count // max(ends[-1], 1)
        parts = [part[top(abs(sums[r, part]), ends[r + 1] - ends[r])] for r, part in enumerate(parts)]

        # Balance and allgather.
        shares = ends if renew else np.arange(size + 1) * count // size
        for r in range(size):
            for to in range(size):
                words[1, r, to] = 2 * max(0, min(ends[r + 1], shares[to + 1]) - max(ends[r], shares[to]))
        held = 2 * np.diff(shares)
        self.handed += 4 * words[1, 0].sum() + 4 * held[0]
        apart = words * (1 - np.eye(size, dtype=int))
        # In a ring a worker passes on all that it has but its successor's part.
        self.traffic = apart.sum(0).sum(1) + held.sum() - np.roll(held, -1), apart.sum(0).sum(0) + held.sum() - held
        total, final = sums.sum(0), np.sort(np.concatenate(parts))
        final = final[top(abs(total[final]), self.k)]
        if renew:
            self.all = abs(total[final]).min(initial=np.inf) if len(final) else np.float32(0)
        self.final = final
        return at(total.astype(np.float64) / size, final), [
            at(x, np.intersect1d(np.concatenate(mine), final)) for x, mine in zip(xs, sent, strict=True)
        ]


def oktopk(ratio, golden=None, **more):
    # With new thresholds and regions in every step, nothing is carried over from the last one.
    def nbytes(x):
        workers = OkTopK(ratio, 4, x.size)
        workers.step([x.reshape(-1)] * 4, 0)
        return workers.handed

    return Row(
        {"compressor": "oktopk", "compress_ratio": ratio, "thresholds_every": 1, "regions_every": 1},
        ("allreduce",),
        nbytes,
        agreed=lambda xs, where: OkTopK(ratio, len(xs), len(xs[0]), 1, 1).step(xs, where.step),
        mask=True,
        ragged=True,
        state=("local", "all", "bounds"),
        golden=golden,
        **more,
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
    oktopk(0.25, golden=(*PAIR, PAIR[1])),
    oktopk(0.01, everywhere=False),
    cltk(0.25, golden=PAIR),
    cltk(0.01),
    # Random signs + - + + and + + + -: products 1.75 and -0.25 of the first row, -1.375 and -0.375 of the second.
    arctopk(0.5, 4, 2, golden=(hexes(0.5, -1, 0.25, 0, dtype="f4"), hexes(0, dtype="i4"))),
    arctopk(0.1, 16, 4),
    sketch_sgd(0.25, golden=PAIR),
    sketch_sgd(0.02, rows=3, columns=64, candidates=2),
    sketch_sgd(0.02, rows=1, columns=16, candidates=1),
]
