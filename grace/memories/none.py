"""No memory."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core import Array, Compressor, Context, MaybeProgram, Memory, Payload, State
from grace.core.registry import register


@register("none")
@dataclass(frozen=True)
class NoMemory(Memory):
    """Keep no state: compression errors are lost. Right for unbiased methods and for votes."""

    standard_feedback = True

    def compensate(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        return x, state

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        return state
