"""Workers in this process: a single one, or several that run in lockstep and exchange messages through memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grace.core import Array, Transport
from grace.core.collectives import AllToAll, Collective, arrays_of
from grace.transports.launched import group_size
from grace.transports.messages import MessageTransport, Wait


class World:
    """State that the workers of one process share: the values that they have posted, by key."""

    def __init__(self, size: int):
        self.size = size
        self._posts: dict[Any, dict[int, Any]] = {}
        self._parts: dict[tuple[int, ...], World] = {}

    def part(self, ranks: list[int]) -> World:
        """The world of a subset of workers, the same object for each of them."""
        return self._parts.setdefault(tuple(ranks), World(len(ranks)))

    def post(self, key: Any, rank: int, value: Any) -> Callable[[], list[Any]]:
        """Post a value; returns a function that collects all workers' values, in rank order."""
        posts = self._posts.setdefault(key, {})
        posts[rank] = value

        def collect() -> list[Any]:
            if missing := [rank for rank in range(self.size) if rank not in posts]:
                raise RuntimeError(f"{key}: worker {rank} waits for worker {missing[0]}, which has not come so far")
            self._posts.pop(key, None)
            return [posts[rank] for rank in range(self.size)]

        return collect


class LocalTransport(MessageTransport):
    """One of ``world.size`` workers in this process; without a world, the only worker."""

    lockstep = True

    def __init__(self, world: World | None = None, rank: int = 0):
        self._world = world or World(1)
        self._round = 0
        self.rank, self.size = rank, self._world.size

    def bind(self, xp: Any) -> Transport:
        self.xp = xp
        return self

    def among(self, ranks: list[int]) -> LocalTransport:
        part = LocalTransport(self._world.part(ranks), ranks.index(self.rank))
        part.xp = self.xp
        return part

    def exchange(self, text: str) -> list[str]:
        return [text] * self.size  # workers in one process share their settings

    def begin(self, collectives: Sequence[Collective], name: str) -> Callable[[], list[Any]]:
        # On a network, workers whose programs differ would hang. Here an error names both workers' collectives.
        self._round += 1
        if self.size == 1:
            return super().begin(collectives, f"{name}.{self._round}")
        asked = self._world.post((self._round, name, "asked"), self.rank, [self._describe(c) for c in collectives])
        wait = super().begin(collectives, f"{name}.{self._round}")

        def checked() -> list[Any]:
            mine, *_ = everybody = asked()
            for rank, theirs in enumerate(everybody):
                if theirs != mine:
                    here, there = next(
                        (pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]),
                        (f"{len(mine)} collectives", f"{len(theirs)} collectives"),
                    )
                    raise RuntimeError(
                        f"mismatched collective in {name}: worker 0 asks for {here}, worker {rank} for {there}"
                    )
            return wait()

        return checked

    def _describe(self, collective: Collective) -> str:
        kind = type(collective).__name__
        ragged = getattr(collective, "ragged", False) or getattr(collective, "shapes", None) is not None
        details = [str(getattr(collective, field)) for field in ("op", "root") if hasattr(collective, field)]
        arrays = arrays_of(collective)
        if isinstance(collective, AllToAll):  # parts have the same shapes on all workers, unless ``mutual``
            details.append(f"{len(collective.parts)} parts{' between neighbours' * collective.mutual}")
            arrays = () if collective.mutual else arrays
        shapes = [
            f"{self.xp.dtype(array)}{['?', *self.xp.shape(array)[1:]] if ragged else list(self.xp.shape(array))}"
            for array in arrays
        ]
        return f"{kind}({', '.join(details + shapes)})"

    def _post(self, name: str, value: Any) -> Callable[[], list[Any]]:
        return self._world.post((self._round, name), self.rank, value)

    def reduce(self, buffer: Array, op: str, name: str) -> Wait:
        wait = self._post(name, buffer)
        combine = {"sum": lambda a, b: a + b, "min": self.xp.minimum, "max": self.xp.maximum}[op]

        def finish() -> Array:
            total, *rest = wait()
            for other in rest:
                total = combine(total, other)
            return total

        return finish

    def gather(self, buffer: Array, name: str) -> Wait:
        return self._post(name, buffer)

    gather_ragged = gather

    def broadcast(self, buffer: Array, root: int, name: str) -> Wait:
        wait = self._post(name, buffer)
        return lambda: wait()[root]

    broadcast_ragged = broadcast

    def all_to_all(self, buffers: list[Array], sizes: list[int], name: str) -> Wait:
        return self.all_to_all_ragged(buffers, name)

    def all_to_all_ragged(self, buffers: list[Array], name: str) -> Wait:
        wait = self._post(name, buffers)
        return lambda: [sent[self.rank] for sent in wait()]


class SingleWorker(LocalTransport):
    """The only worker, because no group existed when it was created."""

    def bind(self, xp: Any) -> Transport:
        self.check_workers()
        return super().bind(xp)

    def check_workers(self) -> None:
        if (size := group_size()) > 1:
            raise RuntimeError(
                f"this Grace looked for its workers before there was a group, so it is alone beside a group of {size}: "
                "initialise Horovod or torch.distributed before the optimizer is wrapped, tensors are built or "
                "world_size is read; grc.reset() goes on with the group. transport='local' trains this worker by itself"
            )
