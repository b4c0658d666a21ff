"""Kernels of memories, on host arrays."""

from __future__ import annotations

from typing import Any

from grace.kernels.calls import Family

Array = Any


class Memories(Family):
    """Kernels of memories."""

    def accumulate(self, x: Array, last: Array, beta: float, gamma: float, moments: Array | None = None) -> Array:
        """`grace.ops.sums.weighted_sum`, written over ``last``; needs a rollback log.

        ``moments``: float64[3], receives ``xp.excess`` of the sum over the bound 0.
        """
        xp, at = self._xp, self._at
        self.library.accumulate(at(x), at(last), beta, gamma, at(moments), xp.shape(x)[0], xp.threads)
        self._note(x, last)
        return last

    def corrected(self, x: Array, u: Array, v: Array, momentum: float, nesterov: bool) -> tuple[Array, Array]:
        """The next momentum, in new memory, and the sum of v and its contribution, as in `grace.memories.dgc`."""
        xp, at = self._xp, self._at
        (n,) = xp.shape(x)
        fresh, total, last = (
            xp.buffers.empty(n),
            (x if self._log is None else v),
            (None if self._log is None else at(x)),
        )
        self.library.correct(at(x), at(u), at(v), at(fresh), at(total), last, momentum, nesterov, n, xp.threads)
        self._note(x, v)
        return fresh, total
