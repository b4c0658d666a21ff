"""Accuracy of the planner's predictions: strategies and methods, predicted and measured on rate-limited links.

Every worker runs this file, by torchrun: FOLDER. Worker 0 writes FOLDER/fidelity.json.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

import grace.torch
from benchmarks.lab.rounds import medians
from benchmarks.lab.table import EMULATED
from grace import grace_from_params
from grace.backends import get_backend
from grace.bench import costs as measure
from grace.communicators.planned.strategy import Option, parse
from grace.core import Transport
from grace.planner import plan
from grace.planner.advise import Candidate, candidate, step
from grace.planner.costs import Costs, codec
from grace.planner.profile import Profile, from_dict
from grace.planner.torch import profile
from grace.transports import get_transport

WIDTH, DEPTH, BATCH = 1024, 6, 128
SIZES = (2**12, 2**16, 2**18, 2**21, 2**22, 2**23)
"""Sizes in bytes at which collectives are timed; most exceed a link's burst."""
WARM_UP, SECONDS = 3, 100.0  # warm-up steps of each training, and seconds of all rounds
METHOD = {"compressor": "topk", "compress_ratio": 0.01}
DENSE, GATHERED = "allreduce(flat)", "compress(gpu) allgather*(flat) decompress(gpu)"
SHUFFLED = "compress(gpu) alltoall*(flat) decompress(gpu) compress(gpu) allgather*(flat) decompress(gpu)"
CHOICES = (
    DENSE,
    GATHERED,
    SHUFFLED,
    "reduce_scatter(flat) allgather(flat)",
    "reduce_scatter(flat) compress(gpu) allgather*(flat) decompress(gpu)",
)
METHODS: Mapping[str, dict[str, Any]] = {
    "fp16": {"compressor": "fp16"},
    "topk": METHOD,
    "powersgd": {"compressor": "powersgd", "compress_rank": 4},
}
ONE_EACH = {"bucket_mb": 1e-6}  # a message for each tensor, as the prediction of a plan assumes
WHOLE = 2**18  # fewest elements of a tensor with a drawn strategy; smaller tensors are dense


def network(depth: int = DEPTH) -> nn.Sequential:
    """Linear layers of equal width, 1 million parameters each."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


class Bench:
    """The transport, the inputs and the loss, which all measurements share."""

    def __init__(self, carrier: Transport):
        self.carrier = carrier
        self.inputs = torch.randn(BATCH, WIDTH)

    def loss(self, model: nn.Module) -> torch.Tensor:
        return model(self.inputs).square().mean()

    def agreed(self, text: str) -> str:
        """Return worker 0's text on all workers."""
        return self.carrier.exchange(text)[0]

    def step(self, params: Mapping[str, Any]) -> Callable[[], float]:
        """Set up a training; returns a function that runs a step, and returns the seconds until all means are there."""
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        grace.torch.DistributedOptimizer(optimizer, grace_from_params(params), model.named_parameters())

        def timed() -> float:
            optimizer.zero_grad()
            self.carrier.exchange("")  # all workers start together
            began = time.perf_counter()
            self.loss(model).backward()
            found = time.perf_counter() - began
            optimizer.step()
            return found

        return timed

    def profile(self, model: nn.Module, steps: int = 20) -> Profile:
        """Measure the model's profile; returns that of the slowest worker."""
        texts = self.carrier.exchange(json.dumps(profile(model, lambda: self.loss(model), steps, 1).to_dict()))
        return max((from_dict(json.loads(text)) for text in texts), key=_alone)

    def seconds(self, ways: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, float], Profile]:
        """Measure the step times of all trainings, and the model's profile in the same rounds."""
        model, trainings = network(), {label: self.step(params) for label, params in ways.items()}
        for train in trainings.values():
            for _ in range(WARM_UP):
                train()
        profiles: list[Profile] = []
        found = medians(self.carrier, trainings, SECONDS, lambda: profiles.append(self.profile(model, 4)))
        profiles.sort(key=_alone)
        return found, profiles[len(profiles) // 2]


def _alone(found: Profile) -> float:
    return found.forward + found.backward


def strategies(found: Profile, costs: Costs) -> dict[str, dict[str, str]]:
    """Named assignments of strategies to all tensors: manual, random, and the planner's."""
    large = [tensor.name for tensor in found.tensors if tensor.size >= WHOLE]
    dense = dict.fromkeys((tensor.name for tensor in found.tensors), DENSE)
    named = {"dense": dense}
    for label, text in (("all gathered", GATHERED), ("all shuffled", SHUFFLED)):
        named[label] = {**dense, **dict.fromkeys(large, text)}
    for count in range(1, len(large)):  # the profile lists the last layers first; all large tensors have one size
        named[f"last {count} gathered"] = {**dense, **dict.fromkeys(large[:count], GATHERED)}
    draw = random.Random(0)
    for number in range(10):
        named[f"random {number}"] = {**dense, **{name: draw.choice(CHOICES) for name in large}}
    named["planned"] = plan.make(found, costs).plan.strategies
    return named


def planned(options: Mapping[str, str]) -> dict[str, Any]:
    """A plan with these strategies."""
    return {"params": METHOD, "tensors": {name: {"option": text} for name, text in options.items()}}


def run(folder: Path) -> None:
    """Measure and predict. All workers call it together."""
    dist.init_process_group("gloo")
    carrier = get_transport("torch").bind(get_backend("torch"))
    bench = Bench(carrier)
    model = network()
    cluster = measure.links(carrier, sizes=SIZES, repeats=5)
    alone = [measure.compressor(params, backend="torch").to_dict() for params in METHODS.values()]
    alone = json.loads(bench.agreed(json.dumps(alone)))
    message, priced = measure.at_work(carrier, [*map(codec, alone)])
    cluster, codecs = replace(cluster, message=message), dict(zip(METHODS, priced, strict=True))
    costs = Costs(cluster, codecs["topk"])
    named = json.loads(bench.agreed(json.dumps(strategies(bench.profile(model), costs))))
    ways = {label: {"plan": planned(options), **ONE_EACH} for label, options in named.items()}
    candidates: dict[str, Candidate | None] = {"fp32": None}
    candidates |= {label: candidate(label, each) for label, each in codecs.items()}
    ways |= {label: METHODS.get(label, {"compressor": "none"}) for label in candidates}
    measured, found = bench.seconds(ways)
    rows: list[dict[str, Any]] = []
    for label, options in named.items():
        tensors: dict[str, Option] = {name: parse(text) for name, text in options.items()}
        rows.append({"kind": "strategy", "name": label, "predicted": plan.predict(found, costs, tensors)})
    for label, each in candidates.items():
        rows.append({"kind": "method", "name": label, "predicted": step(found, cluster, each)})
    rows = [{**row, "measured": measured[row["name"]]} for row in rows]
    if carrier.rank == 0:
        about = {"cluster": cluster.to_dict(), "backward": found.backward, "forward": found.forward}
        (folder / "fidelity.json").write_text(json.dumps({**about, "rows": rows}))
    carrier.exchange("")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group


# -- output ------------------------------------------------------------------------------------------------------------
def judged(found: Mapping[str, Any]) -> dict[str, float]:
    """Figures of one link rate: prediction errors, rank correlation, and the plan's relative time."""
    rows = found["rows"]
    drawn = [row for row in rows if row["name"].startswith("random")]
    ways = {row["name"]: row["measured"] for row in rows if row["kind"] == "strategy"}
    methods = [row for row in rows if row["kind"] == "method"]
    return {
        "error of random strategies": statistics.mean(map(_error, drawn)),
        "rank correlation": _rank_correlation([(row["predicted"], row["measured"]) for row in drawn]),
        "plan / best": ways["planned"] / min(ways.values()),
        "plan / dense": ways["planned"] / ways["dense"],
        **{f"error of {row['name']}": _error(row) for row in methods},
    }


def signs(found: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Speed-ups over dense, predicted and measured, of methods and strategies."""
    pairs = []
    for kind, base in (("method", "fp32"), ("strategy", "dense")):
        rows = {row["name"]: row for row in found["rows"] if row["kind"] == kind}
        first = rows.pop(base)
        for row in rows.values():
            pairs.append((first["predicted"] / row["predicted"], first["measured"] / row["measured"]))
    return pairs


def tables(found: Mapping[str, Any]) -> list[Table]:
    """By link rate: predicted and measured steps, and a summary."""
    every = Table("", *(f"{rate}: predicted" if part else rate for rate in found for part in (1, 0)), title=EMULATED)
    rows = {rate: {row["name"]: row for row in figures["rows"]} for rate, figures in found.items()}
    for name in next(iter(rows.values())):
        cells = (rows[rate][name][key] for rate in found for key in ("predicted", "measured"))
        every.add_row(name, *(f"{1e3 * seconds:.1f} ms" for seconds in cells))
    verdicts = {rate: judged(figures) for rate, figures in found.items()}
    said = Table("", *found)
    for key in next(iter(verdicts.values())):
        said.add_row(key, *(f"{verdict[key]:.2f}" for verdict in verdicts.values()))
    pairs = [pair for figures in found.values() for pair in signs(figures) if abs(pair[1] - 1) > 0.05]
    right = sum((predicted > 1) == (measured > 1) for predicted, measured in pairs)
    said.caption = f"faster or slower than dense by more than 5 %: {right} of {len(pairs)} predicted rightly"
    return [every, said]


def _error(row: Mapping[str, Any]) -> float:
    return abs(row["predicted"] / row["measured"] - 1)


def _rank_correlation(pairs: list[tuple[float, float]]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(*zip(*pairs, strict=True)).statistic)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
