"""DistributedOptimizer: an optimizer of PyTorch that steps with means over all workers."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

import torch

from grace.collectives import Reduce
from grace.core import name_of
from grace.pipeline import MOMENTUM_TWICE, Grace
from grace.torch.gradients import dense, plain


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    grace: Grace,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    backward_passes_per_step: int = 1,
    *,
    compression: None = None,
    op: Any = "average",
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: None = None,
    sparse_as_dense: bool = False,
    process_set: None = None,
) -> torch.optim.Optimizer:
    """Let an optimizer step with gradients averaged over all workers. Returns the optimizer that was passed in.

    Gradients leave while the backward pass goes on and are replaced by their means before ``backward`` returns, as in
    DistributedDataParallel: clipping, GradScaler, closures and schedulers see means and need no special order. A loss
    that a closure returns is averaged too, so that line searches decide alike on all workers.

    ``named_parameters``: as ``model.named_parameters()``; names key the state, also in checkpoints. Without them
    parameters are numbered in the optimizer's order.
    ``backward_passes_per_step``: gradients of so many passes add up before they are exchanged, once; so many times
    ``grace.decision.micro_steps``, which a policy may change.
    The other arguments are Horovod's. What GRACE does elsewhere is refused with the place: it is not ignored.

    Every worker must make this call: the workers compare their parameters, and all raise ValueError if they differ.
    """
    remedies = {
        "compression": (compression, None, "name the method in grace_from_params"),
        "op": (_op_name(op), "average", "GRACE averages"),
        "gradient_predivide_factor": (gradient_predivide_factor, 1.0, "scale the loss"),
        "num_groups": (num_groups, 0, "set bucket_mb in grace_from_params"),
        "groups": (groups, None, "set bucket_mb in grace_from_params"),
        "process_set": (process_set, None, "grace_from_params(..., transport=HorovodTransport(process_set))"),
    }
    for key, (value, allowed, remedy) in remedies.items():
        if value != allowed:
            raise ValueError(f"{key}={value!r} is not for GRACE's DistributedOptimizer: {remedy}")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step!r} must be at least 1")
    if hasattr(optimizer, "_grace"):
        raise ValueError("this optimizer is distributed already: wrap it once")
    driver = _Driver(optimizer, grace, named_parameters, backward_passes_per_step)
    optimizer._grace = driver
    # Horovod's names, for scripts that call them. Means are there already, so there is nothing to skip.
    optimizer.synchronize = driver.synchronize
    optimizer.skip_synchronize = _nothing_to_skip
    return optimizer


def release(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Undo `DistributedOptimizer`: gradients stay here, and the Grace may drive another optimizer."""
    driver = optimizer.__dict__.pop("_grace", None)
    if driver is None:
        raise ValueError("this optimizer is not distributed")
    driver.release()
    del optimizer.synchronize, optimizer.skip_synchronize
    return optimizer


class _Driver:
    """Drives a Grace from the hooks of an optimizer and its parameters."""

    def __init__(self, optimizer: Any, grace: Grace, named: Any, passes_per_step: int):
        self.grace = grace
        self._optimizer = optimizer
        self._backward_passes = passes_per_step
        self._passes = 0
        self._task = -1  # the backward pass that is under way
        self._nested = -1  # the last one inside another
        self._began = 0.0
        self._synced = False
        self._versions: dict[str, tuple[Any, int]] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._names: dict[torch.Tensor, str] = {p: plain(name) for name, p in named or ()}
        if named is not None:
            unnamed = [list(p.shape) for p in self._trained() if p not in self._names]
            if unnamed:
                raise ValueError(
                    f"named_parameters lacks {len(unnamed)} of the optimizer's parameters, of shapes {unnamed[:3]}"
                )
        grace.track_missing = True
        grace.learning_rate = self._learning_rate
        if grace.method.memory.momentum_inside and any(group.get("momentum") for group in optimizer.param_groups):
            warnings.warn(MOMENTUM_TWICE.format(name_of(grace.method.memory)), stacklevel=3)
        self._adopt()
        self._hooks += [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def _passes_per_step(self) -> int:
        return self._backward_passes * self.grace.decision.micro_steps

    def _learning_rate(self, name: str) -> Any:
        p = self._parameters[name]
        return next(group["lr"] for group in self._optimizer.param_groups if any(p is q for q in group["params"]))

    def _trained(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _adopt(self) -> None:
        # Parameters that are new: all at first, later those of added groups or unfrozen ones.
        new = [p for p in self._trained() if self._names.get(p) not in self._parameters]
        if not new:  # at nearly every step
            return
        for p in new:
            self._names.setdefault(p, f"parameter{len(self._names)}")
        order = {p: index for index, p in enumerate(self._names)}
        named = {self._names[p]: p for p in sorted(new, key=order.__getitem__)}
        self.grace.build(named)
        self._parameters.update(named)
        # Parameters hold hooks where Python's collector does not look, and a hook that held this would keep all alive.
        arrived = WeakMethod(self._on_gradient)

        def on_gradient(p: torch.Tensor) -> None:
            if (handle := arrived()) is not None:
                handle(p)

        for p in new:
            self._hooks.append(p.register_post_accumulate_grad_hook(on_gradient))

    def release(self) -> None:
        """Leave the optimizer and its parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def reset(self) -> None:
        """Forget the pass and the gradients that were under way when the workers changed."""
        self._passes, self._task, self._nested, self._synced, self._versions = 0, -1, -1, False, {}
        for p in self._parameters.values():
            p.grad = None

    def _on_gradient(self, p: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in (self._task, self._nested):
            self._begin_backward(task)
            self._refuse_sum_with_means(p)
            self._synced = False
        if self._passes + 1 == self._passes_per_step:
            self.grace.start(self._names[p], self._gradient(p), spent=True)

    def _begin_backward(self, task: int) -> None:
        if _inside_backward():
            # Its end is not the end of the whole pass, which may show no gradient of its own to hook on to.
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
        if self._nested == -1 and self.grace.started:
            warnings.warn("the backward pass before this one failed: what it sent is dropped", stacklevel=2)
            self.grace.abandon()
        self._task = task
        self._began = time.perf_counter()
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _refuse_sum_with_means(self, p: torch.Tensor) -> None:
        # zero_grad makes a new gradient or changes the old one's version twice; a bare second backward, once.
        if not self._synced:
            return
        grad, version = self._versions.get(self._names[p], (None, -1))
        if grad is p.grad and p.grad is not None and p.grad._version == version + 1:
            raise RuntimeError(
                "a second backward pass added its gradients to means that were exchanged already: call zero_grad() "
                "first, or pass backward_passes_per_step to DistributedOptimizer to accumulate several passes"
            )

    def _after_backward(self) -> None:
        self._task = self._nested = -1
        self.grace.trace.add("backward", "from the first gradient on", self._began)
        self._passes += 1
        if self._passes == self._passes_per_step:
            self.synchronize()

    def synchronize(self) -> None:
        """Replace all gradients by their means, unless that was done since the last backward pass."""
        if self._synced:
            return
        self._passes = 0
        self._adopt()
        started = self.grace.started
        for name, p in self._parameters.items():
            if name not in started:
                self.grace.start(name, self._gradient(p), spent=True)
        self.grace.flush()
        self._versions = {}
        for name, p in self._parameters.items():
            mean = self.grace.mean(name)
            if mean is None:
                continue
            if p.grad is None or p.grad.is_sparse:
                p.grad = mean.clone()  # the mean is a view of a whole message
            elif mean.data_ptr() != p.grad.data_ptr():
                with torch.no_grad():
                    p.grad.copy_(mean)
            self._versions[name] = (p.grad, p.grad._version)
        self._synced = True
        self._task = self._nested = -1
        self.grace.tune()

    def _gradient(self, p: torch.Tensor) -> torch.Tensor | None:
        if p.grad is None or not p.requires_grad:  # a frozen parameter may still have an old gradient
            return None
        return dense(p.grad.detach(), self.grace, self._names[p])

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = args[1:] if args and args[0] is optimizer else args
        closure = args[0] if args else kwargs.get("closure")
        if closure is None:
            self.synchronize()
            return None
        return (optimizer, self._averaged(closure), *args[1:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            self._synced, self._versions = False, {}
            loss = closure()
            self.synchronize()
            if self.grace.world_size == 1 or loss is None:
                return loss
            value = torch.as_tensor(loss, dtype=torch.float32).detach().reshape(1)
            ((mean,),) = self.grace.transport.start([Reduce((value,), "mean")], "loss")()
            return mean.reshape(()) if isinstance(loss, torch.Tensor) else mean.item()

        return averaged

    def _after_step(self, *_: Any) -> None:
        self._synced, self._passes = False, 0
        self._versions = {}


def _inside_backward() -> bool:
    # Whether this backward pass was begun by the backward of an autograd.Function, as reentrant checkpoints do.
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _FUNCTION_BACKWARD:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_FUNCTION_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__


def _op_name(op: Any) -> str:
    # Horovod's Average is an object of its own; its integer is not ours to know.
    return (
        "average"
        if op in ("average", None) or getattr(op, "__name__", str(op)).lower().endswith("average")
        else str(op)
    )


@contextmanager
def _nothing_to_skip() -> Iterator[None]:
    yield
