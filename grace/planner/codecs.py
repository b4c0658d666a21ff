"""The cost of a compressor: bytes on the wire and seconds on each device, by number of elements."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from grace.communicators.planned.strategy import (
    DEVICES,
    Device,
)
from grace.planner.profile import but
from grace.planner.profile import seconds as checked


@dataclass(frozen=True)
class Curve:
    """A quantity as a function of the number of elements, with linear interpolation between known sizes.

    Below the smallest size it is constant. Beyond the largest it follows the last power law, but grows at most linearly
    (with a single known size: linearly).
    """

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, size: float) -> float:
        sizes, values = self.sizes, self.values
        if size <= sizes[0]:
            return values[0]
        right = bisect_right(sizes, size)
        if right == len(sizes):
            return values[-1] * (size / sizes[-1]) ** self._power
        slope = (values[right] - values[right - 1]) / (sizes[right] - sizes[right - 1])
        return values[right - 1] + slope * (size - sizes[right - 1])

    def scaled(self, factor: float) -> Curve:
        """All values multiplied by ``factor``."""
        return Curve(self.sizes, tuple(value * factor for value in self.values))

    @cached_property
    def _power(self) -> float:
        if len(self.sizes) == 1 or min(self.values[-2:]) <= 0:
            return 1.0
        (a, b), (u, v) = self.sizes[-2:], self.values[-2:]
        return min(max(math.log(v / u) / math.log(b / a), 0.0), 1.0)


@dataclass(frozen=True)
class Speed:
    """Seconds of a compressor on one device, by number of elements."""

    encode: Curve
    decode: Curve
    """Seconds to decode one payload to a dense vector."""
    piece: Curve
    """Seconds to add each further payload to that vector."""

    def slowed(self, factor: float) -> Speed:
        """All seconds multiplied by ``factor``."""
        return Speed(*(c.scaled(factor) for c in (self.encode, self.decode, self.piece)))


@dataclass(frozen=True)
class Codec:
    """The costs of a compressor: bytes on the wire, and seconds on each device."""

    params: Mapping[str, Any]
    """The compressor and its parameters, as for `grace.grace_from_params`."""
    wire: Curve
    """Bytes of a payload, by number of elements."""
    speeds: Mapping[Device, Speed]
    source: str = "given"

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices with known costs; the device that computes gradients comes first."""
        return tuple(device for device in DEVICES if device in self.speeds)

    def encode(self, size: float, device: Device = "gpu") -> float:
        """Seconds to compress ``size`` elements."""
        return self.speeds[device].encode(size)

    def decode(self, size: float, pieces: int = 1, device: Device = "gpu") -> float:
        """Seconds to decode ``pieces`` payloads of ``size`` elements into one dense sum."""
        speed = self.speeds[device]
        return speed.decode(size) + (pieces - 1) * speed.piece(size)

    def slowed(self, factor: float) -> Codec:
        """The same bytes with all seconds multiplied by ``factor``, on every device."""
        speeds = {device: speed.slowed(factor) for device, speed in self.speeds.items()}
        return replace(self, speeds=speeds)

    def offloaded(self, device: float = 1.0, pool: float = 1.0) -> Codec:
        """Costs on GPU and CPU: the seconds measured on a host, times ``device`` and ``pool`` respectively."""
        host = self.speeds["gpu"]
        return replace(self, speeds={"gpu": host.slowed(device), "cpu": host.slowed(pool)})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `codec` is the inverse."""

        def pairs(curve: Curve) -> list[list[float]]:
            return [list(pair) for pair in zip(curve.sizes, curve.values, strict=True)]

        speeds = {
            device: {"encode": pairs(speed.encode), "decode": pairs(speed.decode), "piece": pairs(speed.piece)}
            for device, speed in self.speeds.items()
        }
        return {"params": dict(self.params), "wire": pairs(self.wire), "speeds": speeds, "source": self.source}


def codec(data: Any) -> Codec:
    """A `Codec` from JSON data, as `Codec.to_dict` writes it. ValueError explains what is wrong."""
    if not isinstance(data, Mapping) or not {"params", "wire", "speeds"} <= set(data):
        raise ValueError(
            'compression costs are {"params": {...}, "wire": [[elements, bytes], ...], "speeds": {...}}' + but(data)
        )
    if not isinstance(data["params"], Mapping) or "compressor" not in data["params"]:
        raise ValueError('params of compression costs name a "compressor"')
    name = data["params"]["compressor"]

    def curve(pairs: Any, what: str) -> Curve:
        if (
            not isinstance(pairs, Sequence)
            or not pairs
            or not all(isinstance(p, Sequence) and len(p) == 2 for p in pairs)
        ):
            raise ValueError(f"{what} of {name!r} is [[elements, value], ...], not {pairs!r}")
        rows = [(checked(size, f"elements in {what}"), checked(value, what)) for size, value in pairs]
        sizes, values = zip(*rows, strict=True)
        if list(sizes) != sorted(set(sizes)) or sizes[0] <= 0:
            raise ValueError(f"the numbers of elements in {what} of {name!r} must rise from above 0")
        return Curve(sizes, values)

    speeds = {}
    for device, each in data["speeds"].items() if isinstance(data["speeds"], Mapping) else ():
        if device not in DEVICES or not isinstance(each, Mapping) or set(each) != {"encode", "decode", "piece"}:
            raise ValueError(f'speeds of {name!r} are {{"gpu" or "cpu": {{"encode", "decode", "piece"}}}}')
        speeds[device] = Speed(*(curve(each[what], what) for what in ("encode", "decode", "piece")))
    if not speeds:
        raise ValueError(f"speeds of {name!r} are empty: give those of at least one device")
    return Codec(dict(data["params"]), curve(data["wire"], "wire"), speeds, str(data.get("source", "given")))
