"""How well the noise ratio that `auto` measures predicts the number of steps of a training.

python -m benchmarks.noise 'transformer:dense;eden:bits=1;topk' 'image:dense;topk' --seeds 2 -o out/noise.jsonl
python -m benchmarks.noise --show benchmarks/results/noise.jsonl    # the table of docs/guide.md

Trains quick tasks of `grace bench tasks` with PyTorch, all workers in this process; times are not measured. For each
method it reports the noise ratio over the first steps and over all steps, the final quality, the step at which dense
gradients had reached this quality, and how many steps make as much progress as one dense step: as measured and as the
model predicts. A memory with its own momentum has no noise ratio, since its means differ from mean gradients by design.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from grace import grace_from_params
from grace.bench.plan import parse
from grace.bench.tasks.tasks import batch, rate, task_of
from grace.bench.tasks.torch_models import MODELS
from grace.policies import Decision, Noise, Policy
from grace.policies.auto import DELAY_FACTOR, FACTOR, error_and_signal, noise_ratio
from grace.transports.local import LocalTransport, World

EVERY = 10  # steps between two measurements of the noise
FIRST = 30  # end of the first steps, in which `auto` would try methods


@dataclass(frozen=True)
class Watch(Policy):
    """A policy with one level that stores a noise ratio in its memo every ``every`` steps."""

    feeds_back: bool
    every: int = EVERY
    measures_noise: ClassVar[bool] = True

    def trial(self, decision: Decision, workers: int) -> int | None:
        return self.every - 1  # after an untimed step

    def on_trial_end(
        self, decision: Decision, workers: int, seconds: float, noise: Mapping[str, Noise] | None = None
    ) -> Decision:
        ratios = [*decision.memo.get("ratios", []), noise_ratio(*error_and_signal(noise or {}), self.feeds_back)]
        return replace(decision, memo={"ratios": ratios})

    def on_epoch_end(
        self, decision: Decision, epoch: int, lr: float | None, next_lr: float | None, norms: Mapping[str, float]
    ) -> Decision:
        return decision


def train(name: str, method: str, workers: int, seed: int) -> dict[str, Any]:
    """Train once; returns a row with the noise ratios, and the curve of (step, quality)."""
    task = task_of(name)
    scale, data = task.quick, task.data()
    torch.manual_seed(seed)
    model = MODELS[task.model](**data.sizes, **scale.model)
    parameters = dict(model.named_parameters())
    params = {"compressor": "none"} if method == "dense" else parse(method).params
    memory = grace_from_params(params, "local").method.memory
    watch = Watch(memory.feedback)
    world = World(workers)
    graces = [grace_from_params({**params, "policy": watch}, LocalTransport(world, rank)) for rank in range(workers)]
    for grc in graces:
        grc.build(parameters)
    momentum = 0.0 if memory.includes_momentum else 0.9
    optimizer: torch.optim.Optimizer
    if task.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters.values(), scale.lr, betas=(momentum, 0.999))
    else:
        optimizer = torch.optim.SGD(parameters.values(), scale.lr, momentum=momentum)

    def predict(inputs: Any) -> Any:
        model.eval()
        with torch.no_grad():
            found = model(*map(torch.from_numpy, inputs)).numpy()
        model.train()
        return found

    curve = []
    for step in range(scale.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(scale, step)
        for rank, grc in enumerate(graces):
            inputs, targets = batch(data, scale.batch, rank, step, seed)
            logits, wanted = model(*map(torch.from_numpy, inputs)), torch.from_numpy(targets)
            if task.binary:
                loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted.float())
            else:
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), wanted.flatten())
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            grc.launch(dict(zip(parameters, gradients, strict=True)))
        while [grc for grc in graces if not grc.advance()]:
            pass
        for grc in graces:
            grc.land()
        flights = [grc.tuning() for grc in graces]
        while [flight for flight in flights if flight is not None and not flight.advance()]:
            pass
        for key, p in parameters.items():
            p.grad = graces[0].mean(key)
            for grc in graces[1:]:
                grc.mean(key)
        optimizer.step()
        if (step + 1) % scale.every == 0:
            curve.append((step + 1, data.quality(predict)))
    ratios = graces[0].decision.memo["ratios"]
    head = {"task": name, "method": method, "feeds_back": memory.feedback, "workers": workers, "seed": seed}
    return {**head, "ratios": ratios, "curve": curve}


def steps_to(curve: list[tuple[int, float]], higher: bool, target: float) -> float | None:
    """Steps to a quality, linearly interpolated between evaluations; None if it is never reached."""
    before = (0, None)
    for step, quality in curve:
        if quality >= target if higher else quality <= target:
            if before[1] is None:
                return step
            share = (target - before[1]) / (quality - before[1])
            return before[0] + share * (step - before[0])
        before = (step, quality)
    return None


def stored(file: Path) -> list[dict[str, Any]]:
    """The rows of a file that ``-o`` wrote."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def last_quality(rows: list[dict[str, Any]]) -> float:
    """The quality after the last step, a mean over the seeds."""
    return statistics.mean(row["curve"][-1][1] for row in rows)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each task and method, means over the seeds."""
    heads = ["task", "method", "noise ratio, first steps", "noise ratio, all steps", "quality", "dense steps to it"]
    heads += ["steps per dense step", "predicted"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["method"]), []).append(row)
    for (name, method), mine in groups.items():
        task = task_of(name)

        def dense_after(quality: float, name: str = name, higher: bool = task.higher) -> float | None:
            found = [steps_to(row["curve"], higher, quality) for row in groups.get((name, "dense"), [])]
            # None: the method was better than dense
            return None if not found or None in found else statistics.mean(found)

        quality = last_quality(mine)
        after = dense_after(quality)
        own = dense_after(last_quality(groups.get((name, "dense"), mine)))
        ratios = [row["ratios"] for row in mine]
        first = statistics.mean(ratio for each in ratios for ratio in each[1 : FIRST // EVERY])
        every = statistics.mean(ratio for each in ratios for ratio in each)
        factor = DELAY_FACTOR if mine[0]["feeds_back"] else FACTOR
        cells = [name, method, f"{first:.2g}", f"{every:.2g}", f"{quality:.4g}"]
        cells += ["-", "-"] if after is None or own is None else [f"{after:.0f}", f"{own / after:.2f}"]
        lines.append(f"| {' | '.join([*cells, f'{1 + factor * every:.2f}'])} |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help="TASK:METHOD;METHOD, methods as `grace bench tasks` has them")
    parser.add_argument("--show", type=Path, metavar="FILE", help="train nothing: the table of rows that are stored")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="rows are added to this file, as JSON lines")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [] if args.show is None else stored(args.show)
    for seed in range(args.seeds):
        for job in args.jobs:
            name, _, methods = job.partition(":")
            for method in methods.split(";"):
                rows.append(train(name, method, args.workers, seed))
                if args.output is not None:
                    with args.output.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
