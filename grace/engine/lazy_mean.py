"""Means and residuals that are computed chunk by chunk in their final memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from grace.backends.deferred import DeferredKernels
from grace.core import Array, Compressor, Context, Payload, Program
from grace.core.errors import sent_by
from grace.core.gathered import GatheredPayloads
from grace.core.method import Lazy
from grace.core.sharding import cut, cuttable, in_chunks, piece, pieces, strides
from grace.engine import accelerators
from grace.engine.accelerators import accelerator_of
from grace.engine.compiled import compiled
from grace.engine.host import host_backend, on_host
from grace.engine.workspace import workspace


class LazyMean(Lazy):
    """The mean of payloads, not decoded yet: it can be decoded chunk by chunk into its final memory."""

    def __init__(self, compressor: Compressor, payloads: Sequence[Payload], ctx: Context, agreed: bool = False):
        self._compressor, self._payloads, self._ctx, self._agreed = compressor, payloads, ctx, agreed

    @property
    def marked(self) -> bool:
        """Whether `marks` show if the mean is finite; otherwise only the decoded mean shows it."""
        return self._compressor.traits.nonfinite_in_payload

    def marks(self) -> list[Array]:
        """float32 vectors, all finite if and only if the mean is."""
        xp = self._ctx.xp
        floats = [array for payload in self._payloads for array in payload if xp.dtype(array) == "float32"]
        return [xp.reshape(array, (-1,)) for array in floats]

    @property
    def placed(self) -> bool:
        """Whether `places` are known: the payloads are parts of received messages."""
        return isinstance(self._payloads, GatheredPayloads)

    def places(self) -> list[tuple[int, int]]:
        """Address and length of each of the `marks`."""
        payloads: Any = self._payloads
        columns = zip(payloads.layout, payloads.addresses(), strict=True)
        return [
            (address, math.prod(shape)) for (dtype, shape), each in columns if dtype == "float32" for address in each
        ]

    def array(self, deferred: DeferredKernels | None = None) -> Array:
        """The mean, float32[n]; a kernel in ``deferred`` may fill it later. ValueError names a bad payload's sender."""
        xp, ctx = self._ctx.xp, self._ctx
        if xp.mutable and (xp.kernels or in_chunks(self._compressor, ctx)):
            return self.into(xp.buffers.empty(ctx.size, ctx.dtype), deferred)
        with self._named():
            return self._whole()

    def into(self, out: Array, deferred: DeferredKernels | None = None) -> Array:
        """As `array`, written to float32[n] ``out``."""
        with self._named():
            return self._into(out, deferred)

    def made(self) -> Program[Array]:
        """As `array`, within a program: kernels that decode the means of many tensors may then run together."""
        deferred = workspace(self._ctx).deferred
        array = self.array(deferred)
        if deferred:
            yield None  # wait until the deferred kernels have run
        return array

    @contextmanager
    def _named(self) -> Iterator[None]:
        # Name the sender in the error: the worker of the first payload that cannot be decoded by itself.
        try:
            yield
        except ValueError:
            for worker, payload, ctx in self._sent():
                with sent_by(worker, self._compressor, self._ctx):
                    self._compressor.decompress(payload, ctx)
            raise

    def _sent(self) -> Iterator[tuple[int | None, Payload, Context]]:
        # Each payload with its sender (None: all workers) and the context of its elements.
        for worker, payload in enumerate(self._payloads):
            yield None if self._agreed else worker, payload, self._ctx

    def _whole(self) -> Array:
        ctx = self._ctx
        found = self._hosted()
        if found is None and ctx.size:
            found = accelerators.mean(self._compressor, self._payloads, None, ctx)
        return self._decode(self._payloads, ctx) if found is None else found

    def _hosted(self) -> Array | None:
        # The mean by NumPy's kernels, as in `encode_hosted`.
        ctx, host, payloads = self._ctx, host_backend(self._ctx, self._compressor), self._payloads
        if host is None:
            return None
        each = len(payloads[0])

        def work(step: Any, *arrays: Any) -> list[Array]:
            parts = [arrays[i : i + each] for i in range(0, len(arrays), each)]
            with host.quiet():
                return [LazyMean(self._compressor, parts, on_host(ctx, host, step), self._agreed).array()]

        arrays = [ctx.xp.asarray(ctx.step, "int64"), *(array for payload in payloads for array in payload)]
        (mean,) = ctx.xp.hosted(work, arrays, [("float32", (ctx.size,))])
        return mean

    def _into(self, out: Array, deferred: DeferredKernels | None) -> Array:
        xp, ctx, compressor = self._ctx.xp, self._ctx, self._compressor
        if ctx.size == 0:
            return out
        if accelerators.mean(compressor, self._payloads, out, ctx, deferred) is not None:
            return out
        if not in_chunks(compressor, ctx):
            return self._decode_into(out, self._payloads, ctx)
        forms: Any = compiled(xp) if workspace(ctx).compile and not compressor.traits.lossless else None
        size, payloads, steps = piece(compressor, xp), list(self._payloads), strides(compressor, xp)
        for start, stop in pieces(compressor, ctx):
            parts = [cut(payload, steps, start, stop, ctx.size) for payload in payloads]
            here = ctx.piece(start, stop - start)
            fits = forms is not None and here.size == size
            if not (fits and forms.mean(compressor, out[start:stop], parts, self._agreed, here)):
                self._decode_into(out[start:stop], parts, here)
        return out

    def _decode_into(self, out: Array, payloads: Sequence[Payload], ctx: Context) -> Array:
        compressor, accelerator = self._compressor, accelerator_of(self._compressor)
        if self._agreed:
            return accelerator.decode_into(compressor, out, payloads[0], ctx)
        return accelerator.aggregate_into(compressor, out, payloads, ctx)

    def _decode(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        compressor, accelerator = self._compressor, accelerator_of(self._compressor)
        if self._agreed:
            return accelerator.decode(compressor, payloads[0], ctx)
        return accelerator.aggregate(compressor, payloads, ctx)


class LazyShardedMean(LazyMean):
    """The mean of a tensor whose consecutive shards have one payload each, not decoded yet."""

    def __init__(self, compressor: Compressor, payloads: Sequence[Payload], ctx: Context, shards: Sequence[Context]):
        super().__init__(compressor, payloads, ctx, agreed=True)
        self._shards = shards

    def _sent(self) -> Iterator[tuple[int | None, Payload, Context]]:
        yield from ((worker, self._payloads[worker], ctx) for worker, ctx in enumerate(self._shards))

    def _parts(self) -> Iterator[LazyMean]:
        for payload, ctx in zip(self._payloads, self._shards, strict=True):
            yield LazyMean(self._compressor, [payload], ctx, agreed=True)

    def _whole(self) -> Array:
        if not cuttable(self._compressor):
            return self._ctx.xp.concat([part._whole() for part in self._parts()])
        # Decode all shards at once: the graph is smaller.
        whole = tuple(map(self._ctx.xp.concat, zip(*self._payloads, strict=True)))
        return LazyMean(self._compressor, [whole], self._ctx, True)._whole()

    def _into(self, out: Array, deferred: DeferredKernels | None) -> Array:
        start = 0
        for part in self._parts():
            size = part._ctx.size
            part._into(out[start : start + size], deferred)
            start += size
        return out


class DeferredResidual:
    """A residual that is computed in its final memory. Until then x and the payload must not change."""

    def __init__(self, compressor: Compressor, x: Array, payload: Payload, ctx: Context):
        self.x, self._compressor, self._payload, self._ctx = x, compressor, payload, ctx

    def into(self, out: Array) -> None:
        """Write the residual to float32[n] ``out``, and the decoded payload over x."""
        compressor = self._compressor
        accelerator_of(compressor).split_residual(compressor, self.x, self._payload, out, self._ctx)


def all_finite(means: Sequence[LazyMean], xp: Any) -> bool:
    """Whether the marks of all these means are finite: a joint check is cheaper than one for each mean."""
    kernels = xp.kernels
    if kernels and kernels.arrays.finite and all(mean.placed for mean in means):
        places = [place for mean in means for place in mean.places()]
        return bool(kernels.arrays.finite([address for address, _ in places], [count for _, count in places]))
    return bool(xp.finite(xp.concat([array for mean in means for array in mean.marks()])))
