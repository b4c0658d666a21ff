"""Chooses the class of group that exchanges a tensor, and the tensors that are sent as one vector."""

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
from grace.compressors.studies.randomk import RandomK
from grace.core import Context, Memory, State
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.engine.groups.exchanges import RESIDUAL, CodedGroup, GatheredGroup, Group
from grace.engine.groups.joint import JointGathered, JointSummed, JointTwoStage, SummedGroup
from grace.engine.groups.lowrank import DIRECTIONS, LowRankGroup
from grace.engine.groups.machines import HierarchicalGroup
from grace.engine.groups.recipes import recipe
from grace.engine.groups.twostage import TwoStageGroup
from grace.memories.decoupled import DecoupledMomentum
from grace.memories.ef21 import EF21
from grace.memories.lowpass import LowPass
from grace.memories.momentum import Momentum
from grace.memories.none import NoMemory
from grace.memories.residual import Residual

GROUPS: dict[type[Communicator], type[CodedGroup]] = {Allgather: GatheredGroup, TwoStage: TwoStageGroup}
JOINT: dict[type[Communicator], type[CodedGroup]] = {Allgather: JointGathered, TwoStage: JointTwoStage}
"""The classes for `ELEMENTWISE` memories other than standard error feedback."""
ELEMENTWISE = (NoMemory, Residual, Momentum, EF21, LowPass, DecoupledMomentum)
"""Elementwise memories, which can run on concatenated vectors. Subclasses are excluded: they may differ."""
LARGE = 2**22
"""Maximum size of a tensor in a concatenated vector, which costs a temporary copy of the tensor and its state."""


class Kind(NamedTuple):
    """The properties that all units of a group share."""

    group: type[Group]
    coded: bool = False
    """Whether positions are sent encoded: see `Recipe.coded`."""
    between: type[CodedGroup] | None = None
    """The class of the group between machines, for a `HierarchicalGroup`; None for another group."""

    def make(self, *parts: Any) -> Group:
        """Build the group. ``parts``: the arguments of `Group`."""
        return self.group(*parts) if self.between is None else HierarchicalGroup(*parts, between=self.between)


def kind_of(method: Method, communicator: Communicator, ctx: Context, state: State, judged: bool) -> Kind | None:
    """The kind of group that a tensor belongs to; None if it cannot be exchanged in a group.

    ``judged``: whether the engine checks if its mean is finite.
    """
    if type(communicator) is Hierarchical:
        return _of_machines(method, communicator, ctx, state)
    memory, compressor = method.memory, method.compressor
    standard = memory.standard_feedback and type(memory).after_mean is Memory.after_mean
    asks = isinstance(memory, EF21) and memory.refresh > 0  # a round before the compression
    joins = type(memory) in ELEMENTWISE and not asks and (standard or ctx.size <= LARGE)
    if ctx.size == 0 or not (standard or joins):
        return None
    if type(communicator) is Allreduce:
        if type(compressor) is PowerSGD and standard:
            return Kind(LowRankGroup) if state.keys() <= {RESIDUAL, DIRECTIONS} else None
        return _summed(method, ctx, state) if joins else None
    found = (GROUPS if standard else JOINT).get(type(communicator))
    if found is None or (standard and judged and not compressor.traits.nonfinite_in_payload):
        return None
    if standard and any(not key.endswith(RESIDUAL) for key in state):
        return None
    parts = [ctx]
    if isinstance(communicator, TwoStage):
        parts = [shard for shard in communicator.owned(compressor, ctx).values() if shard.size]
    recipes = [recipe(compressor, part) for part in parts]
    swapped = standard or method.for_second_stage.memory.standard_feedback
    if (
        swapped
        and any(key.endswith(RESIDUAL) for key in state)
        and any(each is not None and each.codec is not None for each in recipes)
    ):
        return None  # the kernel codes_encode cannot swap residuals
    forms = {None if each is None else each.coded is not None for each in recipes}
    form = forms.pop()
    return None if form is None or forms else Kind(found, form)


def _summed(method: Method, ctx: Context, state: State) -> Kind | None:
    # Returns the kind of a tensor whose payloads communicator "allreduce" averages; None if it has none.
    compressor = method.compressor
    if type(compressor) is RandomK:
        return Kind(JointSummed) if compressor.mode == "fixed" and ctx.size <= LARGE else None
    if type(compressor) is not NoCompression or not state or ctx.wire != "float32":
        return None
    return Kind(SummedGroup if method.memory.standard_feedback else JointSummed)


def _of_machines(method: Method, communicator: Hierarchical, ctx: Context, state: State) -> Kind | None:
    # All workers of a machine must form the same groups, so their shards must all have the same kind. ``judged`` is
    # False because the group checks its means itself, and so needs no payloads that show NaN.
    crossing = [communicator.cross(method, ctx, place) for place in range(communicator.node_size)]
    if any(not shard.size and not _empty(method, shard) for shard in crossing):
        return None
    found = [kind_of(method, communicator.outer, shard, state, judged=False) for shard in crossing if shard.size]
    kind, *others = set(found) or {None}
    if others or kind is None or not issubclass(kind.group, CodedGroup):
        return None
    return kind._replace(group=HierarchicalGroup, between=kind.group)


def elementwise(method: Method, communicator: Communicator) -> bool:
    """Return whether tensors may be exchanged as one vector: compression is elementwise, without random numbers.

    False for communicators that cut tensors into shards: they would cut the vector at other elements, and so send
    other payloads.
    """
    compressor = method.compressor
    alone = type(compressor) in (FP16, NoCompression) or (type(compressor) is BF16 and not compressor.traits.unbiased)
    return alone and type(method.memory) is NoMemory and type(communicator) in (Allreduce, Allgather)


def _empty(method: Method, ctx: Context) -> bool:
    # Returns whether the payload has no elements.
    found = recipe(method.compressor, ctx)
    return found is not None and not any(length for _, _, length in found.arrays)
