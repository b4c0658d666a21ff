"""Packed bits and random bits of PyTorch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from grace.backends.bits import Bits
from grace.backends.random import LARGE, Random
from grace.backends.selection import smallest
from grace.backends.torch_buffers import CPU, POOL
from grace.core.rng import MASK32, NOISE, noise_offset, noise_rows, signed

Array = Any
SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32) * 2 - 1
"""float32[256, 8]: the signs of each byte of bits. A lookup is faster than the computation."""


class TorchBits(Bits):
    """Bits, packed by NumPy on the host."""

    # On the host NumPy shares the memory, and converts numbers to bits many times faster than PyTorch.
    def pack(self, mask: Array) -> Array:
        if not self._xp.on_host:
            return super().pack(mask)
        return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))

    def unpack(self, packed: Array, n: int) -> Array:
        if not self._xp.on_host:
            return super().unpack(packed, n)
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=n, bitorder="little").view(bool))

    def pack_signs(self, x: Array) -> Array:
        if not self._xp.on_host:
            return super().pack_signs(x)
        return torch.from_numpy(np.packbits(np.greater_equal(x.numpy(), 0), bitorder="little"))

    def unpack_signs(self, packed: Array, n: int) -> Array:
        if not self._xp.on_host:
            return super().unpack_signs(packed, n)
        signs = POOL.empty((packed.shape[0] * 8,), torch.float32)
        # a byte is always in range
        np.take(SIGNS, packed.numpy(), axis=0, out=signs.numpy().reshape(-1, 8), mode="clip")
        return signs[:n]

    def map_bytes(self, values: Callable[[Array, int], Array], packed: Array, m: int) -> Array:
        if not self._xp.on_host or m < 512:
            return values(packed, m)
        table = values(torch.arange(256, dtype=torch.uint8, device=CPU), 256).numpy()
        found = POOL.empty((m * len(table) // 256,), torch.float32)
        row = () if len(table) == 256 else (len(table) // 256,)  # rows of one number are slower than scalars
        out = found.numpy().reshape(m, *row)
        np.take(table.reshape(256, *row), packed.numpy(), axis=0, out=out, mode="clip")  # a byte is always in range
        return found


class TorchRandom(Random):
    """Random bits, with a kernel if there is one."""

    def words(self, key0: Any, key1: Any, start: int, n: int) -> Array:
        if self._xp.host_kernels:
            return self._xp.host_kernels.arrays.words(key0, key1, start, n)
        pieces = []
        while n > 0:  # a chunk ends where the upper half of the counter changes
            low, high = start & MASK32, start >> 32
            count = min(n, MASK32 + 1 - low)
            h = torch.arange(count, dtype=torch.int32, device=self._xp.device)
            h = _mix(h.add_(signed(low + key0)))
            pieces.append(_mix(h.bitwise_xor_(signed(high + key1))))
            start, n = start + count, n - count
        return self._xp.concat(pieces) if pieces else self._xp.zeros(0, "int32")

    def sample(self, key0: Any, key1: Any, start: int, n: int, k: int) -> Array:
        if self._xp.host_kernels:
            return self._xp.host_kernels.arrays.sample(key0, key1, start, n, k)
        if not self._xp.on_host:
            return super().sample(key0, key1, start, n, k)
        return torch.from_numpy(smallest(self.words(key0, key1, start, n).numpy(), k))

    def noise(self, table: tuple[Any, Any], keys: tuple[Any, Any], start: int, n: int) -> Array:
        if n < LARGE:
            return super().noise(table, keys, start, n)
        noise, row, first = self._xp.buffers.empty(n), *divmod(start, NOISE)
        rows = 0 if first else n // NOISE
        whole, offsets = self.noise_parts(table, keys, row, rows)
        if rows:  # all whole rows at once
            torch.add(whole, offsets, out=noise[: rows * NOISE].view(rows, NOISE))
        for row, at, first, count in noise_rows(start + rows * NOISE, n - rows * NOISE):
            at += rows * NOISE
            torch.add(whole[first : first + count], noise_offset(keys, row), out=noise[at : at + count])
        return noise.frac_()

    def noise_parts(self, table: tuple[Any, Any], keys: tuple[Any, Any], row: int, rows: int) -> tuple[Array, Array]:
        """The noise table, float32[NOISE], and row offsets, float32[rows, 1]: noise rows are the fractions of sums."""
        offsets = self._xp.asarray([[noise_offset(keys, row + i)] for i in range(rows)], "float32")
        return self._whole_table(table), offsets


def _mix(h: Array) -> Array:
    # grace.core.rng.mix on int32 vectors, in place: products wrap, and masks undo the arithmetic shift.
    h ^= (h >> 16) & 0xFFFF
    h *= signed(0x85EBCA6B)
    h ^= (h >> 13) & 0x7FFFF
    h *= signed(0xC2B2AE35)
    h ^= (h >> 16) & 0xFFFF
    return h
