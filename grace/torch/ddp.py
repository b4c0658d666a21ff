"""ddp_hook: a DistributedDataParallel communication hook."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from grace.backends.torch_buffers import span
from grace.engine.session import Grace
from grace.torch.checks import check_grace, check_momentum
from grace.torch.gradients import dense
from grace.torch.named import Names
from grace.torch.ownership import HOOK, Claim, claim, extend, models_of, weakly
from grace.torch.passes import NONE, running
from grace.torch.watch import Watch

LOOKS = 8
"""Approximate number of parameters per bucket whose hooks check, before accumulation, if means were removed."""


@torch.no_grad()  # since create_graph=True enables autograd in the backward pass
def ddp_hook(grace: Grace, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Communication hook: ``ddp_model.register_comm_hook(grc, grace.torch.ddp_hook)``.

    A parameter's means are applied when an optimizer that holds the parameter steps with them as its gradient, and this
    step changes a parameter or the state of the optimizer. Manual clamping, decay or averaging does not count as a
    step. A step decides only for the parameters of its own optimizer. If no optimizer has stepped a parameter yet, its
    means are applied when its weights are written, or when an optimizer over copies of the parameter steps. Means that
    were removed, zeroed or replaced earlier are discarded, which restores the state from before the exchange. A pass
    that adds to undecided means is applied or discarded with them. If the outcome is unknown, means count as applied,
    with one warning; `Grace.commit`, `Grace.discard` and ``no_sync`` decide explicitly.

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
    book = _book(grace)
    known = book.known(grace, bucket.parameters())
    book.check_divisor()
    if not book.waiting:
        book.watch.settle(book.present)
        grace.tune()
    grace.defer_commit = True
    grace.track_missing = True  # DDP drops the means of parameters that no worker uses: their state must stay unchanged
    buffer = bucket.buffer()
    views = [dense(buffer, grace, *known.names)] if buffer.is_sparse else bucket.gradients()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    book.waiting.append(_Arrived(future, buffer, known, views))
    if grace.setup.table.tensors or bucket.is_last():
        present = book.present
        new = [arrived.known for arrived in book.waiting[book.launched :] if not arrived.known.built]
        if new:  # build from parameters, not gradients: DDP presents complex gradients as real ones
            grace.build([pair for each in new for pair in zip(each.names, each.parameters, strict=True)])
        for each in new:
            each.built = True
        for arrived in book.waiting[book.launched :]:
            grace.launch(arrived.gradients(present), together=f"ddp{book.launched}", spent=True)
            book.launched += 1
    if bucket.is_last():
        waiting, book.waiting, book.launched = book.waiting, [], 0
        grace.land()
        for arrived in waiting:
            arrived.future.set_result(arrived.result(grace.means(arrived.known.names)))
        book.arrived.clear()
        names = [name for arrived in waiting for name in arrived.known.names]
        if running() == NONE:  # this worker is inside DDP's `join`, out of data: it cannot see the others' steps
            grace.commit()
        else:
            # At the end of the pass DDP puts the means into p.grad, in a callback that it queues after this hook.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(partial(book.landed, names)))
    return future


# DDP checks that a hook's annotations are certain types, but in this module annotations are strings.
ddp_hook.__annotations__.clear()


def name_parameters(grace: Grace, model: torch.nn.Module) -> None:
    """Give `ddp_hook` the names of a model's parameters. Call it before the first backward pass."""
    check_grace(grace, "grace.torch.name_parameters(grc, model)")
    model = getattr(model, "module", model)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"a model is needed, not {type(model).__name__}: grace.torch.name_parameters(grc, model)")
    _book(grace).rename(model.named_parameters())


class _Known:
    """The parameters of a bucket, whose names do not change as long as DDP keeps the bucket."""

    def __init__(self, parameters: list[torch.Tensor], names: list[str]):
        self.parameters, self.names = parameters, names
        self.ids = frozenset(map(id, parameters))
        self.built = False


class _Arrived(NamedTuple):
    """A DDP bucket that waits for its means; ``future`` gets the result."""

    future: torch.futures.Future[torch.Tensor]
    buffer: torch.Tensor
    known: _Known
    views: list[torch.Tensor]
    """The gradients: views of ``buffer``, or a dense copy if it is sparse."""

    def gradients(self, present: set[int]) -> dict[str, torch.Tensor | None]:
        """Return, by name, the gradients of parameters whose IDs are ``present``, and None for the others."""
        if self.known.ids <= present:
            return dict(zip(self.known.names, self.views, strict=True))
        each = zip(self.known.names, self.known.parameters, self.views, strict=True)
        return {name: view if id(p) in present else None for name, p, view in each}

    def result(self, means: list[torch.Tensor | None]) -> torch.Tensor:
        """Return the means as one vector: their own memory if they lie side by side, else ``buffer``."""
        found = [mean for mean in means if mean is not None]
        if len(found) == len(means) and found[0].dtype == self.buffer.dtype and not self.buffer.is_sparse:
            whole = span(found)
            if whole is not None:
                return whole.view(self.buffer.dtype)
        moved = [pair for pair in zip(self.views, means, strict=True) if pair[1] is not None and pair[1] is not pair[0]]
        if moved:
            torch._foreach_copy_(*map(list, zip(*moved, strict=True)))
        return self.views[0].to_sparse(1) if self.buffer.is_sparse else self.buffer


class _Book:
    """`ddp_hook`'s state for one Grace."""

    def __init__(self, grace: Grace) -> None:
        self.names = Names()
        self.claim: Claim | None = None
        self.waiting: list[_Arrived] = []
        self.launched = 0  # how many of the waiting buckets were launched
        self.arrived: list[torch.Tensor] = []
        """Parameters that got a gradient since the last exchange; DDP also passes old gradients of unused ones."""
        self.members: dict[str, tuple[torch.Tensor]] = {}
        self.watch = Watch(grace, self.members, stepping=self.check_momentum)
        self._known: set[int] = set()  # IDs of the claimed parameters
        self._buckets: dict[tuple[int, ...], _Known] = {}  # by the IDs of their parameters
        self._seen: WeakSet[Any] = WeakSet()  # optimizers that were already checked
        self._models: list[ref[torch.nn.Module]] = []

    def known(self, grace: Grace, parameters: list[torch.Tensor]) -> _Known:
        """Return the record of a bucket's parameters, and claim new parameters.

        Raises ValueError if another integration drives them, RuntimeError if the claim ended.
        """
        if self.claim is not None and self.claim.released:
            raise RuntimeError(f"this model's ddp_hook does not average gradients any more: {self.claim.released}")
        key = tuple(map(id, parameters))
        if (found := self._buckets.get(key)) is None:
            self._hold(grace, parameters)
            found = self._buckets[key] = _Known(parameters, [self.names.of(p) for p in parameters])
        return found

    def _hold(self, grace: Grace, parameters: list[torch.Tensor]) -> None:
        new = [p for p in parameters if id(p) not in self._known]
        self._known.update(map(id, new))
        if not new:
            return
        if self.claim is None:
            self.claim = claim(grace, new, HOOK, self)
        else:
            extend(self.claim, new)
        for p in new:
            self.members[self.names.of(p)] = (p,)
            self.claim.on_accumulated(p, self.arrived.append)
        self.arrived.extend(p for p in new if p.grad is not None)  # their hooks miss this first pass
        for p in new[:: max(1, len(new) // LOOKS)]:
            self.claim.before_accumulation(p, weakly(self._before_accumulation))
        self._models = models_of(new)
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
        """Raise ValueError inside a ``join`` that divides by the number of remaining workers: hooks do not know it."""
        models = [model() for model in self._models]
        if any(getattr(model, "_divide_by_initial_world_size", True) is False for model in models):
            raise ValueError(
                "join(divide_by_initial_world_size=False) divides by the number of remaining workers, which DDP does "
                "not tell a hook: leave it out, so that means are over all workers"
            )

    def _before_accumulation(self, _: torch.Tensor) -> None:
        # Before a pass adds to gradients, check whether the last means were removed or zeroed.
        grace = self.watch.grace
        if not self.waiting and grace is not None and grace.provisional:
            self.watch.settle(self.present)

    @property
    def present(self) -> set[int]:
        """The IDs of the parameters in `arrived`."""
        return set(map(id, self.arrived))

    def landed(self, names: list[str]) -> None:
        """Called when the means of an exchange are in ``p.grad``."""
        self.watch.exchanged(names)

    def check_momentum(self, optimizer: Any) -> None:
        """Check the momentum of an optimizer that is about to step these parameters, once."""
        grace = self.watch.grace
        if grace is not None and optimizer not in self._seen:
            self._seen.add(optimizer)
            check_momentum(grace, optimizer, stacklevel=6)

    def rename(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all names."""
        self._buckets.clear()
        self.names = Names(named)
        known = [p for (p,) in self.members.values() if id(p) in self.names]
        self.members.clear()
        self.members.update({self.names[id(p)]: (p,) for p in known})
        self.watch.renamed()


_books: WeakKeyDictionary[Grace, _Book] = WeakKeyDictionary()


def _book(grace: Grace) -> _Book:
    if grace not in _books:
        _books[grace] = _Book(grace)
    return _books[grace]
