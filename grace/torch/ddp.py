"""ddp_hook: a DistributedDataParallel communication hook."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod, WeakSet, ref

import torch

from grace.engine.session import Grace
from grace.torch.checks import check_grace, check_momentum
from grace.torch.gradients import dense, plain
from grace.torch.ownership import HOOK, Claim, claim, claimed, extend
from grace.torch.provisional import Sample, nonzero


@torch.no_grad()  # since create_graph=True enables autograd in the backward pass
def ddp_hook(grace: Grace, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Communication hook: ``ddp_model.register_comm_hook(grc, grace.torch.ddp_hook)``.

    An exchange is provisional until an optimizer steps. If its means are discarded instead (a GAN's generator loss
    goes through the discriminator; a loss scaler skips the step), residuals are rolled back.

    State is stored by parameter, so DDP may rebuild its buckets. A bucket's first round of collectives overlaps the
    backward pass; later rounds follow once the last bucket is ready, in the same order on all workers. In the first
    pass all buckets wait for the last one, since only then are all tensors known. DDP passes a hook no parameter names:
    call `name_parameters` first to save state under the model's names. Inside the model's ``join`` context, means are
    over all workers; ``divide_by_initial_world_size=False`` raises ValueError.
    """
    check_grace(grace, "ddp_model.register_comm_hook(grc, grace.torch.ddp_hook)")
    if grace.options.fuse != "tensor":
        raise ValueError(f"fuse={grace.options.fuse!r} does not fit DDP, which rebuilds its buckets: use fuse='tensor'")
    if grace.paused:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
    book = _books.setdefault(grace, _Book())
    book.hold(grace, bucket.parameters())
    book.check_divisor()
    grace.defer_commit = True
    if grace.provisional and not book.waiting:
        book.applied()  # this pass accumulated onto the last means, so they count as applied
    grace.track_missing = True  # DDP drops the means of parameters that no worker uses: their state must stay unchanged
    parameters = {book.name(p): p for p in bucket.parameters()}
    buffer = bucket.buffer()
    views = [dense(buffer, grace, *parameters)] if buffer.is_sparse else bucket.gradients()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    book.waiting.append(_Arrived(future, buffer, parameters, dict(zip(parameters, views, strict=True))))
    known = set(grace.names)
    if known or bucket.is_last():
        new = {n: p for arrived in book.waiting for n, p in arrived.parameters.items() if n not in known}
        if new:  # build from parameters, not gradients: DDP presents complex gradients as real ones
            grace.build(new)
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
        book.before.take(book.names, lambda p: p)
    return future


# DDP checks that a hook's annotations are certain types, but in this module annotations are strings.
ddp_hook.__annotations__.clear()


def name_parameters(grace: Grace, model: torch.nn.Module) -> None:
    """Give `ddp_hook` the names of a model's parameters. Call it before the first backward pass."""
    check_grace(grace, "grace.torch.name_parameters(grc, model)")
    model = getattr(model, "module", model)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"a model is needed, not {type(model).__name__}: grace.torch.name_parameters(grc, model)")
    _books.setdefault(grace, _Book()).names = {p: plain(name) for name, p in model.named_parameters()}


def _models_of(parameters: list[torch.Tensor]) -> list[ref[torch.nn.Module]]:
    # The DistributedDataParallel models of these parameters. A hook receives no model, so search for them once.
    kind, wanted = torch.nn.parallel.DistributedDataParallel, set(parameters)
    models = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    return [ref(model) for model in models if not wanted.isdisjoint(model.parameters())]


class _Arrived(NamedTuple):
    """A DDP bucket that waits for its means; ``future`` gets the result. ``parameters`` are by name."""

    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    parameters: dict[str, torch.Tensor]
    views: dict[str, torch.Tensor]
    """By name, the gradients: views of ``buffer``, or a dense copy if it is sparse."""


class _Book:
    """`ddp_hook`'s state for one Grace."""

    def __init__(self) -> None:
        self.names: dict[torch.Tensor, str] = {}
        self.claim: Claim | None = None
        self.waiting: list[_Arrived] = []
        self.launched = 0  # how many of the waiting buckets were launched
        self.before = Sample()  # copies of some parameters, made at the last exchange
        self._seen: WeakSet[Any] = WeakSet()  # optimizers that were already checked
        self._models: list[ref[torch.nn.Module]] = []

    def hold(self, grace: Grace, parameters: list[torch.Tensor]) -> None:
        """Claim new parameters. ValueError if another integration drives them, RuntimeError if the claim ended."""
        if self.claim is not None and self.claim.released:
            raise RuntimeError(f"this model's ddp_hook does not average gradients any more: {self.claim.released}")
        new = [p for p in parameters if self.claim is None or claimed(p) is not self.claim]
        if not new:
            return
        if self.claim is None:
            self.claim = claim(grace, new, HOOK, self)
        else:
            extend(self.claim, new)
        arriving = WeakMethod(self._before_accumulation)

        def before_accumulation(gradient: torch.Tensor) -> None:
            if (handle := arriving()) is not None:
                handle()

        self.claim.hooks += [p.register_hook(before_accumulation) for p in new]
        self._models = _models_of(new)
        self._check_group(grace)

    def _check_group(self, grace: Grace) -> None:
        # Raise ValueError if the Grace averages over other workers than the model's replicas.
        models: list[Any] = [each() for each in self._models]
        for model in models:
            if model is None or not any(state is grace for _, state in model._comm_hooks):
                continue
            ranks = torch.distributed.get_process_group_ranks(model.process_group)
            if getattr(grace.transport, "ranks", ranks) != ranks or grace.world_size != len(ranks):
                raise ValueError(
                    f"the model is replicated over workers {ranks}, but grace averages over {grace.world_size} "
                    "workers: make it with transport=TorchDistributedTransport(model.process_group)"
                )

    def check_divisor(self) -> None:
        """Raise ValueError inside a ``join`` that divides by the number of remaining workers, unknown to a hook."""
        models = [model() for model in self._models]
        if any(getattr(model, "_divide_by_initial_world_size", True) is False for model in models):
            raise ValueError(
                "join(divide_by_initial_world_size=False) divides by the number of remaining workers, which DDP does "
                "not tell a hook: leave it out, so that means are over all workers"
            )

    def _before_accumulation(self) -> None:
        # Before a pass accumulates its first gradient: commit means applied by hand, roll back if all are zero.
        grace = None if self.claim is None else self.claim.grace
        if grace is None or not grace.provisional or self.waiting:
            return
        if self.before.changed:  # updated by hand, not by an optimizer
            self.applied()
        elif not any(nonzero(p.grad) for p in self.names):
            grace.rollback()

    def applied(self) -> None:
        """Commit the last exchange, whose means were applied."""
        grace = None if self.claim is None else self.claim.grace
        if grace is not None and grace.provisional:
            grace.commit()
            grace.tune()

    def before_another(self, optimizer: Any) -> None:
        """Called before an optimizer steps these parameters: check its momentum once."""
        grace = None if self.claim is None else self.claim.grace
        if grace is not None and optimizer not in self._seen:
            self._seen.add(optimizer)
            check_momentum(grace, optimizer, stacklevel=4)

    def after_another(self, optimizer: Any) -> None:
        """Called after an optimizer has stepped these parameters."""
        self.applied()

    def name(self, p: torch.Tensor) -> str:
        return self.names.setdefault(p, f"parameter{len(self.names)}")


_books: WeakKeyDictionary[Grace, _Book] = WeakKeyDictionary()
