"""The table of methods that the laws are held against, and what the tests need to run them.

A new compressor needs one row here, and gets every law of test_methods.py.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from grace import grace_from_params
from grace.backends import get_backend
from grace.core import Context, run
from grace.transports.local import LocalTransport, World

BACKENDS = ("numpy", "torch", "tensorflow")
SIZES = (1, 7, 8, 9, 1000, 5000)
ANY = ("allgather", "broadcast")
VOTES = ("signsgd", "signum")


@dataclass(frozen=True)
class Row:
    """A compressor with its settings, and what is expected of it."""

    params: dict[str, Any]
    communicators: tuple[str, ...]
    nbytes: Callable[[int], int] | None
    """Bytes of the payload for n elements; None where they depend on the values or on the shape."""
    mask: bool = False
    """Every element is sent as it is, or kept as it is."""
    random: bool = False
    """Another step, another payload."""
    variance: Callable[[int], float] | None = None
    """w with E|x - x̂|² <= w|x|², for methods whose expectation is x."""
    contraction: Callable[[int], float] | None = None
    """d with |x - x̂|² <= (1 - d)|x|²."""
    largest: float = 1e30
    """Finite values up to here give finite results."""
    matrix: bool = False
    """Sees matrices, not vectors."""
    everywhere: bool = True
    """Exchanged on every toolkit, not on NumPy alone."""

    @property
    def name(self) -> str:
        return self.params["compressor"]

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{k}={v}" for k, v in self.params.items() if k not in ("compressor", "memory"))])


def share(ratio: float) -> Callable[[int], int]:
    """How many of n elements a ratio keeps."""
    return lambda n: min(n, max(1, int(ratio * n)))


def qsgd(levels: int, bucket: int, bits: int, everywhere: bool = True) -> Row:
    """A row of QSGD: ``bits`` is the width of one code."""

    def codes(n: int) -> int:
        # Codes of 3, 5, 6 or 7 bits come in groups of eight.
        return math.ceil(n * bits / 8) if 8 % bits == 0 else math.ceil(n / 8) * bits

    def variance(n: int) -> float:
        n = min(n, bucket or n)
        return min(n / levels**2, math.sqrt(n) / levels)

    return Row(
        {"compressor": "qsgd", "quantum_num": levels, "bucket_size": bucket},
        (*ANY, "twostage") if bucket else ANY,
        lambda n: codes(n) + 4 * math.ceil(n / (bucket or n)),
        random=True,
        variance=variance,
        everywhere=everywhere,
    )


def topk(ratio: float) -> Row:
    """A row of top-k: four bytes of value and four of position for each element that is kept."""
    return Row(
        {"compressor": "topk", "compress_ratio": ratio},
        ANY,
        lambda n: 8 * share(ratio)(n),
        mask=True,
        contraction=lambda n: share(ratio)(n) / n,
    )


def randomk(ratio: float) -> Row:
    """A row of biased random-k: positions are drawn, not sent."""
    return Row(
        {"compressor": "randomk", "compress_ratio": ratio},
        ("allreduce", *ANY),
        lambda n: 4 * share(ratio)(n),
        mask=True,
        random=True,
    )


def efsignsgd(block: int) -> Row:
    """A row of scaled signs: one bit for each element, one scale for each block."""
    return Row(
        {"compressor": "efsignsgd", "block_size": block},
        (*ANY, "twostage") if block else ANY,
        lambda n: math.ceil(n / 8) + 4 * math.ceil(n / (block or n)),
        contraction=lambda n: 1 / min(n, block or n),
    )


def onebit(block: int) -> Row:
    """A row of 1-bit SGD: one bit for each element, two means for each block."""
    return Row(
        {"compressor": "onebit", "block_size": block},
        (*ANY, "twostage") if block else ANY,
        lambda n: math.ceil(n / 8) + 8 * math.ceil(n / (block or n)),
        contraction=lambda n: 1 / min(n, block or n),
    )


def terngrad(block: int, clip: float = 0.0) -> Row:
    """A row of TernGrad: two bits for each element, one scale for each block."""
    return Row(
        {"compressor": "terngrad", "block_size": block, "clip": clip},
        (*ANY, "twostage") if block else ANY,
        lambda n: math.ceil(n / 4) + 4 * math.ceil(n / (block or n)),
        random=True,
        variance=None if clip else lambda n: (math.sqrt(min(n, block or n)) - 1) / 2,
    )


def dettmers8(table: str, block: int, bits: int, worst: float) -> Row:
    """A row of a codebook; ``worst``: the error of the largest element, relative to it."""
    return Row(
        {"compressor": "dettmers8", "table": table, "block_size": block},
        (*ANY, "twostage") if block else ANY,
        lambda n: math.ceil(n * bits / 8) + 4 * math.ceil(n / (block or n)),
        contraction=lambda n: (1 - worst**2) / min(n, block or n),
    )


ROWS = [
    Row(
        {"compressor": "none"},
        ("allreduce", *ANY, "twostage"),
        lambda n: 4 * n,
        mask=True,
        variance=lambda n: 0.0,
        contraction=lambda n: 1.0,
    ),
    Row({"compressor": "fp16"}, ("allreduce", *ANY, "twostage"), lambda n: 2 * n, largest=6e4),
    Row({"compressor": "bf16"}, (*ANY, "twostage"), lambda n: 2 * n, contraction=lambda n: 1 - 2**-16),
    Row(
        {"compressor": "bf16", "rounding": "stochastic"},
        (*ANY, "twostage"),
        lambda n: 2 * n,
        random=True,
        variance=lambda n: 2**-16,
    ),
    topk(0.01),
    topk(0.3),
    topk(1.0),
    randomk(0.1),
    randomk(1.0),
    Row(
        {"compressor": "randomk", "compress_ratio": 0.25, "unbiased_scale": True},
        ("allreduce", *ANY),
        lambda n: 4 * share(0.25)(n),
        random=True,
        variance=lambda n: n / share(0.25)(n) - 1,
    ),
    Row({"compressor": "threshold", "threshold": 0.5}, ANY, None, mask=True),
    efsignsgd(0),
    efsignsgd(64),
    qsgd(127, 512, 8),
    qsgd(7, 0, 4),
    qsgd(1, 8, 2),
    qsgd(2, 24, 3, everywhere=False),
    qsgd(15, 64, 5, everywhere=False),
    qsgd(31, 512, 6, everywhere=False),
    qsgd(63, 0, 7, everywhere=False),
    onebit(0),
    onebit(64),
    terngrad(0),
    terngrad(512),
    terngrad(0, clip=2.5),
    Row({"compressor": "natural"}, ANY, lambda n: n + 4, random=True, variance=lambda n: 1 / 8),
    Row({"compressor": "natural", "stochastic": False}, ANY, lambda n: n + 4, contraction=lambda n: 8 / 9),
    Row({"compressor": "natural", "window": "grace"}, ANY, lambda n: n + 4, random=True, largest=1e5),
    dettmers8("dynamic8", 4096, 8, 0.5 * 0.9 / 64),
    dettmers8("linear8", 0, 8, 0.0),
    dettmers8("nf4", 64, 4, 0.0),
    dettmers8("fp4", 64, 4, 0.0),
    Row({"compressor": "signum"}, (*ANY, "twostage"), lambda n: math.ceil(n / 8) + math.ceil(n / 8192)),
    Row({"compressor": "signsgd"}, (*ANY, "twostage"), lambda n: math.ceil(n / 8) + math.ceil(n / 8192)),
    Row(
        {"compressor": "signsgd", "packed": False},
        ("allreduce", *ANY, "twostage"),
        lambda n: n + math.ceil(n / 8192),
    ),
    Row({"compressor": "powersgd", "compress_rank": 1, "min_rate": 1.0}, ("allreduce",), None, matrix=True),
    Row({"compressor": "powersgd", "min_rate": 1.0}, ("allreduce",), None, matrix=True),
]
EXCHANGES = [(row, communicator) for row in ROWS for communicator in row.communicators]


def rows(chosen: Callable[[Row], Any] = lambda row: True) -> Any:
    """Decorator: run a test for each row for which ``chosen`` is true."""
    return pytest.mark.parametrize("row", [row for row in ROWS if chosen(row)], ids=str)


def exchanges(chosen: Callable[[Row, str], Any] = lambda row, communicator: True) -> Any:
    """Decorator: run a test, which uses the fixture ``xp``, for each row with each communicator that fits it.

    NumPy sees them all. On the other toolkits a broadcast is left to the transports' tests, and a width of codes to
    test_packing.py.
    """
    some = [
        (row, communicator, name)
        for name in BACKENDS
        for row, communicator in EXCHANGES
        if chosen(row, communicator) and (name == "numpy" or (row.everywhere and communicator != "broadcast"))
    ]
    ids = [f"{name}-{row}-{communicator}" for row, communicator, name in some]
    return pytest.mark.parametrize("row, communicator, xp", some, ids=ids, indirect=["xp"])


def backend(name: str) -> Any:
    """A backend; skips the test where its toolkit is not installed."""
    if name != "numpy":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a toolkit says about itself while it is imported
            pytest.importorskip(name)
    return get_backend(name)


def context(xp: Any, shape: Any, **fields: Any) -> Context:
    """The context of a tensor "w" on worker 0 of 4."""
    shape = (shape,) if isinstance(shape, int) else shape
    return Context(**{"xp": xp, "name": "w", "shape": shape, "world_size": 4, **fields})


def parts(row: Row) -> Any:
    """The `grace.Method` of a row: its compressor and memory."""
    return grace_from_params({**row.params, "communicator": row.communicators[0]}, LocalTransport()).method


def workers(params: dict[str, Any], size: int) -> list[Any]:
    """One Grace for each worker of a world in this process; small tensors are compressed too."""
    world = World(size)
    return [grace_from_params({"min_numel": 0, **params}, LocalTransport(world, rank)) for rank in range(size)]


def lockstep(graces: list[Any], gradients: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One exchange of all workers of a world; the means that each worker finds."""
    for grace, mine in zip(graces, gradients, strict=True):
        grace.launch(mine)
    while [grace for grace in graces if not grace.advance()]:
        pass
    for grace in graces:
        grace.land()
    return [{name: grace.mean(name) for name in mine} for grace, mine in zip(graces, gradients, strict=True)]


def alone(steps: Any) -> Any:
    """The value of a program on the only worker: what it hands over is what it gets back."""
    program, answer = run(steps), None
    while True:
        try:
            answer = program.send(answer).arrays
        except StopIteration as stop:
            return stop.value


def host(xp: Any, payload: Any) -> list[Any]:
    """Arrays of a payload, copied to NumPy."""
    return [np.array(xp.to_numpy(array)) for array in payload]


def same(one: Any, two: Any) -> bool:
    """Equal shapes, dtypes and bits, array by array."""
    return [(a.shape, a.dtype, a.tobytes()) for a in one] == [(b.shape, b.dtype, b.tobytes()) for b in two]


def normal(*shape: int, seed: int = 0) -> Any:
    """float32 numbers of the normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# -- the random numbers, written a second time from the specification, in 64-bit NumPy and Python integers ---------
M32 = 0xFFFFFFFF


def mix(h: Any) -> Any:
    """The 32-bit finaliser of MurmurHash3."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & M32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & M32
    return h ^ (h >> 16)


def fnv1a(text: str) -> int:
    """32-bit FNV-1a."""
    h = 2166136261
    for byte in text.encode("utf-8"):
        h = (h ^ byte) * 16777619 % 2**32
    return h


def fold(start: int, *values: int) -> int:
    """Hash integers into a word."""
    for value in values:
        start = mix((start + mix(value & M32)) & M32)
    return start


def keys(seed: int, label: str, name: str, step: int, worker: int) -> tuple[int, int]:
    """The two keys of a stream; worker is the rank + 1, or 0 for all workers."""
    h = fold(0, seed, fnv1a(label), fnv1a(name), step, worker)
    return fold(h, 1), fold(h, 2)


def words(key0: int, key1: int, start: int, n: int) -> Any:
    """uint32[n]: word j is mix(mix(lo(j) + key0) ^ (hi(j) + key1))."""
    j = np.arange(start, start + n, dtype=np.uint64)
    low = mix(((j & M32) + np.uint64(key0)) & M32)
    return mix(low ^ (((j >> 32) + np.uint64(key1)) & M32)).astype(np.uint32)


def uniform(seed: int, label: str, name: str, step: int, worker: int, start: int, n: int) -> Any:
    """float64[n] in [0, 1): the upper 24 bits of each word."""
    return (words(*keys(seed, label, name, step, worker), start, n) >> 8) / 2.0**24
