"""Methods that send some elements unchanged, with their positions: topk, randomk, threshold."""

import math

import numpy as np

from table.row import ANY, Row, Where, hexes, share


def masked(positions):
    """The formula of a method that sends the elements at ``positions(x, where)`` unchanged."""

    def formula(x, where):
        found = np.zeros_like(x)
        chosen = positions(x, where)
        found[chosen] = x[chosen]
        return found

    return formula


def coded(coding, n, k):
    """Bytes of k positions of 0 .. n-1."""
    if not k:
        return 0 if coding != "bitmap" else math.ceil(n / 8)
    lower = int(math.log2(n // k))
    each = {
        "int32": 4 * k,
        "bitmap": math.ceil(n / 8),
        # The lower bits in groups of up to a byte; the upper bits in unary: a mark per position, a zero per step.
        "elias_fano": sum(
            math.ceil(k * bits / 8) if 8 % bits == 0 else math.ceil(k / 8) * bits
            for bits in [8] * (lower // 8) + [lower % 8] * (lower % 8 > 0)
        )
        + math.ceil((k + (n - 1) // 2**lower) / 8),
    }
    return min(each.values()) if coding == "auto" else each[coding]


def topk(ratio, coding="int32", golden=None):
    """Four bytes of value for each element that is kept, and its position."""
    return Row(
        {"compressor": "topk", "compress_ratio": ratio, "index_coding": coding},
        ANY,
        lambda x: 4 * share(ratio, x.size) + coded(coding, x.size, share(ratio, x.size)),
        masked(lambda x, where: np.argsort(-abs(x), kind="stable")[: share(ratio, len(x))]),
        mask=True,
        contraction=lambda n: share(ratio, n) / n,
        golden=golden,
    )


def drawn(ratio):
    return lambda x, where: np.argsort(where.shared_words("positions", len(x)), kind="stable")[: share(ratio, len(x))]


def randomk(ratio, scaled=False, golden=None):
    """Positions are drawn, not sent."""
    plain = masked(drawn(ratio))
    return Row(
        {"compressor": "randomk", "compress_ratio": ratio, **({"unbiased_scale": True} if scaled else {})},
        ("allreduce", *ANY),
        lambda x: 4 * share(ratio, x.size),
        (lambda x, where: plain(x, where) * np.float32(len(x) / share(ratio, len(x)))) if scaled else plain,
        mask=not scaled,
        random=True,
        variance=(lambda n: n / share(ratio, n) - 1) if scaled else None,
        attained=scaled,
        golden=golden,
    )


def bernoulli(ratio, scaled=False, golden=None):
    """Each element with probability ``ratio``, from the shared stream; at least the one with the smallest word."""

    def drawn(x, where):
        words = where.shared_words("positions", len(x))
        return np.flatnonzero((words < ratio * 2.0**32) | (words == words.min(initial=2**32 - 1)))

    def chance(n):
        return ratio + (1 - ratio) ** n / n

    plain = masked(drawn)
    return Row(
        {
            "compressor": "randomk",
            "compress_ratio": ratio,
            "mode": "bernoulli",
            **({"unbiased_scale": True} if scaled else {}),
        },
        ("allreduce", *ANY),
        lambda x: 4 * len(drawn(x.reshape(-1), Where())),
        (lambda x, where: plain(x, where) / np.float32(chance(len(x)))) if scaled else plain,
        ragged=True,
        mask=not scaled,
        random=True,
        contraction=None if scaled else chance,
        variance=(lambda n: 1 / chance(n) - 1) if scaled else None,
        golden=golden,
    )


def reach(x):
    """The number of elements that reach the threshold 0.5 of the rows below."""
    return sum(abs(v) >= 0.5 for v in x.reshape(-1).tolist())


def threshold(coding, golden=None):
    return Row(
        {"compressor": "threshold", "threshold": 0.5, "index_coding": coding},
        ANY,
        lambda x: 4 * reach(x) + coded(coding, x.size, reach(x)),
        masked(lambda x, where: np.flatnonzero(abs(x) >= np.float32(0.5))),
        ragged=True,
        mask=True,
        golden=golden,
    )


def selected(selector, ratio, count, coding="int32", golden=None):
    """Top-k by another selector; ``count(magnitudes, k)``: how many of the largest it takes."""

    def largest(x):
        size = abs(x.reshape(-1))
        many = count(size, share(ratio, len(size))) if len(size) > 100 else share(ratio, len(size))
        return np.argsort(-size, kind="stable")[:many]

    return Row(
        {"compressor": "topk", "compress_ratio": ratio, "selector": selector, "index_coding": coding},
        ANY,
        lambda x: 4 * len(largest(x)) + coded(coding, x.size, len(largest(x))),
        masked(lambda x, where: largest(x)),
        ragged=True,
        mask=True,
        golden=golden,
    )


def of_range(size, part):
    """The number of elements above mean + part * (largest - mean)."""
    mean = size.astype(np.float64).mean()
    return int((size > np.float32(mean + part * (float(size.max()) - mean))).sum())


def bisected(size, k):
    low, high = 0.0, 1.0
    while high - low > 0.2:
        many = of_range(size, (low + high) / 2)
        if k < many < 2 * k:
            break
        low, high = ((low + high) / 2, high) if many > k else (low, (low + high) / 2)
    return max(many, 1)


def trimmed(size, k):
    return next((many for part in (0.8, 0.6, 0.4, 0.2) if (many := of_range(size, part)) >= k), of_range(size, 0))


def chunks(ratio, golden=None):
    """The largest of each chunk of 4096 elements or more."""

    def positions(x, where):
        n, k = len(x), share(ratio, len(x))
        size = max(4096, math.ceil(n / k))
        full, rest = divmod(n, size)
        last = max(1, k * rest // n) if rest else 0
        wanted = [(k - last) // max(full, 1) + (i < (k - last) % max(full, 1)) for i in range(full)] + [last]
        found = [
            i * size + np.argsort(-abs(x[i * size : (i + 1) * size]), kind="stable")[:many]
            for i, many in enumerate(wanted)
        ]
        return np.concatenate(found)

    def kept_at_least(n):
        k, full = share(ratio, n), n // max(4096, math.ceil(n / share(ratio, n)))
        if not full:
            return k / n
        size = max(4096, math.ceil(n / k))
        last = max(1, k * (n % size) // n) if n % size else 0
        return min((k - last) // full / size, last / (n % size) if n % size else 1)

    return Row(
        {"compressor": "topk", "compress_ratio": ratio, "selector": "chunk"},
        ANY,
        lambda x: 8 * share(ratio, x.size),
        masked(positions),
        mask=True,
        contraction=kept_at_least,
        golden=golden,
    )


def sidco(ratio, sid="p", golden=None, **params):
    """Up to 4095 elements: exactly the k largest. Thresholds for longer tensors: test_sidco.py."""
    return Row(
        {"compressor": "sidco", "compress_ratio": ratio, "sid": sid, **params},
        ANY,
        None,
        masked(lambda x, where: np.argsort(-abs(x), kind="stable")[: share(ratio, len(x))]),
        ragged=True,
        mask=True,
        golden=golden,
    )


CHOSEN = np.array([0.5, -1, 2, -0.75, 1.5], np.float32)  # the golden vector's elements at 0 1 5 6 7
ROWS = [
    topk(0.01),
    topk(0.3, golden=(hexes(2, 1.5, dtype="f4"), hexes(5, 7, dtype="i4"))),
    topk(1.0),
    # k = 2 of 8: lower two bits 1 and 3; upper bits 1 and 1, so marks at 1 + 0 and 1 + 1.
    topk(0.25, "elias_fano", golden=(hexes(2, 1.5, dtype="f4"), "0d", "06")),
    topk(0.3, "bitmap", golden=(hexes(2, 1.5, dtype="f4"), "a0")),
    topk(0.002, "auto"),
    # Positions 0 and 2 have the two smallest words.
    randomk(0.1),
    randomk(0.25, golden=("0000003f0000803e",)),
    randomk(1.0),
    randomk(0.25, scaled=True, golden=("000000400000803f",)),
    # The words 2e7d...., 1677...., 34.. and 43.. are below 0.3 * 2**32 = 4ccc...: positions 0, 2, 4 and 6.
    bernoulli(0.3, golden=(hexes(0.5, 0.25, -0.125, -0.75, dtype="f4"),)),
    bernoulli(0.1, scaled=True),
    threshold("int32", golden=(CHOSEN.tobytes().hex(), hexes(0, 1, 5, 6, 7, dtype="i4"))),
    selected("bisect", 0.05, bisected, golden=(hexes(2, dtype="f4"), hexes(5, dtype="i4"))),
    selected("trim", 0.02, trimmed, "bitmap"),
    chunks(0.01, golden=(hexes(2, dtype="f4"), hexes(5, dtype="i4"))),
    sidco(0.25, golden=(hexes(2, 1.5, dtype="f4"), hexes(5, 7, dtype="i4"))),
    sidco(0.01, "gp"),
    sidco(0.1, "e", index_coding="bitmap"),
    threshold("bitmap", golden=(CHOSEN.tobytes().hex(), "e3")),
]
