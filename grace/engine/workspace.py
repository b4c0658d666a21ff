"""The engine's data on one unit within one step. A context carries it; methods and memories never access it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grace.backends.deferred import DeferredKernels
from grace.core import Array, Context
from grace.ops.sums import weighted_sum


@dataclass(slots=True, eq=False)
class Workspace:
    """Rollback log, deferred kernels and draw cache of one unit in one step."""

    rollback_log: list[tuple[Array, Array]] | None = None
    """Residuals that kernels have overwritten, with the arrays (donated x) that hold the previous values. A kernel may
    overwrite a residual if it appends to this log. None: residuals must stay intact.
    """
    deferred: DeferredKernels | None = None
    """A queue for kernels. Accelerators may return arrays that queued kernels fill later, and must not read them. None:
    call kernels immediately."""
    compile: bool = False
    """Whether chunks may run compiled by PyTorch (`grace.engine.compiled`)."""
    draws: dict[Any, Array] = field(default_factory=dict)
    """Cache of random draws that decoding repeats. A key holds everything that its draw depends on."""
    _bound: tuple[Any, Any] = field(default=(None, None), init=False)

    def kernels(self, xp: Any) -> Any:
        """The backend's kernels, bound to the rollback log and the queue; None or a false value without kernels."""
        found = xp.kernels
        if not found or (self.rollback_log is None and self.deferred is None):
            return found
        if self._bound[0] is not found:
            self._bound = found, found.within(self.rollback_log, self.deferred)
        return self._bound[1]


def workspace(ctx: Context) -> Workspace:
    """A context's workspace; an empty one if it has none."""
    return ctx._workspace or Workspace()


def with_workspace(ctx: Context, workspace: Workspace) -> Context:
    """The same context with another workspace."""
    return ctx._with(_workspace=workspace)


def without_rollback(ctx: Context) -> Context:
    """The same context without a rollback log."""
    own = workspace(ctx)
    return with_workspace(ctx, Workspace(None, own.deferred, own.compile, own.draws))


def deferring(ctx: Context, deferred: DeferredKernels | None) -> Context:
    """The same context with another queue of deferred kernels; None: call kernels immediately."""
    own = workspace(ctx)
    if own.deferred is deferred:
        return ctx
    return with_workspace(ctx, Workspace(own.rollback_log, deferred, own.compile, own.draws))


def kernels(ctx: Context) -> Any:
    """`Workspace.kernels` of the context's backend."""
    own: Workspace | None = ctx._workspace
    return ctx.xp.kernels if own is None else own.kernels(ctx.xp)


def accumulated(ctx: Context, x: Array, last: Array, beta: float = 1.0, gamma: float = 1.0) -> Array:
    """Return `weighted_sum`. With a rollback log, a kernel may write the sum to ``last``."""
    if workspace(ctx).rollback_log is not None and (found := kernels(ctx)) and found.memories.accumulate:
        return found.memories.accumulate(x, last, beta, gamma)
    return weighted_sum(ctx, x, last, beta, gamma)
