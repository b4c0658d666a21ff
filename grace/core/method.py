"""The pair of a compressor and a memory."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grace.core.compressor import Compressor
from grace.core.context import Context
from grace.core.memory import Memory
from grace.core.program import Program, as_program
from grace.core.state import Array, Payload, Resize, State, apart, join, name_of, scope


@dataclass(frozen=True)
class Method:
    """A compressor with its memory: all that a worker does at one compression point."""

    compressor: Compressor
    memory: Memory

    @property
    def feeds_back(self) -> bool:
        """Whether errors are sent in later steps: by the memory, or by the compressor's own residual."""
        return self.memory.feedback or self.compressor.traits.internal_feedback

    def check(self) -> None:
        """Raise ValueError for an invalid pair, and warn if a pair loses gradients."""
        compressor, traits, large = self.compressor, self.compressor.traits, 2**20
        name = name_of(compressor)
        if self.memory.feedback and traits.majority_vote:
            raise ValueError(
                f"memory {name_of(self.memory)!r} cannot feed back the error of a majority vote: use memory 'none' "
                f"with {name!r}, or compressor 'efsignsgd', which sends a scale with its signs"
            )
        if self.memory.feedback and traits.internal_feedback:
            raise ValueError(
                f"memory {name_of(self.memory)!r} would apply error feedback twice: {name!r} keeps its own residual. "
                "Use memory 'none'"
            )
        if self.memory.feedback and (compressor.variance(large) or 0) >= 1:
            raise ValueError(
                f"memory {name_of(self.memory)!r} diverges with {name!r} at these settings: its error can exceed the "
                "gradient. It is unbiased, so use memory 'none'"
            )
        if self.memory.feedback and traits.update_direction and traits.memory != name_of(self.memory):
            raise ValueError(
                f"memory {name_of(self.memory)!r} cannot feed back what {name!r} leaves out: its result is an update, "
                f"no estimate of the gradient. Use memory {traits.memory!r}, or 'none'"
            )
        self.memory.check(compressor)
        lossy = not traits.unbiased and not traits.majority_vote and traits.memory != "none"
        if lossy and not self.memory.feedback and traits.memory != name_of(self.memory):
            warnings.warn(
                f"{name!r} without error feedback loses what it does not send; use memory {traits.memory!r}",
                stacklevel=5,
            )

    def reshard(self, part: str) -> Mapping[str, Resize]:
        """Reshard rules by key for one part of the state, "memory" or "compressor"."""
        return self.memory.reshard if part == "memory" else self.compressor.traits.reshard

    def init(self, ctx: Context) -> State:
        return join(memory=self.memory.init(ctx), compressor=self.compressor.init(ctx))

    def encode(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        """Compensate, compress, update the memory. x is donated, and may become part of the next state."""
        memory, kept = scope(state, "memory"), scope(state, "compressor")
        x, memory = yield from as_program(self.memory.compensate(x, memory, ctx))
        payload, kept = yield from as_program(self.compressor.compress(x, kept, ctx))
        payload = apart(payload, (x,), ctx.xp)
        memory = self.memory.update(x, payload, self.compressor, memory, ctx)
        return payload, join(memory=memory, compressor=kept)

    @property
    def for_second_stage(self) -> Method:
        """The method for a second compression, of a mean: the same compressor with the memory's ``second_stage``."""
        return self if self.memory.second_stage is None else replace(self, memory=self.memory.second_stage)

    def like(self, other: Method) -> Method:
        """The compressor and memory of ``other``, as a method of this one's class."""
        return type(self)(other.compressor, other.memory)

    def mean(self, payloads: Sequence[Payload], ctx: Context, agreed: bool = False) -> Any:
        """Return the mean, float32[n], of all workers' payloads in rank order; if ``agreed``, of their common payload.

        An engine may return an `Undecoded` mean.
        """
        return self.compressor.decompress(payloads[0], ctx) if agreed else self.compressor.aggregate(payloads, ctx)

    def decode(self, payloads: Sequence[Payload], ctx: Context, agreed: bool = False) -> Program[Array]:
        """As `mean`, but always decoded to float32[n], for a program that computes with the result."""
        yield from ()
        return materialize(self.mean(payloads, ctx, agreed))

    def mean_of_shards(
        self, payloads: Sequence[Payload], ctx: Context, shards: Sequence[Context], senders: Sequence[int] = ()
    ) -> Any:
        """Return the tensor, float32[n], decoded from one payload for each of its consecutive ``shards``.

        ``senders``: the ranks that sent them, for an error message; by default 0, 1, ...
        """
        parts = zip(payloads, shards, strict=True)
        return ctx.xp.concat([self.compressor.decompress(payload, shard) for payload, shard in parts])

    def finish(self, mean: Any, state: State, ctx: Context) -> tuple[Any, State]:
        """Apply the memory's `after_mean` to the mean of all workers' payloads."""
        if type(self.memory).after_mean is Memory.after_mean:
            return mean, state
        mean = materialize(mean)
        mean, memory = self.memory.after_mean(mean, self.compressor, scope(state, "memory"), ctx)
        return mean, join(memory=memory, compressor=scope(state, "compressor"))


class Undecoded(ABC):
    """A mean that an engine has not decoded yet."""

    @abstractmethod
    def array(self, out: Array | None = None) -> Array:
        """Return the decoded mean, float32[n], in ``out`` if given."""


def materialize(mean: Any) -> Array:
    """Return a mean as float32[n], and decode it first if necessary."""
    return mean.array() if isinstance(mean, Undecoded) else mean
