"""Quality after training with compression between pipeline stages: scikit-learn's digits, and a small language model.

python -m benchmarks.stages -o out/stages.jsonl                       # five seeds; about six minutes on one core
python -m benchmarks.stages --show benchmarks/results/stages.jsonl    # the table of docs/stages-measured.md

Two `grace.torch.Boundary` cut each model into three stages. Each row has the quality of a trained model on held-out
data, evaluated with and without compression between its stages. Digits: a network of two hidden layers, accuracy in
percent. Text: a Transformer with three blocks on Python's own sources (`grace bench tasks`), perplexity.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from grace.torch import Boundary
from grace_bench.tasks.data import python_sources
from grace_bench.tasks.torch_models import Transformer

WIDTH = 64


def bits(n: int, levels: int = 0) -> dict[str, Any]:
    """Integers of n bits, with a scale for each row of the last axis. ``levels``: their number; 0: the default."""
    given = {"levels": levels} if levels else {}
    return {"compressor": "blockint", "bits": n, "block_size": WIDTH, **given}


def top(percent: int) -> dict[str, Any]:
    """Top-k of each example, with this percentage of its elements."""
    return {"compressor": "topk", "compress_ratio": percent / 100}


METHODS: Mapping[str, dict[str, Any]] = {
    "none": {"forward": None, "backward": None},
    "8 bits, gradients 8": {"forward": bits(8), "backward": bits(8)},
    "4 bits, gradients 8": {"forward": bits(4), "backward": bits(8)},
    "4 bits, gradients 4": {"forward": bits(4), "backward": bits(4)},
    "2 bits, gradients 8": {"forward": bits(2), "backward": bits(8)},
    "8 bits, gradients 2": {"forward": bits(8), "backward": bits(2)},
    "2 bits by aq, gradients 8": {"forward": bits(2), "backward": bits(8), "feedback": "aq"},
    "2 bits of 4 levels, gradients 8": {"forward": bits(2, 4), "backward": bits(8)},
    "8 bits, gradients 2 of 4 levels": {"forward": bits(8), "backward": bits(2, 4)},
    "2 bits of 4 levels by aq, gradients 8": {"forward": bits(2, 4), "backward": bits(8), "feedback": "aq"},
    "top 30 %": {"forward": top(30), "backward": top(30)},
    "top 20 %": {"forward": top(20), "backward": top(20)},
    "top 10 %": {"forward": top(10), "backward": top(10)},
    "top 10 %, same mask": {"forward": top(10), "same_mask": True},
    "top 10 %, ef": {"forward": top(10), "backward": top(10), "feedback": "ef"},
    "top 10 %, ef21": {"forward": top(10), "backward": top(10), "feedback": "ef21"},
    "top 30 % by aq": {"forward": top(30), "backward": top(30), "feedback": "aq"},
    "top 10 % by aq": {"forward": top(10), "backward": top(10), "feedback": "aq"},
}


def boundaries(method: str, samples: int, seed: int) -> list[Boundary]:
    """The two edges of a model of three stages."""
    settings = METHODS[method]
    more = {"samples": samples} if settings.get("feedback") == "aq" else {}
    return [Boundary(**settings, **more, seed=seed, edge=edge) for edge in ("0-1", "1-2")]


def train(
    model: nn.Module, edges: list[Boundary], loss: Callable[[Any], Any], count: int, batch: int, epochs: int, lr: float
) -> None:
    """Train by Adam with a rate that falls linearly to zero; an epoch has all whole batches of ``count`` examples."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    steps = count // batch * epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model.train()
    for _ in range(epochs):
        for ids in torch.randperm(count)[: count // batch * batch].split(batch):
            for edge in edges:
                edge.sample_ids = ids
            optimizer.zero_grad()
            loss(ids).backward()
            optimizer.step()
            schedule.step()


def used(model: nn.Module, edges: list[Boundary], quality: Callable[[], float]) -> tuple[float, float]:
    """Evaluate the quality with and without compression between the stages."""
    found = []
    model.eval()
    for compress in (True, False):
        for edge in edges:
            edge.compress_in_eval = compress
        with torch.no_grad():
            found.append(quality())
    return found[0], found[1]


def digits(method: str, seed: int) -> tuple[tuple[float, float], list[Boundary]]:
    """Accuracy in percent on 450 images; 10 epochs of 1347."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    inputs, labels = torch.from_numpy(x[order].astype(np.float32) / 16), torch.from_numpy(y[order])
    held, count = 450, len(x) - 450
    edges = boundaries(method, count, seed)
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), edges[0], nn.Linear(WIDTH, WIDTH), nn.ReLU(), edges[1]]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    train(model, edges, lambda ids: cross_entropy(model(inputs[ids]), labels[ids]), count, 32, 10, 0.005)
    accuracy = lambda: 100 * (model(inputs[-held:]).argmax(1) == labels[-held:]).float().mean().item()  # noqa: E731
    return used(model, edges, accuracy), edges


sources = cache(python_sources)


def text(method: str, seed: int) -> tuple[tuple[float, float], list[Boundary]]:
    """Perplexity on 64 held-out pieces of 32 words; 4 epochs of 512 pieces."""
    data, length, count = sources(), 32, 512
    starts = np.random.default_rng(seed).integers(0, len(data.train) - length - 1, count)
    pieces = torch.from_numpy(np.stack([data.train[start : start + length + 1] for start in starts])).long()
    edges = boundaries(method, count, seed)
    model = Transformer(data.sizes["words"], length, WIDTH, 3, 4)
    model.blocks = nn.Sequential(model.blocks[0], edges[0], model.blocks[1], edges[1], model.blocks[2])

    def loss(ids: Any) -> Any:
        rows = pieces[ids]
        return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    train(model, edges, loss, count, 16, 4, 0.003)
    return used(model, edges, lambda: data.quality(lambda inputs: model(torch.from_numpy(inputs[0])).numpy())), edges


TASKS = {"digits": digits, "text": text}


def row(task: str, method: str, seed: int) -> dict[str, Any]:
    """Train once; returns the row of results."""
    torch.manual_seed(seed)
    (compressed, plain), edges = TASKS[task](method, seed)
    reports = [each for edge in edges for each in edge.report().edges]
    ratio = sum(each.dense for each in reports) / max(1, sum(each.nbytes for each in reports))
    head = {"task": task, "method": method, "seed": seed, "ratio": round(ratio, 2)}
    return {**head, "compressed": round(compressed, 3), "plain": round(plain, 3)}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each method, means over the seeds with the standard deviation."""
    tasks = [task for task in TASKS if any(each["task"] == task for each in rows)]
    heads = ["method"]
    for task in tasks:
        heads += [f"fewer bytes, {task}", f"{task}, compressed in use", "not compressed in use"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method in dict.fromkeys(each["method"] for each in rows):
        cells = [method]
        for task in tasks:
            mine = [each for each in rows if (each["task"], each["method"]) == (task, method)]
            cells += [f"{statistics.mean(each['ratio'] for each in mine):.1f}" if mine else "-"]
            for key in ("compressed", "plain"):
                values = [each[key] for each in mine]
                cells.append(_spread(values) if values else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    if not all(math.isfinite(value) for value in values):
        return "diverged"
    mean, deviation = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{mean:.0f} ± {deviation:.0f}" if mean >= 1000 else f"{mean:.1f} ± {deviation:.1f}"


def stored(file: Path) -> list[dict[str, Any]]:
    """The rows of a file that ``-o`` wrote."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", type=Path, metavar="FILE", help="train nothing: the table of rows that are stored")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="rows are added to this file, as JSON lines; those that it has are not trained",
    )
    args = parser.parse_args()
    if args.show is not None:
        print(table(stored(args.show)))
        return
    torch.set_num_threads(1)
    rows = stored(args.output) if args.output is not None and args.output.exists() else []
    known = {(each["task"], each["seed"], each["method"]) for each in rows}
    for task in args.tasks:
        for seed in range(args.seeds):
            for method in args.methods:
                if (task, seed, method) in known:
                    continue
                rows.append(row(task, method, seed))
                if args.output is not None:
                    with args.output.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
