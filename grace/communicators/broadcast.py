"""Collect all payloads by one broadcast from each worker."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core import Array, Context, Program, State
from grace.core.collectives import Broadcast as Send
from grace.core.communicator import Communicator, refuse_agreed
from grace.core.method import Method
from grace.core.registry import register


@register("broadcast")
@dataclass(frozen=True)
class Broadcast(Communicator):
    """As allgather, by one broadcast from each worker: for links and libraries whose gather is slow or missing."""

    def check(self, method: Method, world_size: int) -> None:
        refuse_agreed("broadcast", method)

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        payload, state = yield from method.encode(x, state, ctx)
        ragged = method.compressor.traits.variable_length
        payloads = yield tuple(Send(payload, root, ragged) for root in range(ctx.world_size))
        return method.finish(method.mean(payloads, ctx), state, ctx)
