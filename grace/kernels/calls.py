"""Calls kernels with the addresses of a backend's arrays, as `schema.CODECS` declares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grace.core.gathered import GatheredPayloads
from grace.core.rng import NOISE, Rng, recent
from grace.kernels import Library
from grace.kernels.schema import CODECS
from grace.ops.validate import fitting

Array = Any
Pairs = Sequence[tuple[Array, ...]]


class Family:
    """Kernels of one kind for a backend's arrays. x is donated: a new residual, if requested, overwrites it.

    ``tables``: a cache of noise tables.
    """

    def __init__(self, xp: Any, library: Library, tables: dict[Any, Array]):
        self._xp, self.library, self._tables = xp, library, tables
        self._at = xp.buffers.address

    def _noise(self, rng: Rng | None, n: int) -> tuple[Array | None, Array | None, int]:
        # Returns the noise table, the offsets for n elements, and the start position; without rng, None, None and 0.
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

    def _encode(
        self,
        name: str,
        x: Array,
        residual: Array | None,
        how: tuple[Any, ...],
        more: tuple[Any, ...] = (),
        sizes: Sequence[tuple[str, int | None]] | None = None,
        first: tuple[Any, ...] = (),
        alone: bool = False,
    ) -> tuple[tuple[Array, ...], Array]:
        # Encode with one of `schema.CODECS`: returns the payload and the new residual. ``first``: leading arguments.
        # ``how``: arguments that determine the sizes of arrays; ``more``: the arguments after ``how``. ``alone``: the
        # kernel takes no residual.
        xp, at, codec = self._xp, self._at, CODECS[name]
        payload: list[Array] = []
        addresses: list[int | None] = []
        for dtype, n in sizes or codec.sizes(*how):
            if n is None:
                addresses.append(None)
            else:
                payload.append(array := xp.buffers.empty(n, dtype))
                addresses.append(at(array))
        source = (at(x),) if alone else self._source(x, residual)
        getattr(self.library, codec.encode)(*first, *source, *addresses, *how, *more, xp.threads)
        return tuple(payload), x

    def _source(self, x: Array, residual: Array | None) -> tuple[int, int | None, int | None]:
        # Returns the addresses of x, the residual, and the new residual.
        address = self._at(x)
        return address, self._at(residual), None if residual is None else address

    def _mean(
        self,
        name: str,
        payloads: Pairs,
        out: Array | None,
        how: tuple[Any, ...],
        more: tuple[Any, ...] = (),
        sizes: Sequence[tuple[str, int | None]] | None = None,
        first: tuple[Any, ...] = (),
    ) -> Array:
        # Returns the mean of payloads, with one of `schema.CODECS`; arguments as in `_encode`.
        xp, out, codec = self._xp, self._out(out, how[0]), CODECS[name]
        kept, columns = self._received(payloads, sizes or codec.sizes(*how))
        getattr(self.library, codec.mean)(*first, *columns, len(kept), self._at(out), *how, *more, xp.threads)
        return out

    def _out(self, out: Array | None, n: int) -> Array:
        return self._xp.buffers.empty(n) if out is None else out

    def _received(self, payloads: Pairs, sizes: Sequence[tuple[str, int | None]]) -> tuple[Pairs, list[Any]]:
        # Returns the checked payloads, and for each payload array its addresses by worker, or None if the array is
        # absent.
        kept = fitted(self._xp, payloads, *[each for each in sizes if each[1] is not None])  # type: ignore[arg-type]
        columns: list[Any] = self._columns(kept)
        if len(columns) < len(sizes):
            taken = iter(columns)
            columns = [None if size is None else next(taken) for _, size in sizes]
        return kept, columns

    def _ragged(self, payloads: Pairs, sizes: Sequence[tuple[tuple[str, int], ...]]) -> tuple[Pairs, list[Any]]:
        # As `_received`, for payloads that may differ in size.
        kept = [fitted(self._xp, [payload], *each)[0] for payload, each in zip(payloads, sizes, strict=True)]
        return kept, self._columns(kept)

    def _ready(self, *arrays: Array) -> tuple[Array, ...]:
        return tuple(map(self._xp.buffers.contiguous, arrays))

    def _columns(self, payloads: Pairs) -> list[list[int]]:
        if isinstance(payloads, GatheredPayloads):
            return payloads.addresses()
        return [[self._at(array) for array in arrays] for arrays in zip(*payloads, strict=True)]


def encoder(name: str) -> Callable[..., tuple[tuple[Array, ...], Array]]:
    """Return the method ``encode(x, residual, *attributes)`` for one of `schema.CODECS`."""

    def encode(self: Family, x: Array, residual: Array | None, *how: Any) -> tuple[tuple[Array, ...], Array]:
        return self._encode(name, x, residual, (self._xp.shape(x)[0], *how))

    return encode


def averager(name: str) -> Callable[..., Array]:
    """Return the method ``mean(payloads, out, n, *attributes)`` for one of `schema.CODECS`."""

    def mean(self: Family, payloads: Pairs, out: Array | None, n: int, *how: Any) -> Array:
        return self._mean(name, payloads, out, (n, *how))

    return mean


def fitted(xp: Any, payloads: Pairs, *sizes: tuple[str, int]) -> Pairs:
    """Return the payloads, contiguous; ValueError for wrong dtypes or lengths, which kernels do not check."""
    if isinstance(payloads, GatheredPayloads) and payloads.layout == tuple([(dtype, (n,)) for dtype, n in sizes]):
        return payloads
    for payload in payloads:
        for array, (dtype, n) in zip(payload, sizes, strict=True):
            fitting(xp, array, dtype, n, "arrays")
    return [tuple(xp.buffers.contiguous(array) for array in payload) for payload in payloads]
