"""Shared by tests of kernels: guarded memory, difficult vectors, NumPy with and without kernels."""

from functools import cached_property, lru_cache

import numpy as np

from grace.backends.numpy import NumpyBackend, NumpyBuffers
from grace.kernels.host import HostKernels

GUARD = 64


class Memory:
    """An array of undefined contents at an odd address, between guard bytes that must not change."""

    def __init__(self, n, dtype, odd=0):
        dtype = np.dtype(dtype)
        size = n * dtype.itemsize
        self.raw = np.full(size + 2 * GUARD + 64, 0xA5, np.uint8)
        shift = -self.raw.ctypes.data % 64 + odd
        self.begin, self.end = shift + (GUARD - 64 if shift >= GUARD else GUARD), 0
        self.end = self.begin + size
        self.array = self.raw[self.begin : self.end].view(dtype)
        assert len(self.array) == n

    @classmethod
    def of(cls, array, odd=0):
        memory = cls(len(array), array.dtype, odd)
        memory.array[:] = array
        return memory

    @property
    def address(self):
        return self.raw.ctypes.data + self.begin

    def check(self):
        assert np.all(self.raw[: self.begin] == 0xA5)
        assert np.all(self.raw[self.end :] == 0xA5)
        return self.array


def equal(a, b):
    """Assert equal bits; any NaN equals any other."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    if a.dtype.kind == "f":
        assert np.array_equal(np.isnan(a), np.isnan(b))
        a, b = (np.where(np.isnan(each), 0, each).view(f"u{each.itemsize}") for each in (a, b))
    np.testing.assert_array_equal(a, b)


def vector(n, seed=0, kind="normal"):
    """float32[n] of several scales; ``kind``: special values to add."""
    return drawn(n, seed, kind).copy()


@lru_cache(maxsize=128)
def drawn(n, seed, kind):
    rng = np.random.default_rng(seed)
    x = rng.laplace(size=n) * np.exp(rng.normal(size=n))
    if kind == "tiny":
        x *= 1e-41
    x = x.astype(np.float32)
    if kind == "ties":
        x = np.round(x * 2).astype(np.float32) / 2
    if kind == "zeros":
        x[:] = np.where(rng.integers(0, 2, n) > 0, np.float32(0), np.float32(-0.0))
    if kind == "special":
        for each in (np.nan, np.inf, -np.inf, -np.nan, 0.0, -0.0, 1e-42, 3e38):
            x[rng.integers(0, n, max(1, n // 3000))] = each
    return x


KINDS = ("normal", "tiny", "ties", "zeros", "special")


def address(memory):
    return None if memory is None else memory.address


def blocks_of(x, block):
    return [x[i : i + (block or len(x))] for i in range(0, len(x), block or len(x) or 1)]


def efsignsgd_oracle(v, block):
    sums = np.add.reduceat(np.abs(v.astype(np.float64)), np.arange(0, len(v), block or len(v))) if len(v) else v
    scales = sums.astype(np.float32) / np.array([len(part) for part in blocks_of(v, block)], np.float32)
    return np.packbits(v >= 0, bitorder="little"), scales


def ulps(a, b):
    a, b = np.asarray(a), np.asarray(b)
    finite = np.isfinite(b)
    equal(np.where(finite, 0, a).astype(np.float32), np.where(finite, 0, b).astype(np.float32))
    gap = np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32))[finite]
    assert gap.size == 0 or gap.max() <= 1


class OddBuffers(NumpyBuffers):
    """NumPy's buffers, but payloads start at odd addresses."""

    def empty(self, shape, dtype="float32"):
        return Memory(shape, dtype, 1 if dtype == "uint8" else 4).array


class GuardedBuffers(NumpyBuffers):
    """NumPy's buffers, but all arrays start at odd addresses, between guard bytes."""

    def __init__(self, xp):
        super().__init__(xp)
        self.made = []

    def empty(self, shape, dtype="float32"):
        memory = Memory(shape if isinstance(shape, int) else shape[0], dtype, 1 if dtype == "uint8" else 4)
        self.made.append(memory)
        return memory.array


class Native(NumpyBackend):
    """NumPy with one instruction set's kernels."""

    def __init__(self, lib):
        self._native = HostKernels(self, lib)

    @property
    def kernels(self):
        return self._native

    @property
    def threads(self):
        return 2

    buffers = cached_property(OddBuffers)


class Plain(NumpyBackend):
    """NumPy without kernels."""

    kernels = None


class Guarded(Native):
    """`Native`, but all results start at odd addresses, between guard bytes."""

    buffers = cached_property(GuardedBuffers)

    def check(self):
        for memory in self.buffers.made:
            memory.check()


def moved(payloads):
    return [tuple(Memory.of(each, 1 if each.dtype == np.uint8 else 4).array for each in p) for p in payloads]
