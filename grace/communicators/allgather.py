"""Gather all payloads on every worker."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core import Array, Context, Program, State
from grace.core.collectives import Gather
from grace.core.communicator import Communicator, refuse_agreed
from grace.core.method import Method
from grace.core.registry import register


@register("allgather")
@dataclass(frozen=True)
class Allgather(Communicator):
    """Send every payload to every worker; each worker decodes and averages all of them, in rank order.

    It carries any payload. Traffic grows with the number of workers N: beyond N = 64 / (bits per element) a plain
    float32 allreduce moves fewer bytes.
    """

    def check(self, method: Method, world_size: int) -> None:
        refuse_agreed("allgather", method)

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        payload, state = yield from method.encode(x, state, ctx)
        payloads = yield Gather(payload, ragged=method.compressor.traits.variable_length)
        return method.finish(method.mean(payloads, ctx), state, ctx)
