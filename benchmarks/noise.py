"""How well the noise ratio that `auto` measures predicts the number of steps of a training.

python -m benchmarks.noise --toolkit keras --workers 4 --seeds 3 'lstm:dense;blockint:bits=8;powersgd:compress_rank=16'
python -m benchmarks.noise 'transformer:dense;eden:bits=1;topk' 'image:dense;topk' --seeds 2 -o out/noise.jsonl
python -m benchmarks.noise --show benchmarks/results/noise.jsonl    # the table of docs/noise.md

Trains quick tasks of `grace bench tasks` with PyTorch or Keras, all workers in this process; times are not measured.
For each method it reports the noise ratio over the first steps and over all steps, the final quality, the step at which
dense gradients had reached this quality, and how many steps make as much progress as one dense step: as measured and as
the model predicts. A memory with its own momentum has no noise ratio, since its means differ from mean gradients by
design.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from grace import grace_from_params
from grace.bench.plan import parse
from grace.policies import Decision, Noise, Policy
from grace.policies.auto import DELAY_FACTOR, FACTOR, noise_ratio, relative_error
from grace.transports.local import LocalTransport, World
from grace_bench.tasks.tasks import Task, batch, rate, task_of

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
        ratios = [*decision.memo.get("ratios", []), noise_ratio(relative_error(noise or {}), self.feeds_back)]
        return replace(decision, memo={"ratios": ratios})

    def on_epoch_end(
        self, decision: Decision, epoch: int, lr: float | None, next_lr: float | None, norms: Mapping[str, float]
    ) -> Decision:
        return decision


class TorchModel:
    """A task's model and optimizer in PyTorch."""

    def __init__(self, task: Task, sizes: Mapping[str, int], momentum: float, seed: int):
        import torch

        from grace_bench.tasks import torch_models

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._task, self._torch, self._models = task, torch, torch_models
        self._model = task.builder("torch", torch_models.MODELS)(**sizes, **task.quick.model)
        self.parameters: dict[str, Any] = dict(self._model.named_parameters())
        self._optimizer = torch_models.optimizer_of(task, self.parameters.values(), task.quick.lr, momentum)

    def gradients(self, inputs: Any, targets: Any) -> dict[str, Any]:
        """The gradients of a batch, by name."""
        loss = self._models.loss_of(self._task, self._model, inputs, targets)
        return dict(zip(self.parameters, self._torch.autograd.grad(loss, list(self.parameters.values())), strict=True))

    def apply(self, means: Mapping[str, Any], lr: float) -> None:
        """One step of the optimizer."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for key, p in self.parameters.items():
            p.grad = means[key]
        self._optimizer.step()

    def predict(self, inputs: Any) -> Any:
        """Logits, as a NumPy array."""
        return self._models.predict(self._model, inputs)


class KerasModel:
    """A task's model and optimizer in Keras on TensorFlow; gradients are NumPy's arrays."""

    def __init__(self, task: Task, sizes: Mapping[str, int], momentum: float, seed: int):
        os.environ.setdefault("KERAS_BACKEND", "tensorflow")
        import keras
        import tensorflow as tf

        from grace_bench.tasks.keras_models import MODELS, loss_of, one_or_list, optimizer_of

        keras.utils.set_random_seed(seed)
        model = task.builder("keras", MODELS)(**sizes, **task.quick.model)
        variables = model.trainable_variables
        self.parameters = {variable.path: variable.numpy() for variable in variables}
        self._optimizer = optimizer_of(task, task.quick.lr, momentum)
        self._optimizer.build(variables)
        loss = loss_of(task)

        def gradients(inputs: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                found = loss(targets, model(one_or_list(inputs), training=True))
            each = tape.gradient(found, [variable.value for variable in variables])
            return [tf.convert_to_tensor(gradient) for gradient in each]

        self._gradients = tf.function(gradients)
        self._apply = tf.function(lambda means: self._optimizer.apply(means, variables))
        self._predict = tf.function(lambda inputs: model(one_or_list(inputs), training=False))

    def gradients(self, inputs: Any, targets: Any) -> dict[str, Any]:
        """See `TorchModel`."""
        found = self._gradients(inputs, targets)
        return {key: gradient.numpy() for key, gradient in zip(self.parameters, found, strict=True)}

    def apply(self, means: Mapping[str, Any], lr: float) -> None:
        """See `TorchModel`."""
        self._optimizer.learning_rate = lr
        self._apply([means[key] for key in self.parameters])

    def predict(self, inputs: Any) -> Any:
        """See `TorchModel`."""
        return self._predict(inputs).numpy()


TOOLKITS = {"torch": TorchModel, "keras": KerasModel}


def transposed(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Keras's matrices, except embeddings, in PyTorch's layout, or back: [in, out] and [out, in]."""
    return {
        key: np.ascontiguousarray(array.T) if array.ndim == 2 and "embedding" not in key else array
        for key, array in arrays.items()
    }


def train(toolkit: str, name: str, method: str, workers: int, seed: int, transpose: bool = False) -> dict[str, Any]:
    """Train once; returns a row with the noise ratios, and the curve of (step, quality).

    ``transpose``: exchange matrices `transposed`.
    """
    layout = transposed if transpose else dict
    task = task_of(name)
    scale, data = task.quick, task.data()
    params = {"compressor": "none"} if method == "dense" else parse(method).params
    memory = grace_from_params(params, "local").method.memory
    model = TOOLKITS[toolkit](task, data.sizes, 0.0 if memory.includes_momentum else 0.9, seed)
    watch = Watch(memory.feedback)
    world = World(workers)
    graces = [grace_from_params({**params, "policy": watch}, LocalTransport(world, rank)) for rank in range(workers)]
    for grc in graces:
        grc.build(layout(model.parameters))
    curve = []
    for step in range(scale.steps):
        for rank, grc in enumerate(graces):
            grc.launch(layout(model.gradients(*batch(data, scale.batch, rank, step, seed))))
        while [grc for grc in graces if not grc.advance()]:
            pass
        for grc in graces:
            grc.land()
        flights = [grc.tuning() for grc in graces]
        while [flight for flight in flights if flight is not None and not flight.advance()]:
            pass
        means = [{key: grc.mean(key) for key in model.parameters} for grc in graces]
        model.apply(layout(means[0]), rate(scale, step))
        if (step + 1) % scale.every == 0:
            curve.append((step + 1, data.quality(model.predict)))
    ratios = graces[0].decision.memo["ratios"]
    head = {"toolkit": toolkit, "task": name, "method": method, "feeds_back": memory.feedback}
    about = {**head, "workers": workers, "transposed": transpose, "seed": seed}
    return {**about, "ratios": ratios, "curve": curve}


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


def mean_curve(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Pairs of step and quality, means over the seeds."""
    points = zip(*(row["curve"] for row in rows), strict=True)
    return [(point[0][0], statistics.mean(quality for _, quality in point)) for point in points]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each task and method, means over the seeds. ValueError for rows of different setups."""
    if len({(row.get("toolkit", "torch"), row["workers"], row.get("transposed", False)) for row in rows}) > 1:
        raise ValueError("one table is of one toolkit, layout and number of workers: write others to other files")
    heads = ["task", "method", "noise ratio, first steps", "noise ratio, all steps", "quality", "dense steps to it"]
    heads += ["steps per dense step", "predicted"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["method"]), []).append(row)
    for (name, method), mine in groups.items():
        higher, seeds = task_of(name).higher, {row["seed"] for row in mine}
        dense = mean_curve([row for row in groups.get((name, "dense"), []) if row["seed"] in seeds])
        quality = mean_curve(mine)[-1][1]
        after = steps_to(dense, higher, quality)  # None: the method was better than dense
        own = steps_to(dense, higher, dense[-1][1]) if dense else None
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
    parser.add_argument("--toolkit", choices=tuple(TOOLKITS), default="torch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--transpose", action="store_true", help="exchange Keras's matrices as PyTorch stores them")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="rows are added to this file, as JSON lines")
    args = parser.parse_args()
    if args.transpose and args.toolkit != "keras":
        parser.error("--transpose is for --toolkit keras: PyTorch's matrices have this layout")
    rows = [] if args.show is None else stored(args.show)
    for seed in range(args.seeds):
        for job in args.jobs:
            name, _, methods = job.partition(":")
            for method in methods.split(";"):
                rows.append(train(args.toolkit, name, method, args.workers, seed, args.transpose))
                if args.output is not None:
                    with args.output.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
