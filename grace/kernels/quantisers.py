"""Kernels of quantisers, on host arrays."""

from __future__ import annotations

from ctypes import byref
from typing import Any

from grace.core.rng import Rng
from grace.kernels import Codes
from grace.kernels.calls import Family, Pairs, averager, encoder
from grace.kernels.schema import blocks
from grace.ops.packing import packed_size

Array = Any


class Quantisers(Family):
    """Kernels of methods that send few bits for each element."""

    efsignsgd_encode, efsignsgd_mean = encoder("efsignsgd"), averager("efsignsgd")

    def blockint_encode(
        self, x: Array, residual: Array | None, block: int, bits: int, rng: Rng | None
    ) -> tuple[tuple[Array, ...], Array]:
        """float32[n] -> the payload and the new residual. ``rng``: for stochastic rounding; None: round to nearest."""
        n, at = self._xp.shape(x)[0], self._at
        table, offsets, start = self._noise(rng, n)
        return self._encode("blockint", x, residual, (n, block, bits), (at(table), at(offsets), start))

    blockint_mean = averager("blockint")

    def qsgd_encode(
        self, x: Array, residual: Array | None, block: int, bits: int, levels: int, rng: Rng
    ) -> tuple[tuple[Array, ...], Array]:
        """float32[n] -> the payload and the new residual. ``levels``: 0 for ternary numbers."""
        n, at = self._xp.shape(x)[0], self._at
        table, offsets, _ = self._noise(rng if levels else None, n)
        noise = at(table), at(offsets), rng.offset, *rng.keys
        return self._encode("qsgd", x, residual, (n, block, bits, levels), noise)

    qsgd_mean = averager("qsgd")

    def signsgd_encode(self, x: Array) -> tuple[Array, ...]:
        """float32[n] -> bits, flags."""
        (x,) = self._ready(x)
        return self._encode("signsgd", x, None, self._xp.shape(x), alone=True)[0]

    signsgd_mean = averager("signsgd")

    onebit_encode, onebit_mean = encoder("onebit"), averager("onebit")

    def threelc_encode(
        self, x: Array, residual: Array | None, block: int, sparsity: float, runs: bool
    ) -> tuple[tuple[Array, Array], Array]:
        """float32[n] -> bytes uint8[K] and scales float32[m]; and the new residual."""
        xp, at, n = self._xp, self._at, self._xp.shape(x)[0]
        bytes_, scales = xp.buffers.empty(blocks(n, 5), "uint8"), xp.buffers.empty(blocks(n, block))
        where = *self._source(x, residual), at(bytes_), at(scales)
        size = self.library.threelc_encode(*where, n, block, sparsity, runs, xp.threads)
        return (bytes_[:size], scales), x

    def threelc_mean(self, payloads: Pairs, out: Array | None, n: int, block: int, runs: bool) -> Array:
        """Each worker's bytes and scales -> float32[n], in ``out`` if given; ValueError for invalid runs."""
        xp, scales = self._xp, ("float32", blocks(n, block))
        counts = [xp.shape(bytes_)[0] for bytes_, _ in payloads] if runs else [blocks(n, 5)] * len(payloads)
        kept, columns = self._ragged(payloads, [(("uint8", count), scales) for count in counts])
        out = self._out(out, n)
        self.library.threelc_mean(*columns, counts, len(kept), self._at(out), n, block, runs, xp.threads)
        return out

    def codes_encode(
        self, x: Array, residual: Array | None, block: int, codes: Codes, rng: Rng | None = None
    ) -> tuple[tuple[Array, ...], Array]:
        """float32[n] -> the payload: codes, and scales unless "bfloat16"; and the new residual."""
        n, at = self._xp.shape(x)[0], self._at
        table, offsets, _ = self._noise(rng if codes.kind == "fp8" else None, n)
        keys, start = (None, 0) if rng is None else (rng.keys, rng.offset)
        codec, sizes = codes.with_random(keys, at(table), at(offsets), start), _parts(codes, n, block)
        return self._encode("codes", x, residual, (n, block), (start,), sizes=sizes, first=(byref(codec),))

    def codes_mean(self, payloads: Pairs, out: Array | None, n: int, block: int, codes: Codes) -> Array:
        """Each worker's codes, and scales if there are any -> float32[n], in ``out`` if given."""
        codec, sizes = codes.with_random(), _parts(codes, n, block)
        return self._mean("codes", payloads, out, (n, block), sizes=sizes, first=(byref(codec),))

    def sketch_encode(self, x: Array, q: int, bits: int) -> tuple[Array, ...]:
        """float32[n] -> codes, means."""
        (x,) = self._ready(x)
        return self._encode("sketch", x, None, (self._xp.shape(x)[0], q, bits), alone=True)[0]

    sketch_mean = averager("sketch")

    def inceptionn_encode(self, x: Array, lowest: int, middle: int) -> tuple[Array, ...]:
        """float32[n] -> tags uint8[ceil(n/4)], and numbers of 32, 16 and 8 bits: `grace.compressors.inceptionn`."""
        xp, at, (x,) = self._xp, self._at, self._ready(x)
        (n,) = xp.shape(x)
        starts = xp.buffers.empty(3 * (-(-n // 65536) + 1), "int64")
        self.library.inceptionn_count(at(x), at(starts), n, lowest, middle, xp.threads)
        wide, two, one = xp.integers(starts[-3:])
        payload = (
            xp.buffers.empty(-(-n // 4), "uint8"),
            xp.buffers.empty(wide),
            xp.buffers.empty(2 * two, "uint8"),
            xp.buffers.empty(one, "uint8"),
        )
        self.library.inceptionn_encode(at(x), at(starts), *map(at, payload), n, lowest, middle, xp.threads)
        return payload

    def inceptionn_mean(self, payloads: Pairs, out: Array | None, n: int, lowest: int, middle: int) -> Array:
        """Each worker's tags and numbers -> float32[n], in ``out`` if given; ValueError for invalid tags."""
        xp = self._xp
        counts = [[xp.shape(array)[0] for array in payload[1:]] for payload in payloads]
        if any(two % 2 for _, two, _ in counts):
            raise ValueError("half a number of 16 bits")
        kept, columns = self._ragged(
            payloads,
            [(("uint8", -(-n // 4)), ("float32", w), ("uint8", two), ("uint8", one)) for w, two, one in counts],
        )
        numbers = [number for wide, two, one in counts for number in (wide, two // 2, one)]
        out = self._out(out, n)
        where = *columns, numbers, len(kept), self._at(out)
        self.library.inceptionn_mean(*where, n, lowest, middle, xp.threads)
        return out

    def shared_int_encode(self, x: Array, scales: Array, block: int, top: int, dtype: str, rng: Rng) -> Array:
        """float32[n], float32[m] -> integers [n] of ``dtype``, int8 or int32: `grace.compressors.shared_int`."""
        xp, at, (x, scales) = self._xp, self._at, self._ready(x, scales)
        (n,) = xp.shape(x)
        codes, (table, offsets, start) = xp.buffers.empty(n, dtype), self._noise(rng, n)
        how, noise = (n, block, top, dtype == "int32"), (at(table), at(offsets), start)
        self.library.shared_int_encode(at(x), at(scales), at(codes), *how, *noise, xp.threads)
        return codes

    def shared_int_mean(self, sums: Array, scales: Array, out: Array | None, block: int, steps: int) -> Array:
        """Summed integers of `shared_int_encode` -> float32[n], in ``out`` if given. ``steps``: steps in a scale."""
        return self._shared_values(None, sums, scales, self._out(out, self._xp.shape(sums)[0]), block, steps)

    def shared_int_left(self, x: Array, own: Array, scales: Array, block: int, steps: int) -> Array:
        """Subtract the decoded integers ``own`` from x, float32[n], in place."""
        (x,) = self._ready(x)
        return self._shared_values(x, own, scales, x, block, steps)

    def _shared_values(self, x: Array | None, codes: Array, scales: Array, out: Array, block: int, steps: int) -> Array:
        xp, at, (codes, scales) = self._xp, self._at, self._ready(codes, scales)
        how = xp.shape(out)[0], block, steps, xp.dtype(codes) == "int32"
        self.library.shared_int_values(at(x), at(codes), at(scales), at(out), *how, xp.threads)
        return out


def _parts(codes: Codes, n: int, block: int) -> list[tuple[str, int | None]]:
    # Returns the dtypes and lengths of a payload's arrays.
    if codes.kind == "bfloat16":
        return [("uint8", 2 * n), ("float32", None)]
    scales = "int32" if codes.kind == "natural" else "float32"
    return [("uint8", packed_size(codes.bits, n)), (scales, blocks(n, block))]
