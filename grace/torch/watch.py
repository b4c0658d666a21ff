"""Tells whether the means of an exchange were applied or discarded in PyTorch.

For one Grace, a `Watch` observes weights, gradients and all optimizers of the process. It reports steps, writes and
removals to a `grace.engine.applied.Rule`, which decides.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from grace.engine.applied import Rule
from grace.engine.session import Grace
from grace.torch.ownership import weakly
from grace.torch.signals import Gradients, Tracks, Unowned, alike, nonzero, waits, zero


class Holding(NamedTuple):
    """The parameters of an optimizer whose gradients one Grace averages."""

    names: frozenset[str]
    """The tensors of the Grace that the optimizer holds."""
    pairs: list[tuple[str, torch.Tensor]]
    copies: bool
    """Whether it holds copies of all parameters instead, judged by equal shapes or an equal number of elements."""


class _Bracket:
    # The time from an optimizer's pre-hook to its post-hook.
    def __init__(self, parameters: list[torch.Tensor], holding: Holding, tracks: Tracks, frame: int):
        self.parameters, self.holding, self._tracks, self._frame = parameters, holding, tracks, frame
        self.present: frozenset[str] = frozenset()

    def runs(self, frame: Any) -> bool:
        """Whether ``frame`` was called by this step; False if the step was broken off by an error."""
        while (frame := frame.f_back) is not None:
            if id(frame) == self._frame:
                return True
        return False

    def begin(self, optimizer: Any) -> None:
        """Look at gradients, weights and state; again after an exchange inside the bracket."""
        self.present = frozenset([name for name, p in self.holding.pairs if p.grad is not None])
        self._tracks.take(optimizer, self.parameters)

    def changed(self, optimizer: Any) -> Any:
        """Whether weights or state have changed since `begin`."""
        return self._tracks.changed(optimizer)

    def moved(self) -> bool:
        """Whether the sampled weights have changed since `begin`; waits for a device."""
        return bool(self._tracks.moved())


class Watch:
    """Observes for one Grace whether the means of an exchange are applied.

    ``members``: for each of its tensors, the parameters whose gradients are its means; may grow. ``replaceable``:
    whether a gradient that was replaced by hand still counts as the mean, as in DistributedDataParallel. ``stepping``:
    a method to call with each optimizer that is about to step some of the parameters. ``agree``: for sharded
    parameters, of which no worker sees all elements: a function that starts to sum numbers over the workers and returns
    one that waits for the sums.
    """

    def __init__(
        self,
        grace: Grace,
        members: Mapping[str, Sequence[torch.Tensor]],
        replaceable: bool = True,
        stepping: Callable[[Any], None] | None = None,
        agree: Callable[[list[Any]], Callable[[], list[float]]] | None = None,
    ):
        self._grace = weakref.ref(grace)
        self._members, self._replaceable = members, replaceable
        self._stepping = None if stepping is None else weakly(stepping)
        self.rule = Rule(weakref.proxy(grace))
        # whether a mean of the last exchange has a nonzero element; assumed on a device, to avoid a wait
        self._some = True
        self._agree = agree
        # undecided steps of sharded parameters: what the optimizer holds, the tensors with gradients, and a function
        # that returns the numbers of workers where the step changed something, and where means were not 0
        self._pending: list[tuple[Holding, frozenset[str], Callable[[], list[float]]]] = []
        self._bracket: _Bracket | None = None
        self._optimizer: Any = None  # the optimizer of the bracket
        self.means = Gradients()
        """The gradients that got means."""
        self._versions: dict[int, int] = {}  # versions of the weights, by the parameter's ID
        self._unowned = Unowned()
        self._held: dict[str, bool] = {}  # by tensor: whether an optimizer held it when first looked for
        self._owner: dict[str, int] = {}  # the ID of an optimizer that holds a tensor
        self._holdings: weakref.WeakKeyDictionary[Any, tuple[list[int], int, Holding]] = weakref.WeakKeyDictionary()
        self._tracks: weakref.WeakKeyDictionary[Any, Tracks] = weakref.WeakKeyDictionary()
        grace.settles = weakly(self._settle_now)
        _watches[self] = None
        watch_optimizers()

    @property
    def grace(self) -> Grace | None:
        """The Grace; None once it was garbage-collected."""
        return self._grace()

    # -- exchanges ---------------------------------------------------------------------------------------------------
    def exchanged(self, names: Collection[str]) -> None:
        """An exchange has put means into ``p.grad``."""
        grace = self.grace
        if grace is None:
            return
        self.rule.exchanged()
        members = [p for name in names for p in self._members[name]]
        earlier = [p for name in grace.undecided - set(names) for p in self._members.get(name, ())]
        self.means.record(members, sampled=not self._replaceable, besides=earlier)
        gradients = sorted([p.grad for p in members if p.grad is not None], key=torch.Tensor.numel)
        self._some = bool(gradients) and (not waits(gradients[0].device) or nonzero(gradients))
        self._versions.update({id(p): p._version for p in members})
        if unowned := self.rule.unowned:
            self._unowned.take({name: self._members[name] for name in unowned})
        if self._bracket is not None:
            self._bracket.begin(self._optimizer)

    def put(self, means: Mapping[str, torch.Tensor | None], owned: Collection[int]) -> None:
        """Put means into ``p.grad``. ``owned``: IDs of parameters whose gradients may be overwritten."""
        found = {name: mean for name, mean in means.items() if mean is not None}
        into: list[torch.Tensor] = []
        moved: list[torch.Tensor] = []
        for name, mean in found.items():
            (p,) = self._members[name]
            gradient = p.grad
            if gradient is mean:
                continue
            if gradient is None or gradient.is_sparse or id(p) not in owned:
                p.grad = mean.clone()  # a copy, as the mean is a view that would keep a whole message in memory
            elif mean.data_ptr() != gradient.data_ptr():
                into.append(gradient)
                moved.append(mean)
        if into:
            with torch.no_grad():
                torch._foreach_copy_(into, moved)
        self.exchanged(found)

    def settle(self, arrived: Collection[int] = (), dropped: bool = False) -> None:
        """Decide means, as far as possible, when a backward pass begins.

        ``arrived``: IDs of parameters to whose gradients this pass has already added. ``dropped``: whether all
        gradients are about to be removed.
        """
        grace = self.grace
        if grace is None or not grace.provisional:
            return
        self._settle_step()
        bracket = self._bracket
        if bracket is not None and grace.undecided & bracket.holding.names and bracket.moved():
            grace.decide(bracket.holding.names)  # a closure is evaluated again, with other weights
        if not grace.provisional:
            return
        removed = set(grace.undecided) if dropped else self.removed(arrived)
        written = self._unowned.written(self.rule.unowned)
        if self._agree is not None:
            removed, written = self._agreed(removed, written)
        for name in removed & self.rule.owned:
            if any(p._version != self._versions.get(id(p)) for p in self._members[name]):
                written.add(name)
        loose = self._loose(self.rule.unowned & removed) if self.rule.others else set()
        self.rule.passed(removed, written, loose)

    def _settle_now(self) -> None:
        # Decide means, as far as possible, when the state is requested, perhaps by one worker alone.
        if self._agree is None:
            self.settle()
        elif (grace := self.grace) is not None and grace.provisional:
            self._settle_step()
            gone = {name for name in grace.undecided if all(p.grad is None for p in self._members[name])}
            grace.decide(discarded=gone & self.rule.owned)

    def _settle_step(self) -> None:
        # A step on sharded parameters counts as a change if it changed any worker's shards, or if all means were 0.
        pending, self._pending = self._pending, []
        for holding, present, wait in pending:
            changed, some = wait()
            self._stepped(holding, present, changed > 0 or some == 0)

    def _agreed(self, removed: set[str], written: set[str]) -> tuple[set[str], set[str]]:
        # Means count as removed if all workers removed them, and weights as written if any worker wrote to them.
        grace = self.grace
        assert grace is not None
        assert self._agree is not None
        names = sorted(grace.undecided)
        sums = self._agree([name not in removed for name in names] + [name in written for name in names])()
        kept, changed = sums[: len(names)], sums[len(names) :]
        return (
            {name for name, count in zip(names, kept, strict=True) if not count},
            {name for name, count in zip(names, changed, strict=True) if count},
        )

    def removed(self, arrived: Collection[int] = ()) -> set[str]:
        """Undecided tensors whose means were removed or zeroed, and, unless ``replaceable``, those replaced."""
        grace = self.grace
        assert grace is not None
        gone: set[str] = set()
        intact: list[tuple[str, torch.Tensor]] = []
        late: list[str] = []
        for name in grace.undecided:
            members = self._members.get(name, ())
            if all(self._gone(p, arrived) for p in members):
                gone.add(name)
            elif any(id(p) in arrived for p in members):
                late.append(name)
            else:
                intact += [(name, p) for p in members if p.grad is not None]
        zeroed = zero([p.grad for _, p in intact if p.grad is not None])
        filled = {name for (name, _), empty in zip(intact, zeroed, strict=True) if not empty}
        emptied = {name for name, _ in intact} - filled
        if filled or not self._some:  # a mean may itself be 0: it was not zeroed if it was not written to
            emptied -= {name for name, p in intact if self.means.untouched(p)}
        # The pass has already added to ``late``: they count as zeroed if the other tensors of their optimizer were.
        owners = {self._owner.get(name) for name in emptied} - {self._owner.get(name) for name in filled}
        return gone | emptied | {name for name in late if self._owner.get(name) in owners}

    def _gone(self, p: torch.Tensor, arrived: Collection[int]) -> bool:
        if p.grad is None:
            return True
        return p in self.means and not self.means.kept(p) and (not self._replaceable or id(p) in arrived)

    def _loose(self, names: set[str]) -> set[str]:
        # The tensors among ``names`` that no living optimizer holds; searches memory once for each tensor.
        if new := names - self._held.keys():
            gc.collect()  # a dead optimizer in a cycle would be found on some workers only
            found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
            held = {id(p) for optimizer in found for group in optimizer.param_groups for p in group["params"]}
            self._held.update({name: any(id(p) in held for p in self._members[name]) for name in new})
        return {name for name in names if not self._held[name]}

    def check_means(self) -> None:
        """Raise RuntimeError, on all workers, unless a step's gradients are the undecided means, or computed from them.

        Gradients computed from means are equal on all workers. Comparing takes a message, unless they are scaled means.
        """
        grace = self.grace
        assert grace is not None
        members = [p for name in sorted(grace.undecided) for p in self._members[name] if p.grad is not None]
        replaced = [p for p in members if not self.means.kept(p)]
        if not replaced and not self.means.mixed():
            return
        if not alike([p.grad for p in replaced or members if p.grad is not None], grace.transport):
            raise RuntimeError(
                "the gradients of this step are not the means that were exchanged, and differ between workers: write "
                "in place, alike on all workers, to keep the means, or call grc.discard() before you set your own"
            )
        if self.rule.dropped:
            raise RuntimeError(
                f"{self.rule.dropped} exchanges were thrown away, then the gradients replaced: put the passes inside "
                "optimizer.no_sync(), or call grc.commit() after each whose means you use, and grc.discard() after the "
                "others"
            )

    def renamed(self) -> None:
        """Forget cached names, since some members were renamed."""
        self._holdings.clear()

    # -- optimizers --------------------------------------------------------------------------------------------------
    def holding(self, optimizer: Any) -> Holding:
        """Return which tensors of this Grace an optimizer holds."""
        ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        cached = self._holdings.get(optimizer)
        if cached is not None and cached[0] == ids and cached[1] == len(self._members):
            return cached[2]
        names = {p: name for name, members in self._members.items() for p in members}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        pairs = [(names[p], p) for p in parameters if p in names]
        mine = [p for members in self._members.values() for p in members]
        copies = not pairs and (
            sorted(map(list, (p.shape for p in parameters))) == sorted(map(list, (p.shape for p in mine)))
            or sum(p.numel() for p in parameters) == sum(p.numel() for p in mine)
        )
        found = Holding(frozenset(name for name, _ in pairs), pairs, copies)
        self._owner.update(dict.fromkeys(found.names, id(optimizer)))
        self._holdings[optimizer] = ids, len(self._members), found
        return found

    def before(self, optimizer: Any, frame: Any) -> None:
        """An optimizer's step begins. ``frame``: the stack frame of the step."""
        grace = self.grace
        if grace is None or (self._bracket is not None and self._bracket.runs(frame)):
            return  # a step inside another one
        holding = self.holding(optimizer)
        self._bracket = self._optimizer = None
        if holding.names and self._stepping is not None:
            self._stepping(optimizer)
        watched = holding.names & grace.undecided or (holding.copies and self._loose(self.rule.unowned))
        if watched or holding.names:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            tracks = self._tracks.setdefault(optimizer, Tracks())
            self._bracket, self._optimizer = _Bracket(parameters, holding, tracks, id(frame)), optimizer
            if watched:
                self._bracket.begin(optimizer)

    def after(self, optimizer: Any) -> None:
        """An optimizer's step has ended."""
        bracket, grace = self._bracket, self.grace
        if grace is None:
            return
        if bracket is None or self._optimizer is not optimizer:
            if bracket is None and not self.holding(optimizer).names:
                self.rule.others = True
            return
        self._bracket = self._optimizer = None
        holding = bracket.holding
        undecided = holding.names & grace.undecided or (holding.copies and self._loose(self.rule.unowned))
        changed: Any = False
        if undecided:
            changed = bracket.changed(optimizer)
            means = [p.grad for name, p in holding.pairs if name in undecided and p.grad is not None]
            if self._agree is not None:
                self.rule.owned |= holding.names
                some = changed is True or nonzero(means)
                self._pending.append((holding, bracket.present, self._agree([changed, some])))
                return
            if changed is False:
                changed = bool(means) and not nonzero(means)  # a step with means of 0 changes nothing
            elif changed is not True and means:
                changed = changed | ~nonzero(means)
        self._stepped(holding, bracket.present, changed)

    def _stepped(self, holding: Holding, present: frozenset[str], changed: Any) -> None:
        # ``changed``: a bool, or a flag of a device.
        if not holding.copies:
            certain = isinstance(changed, bool)
            self.rule.stepped(holding.names, present, not certain or changed, None if certain else changed)
        elif changed is not False:
            self.rule.copies_stepped(self._loose(self.rule.unowned))


# -- all optimizers of the process ------------------------------------------------------------------------------------
_watches: weakref.WeakKeyDictionary[Watch, None] = weakref.WeakKeyDictionary()
# The watches, in the order in which they were made, which is equal on all workers: if a model has two Graces, each
# sends a message after a step.
_hooks: list[Any] = []


def watch_optimizers() -> None:
    """Register one pair of hooks for all optimizers of the process."""
    if not _hooks:
        _hooks.extend([register_optimizer_step_pre_hook(_before), register_optimizer_step_post_hook(_after)])


def _before(optimizer: Any, *_: Any) -> None:
    if not _captured():
        for watch in list(_watches):
            watch.before(optimizer, sys._getframe(1))


def _after(optimizer: Any, *_: Any) -> None:
    if not _captured():
        for watch in list(_watches):
            watch.after(optimizer)


def _captured() -> bool:
    # A CUDA graph that is being captured runs later, without hooks.
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
