"""What a number of bits for each tensor would save, at the noise of `eden` of 3 bits for all tensors.

python -m benchmarks.bits -o benchmarks/results/bits.json
python -m benchmarks.bits --show benchmarks/results/bits.json    # the table of docs/noise.md

Trains the quick tasks of `grace bench tasks` with PyTorch, two workers in this process, and looks at the gradients of
three steps. Each tensor gets the bits that minimise all bytes under a bound on the noise, by a Lagrange multiplier
(Markov et al., "L-GreCo: Layerwise-Adaptive Gradient Compression for Efficient and Accurate Deep Learning", MLSys
2024, have a dynamic programme). The noise is that of the whole gradient; with Adam also that of the update, whose
elements are divided by the square root of their second moments.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.noise import TorchModel
from grace import simulate
from grace_bench.tasks.tasks import batch, rate, task_of

TASKS = ("image", "lstm", "transformer", "ncf", "segmentation")
STEPS = (10, 40, 120)
BITS = (1, 2, 3, 4)
UNIFORM = 3
BLOCK, LEAST = 64, 1024
"""Elements of a block, and of the smallest tensor that is compressed."""


def errors() -> dict[int, float]:
    """The relative squared error of `eden` on normal numbers, by bits."""
    x = np.random.default_rng(0).standard_normal(2**18, np.float32)
    found = {}
    for bits in BITS:
        (mean,) = simulate({"compressor": "eden", "bits": bits, "block_size": BLOCK}, [{"x": x}]).means
        found[bits] = float(((mean["x"] - x) ** 2).sum() / (x**2).sum())
    return found


def size(bits: int) -> float:
    """Bits of an element, with its share of the block's scale."""
    return bits + 32 / BLOCK


def allocated(weights: Mapping[str, float], counts: Mapping[str, int], error: Mapping[int, float]) -> dict[str, int]:
    """The bits of each tensor with the fewest bytes whose noise is at most that of `UNIFORM` bits for all.

    ``weights``: by tensor, the noise of an error of 1. ``counts``: numbers of elements.
    """
    most = error[UNIFORM] * sum(weights.values()) * (1 + 1e-9)

    def best(multiplier: float) -> dict[str, int]:
        return {
            name: min(error, key=lambda bits: size(bits) * counts[name] + multiplier * error[bits] * weights[name])
            for name in counts
        }

    low, high = 1e-40, 1e40  # multipliers: the first is too small
    for _ in range(200):
        middle = math.sqrt(low * high)
        noise = sum(error[bits] * weights[name] for name, bits in best(middle).items())
        low, high = (low, middle) if noise <= most else (middle, high)
    return best(high)


def weights_of(gradients: list[Any], moments: Any | None) -> float:
    """The noise in the mean of these gradients of one tensor, if each block's relative squared error is 1.

    ``moments``: Adam's second moments, corrected for their start; the noise is then that of the update.
    """
    total = 0.0
    for gradient in gradients:
        x = np.pad(gradient.reshape(-1), (0, -gradient.size % BLOCK)).reshape(-1, BLOCK)
        scale = np.ones_like(x)
        if moments is not None:
            scale = np.pad((np.sqrt(moments.reshape(-1)) + 1e-8) ** -2, (0, -gradient.size % BLOCK)).reshape(-1, BLOCK)
        total += float(((x**2).mean(1) * scale.sum(1)).sum())
    return total / len(gradients) ** 2


def measured(name: str, error: Mapping[int, float]) -> list[dict[str, Any]]:
    """One row for each of `STEPS` of a task."""
    task = task_of(name)
    scale, data = task.quick, task.data()
    model, rows = TorchModel(task, data.sizes, 0.9, 0), []
    for step in range(max(STEPS) + 1):
        both = [model.gradients(*batch(data, scale.batch, rank, step, 0)) for rank in range(2)]
        model.apply({key: (both[0][key] + both[1][key]) / 2 for key in both[0]}, rate(scale, step))
        if step not in STEPS:
            continue
        own = {key: [each[key].double().numpy() for each in both] for key, x in both[0].items() if x.numel() >= LEAST}
        counts = {key: each[0].size for key, each in own.items()}
        by_gradient = {key: weights_of(each, None) for key, each in own.items()}
        row: dict[str, Any] = {"task": name, "step": step, "gradient": saved(by_gradient, counts, error)}
        state = {key: model._optimizer.state[model.parameters[key]] for key in own}
        if all("exp_avg_sq" in each for each in state.values()):
            corrected = {
                key: each["exp_avg_sq"].double().numpy() / (1 - 0.999 ** (step + 1)) for key, each in state.items()
            }
            by_update = {key: weights_of(each, corrected[key]) for key, each in own.items()}
            row["update"] = saved(by_update, counts, error)
            there = sum(error[row["gradient"]["bits"][key]] * by_update[key] for key in own)
            row["update_noise"] = there / (error[UNIFORM] * sum(by_update.values()))
        rows.append(row)
    return rows


def saved(weights: Mapping[str, float], counts: Mapping[str, int], error: Mapping[int, float]) -> dict[str, Any]:
    """The bits by tensor, and their bytes over those of `UNIFORM` bits."""
    bits = allocated(weights, counts, error)
    sent = sum(size(bits[key]) * count for key, count in counts.items())
    return {"bits": bits, "bytes": sent / (size(UNIFORM) * sum(counts.values()))}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: means over the steps."""
    lines = [
        "| task | bytes, noise of the gradient | its noise of Adam's update | bytes, noise of the update |",
        "|---|---|---|---|",
    ]
    for name in TASKS:
        mine = [row for row in rows if row["task"] == name]
        cells = [f"{np.mean([row['gradient']['bytes'] for row in mine]):.2f}"]
        if all("update" in row for row in mine):
            cells += [f"{np.mean([row['update_noise'] for row in mine]):.2g}"]
            cells += [f"{np.mean([row['update']['bytes'] for row in mine]):.2f}"]
        else:
            cells += ["SGD", "SGD"]
        lines.append(f"| {' | '.join((name, *cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, or show what is stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, help="a file for the results")
    parser.add_argument("--show", type=Path, help="print the table of this file, and measure nothing")
    given = parser.parse_args()
    if given.show:
        print(table(json.loads(given.show.read_text())["rows"]))
        return
    error = errors()
    rows = [row for name in TASKS for row in measured(name, error)]
    if given.out:
        given.out.write_text(json.dumps({"errors": error, "rows": rows}) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
