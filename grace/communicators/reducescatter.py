"""Compressed reduce-scatter: each worker receives the mean of its own row of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core import Array, Context, Memory, Program, State, join, name_of, scope
from grace.core.collectives import AllToAll
from grace.core.communicator import Communicator, refuse_agreed
from grace.core.method import Method
from grace.core.registry import register


@register("reducescatter")
@dataclass(frozen=True)
class ReduceScatter(Communicator):
    """Send row i of every worker's tensor, compressed, to worker i, which averages the rows it receives.

    For sharded training: `grace.torch.fsdp`. A tensor has one row for each of the N workers, and the result on a worker
    is the mean of its own row. Each row is compressed separately and has its own residual. A worker sends N - 1 rows,
    each with a flag byte that says whether the worker's whole gradient is finite. If any worker's flag is unset, the
    mean is NaN on all workers, so all of them keep their previous states.
    """

    reduce_scatters = True

    def check(self, method: Method, world_size: int) -> None:
        refuse_agreed("reducescatter", method)
        name = name_of(method.compressor)
        if method.compressor.traits.variable_length:
            raise ValueError(
                f"communicator 'reducescatter' cannot carry {name!r}, whose payloads differ in length between workers. "
                "Use a method with a fixed length, such as 'topk', 'chunktopk' or 'blockint'"
            )
        if type(method.memory).after_mean is not Memory.after_mean:
            raise ValueError(
                f"communicator 'reducescatter' cannot carry memory {name_of(method.memory)!r}, which tracks the mean "
                "of what the workers sent: no worker sees all of it. Use memory 'residual'"
            )

    def applies(self, method: Method, ctx: Context) -> bool:
        return method.compressor.applies(self.row(ctx, 0))

    def compression_points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        return {str(to): (method, self.row(ctx, to)) for to in range(ctx.world_size)}

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        xp, states, parts = ctx.xp, {}, []
        finite = xp.reshape(xp.cast(xp.finite(x), "uint8"), (1,))
        for to in range(ctx.world_size):
            row = self.row(ctx, to)
            mine = x[to * row.size : (to + 1) * row.size]
            payload, states[str(to)] = yield from method.encode(mine, scope(state, str(to)), row)
            parts.append((*payload, finite))
        received = yield AllToAll(tuple(parts))
        *payloads, flags = zip(*received, strict=True)
        mean = yield from method.decode(list(zip(*payloads, strict=True)), self.row(ctx, ctx.rank))
        mean = xp.choose(xp.all(xp.concat(flags) != 0), mean, xp.full(xp.shape(mean), float("nan"), ctx.dtype))
        return mean, join(**states)

    def row(self, ctx: Context, worker: int) -> Context:
        """The context of the row that ``worker`` averages."""
        size = ctx.size // ctx.world_size
        return ctx.piece(worker * size, size)
