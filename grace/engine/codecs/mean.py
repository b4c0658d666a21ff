"""Means that are decoded after the state is committed: until then, the memory for the mean may hold residuals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from grace.core import Array, Compressor, Context, Payload
from grace.core.errors import sent_by
from grace.core.gathered import GatheredPayloads
from grace.core.method import Undecoded
from grace.core.sharding import cut, cuttable, in_chunks, pieces, strides
from grace.engine.codecs.table import mean
from grace.engine.host import host_backend, on_host


class Part(NamedTuple):
    """Consecutive elements of a mean."""

    payloads: Sequence[Payload]
    ctx: Context
    agreed: bool
    """Whether all workers agreed on the one payload, or a single worker sent it."""
    sender: int | None = None
    """The worker that sent the one payload; None: all workers, in order."""


class PendingMean(Undecoded):
    """The mean of a tensor's payloads, float32[n]: one part, or consecutive shards with one payload each."""

    def __init__(self, compressor: Compressor, parts: Sequence[Part], ctx: Context):
        self._compressor, self._parts, self._ctx = compressor, parts, ctx

    @property
    def marked(self) -> bool:
        """Whether `marks` show if the mean is finite; otherwise only the decoded mean shows it."""
        return self._compressor.traits.nonfinite_in_payload

    def marks(self) -> list[Array]:
        """Return float32 vectors of the payloads, which are all finite if and only if the mean is."""
        xp = self._ctx.xp
        arrays = [array for part in self._parts for payload in part.payloads for array in payload]
        return [xp.reshape(array, (-1,)) for array in arrays if xp.dtype(array) == "float32"]

    def places(self) -> list[tuple[int, int]] | None:
        """Address and length of each of the `marks`; None unless all payloads are parts of received messages."""
        found = []
        for part in self._parts:
            payloads: Any = part.payloads
            if not isinstance(payloads, GatheredPayloads):
                return None
            for (dtype, shape), each in zip(payloads.layout, payloads.addresses(), strict=True):
                found += [(address, math.prod(shape)) for address in each if dtype == "float32"]
        return found

    def array(self, out: Array | None = None) -> Array:
        """Return the mean, float32[n], in a given ``out`` if arrays are mutable. ValueError names a bad sender."""
        xp, ctx = self._ctx.xp, self._ctx
        if not xp.mutable:
            out = None
        elif out is None and (xp.kernels or in_chunks(self._compressor, ctx)):
            out = xp.buffers.empty(ctx.size, ctx.dtype)
        try:
            if out is None:
                return self._made()
            start = 0
            for part in self._parts:
                self._write(part, out[start : start + part.ctx.size] if len(self._parts) > 1 else out)
                start += part.ctx.size
            return out
        except ValueError:
            self._name_sender()
            raise

    def _name_sender(self) -> None:
        # Decode the payloads one by one: the first invalid one raises a ValueError that names its sender.
        for part in self._parts:
            for number, payload in enumerate(part.payloads):
                worker = None if part.agreed else number
                with sent_by(worker if part.sender is None else part.sender, self._compressor, self._ctx):
                    self._compressor.decompress(payload, part.ctx)

    def _made(self) -> Array:
        # Returns the mean in new memory.
        xp, compressor, parts = self._ctx.xp, self._compressor, self._parts
        if len(parts) == 1:
            return self._decoded(parts[0])
        if not cuttable(compressor):
            return xp.concat([self._decoded(part) for part in parts])
        # Decode all shards at once, which makes a smaller graph.
        whole = tuple(map(xp.concat, zip(*(part.payloads[0] for part in parts), strict=True)))
        return self._decoded(Part([whole], self._ctx, agreed=True))

    def _decoded(self, part: Part) -> Array:
        found = self._hosted(part)
        if found is None and part.ctx.size:
            found = mean(self._compressor, part.payloads, None, part.ctx)
        return self._plain(part) if found is None else found

    def _plain(self, part: Part) -> Array:
        if part.agreed:
            return self._compressor.decompress(part.payloads[0], part.ctx)
        return self._compressor.aggregate(part.payloads, part.ctx)

    def _hosted(self, part: Part) -> Array | None:
        # Returns the mean by NumPy's kernels, as `grace.engine.host.encode_hosted` encodes; None if not faster.
        ctx, host, payloads = part.ctx, host_backend(part.ctx, self._compressor), part.payloads
        if host is None:
            return None
        each = len(payloads[0])

        def work(step: Any, *arrays: Any) -> list[Array]:
            here = on_host(ctx, host, step)
            received = [arrays[i : i + each] for i in range(0, len(arrays), each)]
            with host.quiet():
                return [PendingMean(self._compressor, [Part(received, here, part.agreed)], here).array()]

        arrays = [ctx.xp.asarray(ctx.step, "int64"), *(array for payload in payloads for array in payload)]
        (found,) = ctx.xp.hosted(work, arrays, [("float32", (ctx.size,))])
        return found

    def _write(self, part: Part, out: Array) -> None:
        xp, ctx, compressor = part.ctx.xp, part.ctx, self._compressor
        if ctx.size == 0 or mean(compressor, part.payloads, out, ctx) is not None:
            return
        for start, stop, piece in self._pieces(part):
            xp.buffers.write(out[start:stop], self._plain(piece))

    def _pieces(self, part: Part) -> Iterator[tuple[int, int, Part]]:
        # Yields (start, stop, part) of chunks that fit a cache, or of the whole if the method has none.
        compressor, ctx = self._compressor, part.ctx
        if not in_chunks(compressor, ctx):
            yield 0, ctx.size, part
            return
        steps = strides(compressor, ctx.xp)
        for start, stop in pieces(compressor, ctx):
            payloads = [cut(payload, steps, start, stop, ctx.size) for payload in part.payloads]
            yield start, stop, part._replace(payloads=payloads, ctx=ctx.piece(start, stop - start))


def all_finite(means: Sequence[PendingMean], xp: Any) -> bool:
    """Return whether the marks of all these means are finite: a joint check is cheaper than one for each mean."""
    kernels = xp.kernels
    if kernels and kernels.arrays.finite:
        found = [mean.places() for mean in means]
        if None not in found:
            places = [place for each in found for place in each or ()]
            return bool(kernels.arrays.finite([address for address, _ in places], [count for _, count in places]))
    return bool(xp.finite(xp.concat([array for mean in means for array in mean.marks()])))
