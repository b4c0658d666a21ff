"""Which class of groups exchanges a tensor on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grace.compressors.measured.blockint import BlockInt
from grace.compressors.measured.eden import Eden
from grace.compressors.measured.efsignsgd import EFSignSGD
from grace.compressors.measured.powersgd import PowerSGD
from grace.core import Context, State
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.engine.groups.devices import DeviceGathered, DeviceTwoStage
from grace.engine.groups.exchanges import GatheredGroup, Group, TwoStageGroup
from grace.engine.groups.kinds import Kind, kind_of
from grace.engine.groups.lowrank import LowRankGroup
from grace.engine.groups.matrices import DeviceLowRank

LARGE = 8192
"""The largest block that is rotated by one program."""
METHODS: dict[type, Callable[[Any], bool]] = {
    EFSignSGD: lambda compressor: True,
    BlockInt: lambda compressor: True,
    Eden: lambda compressor: compressor.block_size <= LARGE,
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
    serves = METHODS.get(type(method.compressor))
    if serves is None or not serves(method.compressor):
        return None
    kind = kind_of(method, communicator, ctx, state, judged)
    group = None if kind is None else GROUPS.get(kind.group)
    return None if kind is None or group is None else kind._replace(group=group)
