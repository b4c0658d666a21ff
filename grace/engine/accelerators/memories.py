"""Kernels of memories."""

from __future__ import annotations

from typing import Any, TypeVar

from grace.core import Array, Compressor, Context, MaybeProgram, Payload, State
from grace.engine.accelerators.base import MemoryAccelerator, has
from grace.engine.workspace import accumulated, kernels
from grace.memories.decoupled import DecoupledMomentum
from grace.memories.dgc import DGC
from grace.memories.lowpass import LowPass
from grace.memories.momentum import Momentum
from grace.memories.residual import Residual

R = TypeVar("R", bound=Residual)


class Residuals(MemoryAccelerator[R]):
    """Accelerator of memories residual and decoupled_momentum."""

    def compensate(self, memory: R, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        return accumulated(ctx, x, state["residual"], memory.beta, memory.gamma), state


class FilteredResiduals(MemoryAccelerator[LowPass]):
    """Accelerator of memory lowpass. The plain `compensate` keeps the previous residual, which `update` reads."""

    def update(
        self, memory: LowPass, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context
    ) -> State:
        fresh = compressor.residual(x, payload, ctx)
        return memory.stored(accumulated(ctx, fresh, state["residual"], 1.0 - memory.rate, memory.rate), ctx)


class LocalMomentum(MemoryAccelerator[Momentum]):
    """Accelerator of memory momentum."""

    def compensate(self, memory: Momentum, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        x = accumulated(ctx, x, state["momentum"], memory.momentum, 1.0 - memory.momentum)
        return x, {"momentum": x}


class CorrectedMomentum(MemoryAccelerator[DGC]):
    """Accelerator of memory dgc."""

    def compensate(self, memory: DGC, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        if not has(ctx, "memories", "corrected"):
            return memory.compensate(x, state, ctx)
        x, u, v = memory.clipped(x, ctx), state["momentum"], state["residual"]
        u, v = kernels(ctx).memories.corrected(x, u, v, memory.momentum, memory.nesterov)
        return v, {"momentum": u, "residual": v}


ACCELERATORS: dict[type, MemoryAccelerator[Any]] = {
    DGC: CorrectedMomentum(),
    Residual: Residuals[Residual](),
    DecoupledMomentum: Residuals[DecoupledMomentum](),
    LowPass: FilteredResiduals(),
    Momentum: LocalMomentum(),
}
