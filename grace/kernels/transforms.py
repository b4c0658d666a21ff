"""Kernels of methods that transform blocks, on host arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from grace.core.rng import Rng
from grace.kernels.calls import Family, Pairs
from grace.kernels.schema import CODECS, blocks

Array = Any


class Transforms(Family):
    """Rotations and cosine transforms."""

    def normal_encode(
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
        return self._encode("normal", x, residual, how, (levels, middles, divisor, *random))

    def normal_mean(
        self, payloads: Pairs, out: Array | None, n: int, width: int, levels: Sequence[float], rng: Rng
    ) -> Array:
        """Each worker's codes, scales and streams -> float32[n], in ``out`` if given."""
        return self._mean("normal", payloads, out, (n, width, _bits(levels)), (levels, *rng.keys, rng.offset))

    def norms(self, x: Array, block: int) -> Array:
        """float32[n] -> float32[m]: `grace.ops.blocks.norms` of blocks."""
        xp, (x,) = self._xp, self._ready(x)
        (n,) = xp.shape(x)
        norms = xp.buffers.empty(blocks(n, block))
        self.library.norms(self._at(x), self._at(norms), n, block, xp.threads)
        return norms

    def steps_encode(
        self, x: Array, norms: Array, width: int, top: int, dtype: str, cut: float, factor: float, rng: Rng, draw: Rng
    ) -> Array:
        """float32[n], float32[m] -> codes of ``dtype``, uint8 or int32. ``rng``: to rotate; ``draw``: to round."""
        xp, at, (x, norms) = self._xp, self._at, self._ready(x, norms)
        (n,) = xp.shape(x)
        codes = xp.buffers.empty(blocks(n, width) * width, dtype)
        table, offsets, start = self._noise(draw, xp.shape(codes)[0])
        how, noise = (top, dtype == "int32", cut, factor), (at(table), at(offsets))
        self.library.steps_encode(at(x), at(norms), at(codes), n, width, *how, *noise, *rng.keys, start, xp.threads)
        return codes

    def steps_mean(
        self, sums: Array, norms: Array, out: Array | None, n: int, width: int, cut: float, factor: float, rng: Rng
    ) -> Array:
        """Summed codes of `steps_encode` -> float32[n], in ``out`` if given. ``factor``: the value of one step."""
        xp, at, (sums, norms), out = self._xp, self._at, self._ready(sums, norms), self._out(out, n)
        arrays, how = (at(sums), None, at(norms), None, at(out), None), (xp.dtype(sums) == "int32", cut, factor, 0.0)
        where = *rng.keys, rng.offset, xp.threads
        self._do(partial(self.library.steps_values, *arrays, n, width, *how, *where), None, out, sums, norms)
        return out

    def steps_part(
        self,
        x: Array,
        sums: Array | None,
        own: Array,
        norms: Array,
        rest: Array,
        width: int,
        cut: float,
        factors: tuple[float, float],
        rng: Rng,
    ) -> None:
        """Write x minus the decoded ``own`` to ``rest``, and the decoded sums, if given, to x.

        ``factors``: the values of one step of the sums, and of one step of own.
        """
        xp, at, (own, norms) = self._xp, self._at, self._ready(own, norms)
        sums = None if sums is None else xp.buffers.contiguous(sums)
        arrays, how = (at(sums), at(own), at(norms), at(x), at(x), at(rest)), (xp.dtype(own) == "int32", cut, *factors)
        self.library.steps_values(*arrays, xp.shape(x)[0], width, *how, *rng.keys, rng.offset, xp.threads)

    def cosines_encode(
        self, x: Array, residual: Array | None, sizes: tuple[int, int, int, int], k: int
    ) -> tuple[tuple[Array, ...], Array]:
        """float32[n] -> the payload of `grace.compressors.demo`, and the new residual (if there is a residual).

        ``sizes``: rows and columns of the matrix, and of a chunk. ``k``: coefficients per chunk.
        """
        return self._encode("cosines", x, residual, (*sizes, k))

    def cosines_left(self, x: Array, payload: tuple[Array, ...], sizes: tuple[int, int, int, int], k: int) -> Array:
        """float32[n] minus a decoded payload, in place; ValueError for an invalid payload."""
        (x,), at = self._ready(x), self._at
        _kept, columns = self._received([payload], CODECS["cosines"].sizes(*sizes, k))
        where = [column and column[0] for column in columns]
        self.library.cosines_left(at(x), *where, at(x), *sizes, k, self._xp.threads)
        return x

    def cosines_mean(
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
        return self._mean("cosines", payloads, out, (*sizes, k), (senders, sign), now=True)


def _bits(levels: Sequence[float]) -> int:
    return len(levels).bit_length() - 1
