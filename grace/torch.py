"""PyTorch's doors: DistributedOptimizer, a DDP communication hook, FSDP2, and broadcasts of the initial state."""

from __future__ import annotations

import io
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod

import torch

from grace.backends import backend_of
from grace.collectives import Broadcast, Reduce
from grace.core import Transport, name_of
from grace.fsdp import fsdp
from grace.gossip import Gossip
from grace.pipeline import MOMENTUM_TWICE, SPARSE, Grace
from grace.policies import Decision
from grace.transports import get_transport

__all__ = [
    "CheckpointState",
    "DistributedOptimizer",
    "PolicyScheduler",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ddp_hook",
    "fsdp",
    "gossip",
    "name_parameters",
    "release",
]

CHUNK_BYTES = 64 * 2**20  # of one broadcast message


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
        self._names: dict[torch.Tensor, str] = {p: _plain(name) for name, p in named or ()}
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
        return _dense(p.grad.detach(), self.grace, self._names[p])

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


class PolicyScheduler:
    """Tell a Grace's policy that an epoch is over: ``step()`` once per epoch, after the learning rate's scheduler.

    ``optimizer``: whose learning rates are read. ``grace``: by default that of the optimizer, if it is distributed.
    ``scale_lr``: when a policy makes batches larger, multiply the learning rates by as much. Name the learning rate's
    scheduler as ``lr_scheduler`` then, so that it goes on from there.
    Every worker must make the same calls.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        grace: Grace | None = None,
        scale_lr: bool = False,
        lr_scheduler: Any = None,
    ):
        if grace is None and not hasattr(optimizer, "_grace"):
            raise ValueError("this optimizer is not distributed: name the Grace, as PolicyScheduler(optimizer, grace)")
        self.grace: Grace = optimizer._grace.grace if grace is None else grace
        self._optimizer, self._scale_lr, self._lr_scheduler = optimizer, scale_lr, lr_scheduler
        self._rates = self._read()

    def _read(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def step(self) -> Decision:
        """End an epoch; gives what holds from now on."""
        now = self._read()
        # Of several groups, the one whose rate falls most.
        pairs = zip([*self._rates, *now[len(self._rates) :]], now, strict=True)
        lr, next_lr = min(pairs, key=lambda pair: pair[1] / pair[0] if pair[0] else 1.0)
        decision = self.grace.end_epoch(lr, next_lr)
        if self._scale_lr and decision.lr_scale != 1:
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * decision.lr_scale
            if self._lr_scheduler is not None:
                self._lr_scheduler.base_lrs = [lr * decision.lr_scale for lr in self._lr_scheduler.base_lrs]
        self._rates = self._read()
        return decision

    def state_dict(self) -> dict[str, Any]:
        """What was read last; the policy's own state is in the Grace's."""
        return {"rates": list(self._rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._rates = list(state["rates"])


def ddp_hook(grace: Grace, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Communication hook: ``ddp_model.register_comm_hook(grc, grace.torch.ddp_hook)``.

    State is kept by parameter, so DDP may rebuild its buckets. A bucket's first round travels while the backward pass
    goes on; rounds after it follow when the last bucket is there, in the same order on all workers. In the first pass
    all of them wait for the last bucket: only then are all tensors known. Call `name_parameters` first if state is to
    be saved under the model's names: DDP tells a hook none.
    """
    if grace.options.fuse != "tensor":
        raise ValueError(f"fuse={grace.options.fuse!r} does not fit DDP, which rebuilds its buckets: use fuse='tensor'")
    book = _books.setdefault(grace, _Book())
    grace.track_missing = True  # of parameters that no worker uses DDP drops the mean: their state must stay
    parameters = {book.name(p): p for p in bucket.parameters()}
    buffer = bucket.buffer()
    views = [_dense(buffer, grace, *parameters)] if buffer.is_sparse else bucket.gradients()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    book.waiting.append(_Arrived(future, buffer, parameters, dict(zip(parameters, views, strict=True))))
    if grace.names or bucket.is_last():
        # Parameters, not gradients: DDP shows complex gradients as real ones.
        grace.build({name: p for arrived in book.waiting for name, p in arrived.parameters.items()})
        for arrived in book.waiting[book.launched :]:
            present = {n: None if p.grad is None else arrived.views[n] for n, p in arrived.parameters.items()}
            grace.launch(present, together=f"ddp{book.launched}", spent=True)
            book.launched += 1
    if bucket.is_last():
        waiting, book.waiting, book.launched = book.waiting, [], 0
        grace.land()
        for arrived in waiting:
            for name, view in arrived.views.items():
                mean = grace.mean(name)
                if mean is not None and mean.data_ptr() != view.data_ptr():
                    view.copy_(mean)
            sparse = arrived.buffer.is_sparse
            arrived.future.set_result(next(iter(arrived.views.values())).to_sparse(1) if sparse else arrived.buffer)
        grace.tune()
    return future


# DDP compares a hook's annotations with its own types, and ours are text.
ddp_hook.__annotations__.clear()


def name_parameters(grace: Grace, model: torch.nn.Module) -> None:
    """Let `ddp_hook` know a model's parameters by their names. Call it before the first backward pass."""
    model = getattr(model, "module", model)
    _books.setdefault(grace, _Book()).names = {p: _plain(name) for name, p in model.named_parameters()}


class _Arrived(NamedTuple):
    """A bucket of DDP."""

    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    parameters: dict[str, torch.Tensor]
    views: dict[str, torch.Tensor]
    """The gradients in ``buffer``, or a dense copy of a sparse one."""


class _Book:
    """What `ddp_hook` remembers of one Grace."""

    def __init__(self) -> None:
        self.names: dict[torch.Tensor, str] = {}
        self.waiting: list[_Arrived] = []
        self.launched = 0  # of those that wait

    def name(self, p: torch.Tensor) -> str:
        return self.names.setdefault(p, f"parameter{len(self.names)}")


_books: WeakKeyDictionary[Grace, _Book] = WeakKeyDictionary()


def gossip(
    optimizer: torch.optim.Optimizer, gossip: Gossip, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None
) -> torch.optim.Optimizer:
    """Mix parameters between neighbours after each step of an optimizer. Returns the optimizer that was passed in.

    Gradients stay each worker's own. ``named_parameters``: as ``model.named_parameters()``; without them parameters are
    numbered in the optimizer's order. Every worker must make this call, and start from the same parameters.
    """
    names = {p: name for name, p in named_parameters or ()}
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    named = {names.setdefault(p, f"parameter{number}"): p for number, p in enumerate(parameters)}
    gossip.build(named)

    @torch.no_grad()
    def mix(*_: Any) -> None:
        for name, mixed in gossip.step({name: p.detach() for name, p in named.items()}).items():
            named[name].copy_(mixed)

    optimizer.register_step_post_hook(mix)
    return optimizer


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0, grace: Grace | None = None
) -> None:
    """Copy worker ``root_rank``'s values to all workers, in place.

    ``params``: ``model.state_dict()`` or ``model.named_parameters()``. ``grace``: whose transport to use; default: the
    one that is initialised.
    """
    named = dict(params)
    tensors = [named[name].detach() for name in sorted(named) if isinstance(named[name], torch.Tensor)]
    if not tensors:
        return
    transport = _transport(grace, tensors[0])
    for chunk in _chunks(tensors):
        wait = transport.start([Broadcast((tensor.contiguous(),), root_rank) for tensor in chunk], "parameters")
        for tensor, (value,) in zip(chunk, wait(), strict=True):
            tensor.copy_(value)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, grace: Grace | None = None) -> None:
    """Copy worker ``root_rank``'s optimizer state to all workers, also to those that have none yet."""
    example = next(p for group in optimizer.param_groups for p in group["params"])
    transport = _transport(grace, example)
    saved = io.BytesIO()
    if transport.rank == root_rank:
        torch.save(optimizer.state_dict(), saved)
    data = torch.frombuffer(bytearray(saved.getvalue() or b"\0"), dtype=torch.uint8).to(example.device)
    ((received,),) = transport.start([Broadcast((data,), root_rank, ragged=True)], "optimizer")()
    if transport.rank != root_rank:
        content = io.BytesIO(received.cpu().numpy().tobytes())
        optimizer.load_state_dict(torch.load(content, map_location=example.device, weights_only=True))


class CheckpointState:
    """A Grace in the state that torch.distributed.checkpoint saves: ``{"model": ..., "grace": CheckpointState(grc)}``.

    That library keeps one copy of a tensor that has the same name on all workers, and residuals differ between them:
    here every worker's have a name of their own. For a run with as many workers; `grace.checkpoint` follows their
    number.
    """

    def __init__(self, grace: Grace):
        self._grace, self._name = grace, f"worker{grace.rank} of {grace.world_size}"

    def state_dict(self) -> dict[str, Any]:
        state = self._grace.state_dict()
        return {self._name: {**state, "step": torch.tensor(state["step"])}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = state_dict[self._name]
        self._grace.load_state_dict({**state, "step": int(state["step"])})


def _transport(grace: Grace | None, example: torch.Tensor) -> Transport:
    transport = get_transport() if grace is None else grace.transport
    return transport.bind(backend_of(example)) if getattr(transport, "xp", None) is None else transport


def _chunks(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    room = CHUNK_BYTES
    for tensor in tensors:
        if chunk and tensor.nbytes > room:
            yield chunk
            chunk, room = [], CHUNK_BYTES
        chunk.append(tensor)
        room -= tensor.nbytes
    yield chunk


def _dense(grad: torch.Tensor, grace: Grace, name: str) -> torch.Tensor:
    if not grad.is_sparse:
        return grad
    grace.note(name, SPARSE)
    return grad.to_dense()


def _plain(name: str) -> str:
    # torch.compile puts the model into another one; checkpoints fit both.
    return name.replace("_orig_mod.", "")


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
