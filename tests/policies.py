"""Gradients whose norms change between epochs, for tests of policies in one or several processes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

STEPS, EPOCHS = 2, 8
SHAPES = {"jumps": (40, 30), "calm": (50, 40)}

BASES: dict[str, dict[str, Any]] = {
    "topk": {"compressor": "topk", "compress_ratio": 0.01, "k_low": 0.1},
    "powersgd": {"compressor": "powersgd", "compress_rank": 1, "k_low": 4},
    "twostage": {"compressor": "qsgd", "quantum_num": 7, "k_low": 127, "communicator": "twostage"},
}
RUNS = [(name, granularity, "rank0") for name in BASES for granularity in ("layer", "model")]
RUNS += [("topk", "layer", "mean"), ("topk", "layer", "aggregated")]


@cache
def sequence(size: int) -> list[list[dict[str, Any]]]:
    """Each worker's gradients by step. "jumps" grows tenfold in epoch 4, "calm" stays constant."""
    found = []
    for step in range(STEPS * EPOCHS):
        scale = {"jumps": 10.0 if step // STEPS >= 4 else 1.0, "calm": 1.0}
        found.append(
            [
                {
                    name: np.random.default_rng((step, rank, index)).standard_normal(shape).astype(np.float32)
                    * np.float32(scale[name])
                    for index, (name, shape) in enumerate(SHAPES.items())
                }
                for rank in range(size)
            ]
        )
    return found


def levels_of(report: Any) -> dict[str, list[tuple[int, int]]]:
    """For each compressed tensor, pairs: the epoch of a new level; 0 if it is the first level, else 1."""
    return {
        tensor.name: [(epoch, int(level != tensor.levels[0][1])) for epoch, level in tensor.levels]
        for tensor in report.tensors
        if tensor.levels
    }
