"""The method and the communicator of each policy level, and which tensors a level does not compress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from grace.core import Context, Transport, name_of, sharding
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.engine.codecs import TensorCodec
from grace.engine.options import Options
from grace.transports.local import LocalTransport, World


class Way(NamedTuple):
    """A tensor's method and communicator at one policy level; without a policy there is one level."""

    method: Method
    encoder: TensorCodec
    """The method, run by kernels where possible."""
    communicator: Communicator
    dense: bool
    """Whether gradients are averaged uncompressed, in the single dense message of their bucket."""
    layout: str = ""
    """Describes where residuals are stored (`residual_layout`); empty if each worker stores those of whole tensors."""
    choice: str = ""
    """Why the communicator was chosen; empty if the user named it."""


def residual_layout(method: Method, communicator: Communicator) -> str:
    """The text for `Way.layout`. If it is equal for two ways, their residuals have the same keys and shapes."""
    compressor = method.compressor
    if not method.memory.feedback or type(communicator).compression_points is Communicator.compression_points:
        return ""
    shards = "rows" if compressor.traits.needs_shape else sharding.unit(compressor)
    return repr((communicator, method.memory, shards, sharding.cuttable(compressor)))


class Ways(list[Way]):
    """The `Way` of each policy level.

    ``exact``: see `Policy.exact`.
    """

    def __init__(self, exact: int | None):
        super().__init__()
        self._exact = exact
        self._refused: dict[str, dict[int, str]] = {}  # by unit and level, why the level's method does not apply

    def resolve(
        self, methods: Iterable[tuple[Method, Communicator]], transport: Transport | None, options: Options
    ) -> None:
        """Resolve communicators for the workers of ``transport``; with None, provisionally, until workers are known."""
        ways = []
        for method, communicator in methods:
            carrier = transport or LocalTransport(World(getattr(communicator, "node_size", 0) or 1))
            fitted = communicator.resolve(method, carrier)
            fitted.check(method, carrier.size)
            if fitted.reduce_scatters and options.fuse != "tensor":
                raise ValueError(
                    f"communicator {name_of(communicator)!r} needs the rows of each tensor apart: use fuse='tensor', "
                    f"not {options.fuse!r}"
                )
            parts = (method.compressor, method.memory, fitted)
            encoder = TensorCodec(method.compressor, method.memory)
            plain = [name_of(part) for part in parts] == ["none", "none", "allreduce"]
            choice = communicator.choice(method, carrier)
            ways.append(Way(method, encoder, fitted, plain, residual_layout(method, fitted), choice))
        self[:] = ways

    def measure(self, methods: Sequence[tuple[Method, Communicator]], transport: Transport, options: Options) -> None:
        """Let communicators measure the links if their choices depend on them, and `resolve` them anew."""
        if any(communicator.measure(method, transport) for method, communicator in methods):
            self.resolve(methods, transport, options)

    # -- tensors -----------------------------------------------------------------------------------------------------
    def refusal(self, ctx: Context) -> str:
        """Why a tensor goes dense at all levels; empty if it does not."""
        refusals = self._refusals(ctx)
        compressing = {level for level, way in enumerate(self) if not way.method.compressor.traits.lossless}
        always = self._exact is None or compressing <= refusals.keys()
        return next(iter(refusals.values()), "") if always else ""

    def add(self, unit: str, ctx: Context) -> None:
        """Record the levels whose methods do not apply to a compressed unit."""
        self._refused[unit] = self._refusals(ctx)

    def level(self, unit: str, level: int) -> int:
        """The level at which a unit is exchanged while the policy is at ``level``."""
        return level if self._exact is None or not self.refused(unit, level) else self._exact

    def refused(self, unit: str, level: int) -> str:
        """Why a level's method does not apply to a unit; empty if it does."""
        return self._refused.get(unit, {}).get(level, "")

    def at(self, unit: str, level: int) -> Way:
        """A unit's way while the policy is at ``level``."""
        return self[self.level(unit, level)]

    def of(self, unit: str) -> list[Way]:
        """A unit's way at each level."""
        return [self.at(unit, level) for level in range(len(self))]

    def _refusals(self, ctx: Context) -> dict[int, str]:
        return {
            level: way.communicator.reason(way.method, ctx)
            for level, way in enumerate(self)
            if not way.communicator.applies(way.method, ctx)
        }
