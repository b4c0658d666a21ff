"""Which class of groups exchanges a tensor on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grace.communicators.allreduce import Allreduce
from grace.compressors.measured.blockint import BlockInt
from grace.compressors.measured.eden import Eden
from grace.compressors.measured.efsignsgd import EFSignSGD
from grace.compressors.measured.natural import Natural
from grace.compressors.measured.powersgd import PowerSGD
from grace.compressors.measured.qsgd import QSGD
from grace.compressors.measured.signsgd import SignSGD
from grace.compressors.measured.terngrad import TernGrad
from grace.compressors.measured.topk import TopK
from grace.compressors.studies.acpsgd import ACPSGD
from grace.compressors.studies.dion import Dion
from grace.compressors.studies.randomk import RandomK
from grace.core import Context, Memory, State
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.engine.groups.devices import DeviceGathered, DeviceTwoStage
from grace.engine.groups.drawn import DeviceRandomK
from grace.engine.groups.exchanges import RESIDUAL, GatheredGroup, Group
from grace.engine.groups.kinds import Kind, kind_of
from grace.engine.groups.lowrank import DIRECTIONS, LowRankGroup
from grace.engine.groups.matrices import LEFT, DeviceACPSGD, DeviceDion, DeviceLowRank
from grace.engine.groups.twostage import TwoStageGroup
from grace.memories.decoupled import Decoupled

MOMENTUM = "memory/momentum"
LARGE = 8192
"""The largest block that is rotated by one program."""
METHODS: dict[type, Callable[[Any], bool]] = {
    **dict.fromkeys((BlockInt, EFSignSGD, Natural, QSGD, SignSGD, TernGrad), lambda compressor: True),
    Eden: lambda compressor: compressor.block_size <= LARGE,
    TopK: lambda compressor: compressor.selector == "exact" and compressor.index_coding == "int32",
    PowerSGD: lambda compressor: True,
}
"""The compressors with groups on devices, and which of their settings have them."""
GROUPS: dict[type[Group], type[Group]] = {
    GatheredGroup: DeviceGathered,
    TwoStageGroup: DeviceTwoStage,
    LowRankGroup: DeviceLowRank,
}
"""The class on a device for each class on a host."""


def device_kind(method: Method, communicator: Communicator, ctx: Context, state: State, judged: bool) -> Kind | None:
    """`kind_of`, on a device."""
    if type(method.compressor) is RandomK and type(communicator) is Allreduce:
        return Kind(DeviceRandomK) if _drawn(method, ctx, state) else None
    if type(method.compressor) in (ACPSGD, Dion) and type(communicator) is Allreduce:
        return _factored(method, ctx, state)
    serves = METHODS.get(type(method.compressor))
    if serves is None or not serves(method.compressor):
        return None
    kind = kind_of(method, communicator, ctx, state, judged)
    group = None if kind is None else GROUPS.get(kind.group)
    return None if kind is None or group is None else kind._replace(group=group)


def _drawn(method: Method, ctx: Context, state: State) -> bool:
    # Whether `DeviceRandomK` serves a tensor.
    memory, compressor = method.memory, method.compressor
    assert isinstance(compressor, RandomK)
    plain = memory.standard_feedback and type(memory).after_mean is Memory.after_mean and state.keys() <= {RESIDUAL}
    return plain and compressor.mode == "fixed" and not compressor.unbiased_scale and 0 < ctx.size < 2**31


def _factored(method: Method, ctx: Context, state: State) -> Kind | None:
    # The kind of a tensor whose factors all workers agree on, by a method for studies.
    memory, kind, known = method.memory, Kind(DeviceACPSGD), {RESIDUAL, DIRECTIONS, LEFT}
    served = memory.standard_feedback
    if type(method.compressor) is Dion:
        kind, known, served = Kind(DeviceDion), {MOMENTUM, DIRECTIONS}, served or type(memory) is Decoupled
    plain = type(memory).after_mean is Memory.after_mean
    return kind if served and plain and state.keys() <= known and ctx.size else None
