"""Which class of groups exchanges a tensor, and which tensors travel as one vector."""

from __future__ import annotations

from grace.communicators.allgather import Allgather
from grace.communicators.allreduce import Allreduce
from grace.communicators.twostage import TwoStage
from grace.compressors.bf16 import BF16
from grace.compressors.fp16 import FP16
from grace.compressors.none import NoCompression
from grace.compressors.powersgd import PowerSGD
from grace.core import Context, Memory, State
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.engine.groups.exchanges import RESIDUAL, GatheredGroup, Group, TwoStageGroup
from grace.engine.groups.lowrank import DIRECTIONS, LowRankGroup
from grace.engine.groups.recipes import recipe
from grace.memories.none import NoMemory

GROUPS: dict[type[Communicator], type[Group]] = {Allgather: GatheredGroup, TwoStage: TwoStageGroup}


def kind_of(
    method: Method, communicator: Communicator, ctx: Context, state: State, judged: bool
) -> tuple[type[Group], bool] | None:
    """What units of one group share: the class, and whether positions travel coded.

    None for a tensor that cannot be exchanged in a group. ``judged``: whether the engine checks if its mean is finite.
    """
    memory, compressor = method.memory, method.compressor
    if ctx.size == 0 or not memory.standard_feedback or type(memory).after_mean is not Memory.after_mean:
        return None
    if type(communicator) is Allreduce and type(compressor) is PowerSGD:
        return (LowRankGroup, False) if state.keys() <= {RESIDUAL, DIRECTIONS} else None
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
    forms = {None if each is None else each.coded is not None for each in recipes}
    form = forms.pop()
    return None if form is None or forms else (found, form)


def elementwise(method: Method, communicator: Communicator) -> bool:
    """Whether tensors may be exchanged as one vector: each element is compressed alone, and without random numbers.

    Communicators that cut tensors into shards would cut a vector elsewhere, so that other bytes would travel.
    """
    compressor = method.compressor
    alone = type(compressor) in (FP16, NoCompression) or (type(compressor) is BF16 and not compressor.traits.unbiased)
    return alone and type(method.memory) is NoMemory and type(communicator) in (Allreduce, Allgather)
