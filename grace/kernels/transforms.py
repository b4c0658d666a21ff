"""Kernels of methods that transform blocks, on host arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grace.core.rng import Rng
from grace.kernels.calls import Family, Pairs
from grace.kernels.schema import CODECS, blocks

Array = Any


class Transforms(Family):
    """Rotations and cosine transforms."""

    def eden_encode(
        self,
        x: Array,
        residual: Array | None,
        width: int,
        levels: Sequence[float],
        middles: Sequence[float],
        divisor: float,
        stream: int,
        rng: Rng,
    ) -> tuple[tuple[Array, ...], Array]:
        """float32[n] -> the payload: codes, scales and streams; and the new residual.

        ``rng``: the random numbers of the rotation.
        """
        how, random = (self._xp.shape(x)[0], width, _bits(levels)), (stream, *rng.keys, rng.offset)
        return self._encode("eden", x, residual, how, (levels, middles, divisor, *random))

    def eden_mean(
        self, payloads: Pairs, out: Array | None, n: int, width: int, levels: Sequence[float], rng: Rng
    ) -> Array:
        """Each worker's codes, scales and streams -> float32[n], in ``out`` if given."""
        return self._mean("eden", payloads, out, (n, width, _bits(levels)), (levels, *rng.keys, rng.offset))

    def thc_norms(self, x: Array, block: int) -> Array:
        """float32[n] -> float32[m]: `grace.ops.blocks.norms` of blocks."""
        xp, (x,) = self._xp, self._ready(x)
        (n,) = xp.shape(x)
        norms = xp.buffers.empty(blocks(n, block))
        self.library.thc_norms(self._at(x), self._at(norms), n, block, xp.threads)
        return norms

    def thc_encode(
        self, x: Array, norms: Array, width: int, top: int, dtype: str, cut: float, factor: float, rng: Rng, draw: Rng
    ) -> Array:
        """float32[n], float32[m] -> codes of ``dtype``, uint8 or int32. ``rng`` rotates, ``draw`` rounds."""
        xp, at, (x, norms) = self._xp, self._at, self._ready(x, norms)
        (n,) = xp.shape(x)
        codes = xp.buffers.empty(blocks(n, width) * width, dtype)
        table, offsets, start = self._noise(draw, xp.shape(codes)[0])
        how, noise = (top, dtype == "int32", cut, factor), (at(table), at(offsets))
        self.library.thc_encode(at(x), at(norms), at(codes), n, width, *how, *noise, *rng.keys, start, xp.threads)
        return codes

    def thc_mean(
        self, sums: Array, norms: Array, out: Array | None, n: int, width: int, cut: float, factor: float, rng: Rng
    ) -> Array:
        """Summed codes of `thc_encode` -> float32[n], in ``out`` if given. ``factor``: the value of one step."""
        return self._thc_values(None, sums, norms, self._out(out, n), width, cut, factor, rng)

    def thc_left(self, x: Array, own: Array, norms: Array, width: int, cut: float, factor: float, rng: Rng) -> Array:
        """Subtract the decoded codes ``own`` from x, float32[n], in place. ``factor``: the value of one step."""
        return self._thc_values(x, own, norms, x, width, cut, factor, rng)

    def _thc_values(
        self, x: Array | None, codes: Array, norms: Array, out: Array, width: int, cut: float, factor: float, rng: Rng
    ) -> Array:
        xp, at, (codes, norms) = self._xp, self._at, self._ready(codes, norms)
        how = xp.shape(out)[0], width, xp.dtype(codes) == "int32", cut, factor, *rng.keys, rng.offset
        self.library.thc_values(at(x), at(codes), at(norms), at(out), *how, xp.threads)
        return out

    def demo_encode(
        self, x: Array, residual: Array | None, sizes: tuple[int, int, int, int], k: int
    ) -> tuple[tuple[Array, ...], Array]:
        """float32[n] -> the payload of `grace.compressors.demo`, and the new residual (if there is a residual).

        ``sizes``: rows and columns of the matrix, and of a chunk. ``k``: coefficients per chunk.
        """
        return self._encode("demo", x, residual, (*sizes, k))

    def demo_left(self, x: Array, payload: tuple[Array, ...], sizes: tuple[int, int, int, int], k: int) -> Array:
        """Subtract a decoded payload from x, float32[n], in place; ValueError for an invalid payload."""
        (x,), at = self._ready(x), self._at
        _kept, columns = self._received([payload], CODECS["demo"].sizes(*sizes, k))
        where = [column and column[0] for column in columns]
        self.library.demo_left(at(x), *where, at(x), *sizes, k, self._xp.threads)
        return x

    def demo_mean(
        self,
        payloads: Pairs,
        out: Array | None,
        sizes: tuple[int, int, int, int],
        k: int,
        senders: bool,
        sign: bool,
    ) -> Array:
        """Each worker's payload -> float32[n], in ``out`` if given; ValueError for an invalid payload.

        ``senders``: average coefficients over the workers that sent them. ``sign``: return the signs of the result.
        """
        out = self._out(out, sizes[0] * sizes[1])
        return self._mean("demo", payloads, out, (*sizes, k), (senders, sign))


def _bits(levels: Sequence[float]) -> int:
    return len(levels).bit_length() - 1
