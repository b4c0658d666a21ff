"""Statistical threshold sparsification."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from grace.compressors.sparse import EXACT, LARGEST, Elements, Selector, Sparsifier, beyond, check_ratio, first, kept
from grace.core import Array, Context, Resize, State
from grace.core.registry import register
from grace.ops import distributions as tails

LEAST, FEWEST = 4096, 32
"""Below LEAST elements, or FEWEST wanted ones, moments are unreliable: the largest elements are selected exactly."""
FRESH, FORGET = 0.5, 0.9
"""FRESH: the weight of a window's error in the running mean for its number of stages. FORGET: the factor by which all
errors decay after each window."""


@register("sidco")
@dataclass(frozen=True)
class SIDCo(Sparsifier, Selector):
    """Send approximately the largest elements: those above a threshold from a distribution fitted to all magnitudes.

    Payload: values float32[K], positions int32[K], ascending; K is near k = floor(compress_ratio * n) and at least 1.
    Of tensors with fewer than 4096 elements, or fewer than 32 wanted ones, the k largest elements are sent.
    State: stages int32[1], the number of stages; sum float32[1] and count int32[1] of the ratios K / k in this window;
    errors, one float32 for each possible number of stages, -1 if untried. There is no state with a fixed number of
    stages, or if the k largest are sent. ``compress_ratio``: the share of elements to send, in (0, 1].
    ``sid``: the distribution of magnitudes; "e": exponential; "gp": gamma in the first stage, then generalised Pareto;
    "p": generalised Pareto.
    ``stage_rule``: "robust": changes the number of stages unless the new one is known to be worse; "paper": adds one
    if too few elements are selected, removes one if too many are.
    ``stages``: a fixed number of stages; 0: set by the rule, initially one.
    ``q``: steps per window, at least 1; the rule is applied after each window.
    ``eps``: tolerated mean deviation of K / k from 1.
    ``delta1``: the share that passes the first of several stages, in (0, 1).
    ``max_stages``: maximum number of stages; 0: ceil(log2(1 / compress_ratio)).
    ``closed_form``: use the paper's formula for the threshold of the gamma distribution, which is too high, instead of
    the true quantile.
    ``cap_factor``: if K exceeds this many times k, send only the k largest of these; 0: no cap.
    ``index_coding``: the coding of the positions, "int32" or "bitmap" (n bits).
    Each stage fits the distribution to the elements above the previous threshold, from their number, sum and sum of
    squares, so no elements are sorted or collected. The paper's rule stays at one stage even if that lets too many
    elements through, as with heavy-tailed gradients; the default rule is ours.
    Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based Gradient Compression Technique for
    Distributed Training Systems", MLSys 2021, arXiv:2101.10761, algorithm 1.
    """

    index_coding: str = field(default="int32", kw_only=True)
    compress_ratio: float = 0.01
    sid: str = "p"
    stage_rule: str = "robust"
    stages: int = 0
    q: int = 5
    eps: float = 0.2
    delta1: float = 0.25
    max_stages: int = 0
    closed_form: bool = False
    cap_factor: float = 0.0

    traits = replace(
        EXACT, variable_length=True, reshard=dict.fromkeys(("stages", "sum", "count", "errors"), Resize.OWN)
    )

    def __post_init__(self) -> None:
        check_ratio(self.compress_ratio)
        self.elements.check()
        for key, choices in (("sid", ("e", "gp", "p")), ("stage_rule", ("robust", "paper"))):
            if getattr(self, key) not in choices:
                raise ValueError(f"{key}={getattr(self, key)!r}: choose one of {', '.join(map(repr, choices))}")
        for key, least, most in (("stages", 0, 100), ("q", 1, 2**24), ("max_stages", 0, 100)):
            if not least <= getattr(self, key) <= most:
                raise ValueError(f"{key}={getattr(self, key)!r} must lie in {least} .. {most}")
        if self.stages > 1 and self.compress_ratio >= self.delta1:
            raise ValueError(
                f"stages={self.stages} is impossible: the first stage passes a share of delta1={self.delta1}, and "
                f"compress_ratio={self.compress_ratio} is not smaller. Use stages=1, or a larger delta1"
            )
        if self.closed_form and self.sid != "gp":
            raise ValueError(f"closed_form is the gamma law's, and sid={self.sid!r} has none: use sid='gp'")
        if not 0 < self.eps < 1:
            raise ValueError(f"eps={self.eps!r} must lie in (0, 1)")
        if not 0 < self.delta1 < 1:
            raise ValueError(f"delta1={self.delta1!r} must lie in (0, 1)")
        if self.cap_factor and not self.cap_factor >= 1:
            raise ValueError(f"cap_factor={self.cap_factor!r} must be at least 1, or 0 for no cap")

    @property
    def most(self) -> int:
        """The largest number of stages."""
        if self.stages or self.compress_ratio >= self.delta1:
            return max(1, self.stages)
        return self.max_stages or max(1, math.ceil(math.log2(1 / self.compress_ratio)))

    def init(self, ctx: Context) -> State:
        if self._exact(ctx.size) or self.stages or self.most == 1:
            return {}
        xp = ctx.xp
        return {
            "stages": xp.full(1, 1, "int32"),
            "sum": xp.zeros(1),
            "count": xp.zeros(1, "int32"),
            "errors": xp.full(self.most, -1.0),
        }

    @property
    def elements(self) -> Elements:
        return Elements(self, self.index_coding)

    def choose(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """float32[n] -> int32[K], the positions to send, ascending; and next state."""
        xp, k = ctx.xp, kept(self.compress_ratio, ctx.size)
        if self._exact(ctx.size):
            return xp.topk_abs(x, k), state
        stages = state["stages"] if state else xp.full(1, max(1, self.stages), "int32")
        found = beyond(xp, x, self.threshold(xp, x, stages))
        many = xp.lengths([found])
        if state:
            state = self._observed(xp, xp.cast(many, "float32") / float(k), state)
        return (self._capped(xp, x, found, many, k) if self.cap_factor else found), state

    def _exact(self, n: int) -> bool:
        return n < LEAST or self.compress_ratio * n < FEWEST or kept(self.compress_ratio, n) == n

    # -- the threshold ----------------------------------------------------------------------------------------------
    def threshold(self, xp: Any, x: Array, stages: Array) -> Array:
        """Return the threshold after ``stages``, int32[1]: float32[1]. One pass over x per stage, plus one for "gp"."""
        n = float(xp.shape(x)[0])

        def left(stage: Array, _: Array) -> Array:
            return stage <= stages

        def refined(stage: Array, threshold: Array) -> tuple[Array, Array]:
            tail = xp.excess(x, xp.cast(threshold, "float32"))
            return stage + 1, threshold + self._law(xp, tail, xp.maximum(tail[:1], 1.0), self.share(xp, stage, stages))

        one, whole = xp.full(1, 1, "int32"), xp.excess(x, xp.zeros(1))
        share = self.share(xp, one, stages)
        if self.sid == "gp":
            mean = whole[1:2] / n
            start = tails.gamma(xp, mean, self._log(xp, x, whole), share, self.closed_form)
        else:
            start = self._law(xp, whole, n, share)
        return xp.cast(xp.loop(left, refined, (one + 1, start))[1], "float32")

    def share(self, xp: Any, stage: Array, stages: Array) -> Array:
        """Return float64[1], the logarithm of the share that ``stage`` lets through, of ``stages`` stages in all."""
        whole = math.log(self.compress_ratio)
        begin = whole if self.compress_ratio >= self.delta1 else math.log(self.delta1)
        later = (whole - begin) / xp.cast(xp.maximum(stages - 1, 1), "float64")
        alone = xp.full(1, whole, "float64")
        return xp.where(stages == 1, alone, xp.where(stage == 1, xp.full(1, begin, "float64"), later))

    def _law(self, xp: Any, tail: Array, number: Any, share: Array) -> Array:
        mean = tail[1:2] / number
        if self.sid == "e":
            return tails.exponential(xp, mean, share)
        return tails.pareto(xp, mean, tail[2:] / number - mean * mean, share)

    def _log(self, xp: Any, x: Array, whole: Array) -> Array:
        # The mean of ln((|x| + SMALLEST |x|₂) / mean), in chunks that fit a cache. ``whole``: `xp.excess` of x and 0.
        n = xp.shape(x)[0]
        mean = xp.where(whole[1:2] > 0, whole[1:2] / n, 1.0)
        floor = xp.cast(xp.maximum(xp.sqrt(whole[2:]) / mean, 1.0) * tails.SMALLEST, "float32")
        unit = xp.cast(mean, "float32")
        total = xp.zeros(1, "float64")
        for start in range(0, n, xp.piece or n):
            relative = xp.abs(x[start : start + (xp.piece or n)]) / unit
            total = total + xp.cast(xp.reshape(xp.sum(xp.log(relative + floor)), (1,)), "float64")
        return total / float(n)

    def _capped(self, xp: Any, x: Array, found: Array, many: Array, k: int) -> Array:
        # Returns ``found``; if it has more than cap_factor * k positions, only those of the k largest elements.
        values = xp.take(x, found)
        size = xp.where(xp.isfinite(values), xp.abs(values), LARGEST)
        room = xp.where(many > math.ceil(self.cap_factor * k), xp.full(1, k, "int64"), many)
        bound = xp.take(xp.sort(size), xp.cast(many - room, "int32"))
        return xp.take(found, xp.nonzero(first(xp, size > bound, size == bound, xp.cast(room, "int32"))))

    # -- the number of stages ---------------------------------------------------------------------------------------
    def _observed(self, xp: Any, ratio: Array, state: State) -> State:
        # The state after a step that selected ``ratio`` times the wanted number.
        total, count = state["sum"] + ratio, state["count"] + 1
        full = count >= self.q
        stages, errors = self._judged(xp, total / float(self.q), state["stages"], state["errors"])
        return {
            "stages": xp.where(full, stages, state["stages"]),
            "sum": xp.where(full, 0.0, total),
            "count": xp.where(full, 0, count),
            "errors": xp.where(full, errors, state["errors"]),
        }

    def _judged(self, xp: Any, ratio: Array, stages: Array, errors: Array) -> tuple[Array, Array]:
        # The next number of stages after a window with this mean ratio, and the errors by number of stages.
        step = xp.cast(ratio < 1 - self.eps, "int32") - xp.cast(ratio > 1 + self.eps, "int32")
        if self.stage_rule == "paper":
            return xp.minimum(xp.maximum(stages + step, 1), self.most), errors
        numbers, miss = xp.arange(self.most) + 1, xp.abs(xp.log(ratio))
        mean = xp.where(errors < 0, miss, errors + FRESH * (miss - errors))
        errors = xp.where(numbers == stages, mean, errors)
        errors = xp.where(errors < 0, errors, FORGET * errors)
        mine = xp.sum(xp.where(numbers == stages, errors, 0.0))

        def better(other: Array) -> Array:  # an untried number, whose error is -1, counts as better
            known = xp.sum(xp.where(numbers == other, errors, 0.0))
            return (other >= 1) & (other <= self.most) & (known < mine)

        preferred, second = stages + step, stages - step
        return xp.where(better(preferred), preferred, xp.where(better(second), second, stages)), errors
