"""DistributedOptimizer: a PyTorch optimizer that steps with means over all workers."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakMethod

import torch

from grace.core.collectives import Reduce
from grace.engine.handshake import OutOfStep
from grace.engine.session import Grace
from grace.torch.checks import (
    check_grace,
    check_horovod,
    check_momentum,
    check_optimizer,
    check_parameter,
    check_parameters,
    check_passes,
    named_pairs,
    ordinary,
)
from grace.torch.gradients import dense, plain
from grace.torch.ownership import OPTIMIZER, claim, extend
from grace.torch.provisional import Put, Sample, checksum, nonzero


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    grace: Grace,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    backward_passes_per_step: int = 1,
    *,
    compression: Any = None,
    op: Any = "average",
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: None = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> torch.optim.Optimizer:
    """Let an optimizer step with gradients averaged over all workers. Returns the same optimizer.

    Gradients are sent during the backward pass and replaced by their means before ``backward`` returns, as in
    DistributedDataParallel: clipping, GradScaler, closures and schedulers see means and need no special order. A loss
    returned by a closure is averaged, too, so that line searches decide alike on all workers.

    An exchange is provisional until the optimizer steps. If its means are discarded instead (a GAN's generator loss
    goes through the discriminator; an attack; a loss scaler skips the step), residuals are rolled back.
    ``optimizer.no_sync()``: a context whose backward passes and steps stay local, as in DistributedDataParallel.
    ``optimizer.synchronize()``: exchange now, for an accumulation that ends early and whose gradients are clipped or
    unscaled before the step.

    ``named_parameters``: as ``model.named_parameters()``; names key the state, also in checkpoints. Without them,
    parameters are numbered in the optimizer's order.
    ``backward_passes_per_step``: number of passes whose gradients accumulate before one exchange, multiplied by
    ``grace.decision.micro_steps``, which a policy may change.
    The other arguments are Horovod's. Their defaults are accepted, even by Horovod's names (``op=hvd.Average``,
    ``compression=hvd.Compression.none``, ``process_set=hvd.global_process_set`` or that of the Grace's transport).
    Other values raise an error that names GRACE's own setting; none is ignored.

    Every worker must make this call: the workers compare their parameters, and all raise ValueError if they differ.
    Raises TypeError for unsupported arguments and parameters (shards, subclasses, integers), naming the remedy.
    """
    check_optimizer(optimizer)
    check_grace(grace, "DistributedOptimizer(optimizer, grace=grc)")
    check_horovod(grace, compression, op, gradient_predivide_factor, num_groups, groups, process_set)
    check_passes(backward_passes_per_step)
    named_parameters = named_pairs(named_parameters)
    check_parameters(optimizer, named_parameters)
    if hasattr(optimizer, "_grace"):
        raise ValueError("this optimizer is distributed already: wrap it once")
    with ordinary():
        driver = _Driver(optimizer, grace, named_parameters, backward_passes_per_step)
    optimizer._grace = driver
    # Horovod's names, for scripts that call them. Means are already in place, so there is nothing to skip.
    optimizer.synchronize = driver.synchronize
    optimizer.skip_synchronize = _nothing_to_skip
    optimizer.no_sync = grace.no_sync
    optimizer.zero_grad = driver.zero_grad
    optimizer.add_param_group = driver.add_param_group
    optimizer.__deepcopy__ = _no_copy
    return optimizer


ATTRIBUTES = ("_grace", "synchronize", "skip_synchronize", "no_sync", "zero_grad", "add_param_group", "__deepcopy__")
"""Attributes that DistributedOptimizer sets on an optimizer."""


def release(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Undo `DistributedOptimizer`: gradients stay local, and the Grace may drive another optimizer."""
    driver = optimizer.__dict__.get("_grace")
    if driver is None:
        raise ValueError("this optimizer is not distributed")
    driver.release()
    for name in ATTRIBUTES:
        del optimizer.__dict__[name]
    optimizer.__dict__.update(driver.replaced)
    return optimizer


class _Driver:
    """Drives a Grace from the hooks of an optimizer and its parameters.

    A pass ends with an exchange, which is provisional until the optimizer's step commits it. The exchange is rolled
    back if its means are gone when the next pass begins.
    """

    def __init__(self, optimizer: Any, grace: Grace, named: Any, passes_per_step: int):
        self.grace = grace
        self.backward_passes = passes_per_step
        self._optimizer = optimizer
        self._passes = 0  # passes accumulated since the last exchange
        self._task = -1  # the current backward pass
        self._nested = -1  # the last nested backward pass
        self._began = 0.0
        self._arrived: set[torch.Tensor] = set()  # parameters whose gradients wait for the exchange
        self._local: set[torch.Tensor] = set()  # parameters with gradients from passes inside no_sync
        self._put: dict[str, Put] = {}  # the means of the last exchange
        self._partial: dict[torch.Tensor, Put] = {}  # accumulated gradients since the last exchange
        self._sample = Sample()  # of these gradients
        self._parameters_before = Sample()  # at the last exchange
        self._looked = -1  # the backward pass for which `_intact` was computed
        self._intact: set[str] = set()  # means of the last exchange to which the current pass would add
        self._skipped = 0
        self._warned = False
        self._parameters: dict[str, torch.Tensor] = {}
        self._known: set[torch.Tensor] = set()  # parameters with hooks
        self._names = _names(named)
        if named is not None:
            unnamed = [list(p.shape) for p in self._trained() if p not in self._names]
            if unnamed:
                raise ValueError(
                    f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, of shapes {unnamed[:3]}"
                )
        self._claim = claim(grace, self._all(), OPTIMIZER, self)
        try:
            grace.track_missing = grace.defer_commit = True
            grace.learning_rate = self._learning_rate
            check_momentum(grace, optimizer, stacklevel=3)
            self._adopt()
        except BaseException:
            self._claim.release("wrapping it failed")
            raise
        self.replaced = {name: optimizer.__dict__[name] for name in ATTRIBUTES if name in optimizer.__dict__}
        self._zero_grad, self._add_param_group = optimizer.zero_grad, optimizer.add_param_group
        # These outlive the claim: a later step must raise an error.
        self._step_hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def _passes_per_step(self) -> int:
        return self.backward_passes * self.grace.decision.micro_steps

    def _learning_rate(self, name: str) -> Any:
        p = self._parameters[name]
        return next(group["lr"] for group in self._optimizer.param_groups if any(p is q for q in group["params"]))

    # -- parameters -------------------------------------------------------------------------------------------------
    def _all(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _trained(self) -> list[torch.Tensor]:
        return [p for p in self._all() if p.requires_grad]

    def _adopt(self) -> None:
        # Adopt new parameters: all at first, later those of added groups or unfrozen ones.
        if unknown := [p for p in self._all() if p not in self._known]:
            for p in unknown:
                check_parameter(self._names.get(p, "an added parameter"), p)
            extend(self._claim, unknown)
            for p in unknown:
                self._hook(p)
        new = [p for p in self._trained() if self._names.get(p) not in self._parameters]
        if not new:  # in nearly every step
            return
        for p in new:
            self._names.setdefault(p, f"parameter{len(self._names)}")
        order = {p: index for index, p in enumerate(self._names)}
        named = {self._names[p]: p for p in sorted(new, key=order.__getitem__)}
        self.grace.build(named)
        self._parameters.update(named)

    def _hook(self, p: torch.Tensor) -> None:
        # Parameters hold hooks outside the reach of Python's garbage collector: a strong reference to self would leak.
        arriving, arrived = WeakMethod(self._before_accumulation), WeakMethod(self._on_gradient)

        def before_accumulation(gradient: torch.Tensor) -> None:
            if (handle := arriving()) is not None:
                handle()

        def on_gradient(p: torch.Tensor) -> None:
            if (handle := arrived()) is not None:
                handle(p)

        self._known.add(p)
        if not (p.is_floating_point() or p.is_complex()):
            return
        frozen = not p.requires_grad
        p.requires_grad_()  # a frozen parameter accepts no hooks, but keeps existing ones
        self._claim.hooks += [p.register_hook(before_accumulation), p.register_post_accumulate_grad_hook(on_gradient)]
        if frozen:
            p.requires_grad_(False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Call the optimizer's own method, then build the new parameters, on all workers together."""
        self._add_param_group(param_group)
        self._adopt()

    def release(self) -> None:
        """Detach from the optimizer and its parameters."""
        self._claim.release("it was released")
        self.grace.rollback()
        self.grace.defer_commit = False
        for hook in self._step_hooks:
            hook.remove()

    def reset(self) -> None:
        """Drop the current pass and its gradients after a change of workers."""
        self.grace.rollback()
        self._forget()
        for p in self._parameters.values():
            p.grad = None

    def _forget(self) -> None:
        self._passes, self._task, self._nested = 0, -1, -1
        for each in (self._arrived, self._local, self._put, self._partial, self._intact):
            each.clear()

    # -- a backward pass --------------------------------------------------------------------------------------------
    def _before_accumulation(self) -> None:
        # Before a pass adds its first gradient, check whether unapplied means of an exchange are still there.
        # This also runs in torch.autograd.grad, which adds nothing.
        task = torch._C._current_graph_task_id()
        if task == self._looked or not self.grace.provisional or task in (self._task, self._nested):
            return
        self._looked = task
        intact = {n for n, put in self._put.items() if put.holds(g := self._parameters[n].grad) and nonzero(g)}
        if self._parameters_before.changed:  # updated by hand, not by an optimizer
            self._applied()
            intact = set()
        elif gone := self._put.keys() - intact:
            self._discard(gone if intact else None)
        self._intact = intact

    def _on_gradient(self, p: torch.Tensor) -> None:
        if self.grace.paused:
            self._local.add(p)
            return
        task = torch._C._current_graph_task_id()
        if task not in (self._task, self._nested):
            self._begin_backward(task)
        name = self._names.get(p, "")
        put = self._put.get(name)
        if p.grad is None or (put is not None and put.unchanged(p.grad)):
            return  # a user's hook has already stepped
        if self.grace.provisional and name in self._intact:
            raise RuntimeError(
                "a second backward pass added its gradients to means that were exchanged already: call zero_grad() "
                "first, or pass backward_passes_per_step to DistributedOptimizer to accumulate several passes"
            )
        self._put.pop(name, None)
        self._arrived.add(p)
        # new parameters are built after the pass
        if self._passes + 1 == self._passes_per_step and name in self._parameters:
            self.grace.start(name, self._gradient(p), spent=True)

    def _begin_backward(self, task: int) -> None:
        if _inside_backward():
            # Its end is not the end of the whole pass, which may have no gradient of its own to hook.
            self._nested = task
            if self._passes_per_step > 1:
                raise RuntimeError(
                    "backward_passes_per_step cannot count passes of reentrant checkpoints: use_reentrant=False"
                )
            if self._task == -1:
                warnings.warn(
                    "reentrant checkpoints hide the end of the backward pass, so gradients may be exchanged as late as "
                    "in step(): call optimizer.synchronize() before you clip or unscale, or set use_reentrant=False",
                    stacklevel=2,
                )
            return
        if self._failed:
            self._give_up_failed_pass()
        if self._passes and all(put.thrown_away(p.grad) for p, put in self._partial.items()):
            self._passes = 0
            self._partial.clear()
        self._task = task
        self._began = time.perf_counter()
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    @property
    def _failed(self) -> bool:
        # Whether an earlier pass began and did not end, and the current one is not part of it.
        here = torch._C._current_graph_task_id()
        return self._task not in (-1, here) and self._nested == -1

    def _give_up_failed_pass(self) -> None:
        if self.grace.started:
            if self.grace.world_size > 1:
                try:
                    self._give_up("its backward pass failed, and its batch was dropped")
                except OutOfStep as error:
                    if not error.everyone:
                        raise
            self.grace.abandon()
            warnings.warn("the backward pass before this one failed: what it sent is dropped", stacklevel=4)
        self._forget()

    def _give_up(self, reason: str) -> NoReturn:
        self._forget()
        self.grace.abort(reason)

    def _discard(self, names: Iterable[str] | None = None) -> None:
        # Discard means, all or some, that no step applied. An update by hand counts as a step.
        if self._parameters_before.changed:
            return self._applied()
        names = list(self._put) if names is None else list(names)
        if all(name in names for name in self._put):
            self.grace.rollback()
            overflow = self.grace.report_skipped > self._skipped
            if self.grace.world_size > 1 and not self._warned and not overflow:
                self._warned = True
                warnings.warn(
                    "gradients were exchanged and then thrown away: residuals were restored, but the bytes were sent. "
                    "Put backward passes that this optimizer does not apply (a generator's loss "
                    "through its discriminator, an attack) inside `with optimizer.no_sync()`",
                    stacklevel=4,
                )
        else:
            self.grace.rollback(names)
        for name in names:
            del self._put[name]

    def _after_backward(self) -> None:
        self._task = self._nested = -1
        if not self._arrived:  # the optimizer has already stepped inside this pass
            return
        self.grace.trace.add("backward", "from the first gradient on", self._began)
        self._passes += 1
        if self._passes >= self._passes_per_step:
            self.synchronize()
        else:
            self._partial = {p: Put.of(p.grad) for p in self._arrived if p.grad is not None}
            self._sample.take(self._partial, lambda p: p.grad)

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's own method, after discarding means that no step applied."""
        if not self._claim.released:
            if self._failed:
                self._give_up_failed_pass()
            if self._nested != -1 and self.grace.started:
                self._exchange()
            if self._task == -1:
                self._refuse_changed_partial()
            if self.grace.provisional:
                self._discard()
            if self._task == -1:
                self._forget()
        return self._zero_grad(*args, **kwargs)

    def _refuse_changed_partial(self) -> None:
        # Accumulated gradients that were clipped or unscaled before their exchange differ between workers.
        kept = [(p, put) for p, put in self._partial.items() if put.holds(p.grad)] if self._passes else []
        # GradScaler changes gradients without a new version.
        if any(not put.unchanged(p.grad) for p, put in kept) or (kept and self._sample.changed):
            self._give_up(
                "its gradients were changed (clipped, unscaled) before they were exchanged, since fewer backward "
                "passes than backward_passes_per_step came before the step: call optimizer.synchronize() first"
            )

    # -- an exchange ------------------------------------------------------------------------------------------------
    @ordinary()
    def synchronize(self) -> None:
        """Replace all gradients by their means, unless they already are means."""
        if self._failed:
            self._give_up_failed_pass()
        if self.grace.provisional and not self._arrived:
            if any(p in self._local and self._holds_mean(p) for p in self._parameters.values()):
                self._give_up(
                    "a backward pass inside no_sync() added this worker's gradients to means: call zero_grad() after "
                    "it, or make it before the pass that is exchanged"
                )
            replaced = [p for p in self._parameters.values() if p.grad is not None and not self._holds_mean(p)]
            if not replaced or self._alike(replaced):
                return
            self._discard()
        self._exchange()

    def _holds_mean(self, p: torch.Tensor) -> bool:
        put = self._put.get(self._names[p])
        return put is not None and put.holds(p.grad)

    def _alike(self, parameters: Iterable[torch.Tensor]) -> bool:
        # Whether gradients set by hand are equal on all workers. If so, they were computed from the means, as by
        # p.grad = p.grad / 2; otherwise they come from each worker's batch.
        if self.grace.world_size == 1:
            return False
        sums = [checksum(p.grad) for p in parameters if p.grad is not None]
        return len(set(self.grace.transport.exchange(repr(sums)))) == 1

    def _exchange(self) -> None:
        self._passes = 0
        self._adopt()
        started = self.grace.started
        for name, p in self._parameters.items():
            if name not in started:
                put = self._put.get(name)
                mine = None if put is not None and put.unchanged(p.grad) else self._gradient(p)
                self.grace.start(name, mine, spent=p in self._arrived)
        self._skipped = self.grace.report_skipped
        self.grace.flush()
        for name, p in self._parameters.items():
            mean = self.grace.mean(name)
            if mean is None:
                continue
            if p.grad is None or p.grad.is_sparse or p not in self._arrived:
                # The mean is a view of a whole message, and a gradient set by hand is the user's memory.
                p.grad = mean.clone()
            elif mean.data_ptr() != p.grad.data_ptr():
                with torch.no_grad():
                    p.grad.copy_(mean)
            self._put[name] = Put.of(p.grad)
        self._parameters_before.take((self._parameters[name] for name in self._put), lambda p: p)
        for each in (self._arrived, self._local, self._partial, self._intact):
            each.clear()
        if torch._C._current_graph_task_id() == -1:
            self._task = self._nested = -1

    def _gradient(self, p: torch.Tensor) -> torch.Tensor | None:
        if p.grad is None or not p.requires_grad:  # a frozen parameter may still have an old gradient
            return None
        return dense(p.grad.detach(), self.grace, self._names[p])

    # -- a step -----------------------------------------------------------------------------------------------------
    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._claim.released:
            raise RuntimeError(f"this optimizer does not average gradients any more: {self._claim.released}")
        args = args[1:] if args and args[0] is optimizer else args
        closure = args[0] if args else kwargs.get("closure")
        if self.grace.paused:
            return None
        if closure is None:
            self._refuse_changed_partial()
            self.synchronize()
            return None
        return (optimizer, self._averaged(closure), *args[1:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            loss = closure()
            self.synchronize()
            self._applied()
            if self.grace.world_size == 1 or loss is None:
                return loss
            value = (
                loss.detach()
                if isinstance(loss, torch.Tensor)
                else torch.tensor(float(loss), dtype=torch.float64, device="cpu")
            )
            value = value if value.is_floating_point() else value.to(torch.float32)
            value = value.to(next(iter(self._parameters.values())).device).reshape(1)
            ((mean,),) = self.grace.transport.start([Reduce((value,), "mean")], "loss")()
            return mean.reshape(()) if isinstance(loss, torch.Tensor) else mean.item()

        return averaged

    def _applied(self) -> None:
        if self.grace.provisional:
            self.grace.commit()
            self.grace.tune()

    def _after_step(self, *_: Any) -> None:
        if self.grace.paused:
            return
        self._applied()
        for name, put in self._put.items():  # an optimizer may write to gradients
            gradient = self._parameters[name].grad
            if gradient is not None and put.holds(gradient):
                self._put[name] = Put.of(gradient)

    def before_another(self, optimizer: Any) -> None:
        """Called before another optimizer steps this one's parameters."""
        if optimizer.param_groups is self._optimizer.param_groups:  # one wraps the other, as in SAM
            self._before_step(optimizer, (), {})
        elif not self.grace.paused and (self.grace.provisional or self._arrived or self._task != -1):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps parameters whose gradients a DistributedOptimizer exchanges: put "
                "this optimizer's backward passes and steps inside `with distributed.no_sync()` if they are to be each "
                "worker's own, or step the distributed one"
            )

    def after_another(self, optimizer: Any) -> None:
        """Called after another optimizer has stepped this one's parameters."""
        if optimizer.param_groups is self._optimizer.param_groups:
            self._after_step()


def _names(named: Any) -> dict[torch.Tensor, str]:
    names: dict[torch.Tensor, str] = {}
    owners: dict[str, torch.Tensor] = {}
    for name, p in named or ():
        name = plain(name)
        if owners.setdefault(name, p) is not p:
            raise ValueError(
                f"two parameters are named {name!r}: names key the state, so give each module a prefix, as "
                "named_parameters(prefix='encoder')"
            )
        names.setdefault(p, name)
    return names


def _no_copy(memo: Any) -> NoReturn:
    raise TypeError(
        "an optimizer that averages gradients cannot be copied: the copy would train without the other workers. Copy "
        "it before DistributedOptimizer or after grace.torch.release, or keep its state_dict()"
    )


def _inside_backward() -> bool:
    # Whether an autograd.Function started this backward pass inside another, as reentrant checkpoints do.
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _FUNCTION_BACKWARD:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_FUNCTION_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__


@contextmanager
def _nothing_to_skip() -> Iterator[None]:
    yield
