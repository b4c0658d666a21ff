"""A quantiser applied to the values that a sparsifier selects."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from grace.compressors.measured.qsgd import QSGD
from grace.compressors.measured.topk import TopK
from grace.compressors.selectors import SelectingSparsifier
from grace.compressors.sparse import Placed, Sparsifier
from grace.core import Array, Combine, Compressor, Context, Payload, Program, State, Traits, as_program, name_of
from grace.core.registry import register


@register("chain")
@dataclass(frozen=True)
class Chain(Placed):
    """Send some elements with their positions, and their values in fewer bits.

    Payload: the quantiser's arrays for the k values, then the positions as the sparsifier encodes them.
    ``sparsifier``: a method that sends a known number of elements, such as "topk" (selector "exact" or "chunk") or
    "randomk".
    ``quantizer``: a method without state for the values, such as "qsgd", "natural" or "efsignsgd".
    The keys of the two methods (``compress_ratio``, ``selector``, ``quantum_num``) are keys of the chain. Instances are
    accepted instead of names: a chain is also a valid quantiser, so three stages are possible.
    Basu, Data, Karakus and Diggavi, "Qsparse-local-SGD", NeurIPS 2019, arXiv:1906.02367, section 2, for top-k with
    stochastic rounding; any two methods compose in the same way.
    """

    sparsifier: Compressor = field(default=TopK())
    quantizer: Compressor = field(default=QSGD())

    def __post_init__(self) -> None:
        first, second = self.sparsifier, self.quantizer
        if not isinstance(first, Sparsifier) or first.traits.variable_length or first.traits.combine is Combine.AGREED:
            remedy = "use 'topk' or 'randomk' with mode 'fixed'"
            if isinstance(first, SelectingSparsifier):
                remedy = f"with selector={first.selector!r} it varies; use selector 'exact' or 'chunk'"
            raise ValueError(f"sparsifier={name_of(first)!r} does not send a known number of elements: {remedy}")
        has_state = type(second).init not in (Compressor.init, SelectingSparsifier.init)  # exact selectors have none
        traits = second.traits
        if traits.variable_length or traits.majority_vote or has_state or traits.combine is Combine.AGREED:
            raise ValueError(
                f"quantizer={name_of(second)!r} is a vote, has a state, sends no fixed number of bytes or needs all "
                "workers: use 'qsgd', 'natural', 'dettmers8' or 'efsignsgd'"
            )
        if first.traits.unbiased and not traits.unbiased:
            raise ValueError(
                f"a sparsifier that is scaled to be unbiased needs an unbiased quantizer, such as 'qsgd', and not "
                f"{name_of(second)!r}; or leave unbiased_scale out"
            )
        noisy = second.variance(2**20) is not None and self._share(2**20) is None
        if noisy and not self.traits.unbiased:
            raise ValueError(
                f"quantizer={name_of(second)!r} with these settings can have an error larger than its input, so that a "
                "residual diverges: use more levels or smaller buckets, or compressor 'qsparse', which scales it down"
            )

    @cached_property
    def traits(self) -> Traits:
        first, second = self.sparsifier.traits, self.quantizer.traits
        unbiased = first.unbiased and second.unbiased
        return Traits(
            family="hybrid",
            unbiased=unbiased,
            nonfinite_in_payload=first.nonfinite_in_payload and second.nonfinite_in_payload,
            memory="none" if unbiased else "residual",
        )

    def applies(self, ctx: Context) -> bool:
        return self.sparsifier.applies(ctx) and self.quantizer.applies(self.second(ctx))

    def contraction(self, n: int) -> float | None:
        one, two = self.sparsifier.contraction(n), self._share(self.count(n))
        return None if one is None or two is None else one * two

    def variance(self, n: int) -> float | None:
        one, two = self.sparsifier.variance(n), self.quantizer.variance(self.count(n))
        return one + two + one * two if self.traits.unbiased and one is not None and two is not None else None

    def compress(self, x: Array, state: State, ctx: Context) -> Program[tuple[Payload, State]]:
        sent, _ = yield from as_program(self.sparsifier.compress(x, {}, ctx))
        values, _ = yield from as_program(self.quantizer.compress(sent[0], {}, self.second(ctx)))
        return (*values, *sent[1:]), state

    def parts(self, payload: Payload, ctx: Context) -> tuple[Array, Array]:
        assert isinstance(self.sparsifier, Sparsifier)
        values = len(payload) - self.sparsifier.elements.arrays(ctx.size)
        return self.sparsifier.elements.parts((self._decoded(payload[:values], ctx), *payload[values:]), ctx)

    def _decoded(self, found: Payload, ctx: Context) -> Array:
        return self.quantizer.decompress(found, self.second(ctx)) * self.scale(self.count(ctx.size))

    def scale(self, k: int) -> float:
        """The factor by which k decoded values are multiplied."""
        return 1.0

    def _share(self, k: int) -> float | None:
        # The quantiser's contraction: its own, or one derived from a variance below 1.
        w = self.quantizer.variance(k)
        return self.quantizer.contraction(k) if w is None else 1 - w if w < 1 else None

    def count(self, n: int) -> int:
        """Number of elements that are sent of n."""
        assert isinstance(self.sparsifier, Sparsifier)
        k = self.sparsifier.elements.count(n)
        assert k is not None
        return k

    def second(self, ctx: Context) -> Context:
        """The context of the k values: a separate vector with its own random streams."""
        k = self.count(ctx.size)
        return replace(ctx.stage("values"), shape=(k,))
