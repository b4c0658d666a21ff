"""The accelerator interface; its defaults run the plain functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from grace.core import Array, Compressor, Context, MaybeProgram, Memory, Payload, Program, State, apart
from grace.engine.workspace import accumulated

C = TypeVar("C", bound=Compressor)
M = TypeVar("M", bound=Memory)


class Accelerator(Generic[C]):
    """Native kernels and in-place versions of one compressor type. Results equal the plain functions'.

    The engine calls `encode` and `mean` only if the backend has kernels (a backend may lack some of them);
    `compensated`, `split_residual` and the methods ending in ``_into`` only if arrays are mutable (``ctx.xp.mutable``).
    A subclass overrides the methods that it accelerates; all others run the compressor's plain functions.
    """

    def encode(self, compressor: C, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
        """Compress x + residual with a kernel: its payload and the new residual, or None without a kernel.

        x is donated. If ``residual`` is None, the second result is unused.
        """
        return None

    def compress(self, compressor: C, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        """Run `Compressor.compress`, if `encode` returned None or the memory does not use standard error feedback."""
        return compressor.compress(x, state, ctx)

    def compensated(
        self, compressor: C, x: Array, residual: Array, state: State, ctx: Context
    ) -> tuple[Array, Program[tuple[Payload, State]]] | None:
        """Compress x + residual, with the addition fused into the first pass over x; None if this is not supported.

        Replaces `compress`. Returns an array and a program that compresses; once the program has returned, the array
        holds x + residual. x is donated.
        """
        return None

    def residual(self, compressor: C, x: Array, payload: Payload, ctx: Context) -> Array:
        """`Compressor.residual`. x is donated."""
        return compressor.residual(x, payload, ctx)

    def split_residual(self, compressor: C, x: Array, payload: Payload, residual: Array, ctx: Context) -> None:
        """Write the residual of x to float32[n] ``residual``, and then the decoded payload to x."""
        xp = ctx.xp
        xp.buffers.write(residual, x)
        found = self.residual(compressor, residual, payload, ctx)
        if not xp.buffers.same_memory(found, residual):
            xp.buffers.write(residual, found)
        self.decode_into(compressor, x, payload, ctx)

    def mean(self, compressor: C, payloads: Sequence[Payload], out: Array | None, ctx: Context) -> Array | None:
        """`Compressor.aggregate` by a kernel, written to ``out`` if given; None without a kernel."""
        return None

    def decode(self, compressor: C, payload: Payload, ctx: Context) -> Array:
        """`Compressor.decompress`."""
        return compressor.decompress(payload, ctx)

    def decode_into(self, compressor: C, out: Array, payload: Payload, ctx: Context) -> Array:
        """`decode`, written to float32[n] ``out``."""
        ctx.xp.buffers.write(out, self.decode(compressor, payload, ctx))
        return out

    def aggregate(self, compressor: C, payloads: Sequence[Payload], ctx: Context) -> Array:
        """`Compressor.aggregate`."""
        if type(compressor).aggregate is not Compressor.aggregate:
            return compressor.aggregate(payloads, ctx)
        total = self._total(compressor, payloads, ctx)
        return ctx.xp.inplace.divide(total, len(payloads)) if len(payloads) > 1 else total

    def aggregate_into(self, compressor: C, out: Array, payloads: Sequence[Payload], ctx: Context) -> Array:
        """`aggregate`, written to float32[n] ``out``."""
        if type(compressor).aggregate is Compressor.aggregate and len(payloads) > 1:
            return ctx.xp.divided(self._total(compressor, payloads, ctx), len(payloads), out)
        ctx.xp.buffers.write(out, self.aggregate(compressor, payloads, ctx))
        return out

    def add_decoded(self, compressor: C, total: Array, payload: Payload, ctx: Context) -> Array:
        """float32[n] ``total`` + `decode`. total is donated."""
        return ctx.xp.inplace.add(total, self.decode(compressor, payload, ctx))

    def for_memory(self, compressor: C) -> Any:
        """The compressor that a memory receives: its `residual` is this accelerator's."""
        return compressor if type(self).residual is Accelerator.residual else Accelerated(compressor, self)

    @property
    def encodes(self) -> bool:
        """Whether the compressor may have an encode kernel."""
        return type(self).encode is not Accelerator.encode

    def _total(self, compressor: C, payloads: Sequence[Payload], ctx: Context) -> Array:
        (total,) = apart((self.decode(compressor, payloads[0], ctx),), payloads[0], ctx.xp)
        for payload in payloads[1:]:
            total = self.add_decoded(compressor, total, payload, ctx)
        return total


def has(ctx: Context, family: str, kernel: str) -> bool:
    """Whether the backend has this kernel."""
    found = ctx.xp.kernels
    return bool(found and getattr(getattr(found, family), kernel))


def at_once_encoded(
    compressor: Compressor, encode: Callable[[Array], Payload], x: Array, residual: Array | None, ctx: Context
) -> tuple[Payload, Array]:
    """Implement `Accelerator.encode` with ``encode``, which compresses a whole vector and reads it immediately."""
    if residual is None:
        return encode(x), x
    x = accumulated(ctx, x, residual)
    payload = encode(x)
    return payload, compressor.residual(x, payload, ctx)


class MemoryAccelerator(Generic[M]):
    """Native kernels of one memory type. Results equal the plain functions'."""

    def compensate(self, memory: M, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        """`Memory.compensate`."""
        return memory.compensate(x, state, ctx)

    def update(
        self, memory: M, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context
    ) -> State:
        """`Memory.update`."""
        return memory.update(x, payload, compressor, state, ctx)


class Accelerated(Generic[C]):
    """The compressor that a memory receives: only its `residual` is the accelerator's."""

    def __init__(self, compressor: C, accelerator: Accelerator[C]):
        self._compressor, self._accelerator = compressor, accelerator

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        return self._accelerator.residual(self._compressor, x, payload, ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compressor, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._compressor)
