"""Sparsification by the variance of the gradient."""

from __future__ import annotations

from dataclasses import dataclass

from grace.compressors.sparse import Placed, signed, unsigned
from grace.core import Array, Context, MaybeProgram, Payload, Resize, State, Traits
from grace.core.registry import register
from grace.ops.validate import fitting

EXPONENT, HALF, MANTISSA = 0x7F800000, 1 << 22, 23
"""Of a float32 number: the mask of the exponent, the top bit of the mantissa, and the bits of the mantissa."""


@register("variance")
@dataclass(frozen=True)
class Variance(Placed):
    """Send an element when its accumulated gradient is large compared with the variance of that gradient.

    With r the sum of an element's gradients and v the sum of their squares since it was last sent, the element is sent
    if r² > alpha v. Then r and v become 0; otherwise v is multiplied by zeta. An element is sent as a sign and one of
    the eight powers of two from s down to s / 128, the nearest one to its magnitude, where s is the power of two at or
    below the largest magnitude of r. The rounding error, less than half of the element, is not kept. An element too
    small for this code waits.
    The paper adds up the squares of single samples' gradients, each divided by the batch size. A worker here has only
    the mean gradient of its mini-batch, so each step counts as one sample: v holds the whole square of the mean, where
    samples leave 1 / batch size of it, and an element waits for more than about alpha steps even without noise. A mean
    of what was sent would wait again, so it is not compressed a second time (communicator "twostage").
    Payload: words int32[K], 8 * position + d, as -1 - word where the element is negative, for the value s / 2**d; s
    float32[1]. State: residual float32[n] (r) and squares float32[n] (v), so use memory "none", the default.
    ``alpha``: a positive number; the paper's range is 1 to 2. Below 1, an element's first gradient is sent at once.
    ``zeta``: the factor of v in each step, in (0, 1].
    Tensors of 2**28 elements or more go dense.
    Tsuzuku, Imachi and Akiba, "Variance-based Gradient Compression for Efficient Distributed Deep Learning", ICLR 2018
    workshop, arXiv:1802.06058.
    """

    alpha: float = 1.5
    zeta: float = 0.999

    traits = Traits(
        family="sparsification",
        variable_length=True,
        nonfinite_in_payload=True,
        internal_feedback=True,
        waits_for_steps=True,
        max_magnitude=1e15,
        memory="none",
        reshard={"residual": Resize.SUM, "squares": Resize.MEAN},
    )

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"alpha={self.alpha!r} must be positive")
        if not 0 < self.zeta <= 1:
            raise ValueError(f"zeta={self.zeta!r} must lie in (0, 1]")

    def applies(self, ctx: Context) -> bool:
        return ctx.size < 2**28  # three bits of 31 are the exponent's

    def init(self, ctx: Context) -> State:
        return {"residual": ctx.xp.zeros(ctx.size), "squares": ctx.xp.zeros(ctx.size)}

    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        xp = ctx.xp
        total, squares = state["residual"] + x, state["squares"] + x * x
        size = xp.abs(total)
        # Exponents as integers: exact on every toolkit. A non-finite number becomes infinity.
        largest = xp.reshape(xp.max(xp.concat([size, xp.zeros(1)])), (1,))
        top = xp.minimum(xp.bitwise_and(xp.bitcast(largest, "int32"), EXPONENT), EXPONENT)
        near = xp.bitwise_and(xp.minimum(xp.bitcast(size, "int32"), EXPONENT) + HALF, EXPONENT)
        below = xp.shift_right(xp.maximum(top - near, 0), MANTISSA)
        clear = (total * total > self.alpha * squares) & (below < 8) & (near > 0)
        positions = xp.nonzero(clear | xp.invert(xp.isfinite(total)))
        words = signed(xp, positions * 8 + xp.take(below, positions), xp.take(total, positions) < 0)
        kept = xp.scatter(total, positions, 0.0), xp.scatter(squares * self.zeta, positions, 0.0)
        return (words, xp.bitcast(top, "float32")), dict(zip(("residual", "squares"), kept, strict=True))

    def parts(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        xp = ctx.xp
        words, negative = unsigned(xp, payload[0])
        scale = fitting(xp, payload[1], "float32", 1, "scales")
        some = xp.reshape(xp.lengths([words]) > 0, (1,))
        scale = xp.sound(
            scale, lambda: xp.all(some | xp.isfinite(scale)), "its scale is not finite, but nothing is sent"
        )
        powers = xp.asarray([2.0**-d for d in range(8)], "float32")
        values = scale * xp.take(powers, xp.bitwise_and(words, 7))
        return xp.where(negative, -values, values), xp.shift_right(words, 3)
