"""Facts about a method for the laws, from the papers and not from the code under test."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import streams

ANY = ("allgather", "broadcast")
X = np.array([0.5, -1, 0.25, 0, -0.125, 2, -0.75, 1.5], np.float32)
"""The vector of the golden payloads."""


class Where(NamedTuple):
    """Selects the random stream that a formula draws from."""

    name: str = "w"
    step: int = 0
    rank: int = 0
    offset: int = 0

    def words(self, label: str, n: int) -> Any:
        """uint32[n] of this worker's stream."""
        return streams.words(*streams.keys(0, label, self.name, self.step, self.rank + 1), self.offset, n)

    def shared_words(self, label: str, n: int) -> Any:
        """uint32[n] of the stream that is the same on all workers."""
        return streams.words(*streams.keys(0, label, self.name, self.step, 0), self.offset, n)

    def uniform(self, label: str, n: int) -> Any:
        """float64[n] in [0, 1)."""
        return (self.words(label, n) >> 8) / 2.0**24

    def noise(self, label: str, n: int) -> Any:
        """float64[n] in (0, 1), to round with."""
        return streams.noise(0, label, self.name, self.step, self.rank + 1, self.offset, n)


@dataclass(frozen=True)
class Row:
    """A compressor with its settings, and its expected properties."""

    params: dict[str, Any]
    communicators: tuple[str, ...]
    nbytes: Callable[[Any], int] | None
    """Bytes that a worker hands over for a gradient of any shape; None where chance decides."""
    formula: Callable[[Any, Where], Any] | None = None
    """(x float32[n], whose numbers) -> float[n]: what x becomes on its way, by the paper's formula."""
    agreed: Callable[[list[Any], Where], tuple[Any, list[Any]]] | None = None
    """As ``formula``, of methods that agree: (every worker's x) -> the mean, and what of each worker's x is in it."""
    golden: tuple[str, ...] | None = None
    """The payload's arrays for `X`, in hexadecimal."""
    ragged: bool = False
    """The payload's length depends on the values."""
    mask: bool = False
    """Every element is sent as it is, or kept as it is."""
    random: bool = False
    """Another step, another payload."""
    variance: Callable[[int], float] | None = None
    """w with E|x - x̂|² <= w|x|², for methods whose expectation is x."""
    contraction: Callable[[int], float] | None = None
    """d with |x - x̂|² <= (1 - d)|x|²."""
    attained: bool = False
    """Some x has exactly that variance, whatever is drawn."""
    largest: float = 1e30
    """Finite values up to here give finite results."""
    matrix: bool = False
    """Sees matrices, not vectors."""
    state: tuple[str, ...] = ()
    """What the compressor keeps between steps."""
    loose: float = 2e-6
    """How far the mean may be from the formula's, relative to its largest element."""
    everywhere: bool = True
    """Exchanged on every toolkit, not on NumPy alone."""

    @property
    def name(self) -> str:
        return self.params["compressor"]

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{k}={v}" for k, v in self.params.items() if k not in ("compressor", "memory"))])


def share(ratio: float, n: int) -> int:
    """How many of n elements a ratio keeps."""
    return min(n, max(1, int(ratio * n))) if n else 0


def blocks(x: Any, block: int) -> list[Any]:
    """x cut into blocks, the last one short; block 0: all of it."""
    block = block or max(len(x), 1)
    return [x[start : start + block] for start in range(0, len(x), block)]


def by_block(x: Any, block: int, of_block: Callable[[Any, int], Any]) -> Any:
    """float32[n]: ``of_block(elements, start)`` of each block, concatenated."""
    found, start = [], 0
    for part in blocks(x, block):
        found.append(of_block(part, start))
        start += len(part)
    return np.concatenate(found).astype(np.float32) if found else x


def packed(bits: int, n: int) -> int:
    """Bytes of n codes; codes of 3, 5, 6 or 7 bits are packed in groups of eight."""
    return math.ceil(n * bits / 8) if 8 % bits == 0 else math.ceil(n / 8) * bits


def count(n: int, block: int) -> int:
    """How many blocks n elements make."""
    return math.ceil(n / (block or n)) if n else 0


def cut(block: int) -> tuple[str, ...]:
    """The communicators of a method that needs all payloads; with statistics by block ("twostage") or not (0)."""
    return (*ANY, "twostage") if block else ANY


def hexes(*values: float, dtype: str) -> str:
    """The bytes of numbers, in hexadecimal."""
    return np.array(values, dtype).tobytes().hex()
