"""Which class of groups exchanges a tensor, and which tensors travel as one vector."""

from __future__ import annotations

from typing import Any, NamedTuple

from grace.communicators.allgather import Allgather
from grace.communicators.allreduce import Allreduce
from grace.communicators.hierarchical import Hierarchical
from grace.communicators.twostage import TwoStage
from grace.compressors.measured.bf16 import BF16
from grace.compressors.measured.fp16 import FP16
from grace.compressors.measured.none import NoCompression
from grace.compressors.measured.powersgd import PowerSGD
from grace.core import Context, Memory, State
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.engine.groups.exchanges import RESIDUAL, CodedGroup, GatheredGroup, Group, SummedGroup, TwoStageGroup
from grace.engine.groups.lowrank import DIRECTIONS, LowRankGroup
from grace.engine.groups.machines import HierarchicalGroup
from grace.engine.groups.recipes import recipe
from grace.memories.none import NoMemory

GROUPS: dict[type[Communicator], type[CodedGroup]] = {Allgather: GatheredGroup, TwoStage: TwoStageGroup}


class Kind(NamedTuple):
    """What units of one group share."""

    group: type[Group]
    coded: bool = False
    """Whether positions travel coded."""
    between: type[CodedGroup] | None = None
    """The class of the group between machines, for a `HierarchicalGroup`; None for another group."""

    def make(self, *parts: Any) -> Group:
        """The group of these ``parts``: see `Group`."""
        return self.group(*parts) if self.between is None else HierarchicalGroup(*parts, between=self.between)


def kind_of(method: Method, communicator: Communicator, ctx: Context, state: State, judged: bool) -> Kind | None:
    """The kind of group that a tensor belongs to; None if it cannot be exchanged in a group.

    ``judged``: whether the engine checks if its mean is finite.
    """
    if type(communicator) is Hierarchical:
        return _of_machines(method, communicator, ctx, state)
    memory, compressor = method.memory, method.compressor
    if ctx.size == 0 or not memory.standard_feedback or type(memory).after_mean is not Memory.after_mean:
        return None
    if type(communicator) is Allreduce and type(compressor) is PowerSGD:
        return Kind(LowRankGroup) if state.keys() <= {RESIDUAL, DIRECTIONS} else None
    if type(communicator) is Allreduce and type(compressor) is NoCompression:
        return Kind(SummedGroup) if state.keys() == {RESIDUAL} and ctx.wire == "float32" else None
    found = GROUPS.get(type(communicator))
    if found is None or (judged and not compressor.traits.nonfinite_in_payload):
        return None
    if any(not key.endswith(RESIDUAL) for key in state):
        return None
    parts = [ctx]
    if isinstance(communicator, TwoStage):
        if memory.second_stage is not None:
            return None
        parts = [shard for shard in communicator.owned(compressor, ctx).values() if shard.size]
    recipes = [recipe(compressor, part) for part in parts]
    if state and any(each is not None and each.codec is not None for each in recipes):
        return None  # codes_encode cannot swap residuals
    forms = {None if each is None else each.coded is not None for each in recipes}
    form = forms.pop()
    return None if form is None or forms else Kind(found, form)


def _of_machines(method: Method, communicator: Hierarchical, ctx: Context, state: State) -> Kind | None:
    # All workers of a machine must form the same groups, so the shards of all must be of one kind. Payloads need not
    # show whether they are finite, since the group looks at its means.
    crossing = [communicator.cross(method, ctx, place) for place in range(communicator.node_size)]
    if any(not shard.size and not _empty(method, shard) for shard in crossing):
        return None
    found = [kind_of(method, communicator.outer, shard, state, judged=False) for shard in crossing if shard.size]
    kind, *others = set(found) or {None}
    if others or kind is None or not issubclass(kind.group, CodedGroup):
        return None
    return kind._replace(group=HierarchicalGroup, between=kind.group)


def elementwise(method: Method, communicator: Communicator) -> bool:
    """Whether tensors may be exchanged as one vector: each element is compressed alone, and without random numbers.

    Not with communicators that cut tensors into shards, because they would cut a vector at other elements, so that
    other bytes would travel.
    """
    compressor = method.compressor
    alone = type(compressor) in (FP16, NoCompression) or (type(compressor) is BF16 and not compressor.traits.unbiased)
    return alone and type(method.memory) is NoMemory and type(communicator) in (Allreduce, Allgather)


def _empty(method: Method, ctx: Context) -> bool:
    # Whether the payload has no elements.
    found = recipe(method.compressor, ctx)
    return found is not None and not any(length for _, _, length in found.arrays)
