"""Adam from compressed momenta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from grace.core import Array, Compressor, Context, Memory, Payload, Program, Resize, State
from grace.core.collectives import Reduce
from grace.core.registry import register
from grace.memories.residual import Residual

UNSEEN = 1e-4
"""A second moment below this fraction of the mean second moment counts as not learned in the warm-up."""


@register("onebit_adam")
@dataclass(frozen=True)
class OneBitAdam(Memory):
    """Adam that learns its second moment from exact means, then freezes it and compresses its update.

    For an optimizer without momentum (SGD): the result is Adam's update, momentum / (sqrt(second moment) + epsilon).
    During the warm-up, gradients are averaged exactly, in float32; payloads are sent as well, but not used yet. Then
    Adam's update plus the residual is compressed, best with compressor "efsignsgd" and its ``block_size``, over
    communicator "twostage", whose second compression has a residual of its own. Adam's bias correction is frozen
    together with the second moment.
    The paper compresses the momentum and divides by the root of the second moment afterwards, which amplifies the error
    where that moment is small, as for weights of mostly zero inputs; here the quotient is compressed.
    Departure from the paper: a frozen second moment does not follow later gradients, such as those of rare rows of an
    embedding or of unused experts, and a quotient has no bound if its divisor is almost zero. So if an element's
    second moment is below 1e-4 of the mean over the tensor's nonzero second moments, this mean replaces it; if all are
    zero, the gradient divided by its root mean square is sent. No element moves by more than
    max(1, (1 - beta1) / sqrt(1 - beta2)) learning rates per step, Adam's own bound (Kingma and Ba, section 2.1).
    State: momentum, residual, second float32[n], decay float32[2]; second and decay are equal on all workers.
    ``freeze_step``: number of warm-up steps; 15 to 20% of all. ``beta1``: decay of the momentum, in [0, 1). ``beta2``:
    decay of the second moment, in [0, 1). ``epsilon``: a positive number, added to the root of the second moment.
    Tang et al., "1-bit Adam", ICML 2021, arXiv:2102.02888, algorithm 1.
    """

    freeze_step: int = 1000
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    feedback = True
    includes_momentum = True
    second_stage = Residual()
    reshard: ClassVar[Mapping[str, Resize]] = {"momentum": Resize.MEAN, "residual": Resize.SUM}

    def __post_init__(self) -> None:
        if self.freeze_step < 1:
            raise ValueError(f"freeze_step={self.freeze_step!r} must be at least 1: there is a moment to learn")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)!r} must lie in [0, 1)")
        if not self.epsilon > 0:
            raise ValueError(f"epsilon={self.epsilon!r} must be positive")

    def init(self, ctx: Context) -> State:
        return {**self.init_dense(ctx), "residual": ctx.xp.zeros(ctx.size)}

    def compensate(self, x: Array, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        xp, n, warm = ctx.xp, ctx.size, self.warm(ctx)
        # During the warm-up request the exact mean, later the mean of empty arrays: one graph serves both phases.
        length = n * warm if isinstance(warm, bool) else n * xp.cast(warm, "int64")
        (mean,) = yield Reduce((x[:length],), "mean")
        mean = xp.reshape(xp.concat([mean, xp.zeros(n)])[:n], (n,))
        learned = self._learn(mean, state, ctx)
        momentum = state["momentum"] * self.beta1 + x * (1.0 - self.beta1)
        momentum = xp.choose(warm, learned["momentum"], momentum)
        kept = {**learned, "momentum": momentum, "residual": state["residual"]}
        return self._frozen(momentum, x, kept, ctx) + state["residual"], kept

    def update(self, x: Array, payload: Payload, compressor: Compressor, state: State, ctx: Context) -> State:
        kept = compressor.residual(x, payload, ctx)
        return {**state, "residual": ctx.xp.choose(self.warm(ctx), state["residual"], kept)}

    def after_mean(self, mean: Array, compressor: Compressor, state: State, ctx: Context) -> tuple[Array, State]:
        return ctx.xp.choose(self.warm(ctx), self._adam(state["momentum"], state, ctx), mean), state

    def init_dense(self, ctx: Context) -> State:
        zeros = ctx.xp.zeros(ctx.size, ctx.dtype)
        return {"momentum": zeros, "second": zeros, "decay": ctx.xp.full(2, 1.0)}

    def after_dense_mean(self, mean: Array, state: State, ctx: Context) -> tuple[Array, State]:
        # A dense tensor's means are exact and need no freezing, but all tensors must share one learning rate.
        xp = ctx.xp
        learned = self._learn(mean, state, ctx)
        momentum = state["momentum"] * self.beta1 + mean * (1.0 - self.beta1)
        update = xp.choose(
            self.warm(ctx), self._adam(momentum, learned, ctx), self._frozen(momentum, mean, learned, ctx)
        )
        return update, {**learned, "momentum": momentum}

    def warm(self, ctx: Context) -> Any:
        """Return whether the warm-up still learns the second moment."""
        return ctx.step < self.freeze_step

    def _learn(self, mean: Array, state: State, ctx: Context) -> State:
        xp, warm = ctx.xp, self.warm(ctx)
        momentum = state["momentum"] * self.beta1 + mean * (1.0 - self.beta1)
        second = state["second"] * self.beta2 + mean * mean * (1.0 - self.beta2)
        decay = state["decay"] * xp.asarray([self.beta1, self.beta2], "float32")
        return {
            "momentum": momentum,
            "second": xp.choose(warm, second, state["second"]),
            "decay": xp.choose(warm, decay, state["decay"]),
        }

    def _adam(self, momentum: Array, state: State, ctx: Context) -> Array:
        xp = ctx.xp
        start = xp.cast(1.0 - state["decay"], xp.dtype(momentum))
        return momentum / start[:1] / (xp.sqrt(state["second"] / start[1:]) + self.epsilon)

    def _frozen(self, momentum: Array, gradient: Array, state: State, ctx: Context) -> Array:
        # As `_adam`, with substitutes for second moments that the warm-up has not learned.
        xp, dtype, second = ctx.xp, ctx.xp.dtype(momentum), state["second"]
        number = xp.sum(xp.cast(second > 0, dtype))
        usual = xp.sum(second) / xp.maximum(number, 1.0)
        stand = xp.where(second >= UNSEEN * usual, second, xp.full(ctx.size, usual, dtype))
        ratio = self._adam(momentum, {**state, "second": stand}, ctx)
        alone = gradient / (xp.sqrt(xp.sum(gradient * gradient) / max(1, ctx.size)) + self.epsilon)
        ratio = xp.choose(number > 0, ratio, alone)
        bound = max(1.0, (1 - self.beta1) / (1 - self.beta2) ** 0.5)
        cut = xp.minimum(xp.maximum(ratio, -bound), bound)
        return xp.where(xp.isfinite(ratio), cut, ratio)  # non-finite values must stay visible
