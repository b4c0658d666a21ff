"""Pufferfish on small tasks: accuracy, parameters and step times of dense, hybrid and low-rank training.

    python -m benchmarks.pufferfish [--seeds 5] [--epochs 12] [--plot docs/pufferfish.png] [--json FILE]

One process, one thread. Times are ratios of medians over alternating rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import grace.torch
from grace import grace_from_params
from grace.factorize import WarmUp, factorize, plan

TEST_IMAGES = 450  # of 1797 images
LOW: dict[str, Any] = {"rank_ratio": 0.25, "keep_first": 1, "keep_last": True, "min_numel": 0}
HYBRID: dict[str, Any] = {**LOW, "keep_first": 3}
# By name: settings of the plan (None: dense), warm-up epochs (0: random factors from the start), params of the Grace.
ARMS: dict[str, tuple[dict[str, Any] | None, int, dict[str, Any] | None]] = {
    "dense": (None, 0, None),
    "hybrid, warm-up": (HYBRID, 3, None),
    "low rank, warm-up": (LOW, 3, None),
    "low rank, no warm-up": (LOW, 0, None),
    "hybrid, warm-up, PowerSGD": (HYBRID, 3, {"compressor": "powersgd", "compress_rank": 4}),
    "hybrid, warm-up, top-k": (HYBRID, 3, {"compressor": "topk", "compress_ratio": 0.05}),
}


def network() -> nn.Module:
    """102,826 parameters: five convolutions with norms, a mean over positions, and a classifier."""
    widths = [1, 32, 32, 64, 64, 64]
    layers: list[nn.Module] = []
    for number, (i, o) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        if number in (1, 4):
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def images(seed: int) -> tuple[torch.Tensor, ...]:
    """Training images and labels, then test images and labels."""
    data = load_digits()
    x, y = torch.from_numpy((data.images / 16).astype(np.float32))[:, None], torch.from_numpy(data.target)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(x)))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return x[train], y[train], x[test], y[test]


def train(arm: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train one arm. Returns its number of parameters, and the accuracy on the test images after every epoch."""
    settings, warm, method = ARMS[arm]
    x, y, test_x, test_y = images(seed)
    torch.manual_seed(seed)
    model = network()
    warmup = WarmUp(warm, **settings) if settings is not None and warm else None
    if settings is not None and not warm:
        factorize(model, init="random", **settings)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    optimizer = make(model)
    if method is not None:
        grc = grace_from_params(method, transport="local")
        optimizer = grace.torch.DistributedOptimizer(optimizer, grc, model.named_parameters())
    accuracies = []
    for epoch in range(epochs):
        if warmup is not None and warmup.due(epoch):
            model, optimizer = warmup.switch(model, optimizer, make)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - epoch / epochs)
        model.train()
        for batch in torch.randperm(len(x)).split(32)[: len(x) // 32]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracies.append((model(test_x).argmax(1) == test_y).double().mean().item())
    return {"parameters": sum(p.numel() for p in model.parameters()), "accuracy": accuracies}


def teacher_student(seed: int, steps: int = 480, warm: int = 120) -> tuple[float, float]:
    """Losses of a student of rank ratio 1/16 that learns a teacher's outputs: with warm-up, and from random factors."""

    def student(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def answers(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return teacher(x) / spread

    settings: dict[str, Any] = {"rank_ratio": 1 / 16, "keep_first": 0}
    teacher, spread = student(1000 + seed), 1.0
    test = torch.randn(2000, 64, generator=torch.Generator().manual_seed(2000 + seed))
    spread = answers(test).std().item()
    losses = []
    for warmed in (True, False):
        model = student(seed)
        if not warmed:
            factorize(model, init="random", **settings)
        optimizer, warmup = make(model), WarmUp(warm, **settings)
        stream = torch.Generator().manual_seed(seed)
        for step in range(steps):
            if warmed and warmup.due(step):
                model, optimizer = warmup.switch(model, optimizer, make)
            x = torch.randn(64, 64, generator=stream)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), answers(x)).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(nn.functional.mse_loss(model(test), answers(test)).item())
    return losses[0], losses[1]


def step_times(rounds: int = 30) -> dict[str, dict[str, float]]:
    """Measure seconds of a training step, dense and factorised, in alternating runs."""
    mlp = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(1024, 1024), nn.ReLU())))
    convolution = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1))
    found = {}
    for name, dense, shape in (
        ("MLP, 3 x 1024, batch 128", mlp, (128, 1024)),
        ("conv 128 -> 128, 3 x 3 on 16 x 16, batch 32", convolution, (32, 128, 16, 16)),
    ):
        low, _ = factorize(copy.deepcopy(dense), keep_first=0, keep_last=False)
        x = torch.randn(shape)
        forms = {
            form: (model, torch.optim.SGD(model.parameters(), 1e-3)) for form, model in (("dense", dense), ("low", low))
        }
        seconds: dict[str, list[float]] = {form: [] for form in forms}
        for turn in range(rounds + 3):
            for form, (model, optimizer) in list(forms.items())[:: 1 if turn % 2 else -1]:
                began = time.perf_counter()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if turn >= 3:
                    seconds[form].append(time.perf_counter() - began)
        found[name] = {form: statistics.median(times) for form, times in seconds.items()}
    return found


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the accuracy over the epochs, one line per arm: means over seeds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2))
    for arm, runs in results.items():
        if ARMS[arm][2] is None:
            mean = np.mean([run["accuracy"] for run in runs], axis=0)
            label = f"{arm} ({runs[0]['parameters']:,})"
            axes.plot(range(1, len(mean) + 1), 100 * mean, marker="o", markersize=3, label=label)
    axes.set(xlabel="epoch", ylabel="test accuracy (%)", ylim=(60, 100))
    axes.legend(title="parameters", fontsize=7, title_fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(plan(network(), example=torch.zeros(1, 1, 8, 8), **HYBRID), "\n")
    results = {arm: [train(arm, seed, options.epochs) for seed in range(options.seeds)] for arm in ARMS}
    dense = results["dense"][0]["parameters"]
    print(f"Handwritten digits, {options.seeds} seeds, {options.epochs} epochs, {TEST_IMAGES} test images")
    print(f"{'':26}  parameters  of dense  accuracy: mean (sd)")
    for arm, runs in results.items():
        last = [100 * run["accuracy"][-1] for run in runs]
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        parameters = runs[0]["parameters"]
        print(f"{arm:26}  {parameters:10,}  {parameters / dense:8.2f}  {statistics.mean(last):.2f}% ({spread:.2f})")
    pairs = [teacher_student(seed) for seed in range(options.seeds)]
    wins = sum(warm <= cold for warm, cold in pairs)
    print(f"\nTeacher and student, rank 1/16: loss with warm-up not higher in {wins} of {len(pairs)} seeds;")
    print("  " + ", ".join(f"{warm:.4f} against {cold:.4f}" for warm, cold in pairs))
    times = step_times()
    print("\nSeconds per training step, one thread, median of rounds in turns")
    for name, forms in times.items():
        ratio = forms["low"] / forms["dense"]
        print(f"{name:46} {forms['dense'] * 1e3:7.2f} ms  low rank {forms['low'] * 1e3:7.2f} ms  ratio {ratio:.2f}")
    if options.plot:
        plot(results, options.plot)
    if options.json:
        options.json.write_text(json.dumps({"results": results, "teacher": pairs, "times": times}, indent=1))


if __name__ == "__main__":
    main()
