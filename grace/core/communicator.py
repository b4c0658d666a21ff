"""The abstract communicator, and checks shared by several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from grace.core import Array, Combine, Context, Program, State, Transport, join, name_of
from grace.core.grid import Grid
from grace.core.method import Method


class Communicator(ABC):
    """Averages a gradient over all workers.

    It decides where to compress: for example after an exact mean on each machine, twice, or not at all.
    """

    reduce_scatters: ClassVar[bool] = False
    """Whether it reduce-scatters: x has one row per worker, and the result on a worker is the mean of its row."""
    rounds: ClassVar[int] = 1
    """Minimum number of consecutive messages that `reduce` sends, not counting those that the method requests."""

    def check(self, method: Method, world_size: int) -> None:  # noqa: B027 - most have nothing to refuse
        """Raise ValueError, naming the remedy, for a method that this communicator does not support."""

    def resolve(self, method: Method, transport: Transport) -> Communicator:
        """Return the communicator to use, with all settings that depend on the method and the workers."""
        return self

    def choice(self, method: Method, transport: Transport) -> str:
        """The reason why `resolve` returns another communicator, for the report; empty if it returns this one."""
        return ""

    def measure(self, method: Method, transport: Transport) -> bool:
        """Measure the links if `resolve` depends on them, and return whether it may now choose differently.

        Called once on every worker, when the backend is known, before `create_groups`.
        """
        return False

    def adopt_local_plan(self, transport: Transport) -> None:  # noqa: B027 - most need nothing
        """In an elastic job, adopt this worker's own plan, without messages. Called long before `create_groups`."""

    def grid(self, workers: int) -> Grid | None:
        """The grid whose lines are the groups in which `reduce` exchanges, for a number of workers; None if none is."""
        return None

    def create_groups(self, transport: Transport) -> None:
        """Create the groups of workers. Called once on every worker, before the first exchange."""
        if (grid := self.grid(transport.size)) is not None:
            transport.split_grid(grid)

    def applies(self, method: Method, ctx: Context) -> bool:
        """Whether to compress the tensor. If not, it "goes dense": it is averaged uncompressed, as the report says."""
        return method.compressor.applies(ctx)

    def compression_points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        """This worker's compression points by name: the method and the context of the elements that it compresses.

        A single point is named "".
        """
        return {"": (method, ctx)}

    def reason(self, method: Method, ctx: Context) -> str:
        """Why a tensor goes dense, for the report."""
        return f"{name_of(method.compressor)!r} does not apply to shape {list(ctx.shape)}"

    def method(self, method: Method, name: str) -> Method:
        """The method of the tensor ``name``; by default ``method``, the common one."""
        return method

    def strategy(self, name: str) -> str:
        """The strategy of the tensor ``name``, as text; empty if tensors have no strategies of their own."""
        return ""

    def threads(self, name: str) -> int:
        """Number of threads of the CPU pool that compresses the tensor ``name``; 0: no pool."""
        return 0

    @property
    def origin(self) -> str:
        """A description of the workers and data for which a plan was made, for the report."""
        return ""

    def init(self, method: Method, ctx: Context) -> State:
        """The initial state of the method at all compression points, each under the point's name."""
        states = {name: here.init(part) for name, (here, part) in self.compression_points(method, ctx).items()}
        return states[""] if "" in states else join(**states)

    @abstractmethod
    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Any, State]]:
        """Average x, float32[n], over all workers: returns the mean, bit-equal on all workers, and next state.

        A communicator that reduce-scatters returns float32[n / world_size]. x is donated. The mean may be a
        `grace.core.method.Undecoded` mean.
        """


def refuse_agreed(name: str, method: Method) -> None:
    """Raise ValueError for a method whose workers agree on one payload while they compress."""
    if method.compressor.traits.combine is Combine.AGREED:
        raise ValueError(
            f"communicator {name!r} cannot carry {name_of(method.compressor)!r}, whose workers agree on one payload "
            "while they compress. Use communicator 'allreduce'"
        )


def machine_size(name: str, node_size: int, transport: Transport) -> int:
    """Number of workers per machine: ``node_size``, or if that is 0, the number that the launcher started.

    ValueError, naming communicator ``name``, unless it divides the number of workers.
    """
    size = node_size or transport.node_size
    if size < 1 or transport.size % size:
        raise ValueError(
            f"communicator {name!r} needs machines of equal size, but node_size={size} does not divide "
            f"{transport.size} workers: set node_size, or use another communicator"
        )
    return size
