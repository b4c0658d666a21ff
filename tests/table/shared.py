"""Integers with a scale that all workers share, summed on the wire: shared_int, thc."""

import math

import numpy as np

from table.grids import drawn
from table.rotations import sent, transform, turned
from table.row import Row, by_block, count, hexes


def shared_int(block=0, levels=0, dtype="int8", golden=None):
    """One integer for each element, one largest magnitude for each block."""
    width = {"int8": 1, "int32": 4}[dtype]

    def agreed(xs, where):
        top = levels or {"int8": 127 // len(xs), "int32": 2**15}[dtype]
        scale = by_block(np.max([abs(x) for x in xs], 0), block, lambda b, _: np.full(len(b), b.max(initial=0)))
        found = []
        for rank, x in enumerate(xs):
            steps = x / np.where(scale, scale, 1).astype(np.float32) * np.float32(top)
            found.append(drawn(steps, where._replace(rank=rank).noise("round", len(x))) * scale / top)
        return np.mean(found, 0), found

    def variance(n):
        n, top = min(n, block or n), levels or {"int8": 1, "int32": 2**15}[dtype]
        return min(n / (4 * top**2), math.sqrt(n) / top)

    return Row(
        {"compressor": "shared_int", "block_size": block, "levels": levels, "dtype": dtype},
        ("allreduce",),
        lambda x: x.size * width + 4 * count(x.size, block),
        agreed=agreed,
        random=True,
        variance=variance,
        golden=golden,
    )


def thc(bits, block, golden=None):
    """One byte for each element of a whole block (two, where sums of all four workers need them), and one norm."""
    top, cut = 2**bits - 1, 2.1538746940614573  # a normal variable exceeds ``cut`` with probability 1/64

    def agreed(xs, where):
        n, whole = len(xs[0]), [list(turned(x, where, 0, block)) for x in xs]
        mean, found = np.zeros(n), np.zeros((len(xs), n))
        start = 0
        for parts in zip(*whole, strict=True):
            (length, _, sigma), d = parts[0], len(parts[0][1])
            norm = np.float32(max(np.linalg.norm(part.astype(np.float64)) for _, part, _ in parts))
            for rank, (_, part, _) in enumerate(parts):
                y = transform(part / (norm or np.float32(1)) * sigma).astype(np.float64)
                u = where._replace(rank=rank, offset=start).noise("round", d)
                codes = np.minimum(drawn((np.clip(y, -cut, cut) + cut) / (2 * cut) * top, u), top)
                own = transform(codes / top * 2 * cut - cut) / d * sigma * norm
                found[rank, start : start + length] = own[:length]
            start += d
        mean = found.mean(0)
        return mean.astype(np.float32), found.astype(np.float32)

    return Row(
        {"compressor": "thc", "bits": bits, "block_size": block},
        ("allreduce",),
        # The bytes with four workers.
        lambda x: sent(x.size, block)[0] * (1 if 4 * top <= 255 else 2) + 4 * sent(x.size, block)[1],
        agreed=agreed,
        random=True,
        golden=golden,
        loose=1e-5,
    )


ROWS = [
    # floor(63.5 x + u), with one worker.
    shared_int(golden=("20c11000f87fd060", hexes(2, dtype="f4"), "20c11000f87fd060")),
    # floor(3.5 x + u) = 1 -3 0 0 -1 7 -3 6.
    shared_int(64, 7, golden=("02fd01000007fd06", hexes(2, dtype="f4"), "02fd01000007fd06")),
    shared_int(8, 1),
    shared_int(64, 0, "int32"),
    # In standard deviations .48 -.57 1.88 -1.27 .74 .39 -1.01 .74; in steps plus u 9.4 6.3 14.1 3.5 10.4 9.4 4.2 10.9.
    thc(4, 64, golden=("09060e030a09040b", hexes(2.853178, dtype="f4"), "09060e030a09040b")),
    thc(8, 1024),
    thc(2, 4096),
]
