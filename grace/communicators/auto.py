"""The default communicator, which chooses among the others."""

from __future__ import annotations

from dataclasses import dataclass

from grace.communicators.allgather import Allgather
from grace.communicators.allreduce import Allreduce
from grace.communicators.hierarchical import Hierarchical
from grace.communicators.twostage import TwoStage
from grace.core import Array, Combine, Context, Program, State, Transport, name_of
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.registry import register

MIN_SHARD = 2**14
"""Minimum number of elements per shard: smaller shards take longer to handle than to send."""


@register("auto")
@dataclass(frozen=True)
class Auto(Communicator):
    """Choose the communicator with the fewest bytes on the busiest link for this method and these workers; the default.

    Payloads that can be summed, or that the workers agreed on, go by ``allreduce``. Other payloads go by ``allgather``
    between two workers, and by ``twostage`` between more, with shards of at least 16,384 elements. If each of several
    machines has several workers, they go by ``hierarchical``, and this rule chooses the communicator between machines.
    Low-rank factors, and methods that ``twostage`` cannot carry, go by ``allgather``. The choice depends only on the
    method and the workers, so all workers make the same one; `Grace.report` names it.
    """

    def resolve(self, method: Method, transport: Transport) -> Communicator:
        chosen, _ = _among(method, transport)
        return chosen.resolve(method, transport)

    def choice(self, method: Method, transport: Transport) -> str:
        return _among(method, transport)[1]

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        raise TypeError("communicator 'auto' is a choice among others: call resolve(method, transport) first")


def _among(method: Method, transport: Transport) -> tuple[Communicator, str]:
    return choose(method, transport.size, transport.node_size if transport.splits else 1)


def choose(method: Method, workers: int, per_machine: int) -> tuple[Communicator, str]:
    """The default communicator of a method, and the reason. ``workers``: in total; ``per_machine``: on each machine."""
    name = name_of(method.compressor)
    if method.compressor.traits.combine is not Combine.GATHER:
        return Allreduce(), f"payloads of {name!r} are summed on the wire, or agreed on"
    if 1 < per_machine < workers and workers % per_machine == 0:
        outer, why = choose(method, workers // per_machine, 1)
        return Hierarchical(outer, per_machine), f"exact within each machine; between machines {why}"
    if workers < 3:
        return Allgather(), "one round of payloads is as few bytes as two"
    twostage = TwoStage(min_shard=MIN_SHARD)
    if method.compressor.traits.family == "low rank":
        return Allgather(), "the factors of shards are together larger than those of the tensor"
    if twostage.refusal(method):
        return Allgather(), f"memory {name_of(method.memory)!r} forbids a second compression"
    return twostage, f"{2 * (workers - 1) / workers:.3g} payloads per worker instead of {workers - 1}"
