"""Kernels on host arrays: NumPy's, and PyTorch's on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_int64
from functools import partial
from typing import Any, TypeVar

from grace.backends.deferred import DeferredKernels
from grace.backends.random import recent
from grace.core.gathered import GatheredPayloads
from grace.core.rng import NOISE, Rng
from grace.kernels import Codes, Library, library
from grace.kernels.schema import CODECS, blocks
from grace.ops.packing import packed_size
from grace.ops.validate import fitting

T = TypeVar("T")
Array = Any
Pairs = Sequence[tuple[Array, ...]]
Log = list[tuple[Array, Array]]


class _Settled(threading.local):
    library: Library | None = None
    known = False


_settled = _Settled()


@contextmanager
def settled() -> Iterator[None]:
    """A context that looks the library up once, not for each tensor."""
    before = _settled.library, _settled.known
    _settled.library, _settled.known = library(), True
    try:
        yield
    finally:
        _settled.library, _settled.known = before


def host_kernels(xp: Any) -> HostKernels | None:
    """The kernels of a host backend; None if they are not built, or off."""
    found = _settled.library if _settled.known else library()
    if found is None:
        return None
    kernels: HostKernels | None = xp.__dict__.get("_kernels")
    if kernels is None or kernels.library is not found:
        kernels = xp.__dict__["_kernels"] = HostKernels(xp, found)
    return kernels


class HostKernels:
    """A `Library` for a backend's arrays. x is donated: a new residual, if requested, overwrites it.

    `within` a step, the new residual may overwrite the previous one instead, and calls may be deferred.
    """

    _log: Log | None = None
    _deferred: DeferredKernels | None = None

    def __init__(self, xp: Any, library: Library):
        self._xp, self.library, self.isa = xp, library, library.isa
        self._tables: dict[Any, Array] = {}

    def within(self, log: Log | None, deferred: DeferredKernels | None) -> HostKernels:
        """These kernels, bound to a step's workspace.

        ``log``: its rollback log. New residuals overwrite the previous ones, which move to x; the log records both
        arrays.
        ``deferred``: receives all calls except those that determine the length of their results.
        """
        kernels = object.__new__(type(self))
        kernels.__dict__.update(self.__dict__, _log=log, _deferred=deferred)
        return kernels

    def accumulate(self, x: Array, last: Array, beta: float, gamma: float, moments: Array | None = None) -> Array:
        """`grace.ops.sums.weighted_sum`, written over ``last``; needs a rollback log.

        ``moments``: float64[3], receives ``xp.excess`` of the sum and 0.
        """
        xp, at = self._xp, self._xp.buffers.address
        self.library.accumulate(at(x), at(last), beta, gamma, at(moments), xp.shape(x)[0], xp.threads)
        self._note(x, last)
        return last

    def signs_encode(self, x: Array, residual: Array | None, block: int) -> tuple[Array, ...]:
        """float32[n] -> bits, scales, and the new residual (if there is a residual)."""
        return self._encode("signs", x, residual, (self._xp.shape(x)[0], block), flat=True)

    def signs_mean(self, payloads: Pairs, out: Array | None, n: int, block: int) -> Array:
        """Each worker's bits and scales -> float32[n], in ``out`` if given."""
        return self._mean("signs", payloads, out, (n, block))

    def ints_encode(
        self, x: Array, residual: Array | None, block: int, bits: int, rng: Rng | None
    ) -> tuple[Array, ...]:
        """float32[n] -> codes, scales, and the new residual. ``rng``: round at random."""
        n, at = self._xp.shape(x)[0], self._xp.buffers.address
        table, offsets, start = self._noise(rng, n)
        return self._encode(
            "ints", x, residual, (n, block, bits), (at(table), at(offsets), start), table, offsets, flat=True
        )

    def ints_mean(self, payloads: Pairs, out: Array | None, n: int, block: int, bits: int) -> Array:
        """Each worker's codes and scales -> float32[n], in ``out`` if given."""
        return self._mean("ints", payloads, out, (n, block, bits))

    def levels_encode(
        self, x: Array, residual: Array | None, block: int, bits: int, levels: int, rng: Rng
    ) -> tuple[Array, ...]:
        """float32[n] -> codes, scales, and the new residual. levels = 0: ternary."""
        n, at = self._xp.shape(x)[0], self._xp.buffers.address
        table, offsets, _ = self._noise(rng if levels else None, n)
        noise = at(table), at(offsets), rng.offset, *rng.keys
        return self._encode("levels", x, residual, (n, block, bits, levels), noise, table, offsets, flat=True)

    def levels_mean(self, payloads: Pairs, out: Array | None, n: int, block: int, bits: int, levels: int) -> Array:
        """Each worker's codes and scales -> float32[n], in ``out`` if given."""
        return self._mean("levels", payloads, out, (n, block, bits, levels))

    def votes_encode(self, x: Array) -> tuple[Array, ...]:
        """float32[n] -> bits, flags."""
        x = self._xp.buffers.contiguous(x)
        return self._encode("votes", x, None, self._xp.shape(x), alone=True)[0]

    def votes_mean(self, payloads: Pairs, out: Array | None, n: int) -> Array:
        """Each worker's bits and flags -> float32[n], in ``out`` if given."""
        return self._mean("votes", payloads, out, (n,))

    def halves_encode(self, x: Array, residual: Array | None, block: int) -> tuple[Array, ...]:
        """float32[n] -> bits, means, and the new residual."""
        return self._encode("halves", x, residual, (self._xp.shape(x)[0], block), flat=True)

    def halves_mean(self, payloads: Pairs, out: Array | None, n: int, block: int) -> Array:
        """Each worker's bits and means -> float32[n], in ``out`` if given."""
        return self._mean("halves", payloads, out, (n, block))

    def trits_encode(
        self, x: Array, residual: Array | None, block: int, sparsity: float, runs: bool
    ) -> tuple[Array, Array, Array]:
        """float32[n] -> bytes uint8[K], scales float32[m], and the new residual."""
        xp, at, n = self._xp, self._xp.buffers.address, self._xp.shape(x)[0]
        bytes_, scales = xp.buffers.empty(blocks(n, 5), "uint8"), xp.buffers.empty_payload(blocks(n, block))
        left, out, swap = self._left(x, residual)
        where = at(x), at(residual), out, at(bytes_), at(scales)
        size = self.library.trits_encode(*where, n, block, sparsity, runs, xp.threads, swap)
        self._note(x, residual)
        return bytes_[:size], scales, left

    def trits_mean(self, payloads: Pairs, out: Array | None, n: int, block: int, runs: bool) -> Array:
        """Each worker's bytes and scales -> float32[n], in ``out`` if given; ValueError for invalid runs."""
        xp, scales = self._xp, ("float32", blocks(n, block))
        counts = [xp.shape(bytes_)[0] for bytes_, _ in payloads] if runs else [blocks(n, 5)] * len(payloads)
        kept = self._ragged(payloads, [(("uint8", count), scales) for count in counts])
        out, columns = self._out(out, n), self._columns(kept)
        self.library.trits_mean(*columns, counts, len(kept), xp.buffers.address(out), n, block, runs, xp.threads)
        return out

    def codes_encode(
        self, x: Array, residual: Array | None, block: int, codes: Codes, rng: Rng | None = None
    ) -> tuple[tuple[Array, ...], Array]:
        """float32[n] -> the payload, codes and (unless "bfloat16") scales; and the new residual."""
        n, at = self._xp.shape(x)[0], self._xp.buffers.address
        table, offsets, _ = self._noise(rng if codes.kind == "fp8" else None, n)
        keys, start = (None, 0) if rng is None else (rng.keys, rng.offset)
        codec, sizes = codes.with_random(keys, at(table), at(offsets), start), _parts(codes, n, block)
        return self._encode(
            "codes", x, residual, (n, block), (start,), codes, table, offsets, sizes=sizes, first=(byref(codec),)
        )

    def codes_mean(self, payloads: Pairs, out: Array | None, n: int, block: int, codes: Codes) -> Array:
        """Each worker's codes, and scales if there are any -> float32[n], in ``out`` if given."""
        codec, sizes = codes.with_random(), _parts(codes, n, block)
        return self._mean("codes", payloads, out, (n, block), (), codes, sizes=sizes, first=(byref(codec),))

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

        ``rng``: of the rotation.
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
        self.library.norms(xp.buffers.address(x), xp.buffers.address(norms), n, block, xp.threads)
        return norms

    def steps_encode(
        self, x: Array, norms: Array, width: int, top: int, dtype: str, cut: float, factor: float, rng: Rng, draw: Rng
    ) -> Array:
        """float32[n], float32[m] -> codes of ``dtype``, uint8 or int32. ``rng``: to rotate; ``draw``: to round."""
        xp, at, (x, norms) = self._xp, self._xp.buffers.address, self._ready(x, norms)
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
        xp, at, (sums, norms), out = self._xp, self._xp.buffers.address, self._ready(sums, norms), self._out(out, n)
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
        xp, at, (own, norms) = self._xp, self._xp.buffers.address, self._ready(own, norms)
        sums = None if sums is None else xp.buffers.contiguous(sums)
        arrays, how = (at(sums), at(own), at(norms), at(x), at(x), at(rest)), (xp.dtype(own) == "int32", cut, *factors)
        self.library.steps_values(*arrays, xp.shape(x)[0], width, *how, *rng.keys, rng.offset, xp.threads)

    def topk_encode(self, x: Array, residual: Array | None, k: int) -> tuple[Array, Array, Array]:
        """float32[n] -> values float32[k] and positions int32[k] of the largest magnitudes, and the new residual."""
        xp, at = self._xp, self._xp.buffers.address
        values, positions = xp.buffers.empty_payload(k), xp.buffers.empty_payload(k, "int32")
        left, swap = (x, False) if self._log is None or residual is None else (residual, True)
        where = at(x), at(residual), at(left), at(values), at(positions)
        encode = partial(self.library.topk_encode, *where, self._xp.shape(x)[0], k, xp.threads, swap)
        self._do(encode, (x, residual), values, positions)
        return values, positions, left

    def threshold_encode(self, x: Array, residual: Array | None, bound: float) -> tuple[Array, Array, Array]:
        """float32[n] -> values and positions of all that reach the bound or are not finite, and the new residual."""
        xp, at = self._xp, self._xp.buffers.address
        (n,) = xp.shape(x)
        room = min(n, max(1024, n // 16))
        while True:
            values, positions = xp.buffers.empty(room), xp.buffers.empty(room, "int32")
            count = self.library.threshold_encode(
                at(x), at(residual), at(x), bound, at(values), at(positions), room, n, xp.threads
            )
            if count <= room:
                return values[:count], positions[:count], x
            residual, room = None, count  # x now holds the sum

    def topk_abs(self, x: Array, k: int) -> Array:
        """float32[n] -> int32[k], or float32[m, n] -> int32[m, k]: `grace.backends.base.Backend.topk_abs`."""
        xp, at, shape = self._xp, self._xp.buffers.address, self._xp.shape(x)
        (x,), k = self._ready(x), min(k, shape[-1])
        if len(shape) == 2:
            places = xp.buffers.empty((shape[0], k), "int32")
            self.library.topk_rows(at(x), shape[0], shape[1], k, at(places), xp.threads)
            return places
        values, positions = xp.buffers.empty(k), xp.buffers.empty(k, "int32")
        self.library.topk_encode(at(x), None, None, at(values), at(positions), shape[0], k, xp.threads)
        return positions

    def beyond(self, x: Array, bound: float) -> Array:
        """float32[n] -> int32[K]: `grace.backends.base.Backend.beyond`."""
        xp, at, (x,) = self._xp, self._xp.buffers.address, self._ready(x)
        (n,) = xp.shape(x)
        room = min(n, max(1024, n // 16))
        while True:
            values, positions = xp.buffers.empty(room), xp.buffers.empty(room, "int32")
            count = self.library.beyond(at(x), bound, at(values), at(positions), room, n, xp.threads)
            if count <= room:
                return positions[:count]
            room = count

    def excess(self, x: Array, bound: float) -> Array:
        """float32[n] -> float64[3]: `grace.backends.base.Backend.excess`."""
        xp, at, (x,) = self._xp, self._xp.buffers.address, self._ready(x)
        found = xp.buffers.empty(3, "float64")
        self.library.excess(at(x), bound, at(found), xp.shape(x)[0], xp.threads)
        return found

    def sample(self, key0: int, key1: int, start: int, n: int, k: int) -> Array:
        """int32[k]: `grace.backends.random.Random.sample`."""
        positions = self._xp.buffers.empty(min(k, n), "int32")
        self.library.smallest_words(
            key0, key1, start, n, min(k, n), self._xp.buffers.address(positions), self._xp.threads
        )
        return positions

    def sampled(
        self, x: Array, rng: Rng, sample: int, rank: int, factors: Array, miss: Array, first: int, k: int, most: int
    ) -> Array:
        """float32[n] -> int32[K]: `grace.compressors.selectors.Sampled.select`."""
        xp, at, (x,) = self._xp, self._xp.buffers.address, self._ready(x)
        (n,), (many,) = xp.shape(x), xp.shape(factors)
        room = min(n, max(1024, n // 16))
        while True:
            values, positions = xp.buffers.empty(room), xp.buffers.empty(room, "int32")
            count = self.library.sampled(
                at(x), n, *rng.keys, rng.offset, sample, rank, at(factors), at(miss), many, first, k, most, at(values),
                at(positions), room, xp.threads,
            )  # fmt: skip
            if count >= 0:
                return positions[:count]
            room = -3 - count

    def corrected(self, x: Array, u: Array, v: Array, momentum: float, nesterov: bool) -> tuple[Array, Array]:
        """The next momentum, in new memory, and v plus its contribution, as in `grace.memories.dgc`."""
        xp, at = self._xp, self._xp.buffers.address
        (n,) = xp.shape(x)
        fresh, total, last = (
            xp.buffers.empty(n),
            (x if self._log is None else v),
            (None if self._log is None else at(x)),
        )
        self.library.correct(at(x), at(u), at(v), at(fresh), at(total), last, momentum, nesterov, n, xp.threads)
        self._note(x, v)
        return fresh, total

    def sparse_mean(self, payloads: Pairs, out: Array | None, n: int, k: int | None = None) -> Array:
        """Each worker's values and ascending positions -> float32[n]; ValueError names an invalid payload's worker.

        ``k``: required number of elements; None: as many values as positions.
        """
        if k is None:
            return self.sparse_sums(payloads, out, n, (False,))
        kept, columns = self._received(payloads, (("float32", k), ("int32", k)))
        xp, out = self._xp, self._out(out, n)
        self.library.sparse_mean(*columns, [k] * len(kept), len(kept), xp.buffers.address(out), n, xp.threads)
        return out

    def sparse_sums(self, payloads: Pairs, out: Array | None, n: int, pairs: Sequence[bool]) -> Array:
        """As `sparse_mean`; a worker has one pair of arrays for each of ``pairs``, consecutively, and they add up.

        If an entry is true, its pair has two values, and signed positions: negative ones select the second value.
        """
        kinds = list(pairs) * (len(payloads) // len(pairs))
        sizes = [self._xp.shape(positions)[0] for _, positions in payloads]
        kept = self._ragged(
            payloads,
            [(("float32", 2 if pair else size), ("int32", size)) for pair, size in zip(kinds, sizes, strict=True)],
        )
        xp, out, marks = self._xp, self._out(out, n), bytes(kinds) if any(kinds) else None
        where = *self._columns(kept), sizes, marks, len(kept), len(pairs), xp.buffers.address(out)
        self.library.sparse_means(*where, n, xp.threads)
        return out

    def quantiles_encode(self, x: Array, q: int, bits: int) -> tuple[Array, ...]:
        """float32[n] -> codes, means."""
        (x,) = self._ready(x)
        return self._encode("quantiles", x, None, (self._xp.shape(x)[0], q, bits), alone=True, now=True)[0]

    def quantiles_mean(self, payloads: Pairs, out: Array | None, n: int, q: int, bits: int) -> Array:
        """Each worker's codes and means -> float32[n], in ``out`` if given."""
        return self._mean("quantiles", payloads, out, (n, q, bits))

    def largest_of_signs(self, x: Array, residual: Array | None, ratio: float) -> tuple[tuple[Array, Array], Array]:
        """float32[n] -> the payload of `grace.compressors.adaq`, and the new residual."""
        xp, at = self._xp, self._xp.buffers.address
        (n,) = xp.shape(x)
        left, out, swap = self._left(x, residual)
        signs = (c_int64 * 3)()
        self.library.signs_count(at(x), at(residual), out, signs, n, xp.threads, swap)
        self._note(x, residual)
        means, room = xp.buffers.empty(2), min(n, int(ratio * n) + 2)
        while True:
            sent = xp.buffers.empty(room, "int32")
            count = self.library.largest_of_signs(at(left), signs, ratio, at(means), at(sent), out, room, n)
            if count <= room:
                return (means, sent[:count]), left
            room = count

    def count_sketch(self, x: Array, words: Array, group: int, width: int) -> Array:
        """float32[n] -> float32[rows * width]: `grace.compressors.sketch_sgd.SketchSGD.sketch`, by all rows' words."""
        xp, at, (x, words) = self._xp, self._xp.buffers.address, self._ready(x, words)
        (n,) = xp.shape(x)
        rows = xp.shape(words)[0] // (group + -(-n // group))
        table = xp.buffers.empty(rows * width)
        self.library.count_sketch(at(x), at(words), at(table), n, rows, group, width, xp.threads)
        return table

    def count_sketch_estimate(self, table: Array, words: Array, n: int, group: int, width: int) -> Array:
        """float32[rows * width] -> float32[n]: `grace.compressors.sketch_sgd.SketchSGD.estimate`."""
        xp, at, (table, words) = self._xp, self._xp.buffers.address, self._ready(table, words)
        out, rows = xp.buffers.empty(n), xp.shape(table)[0] // width
        self.library.count_sketch_estimate(at(table), at(words), at(out), n, rows, group, width, xp.threads)
        return out

    def tagged_encode(self, x: Array, lowest: int, middle: int) -> tuple[Array, ...]:
        """float32[n] -> tags uint8[ceil(n/4)], and numbers of 32, 16 and 8 bits: `grace.compressors.inceptionn`."""
        xp, at, (x,) = self._xp, self._xp.buffers.address, self._ready(x)
        (n,) = xp.shape(x)
        starts = xp.buffers.empty(3 * (-(-n // 65536) + 1), "int64")
        self.library.tagged_count(at(x), at(starts), n, lowest, middle, xp.threads)
        wide, two, one = xp.integers(starts[-3:])
        payload = (
            xp.buffers.empty(-(-n // 4), "uint8"),
            xp.buffers.empty(wide),
            xp.buffers.empty(2 * two, "uint8"),
            xp.buffers.empty(one, "uint8"),
        )
        self.library.tagged_encode(at(x), at(starts), *map(at, payload), n, lowest, middle, xp.threads)
        return payload

    def tagged_mean(self, payloads: Pairs, out: Array | None, n: int, lowest: int, middle: int) -> Array:
        """Each worker's tags and numbers -> float32[n], in ``out`` if given; ValueError for invalid tags."""
        xp = self._xp
        counts = [[xp.shape(array)[0] for array in payload[1:]] for payload in payloads]
        if any(two % 2 for _, two, _ in counts):
            raise ValueError("half a number of 16 bits")
        kept = self._ragged(
            payloads,
            [(("uint8", -(-n // 4)), ("float32", w), ("uint8", two), ("uint8", one)) for w, two, one in counts],
        )
        numbers = [number for wide, two, one in counts for number in (wide, two // 2, one)]
        out = self._out(out, n)
        where = *self._columns(kept), numbers, len(kept), xp.buffers.address(out)
        self.library.tagged_mean(*where, n, lowest, middle, xp.threads)
        return out

    def bins_encode(self, x: Array, residual: Array, size: int) -> tuple[Array, Array, Array, Array]:
        """Counts uint8[m], places uint8[K], scale float32[1], and the new residual: `grace.compressors.adacomp`."""
        xp, at, (x, residual) = self._xp, self._xp.buffers.address, self._ready(x, residual)
        (n,) = xp.shape(x)
        counts, places, scale = (
            xp.buffers.empty(blocks(n, size), "uint8"),
            xp.buffers.empty(n, "uint8"),
            xp.buffers.empty(1),
        )
        left, payload = xp.buffers.empty(n), (at(counts), at(places), at(scale))
        sent = self.library.bins_encode(at(x), at(residual), at(left), *payload, n, size, xp.threads)
        return counts, places[:sent], scale, left

    def bins_mean(self, payloads: Pairs, out: Array | None, n: int, size: int) -> Array:
        """Each worker's counts, places and scale -> float32[n], in ``out`` if given; ValueError for invalid ones."""
        xp = self._xp
        sizes = [xp.shape(places)[0] for _, places, _ in payloads]
        kept = self._ragged(
            payloads, [(("uint8", blocks(n, size)), ("uint8", count), ("float32", 1)) for count in sizes]
        )
        out = self._out(out, n)
        self.library.bins_mean(*self._columns(kept), sizes, len(kept), xp.buffers.address(out), n, size, xp.threads)
        return out

    def chances_encode(self, x: Array, ratio: float, iterations: int, rng: Rng) -> tuple[Array, ...]:
        """float32[n] -> the payload of `grace.compressors.wangni`."""
        xp, at, (x,) = self._xp, self._xp.buffers.address, self._ready(x)
        (n,), magnitude = xp.shape(x), xp.buffers.empty(1)
        room = min(n, int(1.25 * ratio * n) + 64)
        while True:
            arrays = xp.buffers.empty(room, "int32"), xp.buffers.empty(room), xp.buffers.empty(room, "int32"), magnitude
            where, sent = (*rng.keys, rng.offset, *map(at, arrays), room), (c_int64 * 2)()
            self.library.chances_encode(at(x), ratio * n, iterations, *where, sent, n, xp.threads)
            certain, drawn = sent
            if max(certain, drawn) <= room:
                return arrays[0][:certain], arrays[1][:certain], arrays[2][:drawn], magnitude
            room = max(certain, drawn)

    def shared_encode(self, x: Array, scales: Array, block: int, top: int, dtype: str, rng: Rng) -> Array:
        """float32[n], float32[m] -> integers [n] of ``dtype``, int8 or int32: `grace.compressors.shared_int`."""
        xp, at, (x, scales) = self._xp, self._xp.buffers.address, self._ready(x, scales)
        (n,) = xp.shape(x)
        codes, (table, offsets, start) = xp.buffers.empty(n, dtype), self._noise(rng, n)
        how, noise = (n, block, top, dtype == "int32"), (at(table), at(offsets), start)
        self.library.shared_encode(at(x), at(scales), at(codes), *how, *noise, xp.threads)
        return codes

    def shared_mean(self, sums: Array, scales: Array, out: Array | None, block: int, steps: int) -> Array:
        """Summed integers of `shared_encode` -> float32[n], in ``out`` if given. ``steps``: per scale."""
        xp, at, (sums, scales) = self._xp, self._xp.buffers.address, self._ready(sums, scales)
        (n,) = xp.shape(sums)
        out = self._out(out, n)
        where, wide = (None, at(sums), at(scales), at(out)), xp.dtype(sums) == "int32"
        call = partial(self.library.shared_values, *where, n, block, steps, wide, xp.threads)
        self._do(call, None, out, sums, scales)
        return out

    def shared_left(self, x: Array, own: Array, scales: Array, block: int, steps: int) -> Array:
        """float32[n] minus the decoded integers, in place."""
        xp, at, (x, own, scales) = self._xp, self._xp.buffers.address, self._ready(x, own, scales)
        where, wide = (at(x), at(own), at(scales), at(x)), xp.dtype(own) == "int32"
        self.library.shared_values(*where, xp.shape(x)[0], block, steps, wide, xp.threads)
        return x

    def signed_sums(self, x: Array, words: Array, size: int) -> Array:
        """float32[n], int32[many * size] -> float32[ceil(n / size), many]: `grace.compressors.arctopk`."""
        xp, at, (x, words) = self._xp, self._xp.buffers.address, self._ready(x, words)
        (n,), many = xp.shape(x), xp.shape(words)[0] // size
        rows = blocks(n, size)
        sums = xp.buffers.empty(rows * many)
        self.library.signed_sums(at(x), at(words), at(sums), n, size, many, xp.threads)
        return xp.reshape(sums, (rows, many))

    def largest_sums(self, payloads: Pairs, n: int, k: int) -> tuple[Array, Array]:
        """Each worker's k values and ascending positions -> those of the k largest sums over the workers."""
        xp, (kept, columns) = self._xp, self._received(payloads, (("float32", k), ("int32", k)))
        sums, places = xp.buffers.empty(k), xp.buffers.empty(k, "int32")
        self.library.largest_sums(*columns, len(kept), k, xp.buffers.address(sums), xp.buffers.address(places), n, k)
        return sums, places

    def cosines_encode(
        self, x: Array, residual: Array | None, sizes: tuple[int, int, int, int], k: int
    ) -> tuple[tuple[Array, ...], Array]:
        """float32[n] -> the payload of `grace.compressors.demo`, and the new residual (if there is a residual).

        ``sizes``: rows and columns of the matrix, and of a chunk. ``k``: coefficients per chunk.
        """
        return self._encode("cosines", x, residual, (*sizes, k))

    def cosines_left(self, x: Array, payload: tuple[Array, ...], sizes: tuple[int, int, int, int], k: int) -> Array:
        """float32[n] minus a decoded payload, in place; ValueError for an invalid one."""
        (x,), at = self._ready(x), self._xp.buffers.address
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
        """Each worker's payload -> float32[n], in ``out`` if given; ValueError for an invalid one.

        ``senders``: average coefficients over the workers that sent them. ``sign``: return the signs of the result.
        """
        out = self._out(out, sizes[0] * sizes[1])
        return self._mean("cosines", payloads, out, (*sizes, k), (senders, sign), now=True)

    def positions_write(self, positions: Array, widths: Sequence[int], marks: int) -> tuple[Array, ...]:
        """int32[k] -> planes of lower bits, and the upper bits' code: "elias_fano" in `grace.ops.index_coding`."""
        xp, at, (positions,) = self._xp, self._xp.buffers.address, self._ready(positions)
        (k,) = xp.shape(positions)
        planes = [xp.buffers.empty_payload(packed_size(bits, k), "uint8") for bits in widths]
        upper = xp.buffers.empty_payload(packed_size(1, marks), "uint8")
        where = list(map(at, planes)), at(upper), marks
        if self.library.positions_write(at(positions), k, sum(widths), *where) != k:
            raise ValueError("positions do not ascend, each once, below the number of elements")
        return (*planes, upper)

    def positions_read(self, sent: Sequence[Array], widths: Sequence[int], marks: int, k: int) -> Array | None:
        """The inverse of `positions_write`: int32[k]; None if the number of positions is different."""
        sizes = [("uint8", packed_size(bits, k)) for bits in widths]
        (arrays,), xp = fitted(self._xp, [tuple(sent)], *sizes, ("uint8", packed_size(1, marks))), self._xp
        positions, (*planes, upper) = xp.buffers.empty(k, "int32"), map(xp.buffers.address, arrays)
        found = self.library.positions_read(planes, upper, marks, k, sum(widths), xp.buffers.address(positions))
        return positions if found == k else None

    def chunks_encode(self, x: Array, residual: Array | None, chunk: int, k: int) -> tuple[tuple[Array, ...], Array]:
        """float32[n] -> the payload of `grace.compressors.chunktopk`, and the new residual."""
        return self._encode("chunks", x, residual, (self._xp.shape(x)[0], chunk, k))

    def chunks_values(self, payload: Sequence[Array], n: int, chunk: int, k: int) -> tuple[Array, Array] | None:
        """The inverse: float32[K], and positions int32[K]. None: some places are outside their chunks."""
        sizes, xp = CODECS["chunks"].sizes(n, chunk, k), self._xp
        _kept, columns = self._received([tuple(payload)], sizes)
        values, positions = xp.buffers.empty(sizes[0][1]), xp.buffers.empty(sizes[0][1], "int32")
        where = [column and column[0] for column in columns]
        wrong = self.library.chunks_values(
            *where, n, chunk, k, xp.buffers.address(values), xp.buffers.address(positions)
        )
        return None if wrong else (values, positions)

    def finite(self, addresses: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether all numbers of float32 vectors at these addresses are finite."""
        return bool(self.library.finite(addresses, counts, len(counts)))

    @contextmanager
    def together(self, n: int) -> Iterator[None]:
        """A context for writes of n elements in total."""
        before = self.library.gathered(n)
        try:
            yield
        finally:
            self.library.gathered(before)

    def product(self, x: Array | None, p: Array, q: Array, out: Array) -> Array:
        """The vector x minus p[a, r] q[r, b], or the product alone without x, written to ``out``, which may be x."""
        xp, at = self._xp, self._xp.buffers.address
        p, q, a, b, r = self._fitting(p, q, *(each for each in (x, out) if each is not None))
        self.library.product(at(x), at(p), at(q), at(out), a, b, r, xp.threads)
        return out

    def part(self, x: Array, p: Array, q: Array, rest: Array, taken: tuple[Array, Array] | None = None) -> None:
        """Write the vector x minus the product p[a, r] q[r, b] to ``rest``, and the product to x.

        ``taken``: two factors of the same shapes, whose product is subtracted instead.
        """
        xp, at = self._xp, self._xp.buffers.address
        p, q, a, b, r = self._fitting(p, q, x, rest)
        left, right, *sizes = (p, q, a, b, r) if taken is None else self._fitting(*taken, x, rest)
        if sizes != [a, b, r]:
            raise ValueError(f"the factors of a product are {sizes}, and those of the other {[a, b, r]}")
        self.library.part(at(x), at(p), at(q), at(left), at(right), at(rest), a, b, r, xp.threads)

    def left_factor(self, matrix: Array, q: Array, residual: Array | None = None) -> Array:
        """m[a, b], q[r, b] -> m qᵀ, float32[a, r]; adds the vector ``residual`` to m first, if given."""
        xp, (matrix, q) = self._xp, self._ready(matrix, q)
        at, (a, b), (r, _) = xp.buffers.address, xp.shape(matrix), xp.shape(q)
        p = xp.buffers.empty((a, r))
        self._check_residual(residual, a, b)
        self.library.left(at(matrix), at(residual), at(q), at(p), a, b, r, xp.threads)
        return p

    def right_factor(self, p: Array, matrix: Array, residual: Array | None = None) -> Array:
        """p[a, r], m[a, b] -> pᵀ m, float32[r, b]; adds the vector ``residual`` to m first, if given."""
        xp, (p, matrix) = self._xp, self._ready(p, matrix)
        at, (a, b), (_, r) = xp.buffers.address, xp.shape(matrix), xp.shape(p)
        q = xp.buffers.empty((r, b))
        self._check_residual(residual, a, b)
        self.library.right(at(matrix), at(residual), at(p), at(q), a, b, r, xp.threads)
        return q

    def _check_residual(self, residual: Array | None, a: int, b: int) -> None:
        if residual is not None and self._xp.shape(residual) != (a * b,):
            raise ValueError(f"a residual of {self._xp.shape(residual)} for a matrix of {(a, b)}")

    def words(self, key0: int, key1: int, start: int, n: int) -> Array:
        """int32[n]: `grace.backends.random.Random.words`."""
        out = self._xp.buffers.empty(n, "int32")
        self.library.words(key0, key1, start, n, self._xp.buffers.address(out), self._xp.threads)
        return out

    def _noise(self, rng: Rng | None, n: int) -> tuple[Array | None, Array | None, int]:
        # The noise table, the offsets for n elements, and the start position; all empty without rng.
        if rng is None:
            return None, None, 0
        xp, table, start = self._xp, self._table(rng.table), rng.offset
        first, last = start // NOISE, -(-(start + n) // NOISE)
        offsets = xp.buffers.empty(last, "int16")
        self.library.noise_table(*rng.keys, last, xp.buffers.address(offsets))
        return table, offsets[first:] if first else offsets, start

    def _table(self, keys: tuple[int, int]) -> Array:
        def made() -> Array:
            # Not from pooled memory: it would raise the memory need of the first steps.
            table = self._xp.zeros(NOISE, "int16")
            self.library.noise_table(*keys, NOISE, self._xp.buffers.address(table))
            return table

        return recent(self._tables, keys, made)

    def _left(self, x: Array, residual: Array | None) -> tuple[Array, int | None, bool]:
        # The array of the new residual, its address if it is written, and whether x and the residual are swapped.
        left, swap = (x, False) if self._log is None or residual is None else (residual, True)
        return left, None if residual is None else self._xp.buffers.address(left), swap

    def _encode(
        self,
        name: str,
        x: Array,
        residual: Array | None,
        how: tuple[Any, ...],
        more: tuple[Any, ...] = (),
        *used: Any,
        sizes: Sequence[tuple[str, int | None]] | None = None,
        first: tuple[Any, ...] = (),
        alone: bool = False,
        flat: bool = False,
        now: bool = False,
    ) -> Any:
        # Encode with one of `schema.CODECS`: returns the payload and the new residual. ``how``: determines the array
        # sizes; followed by ``more``. ``used``: arrays to keep alive. ``alone``: no residual. ``now``: do not defer.
        xp, codec = self._xp, CODECS[name]
        at, left = xp.buffers.address, x
        payload: list[Array] = []
        addresses: list[int | None] = []
        for dtype, n in sizes or codec.sizes(*how):
            if n is None:
                addresses.append(None)
            else:
                payload.append(array := xp.buffers.empty_payload(n, dtype))
                addresses.append(at(array))
        kernel = getattr(self.library, codec.encode)
        if alone:
            call = partial(kernel, *first, at(x), *addresses, *how, *more, xp.threads)
        else:
            left, out, swap = self._left(x, residual)
            call = partial(kernel, *first, at(x), at(residual), out, *addresses, *how, *more, xp.threads, swap)
        if self._deferred is None or now:
            call()
            if self._log is not None and residual is not None:
                self._log.append((residual, x))
        else:
            self._defer(call, (x, residual), *payload, *used)
        return (*payload, left) if flat else (tuple(payload), left)

    def _mean(
        self,
        name: str,
        payloads: Pairs,
        out: Array | None,
        how: tuple[Any, ...],
        more: tuple[Any, ...] = (),
        *used: Any,
        sizes: Sequence[tuple[str, int | None]] | None = None,
        first: tuple[Any, ...] = (),
        now: bool = False,
    ) -> Array:
        # Likewise, the mean of payloads.
        xp, out, codec = self._xp, self._out(out, how[0]), CODECS[name]
        kept, columns = self._received(payloads, sizes or codec.sizes(*how))
        kernel = getattr(self.library, codec.mean)
        call = partial(kernel, *first, *columns, len(kept), xp.buffers.address(out), *how, *more, xp.threads)
        if self._deferred is None or now:
            call()
        else:
            self._deferred.add(call, out, kept, *used)
        return out

    def _do(self, kernel: Callable[[], Any], swapped: tuple[Array, Array | None] | None, *used: Any) -> None:
        # ``swapped``: x and the residual, logged after the kernel has run: until then the residual is in place.
        if self._deferred is not None:
            self._defer(kernel, swapped, *used)
            return
        kernel()
        if swapped is not None:
            self._note(*swapped)

    def _defer(self, kernel: Callable[[], Any], swapped: tuple[Array, Array | None] | None, *used: Any) -> None:
        assert self._deferred is not None
        self._deferred.add(kernel if swapped is None else partial(self._noted, kernel, *swapped), *used)

    def _noted(self, kernel: Callable[[], Any], x: Array, residual: Array | None) -> None:
        kernel()
        self._note(x, residual)

    def _note(self, x: Array, residual: Array | None) -> None:
        if self._log is not None and residual is not None:
            self._log.append((residual, x))

    def _out(self, out: Array | None, n: int) -> Array:
        return self._xp.buffers.empty(n) if out is None else out

    def _received(self, payloads: Pairs, sizes: Sequence[tuple[str, int | None]]) -> tuple[Pairs, list[Any]]:
        # The payloads, and the addresses of their arrays: None for absent ones.
        kept = fitted(self._xp, payloads, *[each for each in sizes if each[1] is not None])  # type: ignore[arg-type]
        columns: list[Any] = self._columns(kept)
        if len(columns) < len(sizes):
            taken = iter(columns)
            columns = [None if size is None else next(taken) for _, size in sizes]
        return kept, columns

    def _ragged(self, payloads: Pairs, sizes: Sequence[tuple[tuple[str, int], ...]]) -> Pairs:
        # Payloads that may differ in size.
        return [fitted(self._xp, [payload], *each)[0] for payload, each in zip(payloads, sizes, strict=True)]

    def _ready(self, *arrays: Array) -> tuple[Array, ...]:
        return tuple(self._xp.buffers.contiguous(array) for array in arrays)

    def _fitting(self, p: Array, q: Array, *vectors: Array) -> tuple[Array, Array, int, int, int]:
        # p and q in contiguous memory, and a, b, r. A kernel does not check lengths.
        xp, (p, q) = self._xp, self._ready(p, q)
        (a, r), (rows, b) = xp.shape(p), xp.shape(q)
        if rows != r or any(xp.shape(each) != (a * b,) for each in vectors):
            raise ValueError(f"factors {(a, r)} and {(rows, b)} do not make the product {xp.shape(vectors[-1])}")
        return p, q, a, b, r

    def _columns(self, payloads: Pairs) -> list[list[int]]:
        if isinstance(payloads, GatheredPayloads):
            return payloads.addresses()
        return [[self._xp.buffers.address(array) for array in arrays] for arrays in zip(*payloads, strict=True)]


def partly(kernels: type[T]) -> type[T]:
    """Class decorator for partial replacements of `HostKernels`: missing kernels become None."""
    for name in vars(HostKernels).keys() - vars(kernels).keys():
        if not name.startswith("_"):
            setattr(kernels, name, None)
    return kernels


def fitted(xp: Any, payloads: Pairs, *sizes: tuple[str, int]) -> Pairs:
    """The payloads, if their arrays have these dtypes and lengths, else ValueError: a kernel does not check."""
    if isinstance(payloads, GatheredPayloads) and payloads.layout == tuple([(dtype, (n,)) for dtype, n in sizes]):
        return payloads
    for payload in payloads:
        for array, (dtype, n) in zip(payload, sizes, strict=True):
            fitting(xp, array, dtype, n, "arrays")
    return [tuple(xp.buffers.contiguous(array) for array in payload) for payload in payloads]


def _parts(codes: Codes, n: int, block: int) -> list[tuple[str, int | None]]:
    # dtypes and lengths of a payload.
    if codes.kind == "bfloat16":
        return [("uint8", 2 * n), ("float32", None)]
    scales = "int32" if codes.kind == "natural" else "float32"
    return [("uint8", packed_size(codes.bits, n)), (scales, blocks(n, block))]


def _bits(levels: Sequence[float]) -> int:
    return len(levels).bit_length() - 1
