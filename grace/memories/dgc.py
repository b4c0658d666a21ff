"""Momentum correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from grace.core import Array, Compressor, Context, MaybeProgram, Memory, Payload, Resize, State, name_of
from grace.core.registry import register
from grace.memories.residual import Residual


@register("dgc")
@dataclass(frozen=True)
class DGC(Memory):
    """Accumulate the momentum, not the gradient, of unsent elements; clear momentum and residual of sent elements.

    u = momentum * u + gradient; v = v + u; v is compressed, then v and u are zeroed where elements were sent. For a
    tensor that goes dense, the result is u = momentum * u + mean. So the optimizer needs no momentum of its own.
    State: momentum float32[n] (u), residual float32[n] (v).
    ``momentum``: in [0, 1).
    ``gradient_clipping``: each worker scales a tensor's gradient down to a norm of at most this value divided by the
    square root of the number of workers; 0: no clipping. The paper clips by the norm of the whole model, which is
    unknown during the backward pass. ``nesterov``: look ahead by one step.
    ``masking``: False keeps the momentum of sent elements.
    Lin et al., "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887, sections 3.1-3.2, algorithm 1.
    """

    momentum: float = 0.9
    gradient_clipping: float = 0.0
    nesterov: bool = False
    masking: bool = True
    feedback = True
    includes_momentum = True
    second_stage = Residual()
    reshard: ClassVar[Mapping[str, Resize]] = {"momentum": Resize.MEAN, "residual": Resize.SUM}

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum!r} must lie in [0, 1)")
        if not self.gradient_clipping >= 0:
            raise ValueError(f"gradient_clipping={self.gradient_clipping!r} must be a norm, or 0 for no clipping")

    def check(self, compressor: Compressor) -> None:
        if not compressor.traits.sends_exact_values:
            raise ValueError(
                f"memory 'dgc' works with methods that send elements as they are, such as 'topk' or 'dgc'; "
                f"{name_of(compressor)!r} changes them. Use memory {compressor.traits.memory!r}"
            )

    def init(self, ctx: Context) -> State:
        return {"momentum": ctx.xp.zeros(ctx.size), "residual": ctx.xp.zeros(ctx.size)}

    def compensate(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Array, State]]:
        xp, x, u, v = ctx.xp, self.clipped(x, ctx), state["momentum"], state["residual"]
        u = xp.buffers.copy(u)  # the state before the exchange must stay intact until the exchange ends
        if not 0 < xp.piece < ctx.size:
            u, step = self._momentum(xp, x, u)
            return v + step, {**state, "momentum": u}
        for start in range(0, ctx.size, xp.piece):
            part = slice(start, start + xp.piece)
            _, step = self._momentum(xp, x[part], u[part])
            xp.buffers.write(x[part], v[part])
            xp.inplace.add(x[part], step)
        return x, {**state, "momentum": u}

    def clipped(self, x: Array, ctx: Context) -> Array:
        """The gradient, scaled down if its norm exceeds ``gradient_clipping``."""
        if not self.gradient_clipping:
            return x
        # Scale by the largest element, so that squares do not overflow.
        xp, largest = ctx.xp, ctx.xp.max(ctx.xp.abs(x))
        relative = x / xp.where(largest == 0, 1.0, largest)
        norm = largest * xp.sqrt(xp.sum(relative * relative))
        limit = self.gradient_clipping / ctx.world_size**0.5
        return x * xp.where(norm > limit, limit / xp.where(norm == 0, 1.0, norm), 1.0)

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        # Elements are sent exactly, so the residual of any vector is that vector without the sent positions.
        u = compressor.residual(state["momentum"], payload, ctx) if self.masking else state["momentum"]
        return {"momentum": u, "residual": compressor.residual(x, payload, ctx)}

    def init_dense(self, ctx: Context) -> State:
        return {"momentum": ctx.xp.zeros(ctx.size, ctx.dtype)}

    def after_dense_mean(self, mean: Array, state: State, ctx: Context) -> tuple[Array, State]:
        u, step = self._momentum(ctx.xp, mean, ctx.xp.buffers.copy(state["momentum"]))
        return step, {"momentum": u}

    def _momentum(self, xp: Any, g: Array, u: Array) -> tuple[Array, Array]:
        # Returns the next momentum and its contribution to v. u is donated.
        if self.nesterov:
            u = xp.inplace.multiply(xp.inplace.add(u, g), self.momentum)
            return u, u + g
        u = xp.inplace.add(xp.inplace.multiply(u, self.momentum), g)
        return u, u
