"""What a communicator is, and what several of them ask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from grace.core import Array, Combine, Context, Program, State, Transport, join, name_of
from grace.core.method import Method


class Communicator(ABC):
    """A gradient's way to the mean over all workers.

    It owns the order, so it may compress after an exact step, twice, or not at all.
    """

    scattered: ClassVar[bool] = False
    """A tensor's first dimension is the workers: the result is the mean of this worker's row, and no other's."""

    def check(self, method: Method, world_size: int) -> None:  # noqa: B027 - most have nothing to refuse
        """Raise ValueError, naming the remedy, when this method cannot travel this way."""

    def fitted(self, method: Method, transport: Transport) -> Communicator:
        """This communicator with everything settled that follows from the method and the workers."""
        return self

    def lay(self, transport: Transport) -> None:  # noqa: B027 - most need nothing
        """Where nothing may be said to others yet, before tensors are laid out: settle alone what `prepare` checks."""

    def prepare(self, transport: Transport) -> None:  # noqa: B027 - most need nothing
        """Once, before the first exchange, on every worker: ask the transport for the groups that it needs."""

    def applies(self, method: Method, ctx: Context) -> bool:
        """False: this tensor goes dense, and the report says so."""
        return method.compressor.applies(ctx)

    def points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        """Where it compresses: by a name each, the method and the elements. One point needs no name: ""."""
        return {"": (method, ctx)}

    def reason(self, method: Method, ctx: Context) -> str:
        """Why a tensor goes dense that it does not apply to, for the report."""
        return f"{name_of(method.compressor)!r} does not apply to shape {list(ctx.shape)}"

    def method(self, method: Method, name: str) -> Method:
        """The method of one tensor, where it is not that of all."""
        return method

    def strategy(self, name: str) -> str:
        """How a tensor travels, as text, where tensors do not all travel alike."""
        return ""

    def threads(self, name: str) -> int:
        """How many threads of the CPU may work on a tensor and on others beside the one that computes gradients."""
        return 0

    @property
    def origin(self) -> str:
        """What strategies were made for and from, for the report, where they were planned."""
        return ""

    def init(self, method: Method, ctx: Context) -> State:
        """One method state for each point where it compresses, under its name."""
        states = {name: here.init(part) for name, (here, part) in self.points(method, ctx).items()}
        return states[""] if "" in states else join(**states)

    @abstractmethod
    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Any, State]]:
        """float32[n] -> float32[n], the mean over all workers, bit-equal on all of them; and next state.

        Of a ``scattered`` communicator, float32[n / world_size]. x is spent. The mean may be a
        `grace.core.method.Lazy` one.
        """


def refuse_agreed(name: str, method: Method) -> None:
    """Raise ValueError for a method that has nothing left to exchange."""
    if method.compressor.combine is Combine.AGREED:
        raise ValueError(
            f"communicator {name!r} cannot carry {name_of(method.compressor)!r}, whose workers agree on one payload "
            "while they compress. Use communicator 'allreduce'"
        )


def machine_size(name: str, node_size: int, transport: Transport) -> int:
    """Workers of a machine, for a communicator's ``node_size``; 0: as they were launched."""
    size = node_size or transport.node_size
    if size < 1 or transport.size % size:
        raise ValueError(
            f"communicator {name!r} needs machines of equal size, but node_size={size} does not divide "
            f"{transport.size} workers: set node_size, or use another communicator"
        )
    return size
