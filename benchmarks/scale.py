"""The cost of an exchange per worker against the number of workers, with the default communicator.

    python -m benchmarks.scale [--workers 2,4,8,16] [--compressors bf16,qsgd,...] [--elements 1048576]
    python -m benchmarks.scale --sparse [FILE] [--workers 2,4,8,16,32,64] [--elements 1048576]

Workers in this process exchange a tensor of normally distributed numbers with the code that real workers run. Measured
are the bytes that a worker receives, relative to a dense float32 ring allreduce, and the CPU milliseconds from the
payloads to the mean. With --sparse: the numbers of 4 bytes (values, positions, counts) that a worker receives in a
step, divided by k, by methods that select the k largest elements; means over 32 steps and all workers. FILE gets them
as JSON, with the largest of all steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from statistics import mean

import numpy as np

from grace import grace_from_params
from grace.communicators.allreduce import Allreduce
from grace.core.registry import compressors
from grace.testing.cases import lockstep
from grace.transports.local import LocalTransport, World

STEPS = 3
GATHERS = ("gtopk", "oktopk")
"""Compressors that gather, although their communicator is allreduce."""
SPARSE = {
    "topk, allgather": {"compressor": "topk", "communicator": "allgather"},
    "topk, twostage": {"compressor": "topk", "communicator": "twostage"},
    "gtopk": {"compressor": "gtopk"},
    "oktopk": {"compressor": "oktopk"},
}
"""Ways to exchange the k largest elements."""
REUSED = 32
"""Steps between two searches of `oktopk` for its thresholds."""


def measure(name: str, size: int, elements: int) -> tuple[float, float]:
    """Bytes received relative to dense, and milliseconds of decompression per step; means over workers."""
    world, rng = World(size), np.random.default_rng(0)
    graces = [grace_from_params({"compressor": name}, LocalTransport(world, rank)) for rank in range(size)]
    gradients = [{"w": rng.standard_normal((1024, elements // 1024), np.float32)} for _ in graces]
    for grace in graces:
        grace.build(gradients[0])
    for _ in range(STEPS):
        lockstep(graces, gradients)
    reports = [grace.report() for grace in graces]
    dense = STEPS * 2 * (size - 1) / size * 4 * elements
    received = mean(report.bytes_received for report in reports) / dense
    if isinstance(graces[0].communicator, Allreduce) and name not in GATHERS:
        received *= 2 * (size - 1) / size  # a report counts a sum once, but a ring sends it almost twice
    return received, mean(report.times["decompress"] for report in reports) / STEPS * 1e3


def numbers(params: dict[str, str], size: int, elements: int) -> tuple[float, float]:
    """Numbers of 4 bytes that a worker receives in a step, divided by k: their mean, and the largest of all steps."""
    world, k = World(size), elements // 100
    graces = [grace_from_params(params, LocalTransport(world, rank)) for rank in range(size)]
    for grace in graces:
        grace.build({"w": np.zeros((1024, elements // 1024), np.float32)})
    received = [np.zeros(size)]
    for step in range(REUSED):
        rngs = (np.random.default_rng([step, rank]) for rank in range(size))
        lockstep(graces, [{"w": rng.standard_normal((1024, elements // 1024), np.float32)} for rng in rngs])
        received.append(np.array([grace.report().bytes_received for grace in graces]))
    moved = np.diff(received, axis=0) / 4 / k
    return round(float(moved.mean()), 3), round(float(moved.max()), 3)


def sparse(sizes: list[int], elements: int) -> dict[str, dict[str, tuple[float, float]]]:
    """`numbers` by method and number of workers; prints the means as a table in Markdown."""
    print(f"| numbers received / k | {' | '.join(map(str, sizes))} |\n|---|{'---|' * len(sizes)}")
    found = {}
    for name, params in SPARSE.items():
        found[name] = {str(size): numbers(params, size, elements) for size in sizes}
        print(f"| {name} | {' | '.join(f'{mean:.1f}' for mean, _ in found[name].values())} |", flush=True)
    return found


def main() -> None:
    """Print the tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4,8,16")
    parser.add_argument("--compressors", default=",".join(compressors))
    parser.add_argument("--elements", type=int, default=2**20)
    parser.add_argument("--sparse", nargs="?", const="-", metavar="FILE")
    args = parser.parse_args()
    sizes = [int(size) for size in args.workers.split(",")]
    if args.sparse:
        found = sparse(sizes, args.elements)
        if args.sparse != "-":
            about = {"schema": 1, "command": " ".join(["python -m benchmarks.scale", *sys.argv[1:]])}
            Path(args.sparse).write_text(json.dumps({**about, "elements": args.elements, "received": found}) + "\n")
        return
    print(f"| compressor | {' | '.join(f'{size}' for size in sizes)} | {' | '.join(f'{size}, ms' for size in sizes)} |")
    print("|---|" + "---|" * 2 * len(sizes))
    for name in args.compressors.split(","):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = [measure(name, size, args.elements) for size in sizes]
        cells = [f"{received:.2f}" for received, _ in rows] + [f"{ms:.2f}" for _, ms in rows]
        print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
