"""The schedule of local training, and its outer optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from grace.core import Array


@dataclass(frozen=True)
class Settings:
    """Schedule and outer optimizer of `DiLoCo`, equal on all workers."""

    sync_every: int
    """H: inner steps between two exchanges of a parameter."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer."""
    outer_momentum: float = 0.9
    """Momentum of the outer optimizer; 0: none is stored."""
    nesterov: bool = True
    """Nesterov momentum, as in PyTorch's SGD; otherwise heavy ball."""
    fragments: int | Sequence[Sequence[str]] = 1
    """P fragments of the model take turns. Either their number P, for contiguous fragments of about equal bytes, or the
    parameter names of each fragment.
    """
    fragment_sync_delay: int = 0
    """Inner steps between the start of an exchange and its landing, when its result is applied."""
    fragment_update_alpha: float = 0.0
    """Weight of a worker's own parameters in its new ones at a landing. 0: parameters become the base."""

    def __post_init__(self) -> None:
        for key in ("sync_every", "fragment_sync_delay"):
            if not isinstance(value := getattr(self, key), int) or isinstance(value, bool):
                raise TypeError(f"{key}={value!r} is a number of inner steps, an integer")
        if not isinstance(self.fragments, int):
            object.__setattr__(self, "fragments", tuple(map(tuple, self.fragments)))
        if self.sync_every < 1:
            raise ValueError(f"sync_every={self.sync_every} must be 1 or more")
        if self.parts < 1:
            raise ValueError(f"fragments={self.fragments!r} must be 1 or more, or lists of names")
        if self.sync_every % self.parts:
            below, above = (self.sync_every // self.parts) * self.parts, -(-self.sync_every // self.parts) * self.parts
            choice = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"sync_every={self.sync_every} is not a multiple of {self.parts} fragments, which are exchanged at "
                f"equal distances: take {choice}"
            )
        if not 0 <= self.fragment_sync_delay < self.slot:
            raise ValueError(
                f"fragment_sync_delay={self.fragment_sync_delay} must be in 0 .. {self.slot - 1}: one exchange is in "
                f"flight at a time, and a fragment has its turn every {self.slot} steps"
            )
        if not 0 <= self.fragment_update_alpha <= 1:
            raise ValueError(f"fragment_update_alpha={self.fragment_update_alpha} must be in 0 .. 1")
        if not (self.outer_lr > 0 and math.isfinite(self.outer_lr)):
            raise ValueError(f"outer_lr={self.outer_lr} must be positive")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum={self.outer_momentum} must be in 0 .. 1, without 1")

    @property
    def parts(self) -> int:
        """P, the number of fragments."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    @property
    def slot(self) -> int:
        """S = H / P: inner steps from one landing to the next."""
        return self.sync_every // self.parts

    def split(self, nbytes: Mapping[str, int]) -> list[tuple[str, ...]]:
        """The parameter names of each fragment. ``nbytes``: bytes of each parameter, in the model's order. ValueError
        if listed fragments do not cover each parameter once, or there are more fragments than parameters.
        """
        names = list(nbytes)
        if not isinstance(self.fragments, int):
            listed = [name for part in self.fragments for name in part]
            if odd := sorted(set(listed) ^ set(names)):
                where = (
                    "names a parameter that the model lacks" if odd[0] in listed else "lacks a parameter of the model"
                )
                raise ValueError(f"fragments {where}, {odd[0]!r}: each parameter must be in one fragment")
            if twice := [name for name in names if listed.count(name) > 1]:
                raise ValueError(f"fragments names {twice[0]!r} twice: each parameter must be in one fragment")
            if not all(self.fragments):
                raise ValueError("fragments has an empty list: leave it out")
            return [tuple(part) for part in self.fragments]
        if self.parts > len(names):
            raise ValueError(f"fragments={self.parts}, but there are only {len(names)} parameters: take fewer")
        ends, cuts = [0, *accumulate(nbytes.values())], [0]
        # cut as near to equal shares as possible, with at least one parameter for each fragment
        for part in range(1, self.parts):
            wanted = ends[-1] * part / self.parts
            free = range(cuts[-1] + 1, len(names) - self.parts + part + 1)
            cuts.append(min(free, key=lambda cut: abs(ends[cut] - wanted)))
        return [tuple(names[start:stop]) for start, stop in zip(cuts, [*cuts[1:], len(names)], strict=True)]

    def outer_step(self, base: Array, momentum: Array | None, mean: Array) -> tuple[Array, Array | None]:
        """Return base and momentum after one step of the outer optimizer. ``mean``: the mean pseudo-gradient.
        ``momentum``: None without momentum. All arrays have one shape and dtype.
        """
        if momentum is None:
            return base - self.outer_lr * mean, None
        momentum = self.outer_momentum * momentum + mean
        direction = mean + self.outer_momentum * momentum if self.nesterov else momentum
        return base - self.outer_lr * direction, momentum
