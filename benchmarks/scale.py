"""The cost of an exchange per worker against the number of workers, with the default communicator.

    python -m benchmarks.scale [--workers 2,4,8,16] [--compressors bf16,qsgd,...] [--elements 1048576]

Workers in this process exchange a tensor of normally distributed numbers with the code that real workers run. Measured
are the bytes that a worker receives, relative to a dense float32 ring allreduce, and the CPU milliseconds from the
payloads to the mean.
"""

from __future__ import annotations

import argparse
import warnings
from statistics import mean

import numpy as np

from grace import grace_from_params
from grace.communicators.allreduce import Allreduce
from grace.core.registry import compressors
from grace.testing.cases import lockstep
from grace.transports.local import LocalTransport, World

STEPS = 3


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
    # gtopk gathers, although its communicator is allreduce
    if isinstance(graces[0].communicator, Allreduce) and name != "gtopk":
        received *= 2 * (size - 1) / size  # a report counts a sum once, but a ring sends it almost twice
    return received, mean(report.times["decompress"] for report in reports) / STEPS * 1e3


def main() -> None:
    """Print both tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,4,8,16")
    parser.add_argument("--compressors", default=",".join(compressors))
    parser.add_argument("--elements", type=int, default=2**20)
    args = parser.parse_args()
    sizes = [int(size) for size in args.workers.split(",")]
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
