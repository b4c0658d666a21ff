"""The messages between neighbours: whole tensors, or those of PowerGossip."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grace.core import Array, Context, Payload, Program, State
from grace.core.collectives import AllToAll
from grace.gossip.topology import Edge, ordered
from grace.ops import blocks


class Mixing(ABC):
    """Defines how neighbours' tensors approach each other. A frozen dataclass, pure like a compressor.

    A law: the changes at both ends of an edge cancel out, so that the workers' sum is preserved.
    Arguments: ``x``, a tensor as float32[n]; ``near``, this worker's neighbours.
    """

    @property
    def title(self) -> str:
        """The name for reports."""
        return type(self).__name__.lower()

    def init(self, ctx: Context, near: Sequence[Edge]) -> State:
        """Return a tensor's initial state."""
        return {}

    @abstractmethod
    def mix(self, x: Array, state: State, ctx: Context, near: Sequence[Edge]) -> Program[tuple[Array, State]]:
        """Return this worker's tensor after one round, and its next state. ``ctx.step``: the round's number, an int."""


def swap(parts: Mapping[int, Payload], ctx: Context) -> Program[list[Payload]]:
    """Send ``parts``, payloads by neighbour's rank; return the neighbours' payloads, of equal shapes, in this order."""
    received = yield AllToAll(tuple(parts.get(worker, ()) for worker in range(ctx.world_size)), mutual=True)
    return [received[peer] for peer in parts]


@dataclass(frozen=True)
class Full(Mixing):
    """Neighbours exchange whole tensors: X_i becomes sum_j w_ij X_j."""

    def mix(self, x: Array, state: State, ctx: Context, near: Sequence[Edge]) -> Program[tuple[Array, State]]:
        received = yield from swap({edge.peer: (x,) for edge in near}, ctx)
        change = ctx.xp.zeros(ctx.size)
        for edge, (other,) in zip(near, received, strict=True):
            change = change + edge.weight * (other - x)
        return x + change, state


@dataclass(frozen=True)
class PowerGossip(Mixing):
    """Neighbours move along the directions in which they differ most, found by power iteration on X_i - X_j.

    Each edge has factors P and Q. Each iteration orthonormalises one of them, alternately; both ends send their
    matrix's product with it; the difference of the products becomes the other factor, and both ends move by P Q times
    the edge's weight. A message has r a or r b numbers for an a x b matrix. There is no step size to tune. Vectors are
    mixed uncompressed.
    State: for each neighbour P float32[a, r] and Q float32[r, b], equal at both ends.
    ``rank``: r; if it reaches min(a, b), an iteration is exact. ``steps``: iterations per round. ``gamma``: scales each
    move. ``warm_start``: begin with the last iteration's factor instead of a random one. ``sign``: for rank 1,
    replace the factor by its signs, scaled to norm 1, instead of orthonormalising it.
    The authors' code omits the first round, since it mixes before the optimizer's first step; here each mixing follows
    a step.
    Vogels, Karimireddy and Jaggi, "Practical low-rank communication compression in decentralized deep learning",
    NeurIPS 2020, arXiv:2008.01425, algorithm 1.
    """

    rank: int = 1
    steps: int = 1
    gamma: float = 1.0
    warm_start: bool = True
    sign: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or self.steps < 1:
            raise ValueError(f"rank={self.rank!r} and steps={self.steps!r} must be at least 1")
        if not self.gamma > 0:
            raise ValueError(f"gamma={self.gamma!r} must be positive")
        if self.sign and self.rank > 1:
            raise ValueError(f"sign=True rounds one vector, but rank={self.rank}: set rank=1")

    def init(self, ctx: Context, near: Sequence[Edge]) -> State:
        if len(ctx.shape) < 2 or not self.warm_start:
            return {}
        a, b, r = self._sizes(ctx)
        state = {}
        for edge in near:
            state[f"{edge.peer}/p"] = ctx.xp.transpose(self._drawn(a, r, edge, ctx))
            state[f"{edge.peer}/q"] = self._drawn(b, r, edge, ctx)
        return state

    def mix(self, x: Array, state: State, ctx: Context, near: Sequence[Edge]) -> Program[tuple[Array, State]]:
        if len(ctx.shape) < 2:
            return (yield from Full().mix(x, state, ctx, near))
        xp, (a, b, r) = ctx.xp, self._sizes(ctx)
        matrix, state = xp.reshape(x, (a, b)), dict(state)
        for step in range(ctx.step * self.steps, (ctx.step + 1) * self.steps):
            # At full rank only the basis of the shorter side spans the whole space.
            left = step % 2 == 0 if r < min(a, b) else a <= b
            bases = [self._basis(left, state, edge, ctx) for edge in near]
            mine = [
                xp.linalg.right_factor(basis, matrix) if left else xp.linalg.left_factor(matrix, basis)
                for basis in bases
            ]
            parts = {edge.peer: (product,) for edge, product in zip(near, mine, strict=True)}
            received = yield from swap(parts, ctx)
            change = xp.zeros((a, b))
            for edge, basis, product, (other,) in zip(near, bases, mine, received, strict=True):
                towards = other - product
                change = change + (self.gamma * edge.weight) * (basis @ towards if left else towards @ basis)
                if self.warm_start:  # flip the sign at one end, so that both store the same factor
                    state[f"{edge.peer}/{'q' if left else 'p'}"] = towards if ctx.rank > edge.peer else -towards
            matrix = matrix + change
        return xp.reshape(matrix, (-1,)), state

    def _sizes(self, ctx: Context) -> tuple[int, int, int]:
        # Returns rows, columns and rank of the matrix. A tensor's shape is split where rows + columns is smallest.
        cuts = [math.prod(ctx.shape[:cut]) for cut in range(1, len(ctx.shape))]
        a = min(cuts, key=lambda a: a + ctx.size // a)
        return a, ctx.size // a, min(self.rank, a, ctx.size // a)

    def _drawn(self, count: int, r: int, edge: Edge, ctx: Context) -> Array:
        # Returns float32[r, count]: random directions, equal at both ends of an edge.
        low, high = ordered(ctx.rank, edge.peer)
        return ctx.xp.reshape(ctx.stage(f"{low}-{high}").shared_rng("gossip").normal(r * count), (r, count))

    def _basis(self, left: bool, state: State, edge: Edge, ctx: Context) -> Array:
        # Returns orthonormal directions: float32[a, r] on the left, float32[r, b] on the right.
        xp, (a, b, r) = ctx.xp, self._sizes(ctx)
        count = a if left else b
        if self.warm_start:
            rows = xp.transpose(state[f"{edge.peer}/p"]) if left else state[f"{edge.peer}/q"]
            # Unit scale keeps products in range. A zero direction, which would stay zero, is replaced by a random one.
            largest = xp.max(xp.abs(rows), 1)
            rows = rows / blocks.divisor(xp, largest)
            alive = xp.reshape(largest, (-1, 1)) > 0
            rows = xp.mended(alive, rows, lambda: self._drawn(count, r, edge, ctx))
        else:
            rows = self._drawn(count, r, edge, ctx)
        if self.sign:
            columns = xp.transpose((xp.cast(rows >= 0, "float32") * 2.0 - 1.0) / math.sqrt(count))
        else:
            columns = xp.linalg.qr(xp.transpose(rows))
        return columns if left else xp.transpose(columns)
