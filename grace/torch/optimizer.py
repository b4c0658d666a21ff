"""DistributedOptimizer: a PyTorch optimizer that steps with means over all workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from grace.core import Transport
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
from grace.torch.gradients import dense
from grace.torch.named import NamedParameters
from grace.torch.ownership import OPTIMIZER, claim, extend
from grace.torch.passes import NONE, BackwardPass, is_reentrant, running
from grace.torch.provisional import Accumulation, Means, alike


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
    # Methods under Horovod's names. skip_synchronize does nothing: a step does not exchange means again.
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

    The last backward pass before a step ends with an exchange, which is provisional until the optimizer's step commits
    it. The exchange is rolled back if its means are gone when the next pass begins.
    """

    def __init__(self, optimizer: Any, grace: Grace, named: Any, passes_per_step: int):
        self.grace = grace
        self.backward_passes = passes_per_step
        self._optimizer = optimizer
        self._pass = BackwardPass()
        self._accumulated = Accumulation()
        self._arrived: set[torch.Tensor] = set()  # parameters whose gradients wait for the exchange
        self._local: set[torch.Tensor] = set()  # parameters with gradients from passes inside no_sync
        self._looked = NONE  # the graph task for which `_intact` was computed
        self._intact: set[str] = set()  # names of the last exchange's means to which the current pass would add
        self._skipped = 0  # the report's number of non-finite means before the last exchange
        self._warned = False
        self._parameters = NamedParameters(optimizer, named)
        self._means = Means(self._parameters.built)
        self._hooked: set[torch.Tensor] = set()
        self._claim = claim(grace, self._parameters.all(), OPTIMIZER, self)
        try:
            grace.track_missing = grace.defer_commit = True
            grace.learning_rate = self._parameters.learning_rate
            check_momentum(grace, optimizer, stacklevel=3)
            self._adopt()
        except BaseException:
            self._claim.release("wrapping it failed")
            raise
        self.replaced = {name: optimizer.__dict__[name] for name in ATTRIBUTES if name in optimizer.__dict__}
        self._zero_grad, self._add_param_group = optimizer.zero_grad, optimizer.add_param_group
        # Keep these hooks after the claim is released: a later step must raise an error.
        self._step_hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def _passes_per_step(self) -> int:
        return self.backward_passes * self.grace.decision.micro_steps

    # -- parameters -------------------------------------------------------------------------------------------------
    def _adopt(self) -> None:
        # Hook and build new parameters: at first all, later those of added groups and those unfrozen.
        if added := [p for p in self._parameters.all() if p not in self._hooked]:
            for p in added:
                check_parameter(self._parameters.name(p) or "an added parameter", p)
            extend(self._claim, added)
            self._hooked.update(added)
            for p in added:
                if p.is_floating_point() or p.is_complex():
                    self._claim.hook(p, self._before_accumulation, self._on_gradient)
        if unbuilt := self._parameters.unbuilt():
            self.grace.build(unbuilt)
            self._parameters.built.update(unbuilt)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Call the optimizer's own method, then build the new parameters. Every worker must make this call."""
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
        for p in self._parameters.built.values():
            p.grad = None

    def _forget(self) -> None:
        self._pass.end()
        for each in (self._arrived, self._local, self._means, self._accumulated, self._intact):
            each.clear()

    # -- a backward pass --------------------------------------------------------------------------------------------
    def _before_accumulation(self) -> None:
        # Before a pass accumulates its first gradient: commit means that were applied by hand, and roll back means that
        # were removed, replaced or zeroed. This also runs in torch.autograd.grad, which accumulates nothing.
        task = running()
        if task == self._looked or not self.grace.provisional or self._pass.has(task):
            return
        self._looked, self._intact = task, self._means.intact()
        if self._means.stepped:  # parameters were updated by hand, not by an optimizer
            self._applied()
            self._intact = set()
        elif gone := set(self._means) - self._intact:
            self._discard(gone if self._intact else None)

    def _on_gradient(self, p: torch.Tensor) -> None:
        if self.grace.paused:
            self._local.add(p)
            return
        task = running()
        if not self._pass.has(task):
            self._begin_backward(task)
        name = self._parameters.name(p)
        if p.grad is None or self._means.unchanged(name):
            return  # a user's hook has already stepped
        if self.grace.provisional and name in self._intact:
            raise RuntimeError(
                "a second backward pass added its gradients to means that were exchanged already: call zero_grad() "
                "first, or pass backward_passes_per_step to DistributedOptimizer to accumulate several passes"
            )
        self._means.drop([name])
        self._arrived.add(p)
        # new parameters are built after the pass
        if self._accumulated.passes + 1 == self._passes_per_step and name in self._parameters.built:
            self.grace.start(name, self._gradient(p), spent=True)

    def _begin_backward(self, task: int) -> None:
        if is_reentrant():
            self._pass.begin_inner(task)
            if self._passes_per_step > 1:
                raise RuntimeError(
                    "backward_passes_per_step cannot count passes of reentrant checkpoints: use_reentrant=False"
                )
            if not self._pass.begun:
                warnings.warn(
                    "reentrant checkpoints hide the end of the backward pass, so gradients may be exchanged as late as "
                    "in step(): call optimizer.synchronize() before you clip or unscale, or set use_reentrant=False",
                    stacklevel=2,
                )
            return
        if self._pass.failed:
            self._give_up_failed_pass()
        if self._accumulated.thrown_away:
            self._accumulated.clear()
        self._pass.begin(task, self._after_backward)

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
        # Roll back means that no step applied: of the named parameters, or all. An update by hand counts as a step.
        if self._means.stepped:
            return self._applied()
        names = list(self._means if names is None else names)
        if all(name in names for name in self._means):
            self.grace.rollback()
            overflow = self.grace.report_skipped > self._skipped
            # Tensors that are sent uncompressed may overflow alone: they are not counted as skipped.
            if self.grace.world_size > 1 and not self._warned and not overflow and self._means.finite:
                self._warned = True
                warnings.warn(
                    "gradients were exchanged and then thrown away: residuals were restored, but the bytes were sent. "
                    "Put backward passes that this optimizer does not apply (a generator's loss "
                    "through its discriminator, an attack) inside `with optimizer.no_sync()`",
                    stacklevel=4,
                )
        else:
            self.grace.rollback(names)
        self._means.drop(names)

    def _after_backward(self) -> None:
        began = self._pass.began
        self._pass.end()
        if not self._arrived:  # the optimizer has already stepped inside this pass
            return
        self.grace.trace.add("backward", "from the first gradient on", began)
        self._accumulated.passes += 1
        if self._accumulated.passes >= self._passes_per_step:
            self.synchronize()
        else:
            self._accumulated.record(self._arrived)

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Discard means that no step applied, then call the optimizer's own method."""
        if not self._claim.released:
            if self._pass.failed:
                self._give_up_failed_pass()
            if self._pass.reentrant and self.grace.started:
                self._exchange()
            if not self._pass.begun:
                self._refuse_changed_partial()
            if self.grace.provisional:
                self._discard()
            if not self._pass.begun:
                self._forget()
        return self._zero_grad(*args, **kwargs)

    def _refuse_changed_partial(self) -> None:
        # Abort if a worker changed its accumulated gradients (clipped, unscaled) before their exchange.
        if self._accumulated.changed:
            self._give_up(
                "its gradients were changed (clipped, unscaled) before they were exchanged, since fewer backward "
                "passes than backward_passes_per_step came before the step: call optimizer.synchronize() first"
            )

    # -- an exchange ------------------------------------------------------------------------------------------------
    @ordinary()
    def synchronize(self) -> None:
        """Replace all gradients by their means, unless they already are means."""
        if self._pass.failed:
            self._give_up_failed_pass()
        if self.grace.provisional and not self._arrived:
            built = self._parameters.built.items()
            if any(p in self._local and self._means.holds(name) for name, p in built):
                self._give_up(
                    "a backward pass inside no_sync() added this worker's gradients to means: call zero_grad() after "
                    "it, or make it before the pass that is exchanged"
                )
            replaced = [p.grad for name, p in built if p.grad is not None and not self._means.holds(name)]
            if not replaced or alike(replaced, self.grace.transport):
                return
            self._discard()
        self._exchange()

    def _exchange(self) -> None:
        self._accumulated.passes = 0
        self._adopt()
        started, built = self.grace.started, self._parameters.built
        for name, p in built.items():
            if name not in started:
                mine = None if self._means.unchanged(name) else self._gradient(p)
                self.grace.start(name, mine, spent=p in self._arrived)
        self._skipped = self.grace.report_skipped
        self.grace.flush()
        self._means.put({name: self.grace.mean(name) for name in built}, self._arrived)
        for each in (self._arrived, self._local, self._accumulated, self._intact):
            each.clear()
        if running() == NONE:
            self._pass.end()

    def _gradient(self, p: torch.Tensor) -> torch.Tensor | None:
        if p.grad is None or not p.requires_grad:  # a frozen parameter may still have an old gradient
            return None
        return dense(p.grad.detach(), self.grace, self._parameters.name(p))

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
            return _mean_loss(loss, next(iter(self._parameters.built.values())).device, self.grace.transport)

        return averaged

    def _applied(self) -> None:
        if self.grace.provisional:
            self.grace.commit()
            self.grace.tune()

    def _after_step(self, *_: Any) -> None:
        if not self.grace.paused:
            self._applied()
            self._means.written()

    def before_another(self, optimizer: Any) -> None:
        """Called before another optimizer steps this one's parameters."""
        if optimizer.param_groups is self._optimizer.param_groups:  # one optimizer wraps the other, as in SAM
            self._before_step(optimizer, (), {})
        elif not self.grace.paused and (self.grace.provisional or self._arrived or self._pass.begun):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps parameters whose gradients a DistributedOptimizer exchanges: put "
                "this optimizer's backward passes and steps inside `with distributed.no_sync()` if they are to be each "
                "worker's own, or step the distributed one"
            )

    def after_another(self, optimizer: Any) -> None:
        """Called after another optimizer has stepped this one's parameters."""
        if optimizer.param_groups is self._optimizer.param_groups:
            self._after_step()


def _mean_loss(loss: Any, device: torch.device, transport: Transport) -> Any:
    # Average a loss, a tensor or a number, over all workers.
    if isinstance(loss, torch.Tensor):
        value = loss.detach()
    else:
        value = torch.tensor(float(loss), dtype=torch.float64, device="cpu")
    value = value if value.is_floating_point() else value.to(torch.float32)
    ((mean,),) = transport.start([Reduce((value.to(device).reshape(1),), "mean")], "loss")()
    return mean.reshape(()) if isinstance(loss, torch.Tensor) else mean.item()


def _no_copy(memo: Any) -> NoReturn:
    raise TypeError(
        "an optimizer that averages gradients cannot be copied: the copy would train without the other workers. Copy "
        "it before DistributedOptimizer or after grace.torch.release, or keep its state_dict()"
    )


@contextmanager
def _nothing_to_skip() -> Iterator[None]:
    yield
