"""The abstract communicator, and checks shared by several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from grace.core import Array, Combine, Context, Program, State, Transport, join, name_of
from grace.core.method import Method


class Communicator(ABC):
    """Averages a gradient over all workers.

    It decides where to compress: after an exact step, twice, or not at all.
    """

    reduce_scatters: ClassVar[bool] = False
    """Whether it reduce-scatters: dimension 0 indexes the workers; the result is the mean of this worker's row."""

    def check(self, method: Method, world_size: int) -> None:  # noqa: B027 - most have nothing to refuse
        """Raise ValueError, naming the remedy, for a method that it cannot carry."""

    def resolve(self, method: Method, transport: Transport) -> Communicator:
        """Resolve all settings that depend on the method and the workers."""
        return self

    def choice(self, method: Method, transport: Transport) -> str:
        """Why `resolve` returns another communicator, for the report; empty if it does not."""
        return ""

    def adopt_local_plan(self, transport: Transport) -> None:  # noqa: B027 - most need nothing
        """Elastic jobs: adopt this worker's own plan before the layout, without messages; see `create_groups`."""

    def create_groups(self, transport: Transport) -> None:  # noqa: B027 - most need nothing
        """Create the groups of workers. Called once on every worker, before the first exchange."""

    def applies(self, method: Method, ctx: Context) -> bool:
        """Whether to compress the tensor; if False, it goes dense and the report says so."""
        return method.compressor.applies(ctx)

    def compression_points(self, method: Method, ctx: Context) -> dict[str, tuple[Method, Context]]:
        """Compression points by name: the method and the elements. A single point is named ""."""
        return {"": (method, ctx)}

    def reason(self, method: Method, ctx: Context) -> str:
        """Why a tensor goes dense, for the report."""
        return f"{name_of(method.compressor)!r} does not apply to shape {list(ctx.shape)}"

    def method(self, method: Method, name: str) -> Method:
        """The method of one tensor."""
        return method

    def strategy(self, name: str) -> str:
        """The tensor's own strategy as text; empty if tensors have none."""
        return ""

    def threads(self, name: str) -> int:
        """Threads of the CPU pool for compressing a tensor; 0: none."""
        return 0

    @property
    def origin(self) -> str:
        """A description of the workers and data for which a plan was made, for the report."""
        return ""

    def init(self, method: Method, ctx: Context) -> State:
        """The method's state at each compression point, under the point's name."""
        states = {name: here.init(part) for name, (here, part) in self.compression_points(method, ctx).items()}
        return states[""] if "" in states else join(**states)

    @abstractmethod
    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Any, State]]:
        """float32[n] -> the mean over all workers, float32[n], bit-equal on all of them; and next state.

        A communicator that reduce-scatters returns float32[n / world_size]. x is donated. The mean may be a
        `grace.core.method.Lazy` mean.
        """


def refuse_agreed(name: str, method: Method) -> None:
    """Raise ValueError for a method whose workers agree on one payload while they compress."""
    if method.compressor.traits.combine is Combine.AGREED:
        raise ValueError(
            f"communicator {name!r} cannot carry {name_of(method.compressor)!r}, whose workers agree on one payload "
            "while they compress. Use communicator 'allreduce'"
        )


def machine_size(name: str, node_size: int, transport: Transport) -> int:
    """Workers per machine: a communicator's ``node_size``, or the launched number if that is 0."""
    size = node_size or transport.node_size
    if size < 1 or transport.size % size:
        raise ValueError(
            f"communicator {name!r} needs machines of equal size, but node_size={size} does not divide "
            f"{transport.size} workers: set node_size, or use another communicator"
        )
    return size
