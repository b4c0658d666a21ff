"""The base of memories that track the mean of all workers' estimates."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from grace.core import Array, Compressor, Context, MaybeProgram, Memory, Program, State
from grace.core.collectives import Reduce


@dataclass(frozen=True, repr=False)
class TracksMean(Memory):
    """A memory with this worker's "estimate" and, equal on all workers, the "mean" of all estimates."""

    refresh: int = field(default=0, kw_only=True)
    feedback = True

    def __post_init__(self) -> None:
        if self.refresh < 0:
            raise ValueError(
                f"refresh={self.refresh!r} must be 0 or more: a number of steps; 0 never refreshes the mean"
            )

    def __repr__(self) -> str:
        # Without refresh=0: checkpoints, also those from before this field, hold the text.
        shown = [each.name for each in fields(self) if each.name != "refresh" or self.refresh]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def after_mean(self, mean: Array, compressor: Compressor, state: State, ctx: Context) -> tuple[Array, State]:
        mean = state["mean"] + mean
        return mean, {**state, "mean": mean}

    def refreshed(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        """Return x, and the state with the part of "mean" that is due replaced by the exact mean of the estimates."""
        return self._exchange(x, state, ctx) if self.refresh else (x, state)

    def _exchange(self, x: Array, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        xp, count = ctx.xp, -(-ctx.size // self.refresh)
        if not count:  # an empty shard takes part, as all workers must have the same number of rounds
            yield Reduce((xp.zeros(1),))
            return x, state
        places = (xp.arange(count, "int64") + ctx.step % self.refresh * count) % ctx.size
        (exact,) = yield Reduce((xp.take(state["estimate"], places),))
        return x, {**state, "mean": xp.scatter(state["mean"], places, exact)}
