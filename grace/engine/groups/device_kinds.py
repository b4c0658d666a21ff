"""Which class of groups exchanges a tensor on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grace.communicators.allgather import Allgather
from grace.communicators.allreduce import Allreduce
from grace.communicators.twostage import TwoStage
from grace.compressors.blockint import BlockInt
from grace.compressors.eden import Eden
from grace.compressors.efsignsgd import EFSignSGD
from grace.compressors.powersgd import PowerSGD
from grace.core import Context, State
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.engine.groups.devices import DeviceGathered, DeviceTwoStage
from grace.engine.groups.exchanges import CodedGroup
from grace.engine.groups.kinds import Kind, kind_of
from grace.engine.groups.matrices import DeviceLowRank

LARGE = 8192
"""The largest block that is rotated by one program."""
METHODS: dict[type, Callable[[Any], bool]] = {
    EFSignSGD: lambda compressor: True,
    BlockInt: lambda compressor: True,
    Eden: lambda compressor: compressor.block_size <= LARGE,
}
"""The compressors with kernels of groups, and which of their settings have them."""
GROUPS: dict[type[Communicator], type[CodedGroup]] = {Allgather: DeviceGathered, TwoStage: DeviceTwoStage}


def device_kind(method: Method, communicator: Communicator, ctx: Context, state: State, judged: bool) -> Kind | None:
    """`kind_of`, on a device."""
    if type(method.compressor) is PowerSGD and type(communicator) is Allreduce:
        kind = kind_of(method, communicator, ctx, state, judged)
        return None if kind is None else kind._replace(group=DeviceLowRank)
    serves = METHODS.get(type(method.compressor))
    if serves is None or not serves(method.compressor) or type(communicator) not in GROUPS:
        return None
    kind = kind_of(method, communicator, ctx, state, judged)
    return None if kind is None else kind._replace(group=GROUPS[type(communicator)])
