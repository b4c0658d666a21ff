"""Calls of kernels on a backend's arrays: addresses, deferral, the rollback log, and the rows of `schema.CODECS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from grace.backends.deferred import DeferredKernels
from grace.backends.random import recent
from grace.core.gathered import GatheredPayloads
from grace.core.rng import NOISE, Rng
from grace.kernels import Library
from grace.kernels.schema import CODECS
from grace.ops.validate import fitting

Array = Any
Pairs = Sequence[tuple[Array, ...]]
Log = list[tuple[Array, Array]]


class Family:
    """Kernels of one kind for a backend's arrays. x is donated: a new residual, if requested, overwrites it.

    ``log``: a step's rollback log. New residuals overwrite the previous ones, which move to x; the log records both
    arrays.
    ``deferred``: a queue for all calls except those that determine the length of their results.
    ``tables``: a cache of noise tables.
    """

    def __init__(
        self,
        xp: Any,
        library: Library,
        tables: dict[Any, Array],
        log: Log | None = None,
        deferred: DeferredKernels | None = None,
    ):
        self._xp, self.library, self._tables, self._log, self._deferred = xp, library, tables, log, deferred
        self._at = xp.buffers.address

    def _noise(self, rng: Rng | None, n: int) -> tuple[Array | None, Array | None, int]:
        # The noise table, the offsets for n elements, and the start position; all empty without rng.
        if rng is None:
            return None, None, 0
        xp, table, start = self._xp, self._table(rng.table), rng.offset
        first, last = start // NOISE, -(-(start + n) // NOISE)
        offsets = xp.buffers.empty(last, "int16")
        self.library.noise_table(*rng.keys, last, self._at(offsets))
        return table, offsets[first:] if first else offsets, start

    def _table(self, keys: tuple[int, int]) -> Array:
        def made() -> Array:
            # Do not use pooled memory: that would raise the memory need of the first steps.
            table = self._xp.zeros(NOISE, "int16")
            self.library.noise_table(*keys, NOISE, self._at(table))
            return table

        return recent(self._tables, keys, made)

    def _left(self, x: Array, residual: Array | None) -> tuple[Array, int | None, bool]:
        # The array of the new residual, its address if it is written, and whether x and the residual are swapped.
        left, swap = (x, False) if self._log is None or residual is None else (residual, True)
        return left, None if residual is None else self._at(left), swap

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
        now: bool = False,
    ) -> tuple[tuple[Array, ...], Array]:
        # Encode with one of `schema.CODECS`: returns the payload and the new residual. ``first``: leading arguments.
        # ``how``: arguments that determine the sizes of arrays; ``more``: those after them. ``used``: arrays to keep
        # alive. ``alone``: the kernel takes no residual. ``now``: do not defer.
        xp, codec = self._xp, CODECS[name]
        at, left = self._at, x
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
        if now:
            call()
            self._note(x, residual)
        else:
            self._do(call, (x, residual), *payload, *used)
        return tuple(payload), left

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
        # The mean of payloads, with one of `schema.CODECS`; arguments as in `_encode`.
        xp, out, codec = self._xp, self._out(out, how[0]), CODECS[name]
        kept, columns = self._received(payloads, sizes or codec.sizes(*how))
        kernel = getattr(self.library, codec.mean)
        call = partial(kernel, *first, *columns, len(kept), self._at(out), *how, *more, xp.threads)
        if now:
            call()
        else:
            self._do(call, None, out, kept, *used)
        return out

    def _do(self, kernel: Callable[[], Any], swapped: tuple[Array, Array | None] | None, *used: Any) -> None:
        # ``swapped``: x and the residual, logged after the kernel has run: until then the residual is in place.
        call = kernel if swapped is None else partial(self._noted, kernel, *swapped)
        if self._deferred is None:
            call()
        else:
            self._deferred.add(call, *used)

    def _noted(self, kernel: Callable[[], Any], x: Array, residual: Array | None) -> None:
        kernel()
        self._note(x, residual)

    def _note(self, x: Array, residual: Array | None) -> None:
        if self._log is not None and residual is not None:
            self._log.append((residual, x))

    def _out(self, out: Array | None, n: int) -> Array:
        return self._xp.buffers.empty(n) if out is None else out

    def _received(self, payloads: Pairs, sizes: Sequence[tuple[str, int | None]]) -> tuple[Pairs, list[Any]]:
        # The checked payloads, and for each payload array its addresses by worker; None if it is absent.
        kept = fitted(self._xp, payloads, *[each for each in sizes if each[1] is not None])  # type: ignore[arg-type]
        columns: list[Any] = self._columns(kept)
        if len(columns) < len(sizes):
            taken = iter(columns)
            columns = [None if size is None else next(taken) for _, size in sizes]
        return kept, columns

    def _ragged(self, payloads: Pairs, sizes: Sequence[tuple[tuple[str, int], ...]]) -> Pairs:
        # The payloads, checked; they may differ in size.
        return [fitted(self._xp, [payload], *each)[0] for payload, each in zip(payloads, sizes, strict=True)]

    def _ready(self, *arrays: Array) -> tuple[Array, ...]:
        return tuple(map(self._xp.buffers.contiguous, arrays))

    def _columns(self, payloads: Pairs) -> list[list[int]]:
        if isinstance(payloads, GatheredPayloads):
            return payloads.addresses()
        return [[self._at(array) for array in arrays] for arrays in zip(*payloads, strict=True)]


def encoder(name: str) -> Callable[..., tuple[tuple[Array, ...], Array]]:
    """The method ``encode(x, residual, *attributes)`` of a row of `schema.CODECS`: the payload and new residual."""

    def encode(self: Family, x: Array, residual: Array | None, *how: Any) -> tuple[tuple[Array, ...], Array]:
        return self._encode(name, x, residual, (self._xp.shape(x)[0], *how))

    return encode


def averager(name: str) -> Callable[..., Array]:
    """The method ``mean(payloads, out, n, *attributes)`` of such a row: float32[n], in ``out`` if given."""

    def mean(self: Family, payloads: Pairs, out: Array | None, n: int, *how: Any) -> Array:
        return self._mean(name, payloads, out, (n, *how))

    return mean


def fitted(xp: Any, payloads: Pairs, *sizes: tuple[str, int]) -> Pairs:
    """Check the dtypes and lengths of payloads, which kernels do not: the payloads, contiguous; else ValueError."""
    if isinstance(payloads, GatheredPayloads) and payloads.layout == tuple([(dtype, (n,)) for dtype, n in sizes]):
        return payloads
    for payload in payloads:
        for array, (dtype, n) in zip(payload, sizes, strict=True):
            fitting(xp, array, dtype, n, "arrays")
    return [tuple(xp.buffers.contiguous(array) for array in payload) for payload in payloads]
