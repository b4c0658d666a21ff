"""Does Accordion find the epochs in which compression hurts? `python -m benchmarks.accordion`.

Four workers in this process learn from a teacher network: 32 Gaussian inputs, a tanh layer of 64, 10 classes. Samples
are a stream of chunks, each used for two epochs, so that nothing can be memorised. The script compares accuracy and
sent floats of low compression, Accordion, high compression, and two controls. The first is a placebo: each layer has
low compression in as many epochs as with Accordion, but in random ones. The second is a fixed level that sends as many
floats as Accordion did (for ranks: at most as many).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from grace import Grace, grace_from_params
from grace.policies import Decision, Level, Policy
from grace.simulate import end_epoch, step
from grace.simulate import workers as made_workers

WORKERS, BATCH, CHUNK, WINDOW = 4, 32, 6000, 2
SIZES = (32, 128, 128, 128, 10)
RATE, MOMENTUM = 0.05, 0.9
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "powersgd": ({"compressor": "powersgd", "min_rate": 1.0}, {"compress_rank": 8}, {"compress_rank": 1}),
    "topk": ({"compressor": "topk"}, {"compress_ratio": 0.1}, {"compress_ratio": 0.003}),
}
ARMS = ("low", "accordion", "high", "static", "placebo")

CONTROLS = ("static", "placebo")


@dataclass(frozen=True)
class Planned(Policy):
    """A fixed schedule. ``low``: for each tensor its name and its epochs of low compression; the others are high."""

    k_low: Any
    k_high: Any
    low: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def together(self) -> bool:
        return False

    def levels(self, compressor: Any) -> tuple[Level, ...]:
        return self.k_high, self.k_low  # training begins at the first level

    def on_epoch_end(
        self, decision: Decision, epoch: int, lr: float | None, next_lr: float | None, norms: Mapping[str, float]
    ) -> Decision:
        low = dict(self.low)
        return replace(decision, levels={name: int(epoch + 1 in low[name]) for name in decision.levels})


# -- the task ------------------------------------------------------------------------------------------------------
class Teacher:
    """A fixed random network that labels Gaussian inputs."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.inner = self.rng.standard_normal((SIZES[0], 64)).astype(np.float32) / SIZES[0] ** 0.5 * 2
        self.outer = self.rng.standard_normal((64, SIZES[-1])).astype(np.float32)

    def sample(self, n: int) -> tuple[Any, Any]:
        x = self.rng.standard_normal((n, SIZES[0]), dtype=np.float32)
        return x, (np.tanh(x @ self.inner) @ self.outer).argmax(1)


def network(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(1000 + seed)
    weights = {}
    for layer, (a, b) in enumerate(pairwise(SIZES)):
        for name, shape in ((f"w{layer}", (a, b)), (f"b{layer}", b)):  # PyTorch's initialisation of linear layers
            weights[name] = rng.uniform(-(a**-0.5), a**-0.5, shape).astype(np.float32)
    return weights


def forward(weights: Mapping[str, Any], x: Any) -> list[Any]:
    """Return the inputs of all layers, and the logits."""
    layers = [x]
    for layer in range(len(SIZES) - 1):
        z = layers[-1] @ weights[f"w{layer}"] + weights[f"b{layer}"]
        layers.append(z if layer == len(SIZES) - 2 else np.maximum(z, 0))
    return layers


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def gradients(weights: Mapping[str, Any], x: Any, y: Any) -> tuple[dict[str, Any], float]:
    """Each worker's gradients, [workers, ...], for x[workers, batch, inputs] and y[workers, batch]; the mean loss."""
    layers = forward(weights, x)
    found = log_softmax(layers[-1])
    truth = np.eye(SIZES[-1], dtype=np.float32)[y]
    loss = float(-(found * truth).sum(-1).mean())
    delta = (np.exp(found) - truth) / x.shape[1]
    result = {}
    for layer in reversed(range(len(SIZES) - 1)):
        result[f"w{layer}"] = layers[layer].transpose(0, 2, 1) @ delta
        result[f"b{layer}"] = delta.sum(1)
        if layer:
            delta = (delta @ weights[f"w{layer}"].T) * (layers[layer] > 0)
    return result, loss


# -- training ------------------------------------------------------------------------------------------------------
def rate(epoch: int, epochs: int) -> float:
    """The learning rate: divided by 10 after 60% and again after 80% of the epochs."""
    return RATE * 0.1 ** sum(epoch >= epochs * share // 10 for share in (6, 8))


def graces(params: Mapping[str, Any]) -> list[Grace]:
    with warnings.catch_warnings():
        # the study measures compression without error feedback
        warnings.filterwarnings("ignore", message=".*without error feedback")
        return made_workers({"min_numel": 200, **params}, WORKERS)


def exchange(workers: Sequence[Grace], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the means, computed with the code that real workers run."""
    return step(workers, [{name: each[rank] for name, each in found.items()} for rank in range(WORKERS)])[0]


def train(params: Mapping[str, Any], seed: int, epochs: int, scale_lr: bool = False) -> dict[str, Any]:
    """Train once. Returns accuracy on new samples, loss over the last two epochs, sent floats, each epoch's levels."""
    teacher, weights, workers = Teacher(seed), network(seed), graces(params)
    shuffle, (x_test, y_test) = np.random.default_rng(3000 + seed), teacher.sample(10_000)
    for grace in workers:
        grace.build(weights)
    velocity = {name: np.zeros_like(w) for name, w in weights.items()}
    losses, updates, scale = [], 0, 1.0
    chunk: Any = None
    for epoch in range(epochs):
        if epoch % 2 == 0:
            chunk = teacher.sample(CHUNK)
        order = shuffle.permutation(CHUNK)
        lr, losses = rate(epoch, epochs), losses[-2:]
        micro, batch, total = workers[0].decision.micro_steps, WORKERS * BATCH, []
        for start in range(0, CHUNK - micro * batch + 1, micro * batch):
            rows = order[start : start + micro * batch].reshape(WORKERS, micro * BATCH)
            found, loss = gradients(weights, chunk[0][rows], chunk[1][rows])
            total.append(loss)
            updates += 1
            for name, mean in exchange(workers, found).items():
                velocity[name] = MOMENTUM * velocity[name] + mean
                weights[name] = weights[name] - np.float32(lr * scale) * velocity[name]
        losses.append(float(np.mean(total)))
        end_epoch(workers, lr, rate(epoch + 1, epochs))
        scale *= workers[0].decision.lr_scale if scale_lr else 1.0
    report = workers[0].report()
    history = {tensor.name: tensor.levels for tensor in report.tensors if tensor.levels}
    return {
        "accuracy": float((forward(weights, x_test)[-1].argmax(1) == y_test).mean()),
        "loss": float(np.mean(losses[-2:])),
        "floats": report.bytes_sent // 4,
        "updates": updates,
        "levels": {name: at_epochs(past, epochs) for name, past in history.items()},
    }


def at_epochs(past: Sequence[tuple[int, Any]], epochs: int) -> list[Any]:
    """The level of each epoch. ``past``: the changes, as (epoch, level)."""
    return [next(level for since, level in reversed(past) if since <= epoch) for epoch in range(epochs)]


def placebo(levels: Mapping[str, Sequence[Any]], low: Any, epochs: int, seed: int) -> tuple[Any, ...]:
    """For each layer, as many random epochs of low compression as with Accordion.

    These epochs lie outside the first window and the windows after drops of the learning rate.
    """
    rng = np.random.default_rng(2000 + seed)
    drops = [epoch for epoch in range(1, epochs) if rate(epoch, epochs) < rate(epoch - 1, epochs)]
    barred = {*range(WINDOW + 1), *(drop + i for drop in drops for i in range(WINDOW))}
    free = [epoch for epoch in range(epochs) if epoch not in barred]
    return tuple(
        (name, tuple(rng.choice(free, min(len(free), sum(level == low for level in each)), replace=False).tolist()))
        for name, each in levels.items()
    )


def run(method: str, feedback: bool, seed: int, epochs: int, arms: Sequence[str] = ARMS) -> dict[str, dict[str, Any]]:
    """Train all arms with one seed; returns their results by arm."""
    base, low, high = METHODS[method]
    base = {**base, "memory": "residual" if feedback else "none"}
    found: dict[str, dict[str, Any]] = {}
    for arm in arms:
        if arm == "accordion":
            params = {**base, "policy": "accordion", "k_low": low, "k_high": high, "window": WINDOW}
        elif arm == "placebo":
            params = {**base, "policy": Planned(low, high, placebo(found["accordion"]["levels"], low, epochs, seed))}
        elif arm == "static":
            params = {**base, **static(found, low, high)}
        else:
            params = {**base, **(low if arm == "low" else high)}
        found[arm] = train(params, seed, epochs)
    for each in found.values():
        each["low"] = share(each["levels"], low) if each["levels"] else None
    return found


def static(found: Mapping[str, Mapping[str, Any]], low: Level, high: Level) -> Level:
    """The fixed level that sends as many floats as Accordion: a ratio, or the largest rank that sends no more."""
    most, mine, least = (found[arm]["floats"] for arm in ("low", "accordion", "high"))
    ((key, top),), (bottom,) = low.items(), high.values()
    value = bottom + (top - bottom) * (mine - least) / (most - least)
    return {key: int(value) if isinstance(top, int) else value}


def share(levels: Mapping[str, Sequence[Any]], low: Any) -> float:
    """The share of layer-epochs at the low level."""
    return float(np.mean([level == low for each in levels.values() for level in each]))


def better(first: Sequence[float], second: Sequence[float]) -> float:
    """One-sided p of the paired permutation test that ``first`` is larger, over all signs of the differences."""
    differences = np.subtract(first, second)
    signs = product((1, -1), repeat=len(differences))
    return float(np.mean([np.dot(each, differences) >= differences.sum() - 1e-12 for each in signs]))


# -- the other two claims of the paper ---------------------------------------------------------------------------------
GROWTHS = (4, 8)


def batches(seed: int, epochs: int) -> dict[str, dict[str, Any]]:
    """Train with small batches throughout, and in Accordion's batch mode with linear scaling of the learning rate."""
    policy = {"compressor": "none", "policy": "accordion_batch", "window": WINDOW}
    grown = {f"x{n}": train({**policy, "batch_growth": n}, seed, epochs, scale_lr=True) for n in GROWTHS}
    return {"small": train({"compressor": "none"}, seed, epochs), **grown}


def overhead(rounds: int = 15) -> dict[str, float]:
    """Time steps of a PyTorch network of a million parameters, with and without monitoring in every epoch.

    The two networks run in alternation. Returns their median milliseconds, and the median of the ratio.
    """
    import torch

    import grace.torch

    def made(params: Mapping[str, Any]) -> Any:
        torch.manual_seed(0)
        linear = torch.nn.Linear
        net = torch.nn.Sequential(linear(512, 800), torch.nn.ReLU(), linear(800, 700), torch.nn.ReLU(), linear(700, 64))
        grc = grace_from_params({"compressor": "topk", "compress_ratio": 0.01, **params}, "local")
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        return net, grc, grace.torch.DistributedOptimizer(optimizer, grc, net.named_parameters())

    # Both compress equally, so only the monitoring differs.
    policy = {"policy": "accordion", "k_low": 0.01, "window": 1}
    subjects = {"without": made({}), "with": made(policy)}
    x, y = torch.randn(128, 512), torch.randint(64, (128,))
    times: dict[str, list[float]] = {name: [] for name in subjects}
    steps = 40
    for turn in range(rounds + 2):
        for name, (net, grc, optimizer) in subjects.items():
            began = time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
            grc.end_epoch()
            if turn >= 2:
                times[name].append((time.perf_counter() - began) / steps)
    found = {f"milliseconds {name}": float(np.median(each)) * 1e3 for name, each in times.items()}
    return {**found, "ratio": float(np.median(np.divide(times["with"], times["without"])))}


# -- the table -----------------------------------------------------------------------------------------------------
def summary(method: str, feedback: bool, runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Means and deviations over seeds, and the paired tests against the controls, if there are any."""
    rows = {}
    for arm in runs[0]:
        values = {key: [each[arm][key] for each in runs] for key in ("accuracy", "loss", "floats", "low")}
        rows[arm] = {key: float(np.mean(each)) for key, each in values.items() if None not in each}
        rows[arm]["deviation"] = float(np.std(values["accuracy"], ddof=1)) if len(runs) > 1 else 0.0
    gap = rows["low"]["accuracy"] - rows["high"]["accuracy"]
    found: dict[str, Any] = {
        "method": method,
        "memory": "residual" if feedback else "none",
        "seeds": len(runs),
        "arms": rows,
        "recovered": (rows["accordion"]["accuracy"] - rows["high"]["accuracy"]) / gap if gap else None,
        "floats": rows["accordion"]["floats"] / rows["low"]["floats"],
    }
    for control in CONTROLS:
        if control in rows:
            both = [[each[arm]["accuracy"] for each in runs] for arm in ("accordion", control)]
            found[f"p of no better than {control}"] = better(*both)
            found[f"seeds better than {control}"] = int(sum(one > other for one, other in zip(*both, strict=True)))
    return found


def table(found: Mapping[str, Any]) -> str:
    lines = [
        f"{found['method']}, memory {found['memory']}, {found['seeds']} seeds",
        "",
        "| | accuracy | sd | loss | million floats | layer-epochs at low |",
        "|---|---|---|---|---|---|",
    ]
    for arm, row in found["arms"].items():
        low = {"low": 1.0, "high": 0.0, "static": 0.0}.get(arm, row.get("low", 0.0))
        lines.append(
            f"| {arm} | {row['accuracy']:.4f} | {row['deviation']:.4f} | {row['loss']:.3f} "
            f"| {row['floats'] / 1e6:.2f} | {low:.0%} |"
        )
    lines += ["", f"of the gap in accuracy recovered {found['recovered']:.2f}, floats {found['floats']:.2f} of low"]
    for control in CONTROLS:
        if (p := found.get(f"p of no better than {control}")) is not None:
            wins = found[f"seeds better than {control}"]
            lines.append(f"better than {control} in {wins} of {found['seeds']} seeds, one-sided p {p:.3f}")
    return "\n".join(lines)


def plot(runs: Sequence[Mapping[str, Mapping[str, Any]]], low: Any, path: Path) -> None:
    """Draw the share of runs with low compression, by layer and epoch: the critical regimes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted(runs[0]["accordion"]["levels"])
    share = np.mean([[[level == low for level in run["accordion"]["levels"][n]] for n in names] for run in runs], 0)
    figure, axis = pyplot.subplots(figsize=(8, 2.2), layout="constrained")
    image = axis.imshow(share, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axis.set_yticks(range(len(names)), [f"layer {name[1:]}" for name in names], fontsize=8)
    axis.set_xlabel("epoch")
    epochs = share.shape[1]
    for epoch in range(1, epochs):
        if rate(epoch, epochs) < rate(epoch - 1, epochs):
            axis.axvline(epoch - 0.5, color="tab:red", linestyle="--", linewidth=1)
    axis.set_title("share of runs at low compression; red: the learning rate falls", fontsize=9)
    figure.colorbar(image)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accordion", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--method", choices=list(METHODS), default="powersgd")
    parser.add_argument("--short", action="store_true", help="levels alone: neither the batch mode nor the overhead")
    parser.add_argument("--processes", type=int, default=1, help="seeds that run side by side")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--plot", type=Path, help="draw the critical regimes there")
    options = parser.parse_args(argv)
    began = time.perf_counter()
    seeds = range(options.seeds)
    with ProcessPoolExecutor(options.processes) as pool:
        plain = list(pool.map(partial(run, options.method, False, epochs=options.epochs), seeds))
        fed = list(pool.map(partial(run, options.method, True, epochs=options.epochs, arms=ARMS[:4]), seeds))
        grown = [] if options.short else list(pool.map(partial(batches, epochs=options.epochs), seeds))
    found = [summary(options.method, False, plain), summary(options.method, True, fed)]
    for each in found:
        print(table(each), end="\n\n")
    modes: dict[str, dict[str, float]] = {
        arm: {key: float(np.mean([each[arm][key] for each in grown])) for key in ("loss", "accuracy", "updates")}
        for arm in (grown[0] if grown else ())
    }
    for arm, each in modes.items():
        ratio = each["loss"] / modes["small"]["loss"]
        print(f"batches {arm}: {each['updates']:.0f} updates, accuracy {each['accuracy']:.4f}, loss x {ratio:.4f}")
    cost = {} if options.short else overhead()
    if cost:
        print(f"cost of looking: {cost}")
    print(f"{time.perf_counter() - began:.0f} s")
    if options.json:
        result = {"tables": found, "batch mode": modes, "overhead": cost, "runs": {"none": plain, "residual": fed}}
        options.json.write_text(json.dumps(result, indent=1))
    if options.plot:
        plot(plain, METHODS[options.method][1], options.plot)


if __name__ == "__main__":
    main()
