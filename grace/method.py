"""A compressor with its memory: how they work together on a gradient."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from grace import execution
from grace.core import Array, Compressor, Context, Memory, Payload, Program, State, apart, join, name_of, run, scope
from grace.execution import Mean, Rest, as_array


@dataclass(frozen=True)
class Method:
    """A compressor with its memory: all that happens to a gradient at one point of compression."""

    compressor: Compressor
    memory: Memory

    def check(self) -> None:
        """Raise ValueError for a pair that cannot work, and warn of one that loses gradients."""
        compressor, large = self.compressor, 2**20
        name = name_of(compressor)
        if self.memory.feedback and compressor.vote:
            raise ValueError(
                f"memory {name_of(self.memory)!r} cannot feed back what a vote lost: use memory 'none' with {name!r}, "
                "or compressor 'efsignsgd', which sends a scale with its signs"
            )
        if self.memory.feedback and compressor.feedback:
            raise ValueError(
                f"memory {name_of(self.memory)!r} would feed back twice: {name!r} keeps by itself what it did not "
                "send. Use memory 'none'"
            )
        if self.memory.feedback and (compressor.variance(large) or 0) >= 1:
            raise ValueError(
                f"memory {name_of(self.memory)!r} diverges with {name!r} as it is set: its error can exceed the "
                "gradient. It is unbiased, so use memory 'none'"
            )
        self.memory.check(compressor)
        lossy = not compressor.unbiased and not compressor.vote and compressor.memory != "none"
        if lossy and not self.memory.feedback and compressor.memory != name_of(self.memory):
            warnings.warn(
                f"{name!r} without error feedback loses what it does not send; use memory {compressor.memory!r}",
                stacklevel=4,
            )

    def init(self, ctx: Context) -> State:
        return join(memory=self.memory.init(ctx), compressor=self.compressor.init(ctx))

    def encode(self, x: Array, state: State, ctx: Context, late: bool = False) -> Program[tuple[Payload, State]]:
        """compensate -> compress -> update. x is spent: its memory may be reused, also for the next state.

        ``late``: a residual may come as a `grace.execution.Rest`, to be worked out where it is kept.
        """
        done = execution.encode_hosted(self, x, state, ctx)
        if done is None:
            done = execution.encode(self.compressor, self.memory, x, state, ctx)
        if done is not None:
            if ctx.calls:
                yield ctx.calls
            return done
        memory, kept, program = scope(state, "memory"), scope(state, "compressor"), None
        if self.memory.plain and "residual" in memory and ctx.xp.mutable:
            program = self.compressor.compensated(x, memory["residual"], kept, ctx)
        # Of a mask, whose residual changes only where something was sent, there is nothing to part.
        late = late and not self.compressor.mask and self.memory.plain and "residual" in memory and bool(ctx.xp.piece)
        if program is None:
            if self.compressor.tail and self.memory.plain:
                ctx = ctx.with_tail()
            # A residual that is worked out later has x parted into the last one's memory, so it must not lie there.
            x, memory = yield from run(self.memory.compensate(x, memory, ctx.without_undo() if late else ctx))
            program = run(self.compressor.compress(x, kept, ctx))
        payload, kept = yield from program
        payload = apart(payload, (x,), ctx.xp)
        if late:
            memory = {"residual": Rest(self.compressor, x, payload, ctx)}
        else:
            memory = self.memory.update(x, payload, self.compressor, memory, ctx)
        return payload, join(memory=memory, compressor=kept)

    @property
    def again(self) -> Method:
        """What compresses a mean: this method, with the memory that is for a second compression."""
        return self if self.memory.server is None else replace(self, memory=self.memory.server)

    def mean(self, payloads: Sequence[Payload], ctx: Context, agreed: bool = False) -> Mean:
        """The mean of all workers' payloads, in rank order, or of the one payload that they ``agreed`` on.

        It is not decoded yet: ``.array()`` gives float32[n], ``.into(out)`` writes it there.
        """
        return Mean(self.compressor, payloads, ctx, agreed)

    def finish(self, mean: Array | Mean, state: State, ctx: Context) -> tuple[Any, State]:
        """What the memory makes of the mean of all workers' payloads."""
        if type(self.memory).finish is Memory.finish:
            return mean, state
        mean = as_array(mean)
        mean, memory = self.memory.finish(mean, self.compressor, scope(state, "memory"), ctx)
        return mean, join(memory=memory, compressor=scope(state, "compressor"))
