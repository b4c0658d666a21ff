"""DistributedOptimizer: a PyTorch optimizer that steps with means over all workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from grace.core import Transport
from grace.core.collectives import Reduce
from grace.engine.handshake import OutOfStep
from grace.engine.session import Grace
from grace.torch.arrivals import Arrivals
from grace.torch.checks import (
    check_grace,
    check_horovod,
    check_momentum,
    check_optimizer,
    check_parameter,
    check_parameters,
    check_passes,
    kind_of,
    named_pairs,
    ordinary,
)
from grace.torch.gradients import gradient_of
from grace.torch.named import NamedParameters, check_order
from grace.torch.ownership import OPTIMIZER, check_alone, claim, extend, weakly
from grace.torch.passes import NONE, BackwardPass, is_reentrant, running
from grace.torch.signals import Gradients, zero
from grace.torch.watch import Watch


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

    A parameter's means are applied when an optimizer that holds the parameter steps with them as its gradient, and this
    step changes a parameter or the state of the optimizer. Manual clamping, decay or averaging does not count as a
    step. A step decides only for the parameters of its own optimizer. If no optimizer has stepped a parameter yet, its
    means are applied when its weights are written, or when an optimizer over copies of the parameter steps. Means that
    were removed, zeroed or replaced earlier are discarded, which restores the state from before the exchange. A pass
    that adds to undecided means raises RuntimeError. If the outcome is unknown, means count as applied, with one
    warning; ``grace.commit()``, ``grace.discard()`` and ``no_sync`` decide explicitly. Gradients set without a backward
    pass, such as those of float32 masters, are exchanged in ``step``. If means are undecided at that time, these
    gradients are not exchanged, and all workers raise RuntimeError if they differ between workers.

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
    optimizer.set_backward_passes_per_step = driver.set_backward_passes_per_step
    optimizer.zero_grad = driver.zero_grad
    optimizer.add_param_group = driver.add_param_group
    optimizer.__deepcopy__ = _no_copy
    return optimizer


ATTRIBUTES = (
    "_grace",
    "synchronize",
    "skip_synchronize",
    "no_sync",
    "set_backward_passes_per_step",
    "zero_grad",
    "add_param_group",
    "__deepcopy__",
)
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

    The last backward pass before a step ends with an exchange; a `Watch` decides whether its means are applied.
    """

    def __init__(self, optimizer: Any, grace: Grace, named: Any, passes_per_step: int):
        self.grace = grace
        self.backward_passes = passes_per_step
        self._optimizer = optimizer
        self._pass = BackwardPass()
        # parameters by ID: those whose gradients wait for the exchange, and those with gradients from no_sync passes
        self._arrived: dict[int, torch.Tensor] = {}
        self._local: dict[int, torch.Tensor] = {}
        self._arrivals = Arrivals(grace)
        self._passes = 0  # number of passes since the last exchange
        self._last = True  # whether the running pass is the last one before an exchange
        self._undecided: Set[str] = frozenset()  # tensors whose means were undecided before the running pass
        self._accumulated = Gradients()  # gradients of the passes since the last exchange
        self._set = Gradients()  # gradients set by hand, after the step that used them
        self._left: set[str] = set()  # tensors whose parameter groups were removed
        self._numbered = named is None
        self._checked = False  # whether DDP models of these parameters, and their order, were checked
        self._looked = NONE  # the graph task that was compared with the last exchange
        self._parameters = NamedParameters(optimizer, named)
        self._hooked: set[torch.Tensor] = set()
        self._claim = claim(grace, self._parameters.all(), OPTIMIZER, self)
        self._members: dict[str, tuple[torch.Tensor]] = {}
        self._adopted: list[tuple[int, bool]] = []  # IDs of the parameters, and whether they require gradients
        self._watch = Watch(grace, self._members, replaceable=False, stepping=self._stepping)
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

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of passes before an exchange, between two steps. Every worker must make this call."""
        check_passes(passes)
        if self._passes or self._pass.begun:
            raise RuntimeError("an accumulation is under way: call step() or zero_grad() first")
        self.backward_passes = passes

    @property
    def _passes_per_step(self) -> int:
        return self.backward_passes * self.grace.decision.micro_steps

    def _adopt(self) -> None:
        # Hook and build new parameters: at first all, later those of added groups and those unfrozen.
        parameters = self._parameters.all()
        if (found := [(id(p), p.requires_grad) for p in parameters]) == self._adopted:
            return
        self._adopted = found
        new = [p for p in parameters if p not in self._hooked]
        if added := [p for p in new if p.requires_grad or kind_of(p) is None]:
            for p in added:
                check_parameter(self._parameters.names.get(id(p), "an added parameter"), p)
            extend(self._claim, added)
            self._hooked.update(added)
            before, after = weakly(self._before_accumulation), weakly(self._on_gradient)
            for p in added:
                if p.is_floating_point() or p.is_complex():
                    self._claim.before_accumulation(p, before)
                    self._claim.on_accumulated(p, after)
        if unbuilt := self._parameters.unbuilt():
            self.grace.build(unbuilt)
            self._parameters.built.update(unbuilt)
            self._members.update({name: (p,) for name, p in unbuilt.items()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Call the optimizer's own method, then build the new parameters. Every worker must make this call."""
        self._add_param_group(param_group)
        self._adopt()

    def release(self) -> None:
        """Detach from the optimizer and its parameters."""
        self._claim.release("it was released")
        self.grace.discard()
        self.grace.defer_commit = False
        for hook in self._step_hooks:
            hook.remove()

    def reset(self) -> None:
        """Drop the current pass and its gradients after a change of workers."""
        self.grace.discard()
        self._forget()
        for p in self._parameters.built.values():
            p.grad = None

    def _forget(self) -> None:
        self._pass.end()
        self._passes = 0
        for each in (self._arrived, self._local, self._accumulated, self._arrivals):
            each.clear()

    # -- a backward pass --------------------------------------------------------------------------------------------
    def _before_accumulation(self, _: torch.Tensor) -> None:
        # Runs before a pass adds to its first gradient, and also in torch.autograd.grad, which adds to no gradient.
        task = running()
        if task != self._looked and not self._pass.has(task):
            self._looked = task
            self._watch.settle()

    def _on_gradient(self, p: torch.Tensor) -> None:
        if self.grace.paused:
            self._local[id(p)] = p
            return
        task = running()
        if not self._pass.has(task):
            self._begin_backward(task)
        name = self._parameters.names.get(id(p), "")
        if p.grad is None or self._watch.means.untouched(p) or name in self._left:
            return  # a user's hook has already stepped, or the parameter's group was removed
        if name in self._undecided:
            raise RuntimeError(
                "a second backward pass added its gradients to means that were exchanged already: call zero_grad() "
                "first, or pass backward_passes_per_step to DistributedOptimizer to accumulate several passes"
            )
        self._arrived[id(p)] = p
        if not self._last or name not in self._members:  # other parameters are built after the pass
            return
        if (gradient := gradient_of(p, self.grace, name)) is not None:
            self._arrivals.add(name, gradient)

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
        if self._passes and self._accumulated.removed():
            self._passes = 0
            self._accumulated.clear()
        if not self._passes and not self._arrivals.begun:
            self._begin_exchange()
        self._pass.begin(task, self._after_backward)
        self._last, self._undecided = self._passes + 1 == self._passes_per_step, self.grace.undecided
        if self._last:
            self.grace.start_all(dict.fromkeys(self._left))  # so that no bucket waits for them
            self._arrivals.begin()

    def _begin_exchange(self) -> None:
        if not self._checked:
            self._checked = True
            check_alone(list(self._hooked))
            if self._numbered and not self.grace.transport.elastic:
                check_order(self._parameters.trained(), self.grace.transport)
        self.grace.tune()
        self._left = self._members.keys() - self._watch.holding(self._optimizer).names  # tensors of removed groups
        self.grace.leave(self._left)

    def _give_up_failed_pass(self) -> None:
        if self._arrivals.begun:
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

    def _after_backward(self) -> None:
        began = self._pass.began
        self._pass.end()
        if not self._arrived:  # the optimizer has already stepped inside this pass
            return
        self.grace.setup.trace.add("backward", "from the first gradient on", began)
        self._passes += 1
        if self._passes >= self._passes_per_step:
            self.synchronize()
        else:
            self._accumulated.record(self._arrived.values())

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Discard undecided means, then call the optimizer's own method."""
        if not self._claim.released:
            if self._pass.failed:
                self._give_up_failed_pass()
            if self._pass.reentrant and self._arrivals.begun:
                self._exchange()
            if not self._pass.begun:
                self._refuse_changed_partial()
            self._watch.settle(dropped=True)
            if not self._pass.begun:
                self._forget()
        return self._zero_grad(*args, **kwargs)

    def _refuse_changed_partial(self) -> None:
        # Abort if a worker changed its accumulated gradients (clipped, unscaled) before their exchange.
        if self._passes and self._accumulated.written():
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
        if self._arrived or self._local:
            undecided = [self._members[name][0] for name in self.grace.undecided]
            if not self._arrived and any(id(p) in self._local and self._watch.means.kept(p) for p in undecided):
                self._give_up(
                    "a backward pass inside no_sync() added this worker's gradients to means: call zero_grad() after "
                    "it, or make it before the pass that is exchanged"
                )
            self._exchange()
        elif self.grace.provisional:
            self._watch.check_means()
        elif not is_dummy(self._optimizer):
            self._exchange(by_hand=True)

    def _exchange(self, by_hand: bool = False) -> None:
        self._passes = 0
        self._adopt()
        self._arrivals.submit()
        grace, started = self.grace, self.grace.started
        if not started:
            self._begin_exchange()
        same = by_hand and self._set.unchanged(p for (p,) in self._members.values())
        grace.begin(by_hand and not same)
        for name, (p,) in self._members.items():
            if name not in started:
                new = by_hand or id(p) in self._arrived or id(p) in self._local or not self._watch.means.untouched(p)
                mine = gradient_of(p, grace, name) if new and not same and name not in self._left else None
                if by_hand and mine is not None and not mine.count_nonzero():
                    mine = None
                grace.start(name, mine, spent=id(p) in self._arrived)
        grace.flush()
        self._watch.put(dict(zip(self._members, grace.means(self._members), strict=True)), self._arrived)
        for each in (self._arrived, self._local, self._accumulated, self._set):
            each.clear()
        if by_hand:
            self._set.record(p for (p,) in self._members.values())
        if running() == NONE:
            self._pass.end()

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
        device = next(iter(self._parameters.built.values())).device
        averaged = _averaged(closure, self.synchronize, device, self.grace.transport)
        return (optimizer, averaged, *args[1:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _after_step(self, *_: Any) -> None:
        # Runs before a user's hook can remove gradients. Gradients that the optimizer changed still count as the means.
        if not self.grace.paused:
            self._watch.after(self._optimizer)
            self._watch.means.refresh(sampled=False)
            self._set.refresh()

    def _stepping(self, optimizer: Any) -> None:
        # An optimizer is about to step some of the parameters.
        if optimizer is self._optimizer or self._claim.released:
            return
        if optimizer.param_groups is self._optimizer.param_groups:  # one optimizer wraps the other, as in SAM
            self._before_step(optimizer, (), {})
        elif not self.grace.paused and (self.grace.provisional or self._arrived or self._pass.begun):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps parameters whose gradients a DistributedOptimizer exchanges: put "
                "this optimizer's backward passes and steps inside `with distributed.no_sync()` if they are to be each "
                "worker's own, or step the distributed one"
            )


def is_dummy(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step only creates state, from zero gradients and rates, as torch.distributed.checkpoint makes one."""
    rates = [group.get("lr", 1) for group in optimizer.param_groups]
    present = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return bool(present) and all(float(rate) == 0 for rate in rates) and all(zero(present))


def _averaged(
    closure: Callable[[], Any], synchronize: Callable[[], None], device: torch.device, transport: Transport
) -> Callable[[], Any]:
    # Returns a closure that also replaces the gradients by means, and that returns the mean loss.
    def averaged() -> Any:
        loss = closure()
        synchronize()
        return loss if transport.size == 1 or loss is None else _mean_loss(loss, device, transport)

    return averaged


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
