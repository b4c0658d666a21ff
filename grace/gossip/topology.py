"""Who is a neighbour of whom, and with which weight."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

Topology = str | Iterable[tuple[int, int]]
TOPOLOGIES = ("ring", "torus", "complete")


def edges(topology: Topology, workers: int) -> list[tuple[int, int]]:
    """The pairs (i, j), i < j, of neighbouring workers, sorted.

    ``topology``: "ring"; "torus", a grid as square as the number of workers allows, closed in both directions;
    "complete"; or the pairs themselves. Raises ValueError for invalid pairs, and for a disconnected graph.
    """
    if not isinstance(topology, str):
        found = {(min(pair), max(pair)) for pair in topology}
    elif topology == "ring":
        found = {ordered(i, (i + 1) % workers) for i in range(workers)}
    elif topology == "torus":
        rows = max(d for d in range(1, math.isqrt(workers) + 1) if workers % d == 0)
        columns = workers // rows
        places = [(i, *divmod(i, columns)) for i in range(workers)]
        found = {ordered(i, row * columns + (column + 1) % columns) for i, row, column in places}
        found |= {ordered(i, (row + 1) % rows * columns + column) for i, row, column in places}
    elif topology == "complete":
        found = {(i, j) for j in range(workers) for i in range(j)}
    else:
        raise ValueError(f"unknown topology {topology!r}: name one of {', '.join(TOPOLOGIES)}, or list pairs")
    if isinstance(topology, str):
        found = {(i, j) for i, j in found if i != j}  # a ring of one, a torus of one row
    if wrong := sorted((i, j) for i, j in found if i == j or i < 0 or j >= workers):
        raise ValueError(f"topology: {wrong[0]} is no pair of different workers among 0 .. {workers - 1}")
    reached, fresh = {0}, {0}
    while fresh:
        fresh = {b for pair in found for a, b in (pair, pair[::-1]) if a in fresh} - reached
        reached |= fresh
    if len(reached) < workers:
        lost = min(set(range(workers)) - reached)
        raise ValueError(f"topology: no path joins workers 0 and {lost}, so they would never agree. Add pairs")
    return sorted(found)


@dataclass(frozen=True)
class Edge:
    """The link from a worker to a neighbour, whose rank is ``peer``."""

    peer: int
    weight: float
    """The Metropolis weight 1 / (1 + d), where d is the larger number of neighbours of the two workers. Equal at both
    ends; a worker's weights add up to less than 1."""


def neighbours(topology: Topology, workers: int, rank: int) -> tuple[Edge, ...]:
    """The neighbours of a worker, in rank order."""
    pairs = edges(topology, workers)
    degrees = [sum(i in pair for pair in pairs) for i in range(workers)]
    mine = [sum(pair) - rank for pair in pairs if rank in pair]
    return tuple(Edge(peer, 1 / (1 + max(degrees[rank], degrees[peer]))) for peer in sorted(mine))


def ordered(i: int, j: int) -> tuple[int, int]:
    """A pair, the smaller number first."""
    return min(i, j), max(i, j)
