"""A second implementation of the random numbers from the specification, in 64-bit NumPy and Python integers."""

from typing import Any

import numpy as np

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


def noise(seed: int, label: str, name: str, step: int, worker: int, start: int, n: int) -> Any:
    """float64[n] in (0, 1): the upper halves of a word of all tensors and of one of this stream, added modulo 1."""
    j = np.arange(start, start + n)
    table = words(*keys(seed, label, "", step, worker), 0, 2**16).astype(np.int64) >> 16
    own = keys(seed, label, name, step, worker)
    offsets = np.array([int(words(*own, int(row), 1)[0]) >> 16 for row in np.unique(j // 2**16)])
    return ((table[j % 2**16] + offsets[j // 2**16 - start // 2**16]) % 2**16 + 0.5) / 2**16
