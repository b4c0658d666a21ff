"""Quality and speed of threshold estimates, on known distributions ("laws") and on the gradients of a training.

K / k is the measure of quality: the number of elements that exceed an estimated threshold, over the wanted number.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from grace.backends import get_backend
from grace.bench.kernels import REMEDIES, machine
from grace.bench.subjects import graph
from grace.compressors.measured.topk import TopK
from grace.compressors.sparse import EXACT, Elements, Selector, Sparsifier
from grace.compressors.studies.sidco import SIDCo
from grace.core import Array, Compressor, Context, State, as_program
from grace.engine.codecs import TensorCodec
from grace.engine.codecs.table import compress
from grace.memories.residual import Residual

FORMAT = 1  # version of the JSON format
RATIOS = (0.1, 0.01, 0.001)
LAYERS = (64, 256, 256, 10)
BATCH, RATE, MOMENTUM = 32, 0.05, 0.9
WARM = 100
"""First steps of a training, which are ignored: the number of stages has not settled yet."""
Record = dict[str, Any]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class OneSample(Sparsifier, Selector):
    """The baseline called DGC in SIDCo's paper: the uncorrected threshold of a 1% sample."""

    compress_ratio: float = 0.01

    traits = replace(EXACT, variable_length=True)

    @property
    def elements(self) -> Elements:
        return Elements(self)

    def choose(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        xp, size = ctx.xp, max(1, ctx.size // 100)
        drawn = xp.take(xp.abs(x), xp.bitwise_and(ctx.rng("sample").bits(size), 0x7FFFFFFF) % ctx.size)
        threshold = xp.sort(drawn)[size - math.ceil(self.compress_ratio * size) :][:1]
        return xp.nonzero(xp.abs(x) >= threshold), state


def methods(ratio: float) -> dict[str, Compressor]:
    """The methods to compare: top-k by every selector, and SIDCo by distribution and rule."""
    names = {"DGC sampling": "sampled", "GaussianKSGD": "gaussian", "RedSync bisection": "bisect"}
    names |= {"RedSync trim": "trim", "chunks": "chunk"}
    found: dict[str, Compressor] = {"exact top-k": TopK(ratio), "one sample of 1%": OneSample(ratio)}
    found |= {label: TopK(ratio, selector=selector) for label, selector in names.items()}
    for sid in ("e", "gp", "p"):
        name = f"SIDCo-{sid.upper()}"
        found[f"{name} robust"] = SIDCo(ratio, sid)
        found[f"{name} paper"] = SIDCo(ratio, sid, stage_rule="paper")
        found[f"{name} one stage"] = SIDCo(ratio, sid, stages=1)
    return found


def band(values: Sequence[float]) -> dict[str, float]:
    """The mean, and the 5th and 95th percentiles."""
    low, high = np.percentile(values, (5, 95))
    return {"mean": float(np.mean(values)), "low": float(low), "high": float(high)}


class Worker:
    """One worker's method with its state, on NumPy."""

    def __init__(self, compressor: Compressor, n: int, seed: int = 0):
        self._method = TensorCodec(compressor, Residual())
        self._ctx = Context(get_backend("numpy"), "model", (n,), seed=seed)
        self._state, self._step = self._method.init(self._ctx), 0

    @property
    def stages(self) -> int | None:
        """SIDCo's current number of stages."""
        found = self._state.get("compressor/stages")
        return None if found is None else int(found[0])

    @property
    def residual(self) -> Any:
        """float32[n]: the memory's residual."""
        return self._state["memory/residual"]

    def encode(self, g: Any) -> tuple[Any, Any]:
        """float32[n], donated -> values and positions to send."""
        payload, self._state = _driven(self._method.encode(g, self._state, self._next()))
        return payload

    def choose(self, x: Any) -> int:
        """Number of elements sent from float32[n], without a memory."""
        compressor = self._method.compressor
        state: State = {k.removeprefix("compressor/"): v for k, v in self._state.items() if k.startswith("compressor/")}
        payload, state = _driven(as_program(compress(compressor, x, state, self._next())))
        self._state |= {f"compressor/{key}": value for key, value in state.items()}
        return len(payload[0])

    def _next(self) -> Context:
        self._step += 1
        return dataclasses.replace(self._ctx, step=self._step - 1)


def _driven(program: Any) -> Any:
    try:
        next(program)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("this method needs other workers")


# -- laws --------------------------------------------------------------------------------------------------------------
LAWS: dict[str, Callable[[Any, int], Any]] = {
    "Laplace": lambda rng, n: rng.exponential(size=n),
    "gamma, shape 0.5": lambda rng, n: rng.gamma(0.5, size=n),
    "Pareto, xi 0.25": lambda rng, n: ((1 - rng.random(n)) ** -0.25 - 1) / 0.25,
    "normal": lambda rng, n: abs(rng.standard_normal(n)),
    "Student, 4 degrees": lambda rng, n: abs(rng.standard_t(4, n)),
}
"""By name of a distribution, a function that draws the magnitudes of n gradient elements from it."""


def settled(
    compressor: SIDCo, draws: Sequence[Any], steps: int = 100, skip: int = 40
) -> tuple[list[float], int | None]:
    """Return K / k of steps ``skip`` .. ``steps`` on alternating draws from one law, and the final number of stages."""
    worker, n = Worker(compressor, len(draws[0])), len(draws[0])
    k = math.floor(compressor.compress_ratio * n)
    found = [worker.choose(draws[step % len(draws)]) / k for step in range(steps)]
    return found[skip:], worker.stages


def laws(n: int, progress: Progress = lambda text: None) -> list[Record]:
    """Measure SIDCo, with each distribution that it can assume, on gradients of each distribution in `LAWS`."""
    records = []
    for name, draw in LAWS.items():
        draws = [draw(np.random.default_rng(seed), n).astype(np.float32) for seed in range(8)]
        for ratio in RATIOS:
            for sid in ("e", "gp", "p"):
                for rule in ("robust", "paper"):
                    progress(f"{name}, {ratio}, SIDCo-{sid.upper()} {rule}")
                    ratios, stages = settled(SIDCo(ratio, sid, rule), draws)
                    records.append(
                        {"law": name, "ratio": ratio, "sid": sid, "rule": rule, "stages": stages, **band(ratios)}
                    )
    return records


# -- a training --------------------------------------------------------------------------------------------------------
@dataclass
class Training:
    """Results of a training on handwritten digits."""

    accuracy: float
    """On held-out images."""
    kept: list[float] = field(default_factory=list)
    """K / k of each step."""


class Digits:
    """A network of 64, 256, 256 and 10 units on scikit-learn's digits: 1347 for training, 450 held out.

    Its 85,002 parameters are one vector, and so are its gradients.
    """

    def __init__(self, seed: int):
        from sklearn.datasets import load_digits

        data = load_digits()
        self._rng = np.random.default_rng(seed)
        order = self._rng.permutation(len(data.target))
        self._images = (data.images.reshape(-1, 64) / 16).astype(np.float32)[order]
        self._labels = data.target[order]
        self._shapes = [shape for one, two in pairwise(LAYERS) for shape in ((one, two), (two,))]
        self.size = sum(map(math.prod, self._shapes))
        self._vector = np.zeros(self.size, np.float32)
        for part in self._parts(self._vector)[::2]:
            part[...] = self._rng.standard_normal(part.shape) * math.sqrt(2 / part.shape[0])
        self._velocity = np.zeros_like(self._vector)

    def _parts(self, vector: Any) -> list[Any]:
        ends = np.cumsum([math.prod(shape) for shape in self._shapes])
        return [part.reshape(shape) for part, shape in zip(np.split(vector, ends[:-1]), self._shapes, strict=True)]

    def _forward(self, images: Any) -> list[Any]:
        found, parts = [images], self._parts(self._vector)
        for weight, bias in zip(parts[::2], parts[1::2], strict=True):
            found.append(found[-1] @ weight + bias)
            if len(found) < len(LAYERS):
                np.maximum(found[-1], 0, out=found[-1])
        return found

    def batches(self, epochs: int) -> Iterator[Any]:
        """Row indices of each step's images."""
        for _ in range(epochs):
            order = self._rng.permutation(1347)
            yield from (order[start : start + BATCH] for start in range(0, 1347, BATCH))

    def gradient(self, rows: Any) -> Any:
        """float32[n]: gradient of the mean cross-entropy."""
        *units, scores = self._forward(self._images[rows])
        chances = np.exp(scores - scores.max(1, keepdims=True))
        back = chances / chances.sum(1, keepdims=True)
        back[np.arange(len(rows)), self._labels[rows]] -= 1
        back /= len(rows)
        found = np.empty_like(self._vector)
        gradients, weights = self._parts(found), self._parts(self._vector)[::2]
        for layer in reversed(range(len(weights))):
            gradients[2 * layer][...] = units[layer].T @ back
            gradients[2 * layer + 1][...] = back.sum(0)
            back = (back @ weights[layer].T) * (units[layer] > 0)
        return found

    def step(self, mean: Any) -> None:
        """SGD with momentum."""
        self._velocity *= MOMENTUM
        self._velocity += mean
        self._vector -= RATE * self._velocity

    def accuracy(self) -> float:
        """Accuracy on the held-out images."""
        return float((self._forward(self._images[1347:])[-1].argmax(1) == self._labels[1347:]).mean())


def train(
    compressor: Compressor | None, ratio: float, seed: int, epochs: int, watch: Callable[[Any], None] | None = None
) -> Training:
    """Train with error feedback; None: without compression. ``watch`` receives the vector to compress in each step."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _trained(compressor, ratio, seed, epochs, watch)


def _trained(
    compressor: Compressor | None, ratio: float, seed: int, epochs: int, watch: Callable[[Any], None] | None
) -> Training:
    task = Digits(seed)
    found, k = Training(0.0), math.floor(ratio * task.size)
    worker = None if compressor is None else Worker(compressor, task.size, seed)
    for rows in task.batches(epochs):
        g = task.gradient(rows)
        if not np.isfinite(g).all():  # the training diverged, which is possible with one stage
            break
        if worker is not None:
            if watch is not None:
                watch(g + worker.residual)
            values, positions = worker.encode(g)
            found.kept.append(len(values) / k)
            g = np.zeros(task.size, np.float32)
            g[positions] = values
        task.step(g)
    found.accuracy = task.accuracy()
    return found


def training(epochs: int, seeds: int, progress: Progress = lambda text: None) -> list[Record]:
    """Measure each method in its own training, and all of them on the gradients of the training with exact top-k."""
    records: list[Record] = []
    dense = [train(None, 1.0, seed, epochs).accuracy for seed in range(seeds)]
    records.append({"method": "dense", "ratio": None, "accuracy": float(np.mean(dense))})
    for ratio in RATIOS:
        same = _same_gradients(ratio, epochs, progress)
        for label, compressor in methods(ratio).items():
            progress(f"{ratio}, {label}")
            runs = [train(compressor, ratio, seed, epochs) for seed in range(seeds)]
            own = [kept for each in runs for kept in each.kept[WARM:]]
            records.append(
                {
                    "method": label,
                    "ratio": ratio,
                    "accuracy": float(np.mean([each.accuracy for each in runs])),
                    "own": band(own),
                    "same": band(same[label][0][WARM:]),
                    "us": 1e6 * float(np.median(same[label][1][WARM:])),
                    "steps": runs[0].kept,
                }
            )
    return records


def _same_gradients(ratio: float, epochs: int, progress: Progress) -> dict[str, tuple[list[float], list[float]]]:
    # Returns, for each method, K / k and seconds in each step. The order of methods is random in each step.
    progress(f"{ratio}, all on the same gradients")
    found: dict[str, tuple[list[float], list[float]]] = {label: ([], []) for label in methods(ratio)}
    workers: dict[str, Worker] = {}
    turn = random.Random(0)

    def watch(x: Any) -> None:
        if not workers:
            workers.update({label: Worker(compressor, len(x)) for label, compressor in methods(ratio).items()})
        for label in turn.sample(list(workers), len(workers)):
            start = time.perf_counter()
            many = workers[label].choose(x)
            found[label][1].append(time.perf_counter() - start)
            found[label][0].append(many / math.floor(ratio * len(x)))

    train(TopK(ratio), ratio, 0, epochs, watch)
    return found


# -- the clock ---------------------------------------------------------------------------------------------------------
def speed(backend: str, sizes: Sequence[int], rounds: int = 7, progress: Progress = lambda text: None) -> list[Record]:
    """Median times of compress without a memory and of the toolkit's top-k, on one thread in interleaved rounds."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    xp, own = get_backend(backend), _own_topk(backend)
    records = []
    for n in sizes:
        x = xp.asarray(np.random.default_rng(0).laplace(scale=1e-3, size=n).astype(np.float32), "float32")
        ctx = Context(xp, "w", (n,))
        for ratio in RATIOS:
            progress(f"{backend}, n = {n:,}, {ratio}")
            calls = {"the toolkit's top-k": _call(xp, partial(own, math.floor(ratio * n)))}
            for sid in ("e", "p", "gp"):
                calls[f"SIDCo-{sid.upper()}, 2 stages"] = _compress(xp, SIDCo(ratio, sid, stages=2), ctx)
            kept = {label: c for label, c in methods(ratio).items() if not isinstance(c, SIDCo)}
            calls |= {f"GRACE's {label}": _compress(xp, compressor, ctx) for label, compressor in kept.items()}
            times: dict[str, list[float]] = {label: [] for label in calls}
            turn = random.Random(0)
            for call in calls.values():  # trace the graph
                call(x)
            for _ in range(rounds):
                for label in turn.sample(list(calls), len(calls)):
                    start = time.perf_counter()
                    calls[label](x)
                    times[label].append(time.perf_counter() - start)
            base = float(np.median(times["the toolkit's top-k"]))
            for label, found in times.items():
                seconds = float(np.median(found))
                records.append(
                    {
                        "backend": backend,
                        "n": n,
                        "ratio": ratio,
                        "method": label,
                        "ms": 1e3 * seconds,
                        "faster": base / seconds,
                    }
                )
    return records


def _own_topk(backend: str) -> Callable[[int, Any], Any]:
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
        return lambda k, x: torch.topk(x.abs(), k, sorted=False)
    if backend == "tensorflow":
        import tensorflow as tf

        tf.get_logger().setLevel("ERROR")  # no warnings that each method is traced for each ratio, as intended
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        return lambda k, x: tf.math.top_k(tf.abs(x), k, sorted=False)
    return lambda k, x: np.argpartition(abs(x), len(x) - k)[len(x) - k :]


def _compress(xp: Any, compressor: Compressor, ctx: Context) -> Callable[[Any], Any]:
    # Each call gets an empty state, so the number of stages does not adapt.
    return _call(xp, lambda x: _driven(as_program(compress(compressor, x, {}, ctx)))[0])


def _call(xp: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return graph(function) if xp.traced else function


# -- results -----------------------------------------------------------------------------------------------------------
@dataclass
class Results:
    """The measurements."""

    machine: dict[str, Any] = field(default_factory=machine)
    options: dict[str, Any] = field(default_factory=dict)
    training: list[Record] = field(default_factory=list)
    laws: list[Record] = field(default_factory=list)
    speed: list[Record] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Bands are of K / k; times are medians."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


def measure(
    results: Results,
    epochs: int,
    seeds: int,
    size: int,
    backends: Sequence[str],
    sizes: Sequence[int],
    progress: Progress = lambda text: None,
) -> None:
    """Measure ``seeds`` trainings of ``epochs`` (0: none), laws of ``size`` elements (0: none), times of ``sizes``."""
    if epochs and importlib.util.find_spec("sklearn") is None:
        results.left_out.append("the training, since scikit-learn with the digits is missing: pip install scikit-learn")
    elif epochs:
        results.training = training(epochs, seeds, progress)
    if size:
        results.laws = laws(size, progress)
    for backend in backends:
        if importlib.util.find_spec(backend) is None:
            results.left_out.append(f"times on {backend}, which is missing: {REMEDIES[backend]}")
        else:
            results.speed += speed(backend, sizes, progress=progress)
