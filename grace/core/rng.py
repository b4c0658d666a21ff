"""Random numbers without a generator: a hash of (key, counter), the same bits on every toolkit.

A stream is determined by (seed, label, tensor, step, worker) and nothing else. There is no global generator and no
saved state, and element j of a stream is computed without the others. The mixing function is the public-domain 32-bit
finaliser of MurmurHash3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any

MASK32 = 0xFFFFFFFF
NOISE = 2**16
"""Number of elements in a noise row, which share one offset; also the length of the noise table (`Rng.noise`)."""
RECENT = 16
"""Number of cached tables: a step needs one for each label and worker."""


@lru_cache(4096)
def fnv1a(text: str) -> int:
    """32-bit FNV-1a hash of a name (a sum of bytes would make anagrams collide)."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = ((value ^ byte) * 0x01000193) & MASK32
    return value


def _times(a: Any, c: int) -> Any:
    # A 32-bit product in 64-bit signed arithmetic, so that ints and int64 scalars give the same result.
    if type(a) is int:
        return a * c & MASK32
    return ((a & 0xFFFF) * c + ((((a // 65536) * c) & 0xFFFF) * 65536)) & MASK32


def mix(h: Any) -> Any:
    """Scramble a 32-bit word, given as a Python int or an int64 scalar of any toolkit."""
    h = h ^ (h // 65536)
    h = _times(h, 0x85EBCA6B)
    h = h ^ (h // 8192)
    h = _times(h, 0xC2B2AE35)
    return h ^ (h // 65536)


def fold(*values: Any, start: Any = 0) -> Any:
    """Hash a sequence of integers into one 32-bit word. Values are not just added: (5, 1) and (6, 0) differ.

    ``start``: the hash of the preceding values.
    """
    h = start
    for value in values:
        h = mix((h + mix(value & MASK32)) & MASK32)
    return h


def word(keys: tuple[int, int], j: int) -> int:
    """Word j of a stream: mix(mix(lo(j) + key0) ^ (hi(j) + key1))."""
    return mix(mix(((j & MASK32) + keys[0]) & MASK32) ^ (((j >> 32) + keys[1]) & MASK32))


def noise_offset(keys: tuple[int, int], row: int) -> float:
    """The offset that all elements of a noise row share, in [0, 1)."""
    return (word(keys, row) >> 16) / NOISE


def noise_rows(start: int, n: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the parts of n elements, from position ``start`` on, that lie in one noise row each.

    A part is (row number, position among the n elements, position in the noise table, number of elements).
    """
    at = 0
    while at < n:
        row, first = divmod(start + at, NOISE)
        count = min(n - at, NOISE - first)
        yield row, at, first, count
        at += count


def signed(word: int) -> int:
    """The int32 with the same bits as the 32-bit word."""
    return ((int(word) & MASK32) ^ 2**31) - 2**31


def recent(known: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """The cached value of a key, computed if missing; evicts the oldest entries. Thread-safe."""
    found = known.get(key)
    if found is None:
        found = make()
        for old in list(known)[: max(0, len(known) + 1 - RECENT)]:
            known.pop(old, None)
        known[key] = found
    return found


@lru_cache(4096)
def stem(seed: int, label: str, name: str) -> int:
    """The part of a stream's hash that is the same at all steps."""
    return fold(seed, fnv1a(label), fnv1a(name))


FIRST, SECOND = mix(1), mix(2)


def keys(stem: int, step: Any, worker: Any) -> tuple[Any, Any]:
    """The two keys of a stream. ``stem``: the hash of its seed, label and tensor."""
    h = fold(step, worker, start=stem)
    return mix((h + FIRST) & MASK32), mix((h + SECOND) & MASK32)


_known_keys = lru_cache(4096)(keys)


class Rng:
    """One random stream, with a number for each position in a tensor.

    ``xp`` is the backend; ``offset`` is the position at which the draws begin, so that a chunk of a tensor draws the
    same numbers as that part of the whole tensor.
    """

    def __init__(self, xp: Any, seed: int, label: str, name: str, step: Any, worker: Any, offset: int = 0):
        self._xp = xp
        self._stream = seed, label, step, worker
        self.keys = self._keys(name)
        self.offset = offset

    @cached_property
    def table(self) -> tuple[Any, Any]:
        """The keys of the noise table, which all tensors share."""
        return self._keys("")

    def _keys(self, name: str) -> tuple[Any, Any]:
        seed, label, step, worker = self._stream
        known = isinstance(step, int) and isinstance(worker, int)
        return (_known_keys if known else self._xp.random.keys)(stem(seed, label, name), step, worker)

    def bits(self, n: int) -> Any:
        """Return int32[n] of 32 random bits each."""
        return self._xp.random.words(*self.keys, self.offset, n)

    def uniform(self, n: int) -> Any:
        """Return float32[n] in [0, 1), multiples of 2**-24."""
        return self._xp.random.uniform(*self.keys, self.offset, n)

    def noise(self, n: int) -> Any:
        """Return float32[n] in (0, 1), odd multiples of 2**-17, for stochastic rounding; cheaper than `uniform`.

        Element j is 2**-17 plus a fraction of 16 bits: the upper half of word j mod 2**16 of a table that all tensors
        of a step share, plus that of word j // 2**16 of this stream, modulo 1. Any two elements are independent, so
        rounding errors accumulate like those of independent numbers. If noise is added to a float32 of magnitude below
        2**7, float rounding lifts the sum to an integer only from within 2**-25 below it. Probabilities are exact up to
        about 2**-17, and so is the expectation of floor(x + noise).
        """
        return self._xp.random.noise(self.table, self.keys, self.offset, n)

    def rounded(self, x: Any, n: int) -> Any:
        """Round the float32[n] ``x`` stochastically: each element becomes a neighbouring integer, with expectation x.

        This is floor(x + noise) with the noise added to the fraction alone, so large integers stay exact.
        """
        lower = self._xp.floor(x)
        return lower + self._xp.cast((x - lower) + self.noise(n) >= 1.0, "float32")

    def normal(self, n: int) -> Any:
        """Return float32[n] of mean 0 and variance 1 (Box and Muller, 1958). Equal across toolkits up to rounding."""
        u = self._xp.random.uniform(*self.keys, 2 * self.offset, 2 * n)
        radius = self._xp.sqrt(-2.0 * self._xp.log(1.0 - u[0::2]))
        return radius * self._xp.cos((2.0 * math.pi) * u[1::2])

    def sample(self, n: int, k: int) -> Any:
        """Return int32[k], different positions of 0..n-1, ascending; every set is equally likely.

        They are the positions with the k smallest words, as unsigned numbers. Ties cannot occur for n <= 2**32, because
        the hash permutes the counters.
        """
        return self._xp.random.sample(*self.keys, self.offset, n, k)
