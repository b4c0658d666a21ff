"""The abstract compressor."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from grace.core.context import Context
from grace.core.program import MaybeProgram
from grace.core.state import Array, Payload, State, apart
from grace.core.traits import FORMER, Traits


class Compressor(ABC):
    """Turns a gradient into a payload and a payload back into a gradient.

    Subclasses are frozen dataclasses of hyper-parameters. ``x`` is always float32[n] with n = ``ctx.size``.
    Only ``compress`` and ``decompress`` are required. A donated x may be overwritten. Kernels: `grace.engine.codecs`.
    """

    @property
    def traits(self) -> Traits:
        """The method's promises: a class attribute, or a `cached_property` of the hyper-parameters."""
        return _DEFAULT

    def applies(self, ctx: Context) -> bool:
        """Whether to compress the tensor. If not, it "goes dense": it is averaged uncompressed, as the report says."""
        return True

    def contraction(self, n: int) -> float | None:
        """The contraction d: for every x of n elements and its decoded payload x̂, E|x - x̂|² <= (1 - d)|x|².

        None if no such bound is declared.
        """
        return None

    def variance(self, n: int) -> float | None:
        """The variance w: for every x of n elements and its decoded payload x̂, E|x - x̂|² <= w|x|².

        None if the method is biased, or if no such bound is declared.
        """
        return None

    def init(self, ctx: Context) -> State:
        """The initial state."""
        return {}

    @abstractmethod
    def compress(self, x: Array, state: State, ctx: Context) -> MaybeProgram[tuple[Payload, State]]:
        """Encode x, float32[n]: returns the payload and the next state. A generator may request collectives."""

    @abstractmethod
    def decompress(self, payload: Payload, ctx: Context) -> Array:
        """Decode a payload to float32[n], bit-equal on every worker."""

    def residual(self, x: Array, payload: Payload, ctx: Context) -> Array:
        """Return x minus the decoded payload, float32[n]. x is donated."""
        return ctx.xp.inplace.subtract(x, self.decompress(payload, ctx))

    def aggregate(self, payloads: Sequence[Payload], ctx: Context) -> Array:
        """Decode all workers' payloads, in rank order, and return their mean, float32[n], in one dense buffer."""
        (total,) = apart((self.decompress(payloads[0], ctx),), payloads[0], ctx.xp)
        for payload in payloads[1:]:
            total = ctx.xp.inplace.add(total, self.decompress(payload, ctx))
        return ctx.xp.inplace.divide(total, len(payloads)) if len(payloads) > 1 else total

    def reduced(self, payload: Payload, ctx: Context) -> Array:
        """Decode a payload that was reduced on the wire (`Combine.MEAN`) to float32[n].

        The payload's arrays are sums over the workers if `Traits.wire_sum` is set, else means.
        """
        return self.decompress(payload, ctx)

    def __init_subclass__(cls, **options: Any) -> None:
        """Turn former class attributes and properties, such as ``unbiased = True``, into `traits`."""
        super().__init_subclass__(**options)
        declaring = (cls, *(base for base in cls.__bases__ if not hasattr(base, "traits")))
        former = [name for name in FORMER if any(name in vars(each) for each in declaring)]
        if not former or "traits" in vars(cls):
            return
        fields = ", ".join(f"{FORMER[name]}=..." for name in former)
        warnings.warn(
            f"{cls.__name__} declares {', '.join(former)}: declare traits = Traits({fields}) instead",
            DeprecationWarning,
            stacklevel=3,
        )

        def folded(self: Any) -> Traits:
            here: Any = next(each for each in type(self).__mro__ if vars(each).get("traits") is traits)
            inherited: Any = super(here, self)
            return replace(inherited.traits, **{FORMER[name]: getattr(self, name) for name in former})

        traits = cached_property(folded)
        traits.__set_name__(cls, "traits")
        cls.traits = traits  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        """Hyper-parameters only: cached properties are recomputed."""
        cached = {key for key in vars(self) if isinstance(getattr(type(self), key, None), cached_property)}
        return {key: value for key, value in vars(self).items() if key not in cached}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name not in FORMER or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises AttributeError again
            warnings.warn(f"{name} is now traits.{FORMER[name]}", DeprecationWarning, stacklevel=2)
            return getattr(self.traits, FORMER[name])


_DEFAULT = Traits()
