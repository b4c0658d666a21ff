"""Consensus by gossip: bytes until eight workers agree, compared with CHOCO with signs.

``python -m benchmarks.gossip`` prints the table of docs/gossip.md: workers on a ring, 100 x 100 matrices, until their
distance from the mean is a thousandth of the initial one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grace.gossip import Choco, Full, Gossip, Mixing, PowerGossip
from grace.transports.local import LocalTransport, World

RATES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3)
WORKERS, SIDE = 8, 100


def rounds(gossips: Sequence[Gossip], parameters: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run one round of all workers; returns their new parameters."""
    for gossip, mine in zip(gossips, parameters, strict=True):
        gossip.launch(mine)
    while [gossip for gossip in gossips if not gossip.advance()]:
        pass
    return [gossip.land() for gossip in gossips]


def workers(mixing: Mixing, size: int, topology: Any = "ring") -> list[Gossip]:
    """Make a Gossip for each of ``size`` workers in this process."""
    world = World(size)
    return [Gossip(mixing, topology, LocalTransport(world, rank)) for rank in range(size)]


def matrices(kind: str, seed: int = 0) -> list[Any]:
    """Each worker's matrix, float32[SIDE, SIDE]: "random", or a product of two of "rank 4"."""
    rng = np.random.default_rng(seed)
    if kind == "random":
        return list(rng.standard_normal((WORKERS, SIDE, SIDE)).astype(np.float32))
    p, q = rng.standard_normal((WORKERS, SIDE, 4)), rng.standard_normal((WORKERS, 4, SIDE))
    return list((p @ q).astype(np.float32))


def consensus(mixing: Mixing, start: list[Any], most: int, to: float = 1e-3) -> tuple[list[float], int]:
    """Mix until the relative distance from the mean is below ``to``, for at most ``most`` rounds.

    Returns the distance after each round, and the bytes that a worker sent.
    """
    gossips, mean = workers(mixing, len(start)), np.mean(start, 0)
    xs = [{"w": x} for x in start]
    for gossip in gossips:
        gossip.build(xs[0])
    distances: list[float] = []
    while len(distances) < most and (not distances or to <= distances[-1] < 1e2):
        xs = rounds(gossips, xs)
        distances.append(float(np.linalg.norm([x["w"] - mean for x in xs]) / np.linalg.norm(start - mean)))
    return distances, gossips[0].report().bytes_sent


def tuned(start: list[Any], most: int = 200) -> tuple[float, int]:
    """The rate at which CHOCO needs the fewest bytes, and that number."""
    found = {rate: consensus(Choco("efsignsgd", rate), start, most) for rate in RATES}
    return min(((rate, sent) for rate, (d, sent) in found.items() if d[-1] < 1e-3), key=lambda pair: pair[1])


def main() -> None:
    """Print the table."""
    print("| matrices | mixing | rounds | bytes of a worker | distance |\n|---|---|---|---|---|")
    for kind in ("random", "rank 4"):
        start = matrices(kind)
        rate, _ = tuned(start)
        for mixing, most in (
            (Full(), 100),
            (PowerGossip(1), 4000),
            (PowerGossip(4), 1000),
            (Choco("efsignsgd", rate), 200),
            (Choco("efsignsgd", 0.8), 1000),
        ):
            distances, sent = consensus(mixing, start, most)
            print(f"| {kind} | `{mixing}` | {len(distances)} | {sent:,} | {distances[-1]:.4f} |")


if __name__ == "__main__":
    main()
