"""Kernels of memories."""

from __future__ import annotations

from typing import Any

from grace.core import Array, Context, State, Steps
from grace.engine.accelerators.base import MemoryAccelerator, has
from grace.memories.dgc import DGC


class CorrectedMomentum(MemoryAccelerator[DGC]):
    """dgc."""

    def compensate(self, memory: DGC, x: Array, state: State, ctx: Context) -> Steps[tuple[Array, State]]:
        if not has(ctx, "corrected"):
            return memory.compensate(x, state, ctx)
        x, u, v = memory.clipped(x, ctx), state["momentum"], state["residual"]
        u, v = ctx.kernels.corrected(x, u, v, memory.momentum, memory.nesterov)
        return v, {"momentum": u, "residual": v}


ACCELERATORS: dict[type, MemoryAccelerator[Any]] = {DGC: CorrectedMomentum()}
