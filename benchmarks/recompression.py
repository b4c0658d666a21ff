"""How much noise the further compressions of a two-stage exchange add to gradients of the tasks, by levels.

python -m benchmarks.recompression lstm image ncf transformer -o benchmarks/results/recompression.jsonl  # some minutes
python -m benchmarks.recompression --show benchmarks/results/recompression.jsonl    # the table of docs/noise.md

Trains quick tasks of `grace bench tasks` with dense gradients of 8 workers in this process. At some steps the same
gradients are also exchanged compressed, without error feedback: gathered, which compresses once, and in two stages of 1
to 3 levels, which compress 2 to 4 times. The noise is the squared distance of the mean from the exact one, relative to
the exact one's squared norm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.noise import TorchModel
from grace import simulate
from grace.communicators.auto import MIN_SHARD
from grace.core.grid import Grid, factors
from grace_bench.tasks.tasks import batch, rate, task_of

WORKERS, LEVELS = 8, (1, 2, 3)
STEPS = (0, 10, 20)
METHODS = {"int4": {"compressor": "blockint", "bits": 4}, "eden 3": {"compressor": "eden", "bits": 3}}
WAYS: dict[str, dict[str, Any]] = {
    "gathered": {"communicator": "allgather"},
    **{
        f"{levels} level{'s' * (levels > 1)}": {"communicator": "twostage", "min_shard": MIN_SHARD, "levels": levels}
        for levels in LEVELS
    },
}


def measure(name: str, seed: int) -> list[dict[str, Any]]:
    """A row for each method and way: the noise at each of `STEPS`."""
    task = task_of(name)
    data, scale = task.data(), task.quick
    model = TorchModel(task, data.sizes, 0.9, seed)
    found: dict[tuple[str, str], list[float]] = {(m, way): [] for m in METHODS for way in WAYS}
    for step in range(STEPS[-1] + 1):
        every = [model.gradients(*batch(data, scale.batch, rank, step, seed)) for rank in range(WORKERS)]
        means = {key: sum(each[key] for each in every) / WORKERS for key in model.parameters}
        if step in STEPS:
            arrays = [{key: gradient.numpy() for key, gradient in each.items()} for each in every]
            exact = {key: np.mean([each[key] for each in arrays], 0, dtype=np.float64) for key in means}
            for method, way in found:
                params = {**METHODS[method], **WAYS[way], "memory": "none", "seed": step}
                mean = _exchanged(params, arrays).means[0]
                wrong = sum(float(np.square(mean[key] - exact[key]).sum()) for key in exact)
                found[method, way].append(wrong / sum(float(np.square(each).sum()) for each in exact.values()))
        model.apply(means, rate(scale, step))
    return [
        {"task": name, "seed": seed, "workers": WORKERS, "method": method, "way": way, "noise": noise}
        for (method, way), noise in found.items()
    ]


def _exchanged(params: dict[str, Any], arrays: list[dict[str, Any]]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # blockint warns without error feedback
        return simulate(params, arrays)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the mean noise by task, method and way, and the messages that a worker sends for each bucket."""
    messages = [str(WORKERS - 1), *(str(Grid(factors(WORKERS, levels)).messages) for levels in LEVELS)]
    lines = [f"| | {' | '.join(WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
    groups: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["method"]), {}).setdefault(row["way"], []).extend(row["noise"])
    for (task, method), ways in groups.items():
        lines.append(f"| {task}, {method} | {' | '.join(f'{statistics.mean(ways[way]):.2g}' for way in WAYS)} |")
    lines.append(f"| messages per worker | {' | '.join(messages)} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing: the table of rows that are stored")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="rows are added to this file, as JSON lines")
    args = parser.parse_args()
    rows = [] if args.show is None else [json.loads(line) for line in args.show.read_text().splitlines()]
    for seed in range(args.seeds):
        for name in args.tasks:
            new = measure(name, seed)
            rows += new
            if args.output is not None:
                with args.output.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in new)
    print(table(rows))


if __name__ == "__main__":
    main()
