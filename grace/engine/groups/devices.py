"""Groups on a device: Triton's kernels encode and decode all points of a group, and the host waits for nothing.

Whether a mean is finite is a flag of its unit on the device. Rows of the state advance whatever it says; where it is 0,
a kernel puts the old values into the new row. If a kernel cannot be compiled or launched, the plain functions encode
and decode the same messages point by point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grace.backends import Backend
from grace.compressors.measured.natural import GRACE_TOP
from grace.core import Array, Compressor, apart, run_local
from grace.core.dtypes import ITEMSIZE
from grace.core.errors import Unavailable
from grace.core.rng import MASK32, keys, stem
from grace.engine.groups.cells import RowCell
from grace.engine.groups.exchanges import (
    CodedGroup,
    Coding,
    Feedback,
    GatheredGroup,
    Landed,
    addresses,
)
from grace.engine.groups.native import Message, Point
from grace.engine.groups.twostage import TwoStageGroup


class _Draws:
    """The keys of the random streams of some points, and of the noise table that they share."""

    def __init__(self, points: Sequence[Point]):
        recipe, ctx = points[0].recipe, points[0].ctx
        self._draws, self._worker = bool(recipe.draws), 0 if recipe.shared else ctx.rank + 1
        names = [*(point.ctx.name for point in points), ""]
        self._none = np.zeros((2, len(points)), np.int64)
        self._stems: Any = np.array([stem(ctx.seed, recipe.draws, name) for name in names], np.int64)

    def at(self, step: int) -> tuple[Any, tuple[int, int]]:
        """int64[2, points] and the table's two keys, each as the int32 with the same bits."""
        if not self._draws:
            return self._none, (0, 0)
        found = np.array(keys(self._stems, step & MASK32, self._worker)).astype(np.uint32).view(np.int32)
        return found[:, :-1].astype(np.int64), (int(found[0, -1]), int(found[1, -1]))


class Launches:
    """The points of a group, by launch: those with equal settings."""

    def __init__(self, groups: Any, compressor: Compressor, points: Sequence[Point]):
        self.groups, self.compressor, self.points = groups, compressor, points
        self.draws = _Draws(points)
        self.name, self.random = points[0].recipe.encode.removesuffix("_encode"), bool(points[0].recipe.draws)
        kinds = [dtype for _, dtype, _ in points[0].recipe.arrays]
        self.floats = kinds.index("float32") if "float32" in kinds else 1
        """The place of the float32 array, which shows whether an element is finite, in a payload."""
        alike: dict[Any, list[int]] = {}
        for number, point in enumerate(points):
            alike.setdefault(tuple(point.recipe.how.items()), []).append(number)
        recipes = (points[members[0]].recipe for members in alike.values())
        window = {"levels": GRACE_TOP} if getattr(compressor, "window", "") == "grace" else {}
        settings = [({**recipe.how, **window}, recipe.more) for recipe in recipes]
        self.parts = [(how, np.array(each, np.int64)) for how, each in zip(settings, alike.values(), strict=True)]

    def table(self, members: Any, places: Mapping[str, Any], units: Any) -> dict[str, Any]:
        """What Triton's kernels need to know of some points: int64[points] each."""
        mine, arrays = [self.points[number] for number in members], [name for name, *_ in self.points[0].recipe.arrays]
        arrays.insert(1, arrays.pop(self.floats))
        return {
            "sizes": np.array([point.ctx.size for point in mine], np.int64),
            "starts": np.array([point.ctx.offset for point in mine], np.int64),
            "counts": np.array([point.recipe.arrays[self.floats][2] for point in mine], np.int64),
            "flags": units[members],
            "offsets": [places[array][members] for array in arrays],
        }

    def ran(self, launch: Callable[..., None], *arguments: Any) -> bool:
        """Launch kernels; False if they cannot run, in which case only messages may have been written to."""
        if not self.groups.failed:
            try:
                launch(*arguments)
            except Unavailable:
                return False
        return not self.groups.failed

    def arrays(self, number: int, base: int, places: Mapping[str, Any]) -> tuple[Array, ...]:
        """The arrays of a point's payload in the message at ``base``."""
        arrays = self.points[number].recipe.arrays
        return tuple(self.groups.view(base + int(places[name][number]), n, dtype) for name, dtype, n in arrays)


class DeviceEncoder:
    """`Encoder`, with Triton's kernels."""

    def __init__(self, groups: Any, compressor: Compressor, points: Sequence[Point], message: Message):
        self.message, self._launches = message, Launches(groups, compressor, points)
        self._places = {array: message.begins + at for array, at in message.places.items()}
        mine, nothing = self._launches, np.zeros(len(points), np.int64)
        self._parts = [
            (members, groups.encoder(mine.name, *how, mine.random, mine.table(members, self._places, nothing)))
            for how, members in mine.parts
        ]

    def encode(self, x: Any, old: Any, new: Any, out: int, step: int) -> None:
        """See `Encoder.encode`."""
        keys_at, table = self._launches.draws.at(step)
        old, new = (np.broadcast_to(each, x.shape) for each in (old, new))
        for members, part in self._parts:
            given = x[members], old[members], new[members]
            if not self._launches.ran(part.encode, *given, out, keys_at[:, members], table):
                for number in members.tolist():
                    self._encode_plainly(number, int(x[number]), int(old[number]), int(new[number]), out, step)

    def _encode_plainly(self, number: int, x: int, old: int, new: int, out: int, step: int) -> None:
        point, compressor, view = self._launches.points[number], self._launches.compressor, self._launches.groups.view
        ctx, n, write = point.ctx._with(step=step), point.ctx.size, point.ctx.xp.buffers.write
        source = view(x, n, "float32")
        value = source + view(old, n, "float32") if old else ctx.xp.buffers.copy(source)
        payload, _ = run_local(compressor.compress(value, {}, ctx), compressor)
        payload = apart(payload, (value,), ctx.xp)
        for place, array in zip(self._launches.arrays(number, out, self._places), payload, strict=True):
            write(place, array)
        if old:
            left = compressor.residual(value, payload, ctx)
            if new == old:
                write(source, view(old, n, "float32"))
            write(view(new, n, "float32"), left)


class DeviceDecoder:
    """`Decoder`, with Triton's kernels. ``units``: int64[points], the number of each point's unit."""

    def __init__(
        self,
        groups: Any,
        compressor: Compressor,
        points: Sequence[Point],
        places: Mapping[str, Any],
        senders: Any,
        units: Any,
    ):
        self.points, self._places, self._senders, self._units = points, places, senders, units
        self._launches = mine = Launches(groups, compressor, points)
        self._parts = [
            (members, groups.decoder(mine.name, *how, mine.table(members, places, units), senders[members]))
            for how, members in mine.parts
        ]

    def judge(self, messages: Any, flags: Array) -> None:
        """Clear the flags, int32[units] on the device, of units with payloads that are not finite."""
        for members, part in self._parts:
            if not self._launches.ran(part.judge, messages, flags):
                for number in members.tolist():
                    unit, xp = int(self._units[number]), self.points[number].ctx.xp
                    for payload in self.payloads(number, messages):
                        flags[unit] *= xp.cast(xp.finite(payload[self._launches.floats]), "int32")

    def mean(self, messages: Any, out: Any, step: int) -> None:
        """See `Decoder.mean`."""
        keys_at, _ = self._launches.draws.at(step)
        for members, part in self._parts:
            if not self._launches.ran(part.mean, messages, out[members], keys_at[:, members]):
                for number in members.tolist():
                    ctx = self.points[number].ctx._with(step=step)
                    mean = self._launches.compressor.aggregate(self.payloads(number, messages), ctx)
                    ctx.xp.buffers.write(self._launches.groups.view(int(out[number]), ctx.size, "float32"), mean)

    def payloads(self, number: int, messages: Any) -> list[tuple[Array, ...]]:
        """Each sender's payload of a point."""
        senders = self._senders[number].tolist()
        return [self._launches.arrays(number, int(messages[sender]), self._places) for sender in senders]


class DeviceFeedback(Feedback):
    """`Feedback` whose rows advance in any case: where a flag is 0, the old residual is copied to the new row."""

    def __init__(
        self, groups: Any, xp: Backend, cells: Sequence[RowCell], points: Sequence[Point], starts: Any, units: Any
    ):
        super().__init__(xp, cells, points, starts)
        self._groups, self._units = groups, units
        self._lengths = np.array([point.ctx.size for point in points], np.int64)
        self._restore = groups.restorer(self._lengths, units)

    def _settle(self, x: Any, ok: Any) -> None:
        # ok: int32[units] on the device, or None.
        if ok is not None and not self._restored(x, ok):
            self._restore_plainly(x, ok)
        self._table.advance(self._which)

    def _copy(self, to: int, source: int, number: int) -> None:
        view, n = self._groups.view, int(self._lengths[number])
        self._xp.buffers.write(view(to, n, "float32"), view(source, n, "float32"))

    def undo(self) -> None:
        if self._x is not None:
            self.end(self._xp.zeros(int(self._units.max()) + 1, "int32"))

    def _restored(self, x: Any, ok: Array) -> bool:
        try:
            if not self._groups.failed:
                self._restore(x, self._old, self._new, ok)
        except Unavailable:
            return False
        return not self._groups.failed

    def _restore_plainly(self, x: Any, ok: Array) -> None:
        xp, view = self._xp, self._groups.view
        sources = np.where(self._old == self._new, x, self._old).tolist()
        for source, to, n, unit in zip(
            sources, self._new.tolist(), self._lengths.tolist(), self._units.tolist(), strict=True
        ):
            new = view(to, n, "float32")
            xp.buffers.write(new, xp.choose(ok[unit] != 0, new, view(source, n, "float32")))


class DeviceCoding(Coding):
    """The encoders and decoders of Triton's kernels, `grace.kernels.triton.tables.TritonGroups`."""

    def __init__(self, xp: Backend, groups: Any, compressor: Compressor):
        self.xp, self._groups, self._compressor = xp, groups, compressor

    def encoder(self, points: Sequence[Point], message: Message) -> Any:
        return DeviceEncoder(self._groups, self._compressor, points, message)

    def decoder(self, points: Sequence[Point], places: Mapping[str, Any], senders: Any, units: Any = None) -> Any:
        units = np.zeros(len(points), np.int64) if units is None else units
        return DeviceDecoder(self._groups, self._compressor, points, places, senders, units)

    def feedback(
        self, cells: Sequence[RowCell], points: Sequence[Point], starts: Sequence[int], units: Any
    ) -> Feedback:
        return DeviceFeedback(self._groups, self.xp, cells, points, starts, units)

    def landed(self, received: Sequence[Any], step: int) -> Landed:
        """The messages that were received; those whose float32 numbers would not be aligned are copied."""
        found = addresses(self.xp, received)
        if (found % ITEMSIZE["float32"]).any():
            received = [(self.xp.buffers.copy(array),) for (array,) in received]
            found = addresses(self.xp, received)
        return Landed(received, found, step)


class _OnDevice(CodedGroup):
    coding_of = DeviceCoding
    on_device = True
    _decoder: Any

    def finite(self, landed: Landed) -> Array:
        """Whether the mean of each unit is finite, int32[units] on the device."""
        flags = self.xp.full(len(self.contexts), 1, "int32")
        self._decoder.judge(landed.addresses, flags)
        return flags

    def settle(self, ok: Array | None) -> None:
        for each in self.feedback:
            each.end(ok)


class DeviceGathered(_OnDevice, GatheredGroup):
    """`GatheredGroup` on a device."""


class DeviceTwoStage(_OnDevice, TwoStageGroup):
    """`TwoStageGroup` on a device."""

    def settle(self, ok: Array | None) -> None:
        super().settle(ok)
        self._means = []
