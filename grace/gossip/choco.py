"""CHOCO: gossip by compressed differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grace.backends import get_backend
from grace.core import Array, Compressor, Context, Payload, Program, State, join, name_of, scope
from grace.core.program import as_program, run_local
from grace.core.registry import compressors, take, unknown_key
from grace.gossip.mixings import Full, Mixing, swap
from grace.gossip.topology import Edge
from grace.transports.packer import Packer


def swap_ragged(payload: Payload, near: Sequence[Edge], ctx: Context) -> Program[list[Payload]]:
    """Send all neighbours the same payload; return theirs, whose arrays may have other lengths.

    Two messages: the size, then the payload, padded to the larger of both ends' sizes.
    """
    xp, packer = ctx.xp, Packer(ctx.xp, ctx.rank, ctx.world_size)
    mine, layout = packer.pack_ragged(payload)
    length = xp.lengths([mine])
    answers = yield from swap({edge.peer: (length,) for edge in near}, ctx)
    sizes = {edge.peer: int(xp.integers(size)[0]) for edge, (size,) in zip(near, answers, strict=True)}
    own = int(xp.integers(length)[0])
    received = yield from swap({peer: (xp.pad(mine, max(own, size)),) for peer, size in sizes.items()}, ctx)
    return [
        packer.unpack_ragged(buffer[:size], layout, peer)
        for (peer, size), (buffer,) in zip(sizes.items(), received, strict=True)
    ]


@dataclass(frozen=True)
class Choco(Mixing):
    """Neighbours move towards public copies of each other, which follow by compressed differences.

    Worker j has a public copy c_j of its tensor x_j, 0 at first, which its neighbours store as well. It sends them
    q_j = C(x_j - c_j), and all of them set c_j = c_j + q_j. Then x_i moves by gamma sum_j w_ij (c_j - c_i). What a
    message leaves out stays in x_j - c_j, so there is no memory, and C may be biased.
    Tensors to which the compressor does not apply, as matrix methods to vectors, are mixed uncompressed.
    State: for this worker and each neighbour a copy float32[n], equal on all workers that have it; and the
    compressor's own.
    ``compressor``: a name, a dictionary such as {"compressor": "topk", "compress_ratio": 0.01}, or an instance; any one
    that needs no other workers while it compresses. ``gamma``: the consensus step size, positive; 1 without
    compression. It must be tuned: the coarser the compressor, the smaller.
    Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019, arXiv:1902.00340, algorithms 1 and 2; for non-convex training Koloskova, Lin, Stich and
    Jaggi, "Decentralized Deep Learning with Arbitrary Communication Compression", ICLR 2020, arXiv:1907.09356. The
    authors' code for the latter mixes with the copies of the previous round, before it compresses, and stores their
    weighted sum in place of the neighbours' copies.
    """

    compressor: Any
    gamma: float

    def __post_init__(self) -> None:
        given = self.compressor
        rest: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"compressor": given}
        if "memory" in rest:
            raise ValueError(f"memory {rest['memory']!r}: the public copies already feed errors back: leave memory out")
        compressor: Compressor = take(compressors, rest.pop("compressor", "none"), rest)
        if rest:
            raise ValueError(unknown_key(next(iter(rest)), compressor))
        if reason := _unsuitable(compressor):
            raise ValueError(f"Choco cannot send differences by {name_of(compressor)!r}: {reason}")
        if not self.gamma > 0:
            raise ValueError(f"gamma={self.gamma!r} must be positive")
        object.__setattr__(self, "compressor", compressor)

    @property
    def title(self) -> str:
        return f"choco with {name_of(self.compressor)}"

    def init(self, ctx: Context, near: Sequence[Edge]) -> State:
        if not self.compressor.applies(ctx):
            return {}
        copies = {str(worker): ctx.xp.zeros(ctx.size) for worker in (ctx.rank, *(edge.peer for edge in near))}
        return join(copy=copies, compressor=self.compressor.init(ctx))

    def mix(self, x: Array, state: State, ctx: Context, near: Sequence[Edge]) -> Program[tuple[Array, State]]:
        compressor: Compressor = self.compressor
        if not compressor.applies(ctx):
            return (yield from Full().mix(x, state, ctx, near))
        copies, mine = scope(state, "copy"), str(ctx.rank)
        compressed = compressor.compress(x - copies[mine], scope(state, "compressor"), ctx)
        payload, kept = run_local(compressed, compressor)
        if compressor.traits.variable_length:
            received = yield from swap_ragged(payload, near, ctx)
        else:
            received = yield from swap({edge.peer: payload for edge in near}, ctx)
        sent = {mine: payload, **{str(edge.peer): part for edge, part in zip(near, received, strict=True)}}
        copies = {worker: copies[worker] + compressor.decompress(part, ctx) for worker, part in sent.items()}
        for edge in near:
            x = x + self.gamma * edge.weight * (copies[str(edge.peer)] - copies[mine])
        return x, join(copy=copies, compressor=kept)


def _unsuitable(compressor: Compressor) -> str:
    # Returns why `Choco` cannot use a compressor, with the remedy; empty if it can.
    traits, xp = compressor.traits, get_backend("numpy")
    if traits.majority_vote or traits.update_direction:
        return "its result is no estimate of what it compresses. Use 'efsignsgd', which sends a scale with its signs"
    if traits.internal_feedback:
        return "it has a residual of its own, so errors would be fed back twice. Use another one, such as 'topk'"
    if (compressor.variance(2**20) or 0) >= 1:
        return "at these settings its error can exceed the difference. Use compressor 'damped' with it as method"
    ctx = Context(xp=xp, name="probe", shape=(16, 16))
    try:
        next(as_program(compressor.compress(xp.zeros(ctx.size), compressor.init(ctx), ctx)))
    except StopIteration:
        return ""
    return "it asks all workers while it compresses. Use one that does not, such as 'topk' or 'efsignsgd'"
