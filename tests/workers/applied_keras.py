"""Which exchanges count in Keras, over two workers: OUT TOOLKIT (tensorflow or torch). Saves a dictionary of findings.

Each finding is a list of pairs, a loop's state and its oracle's, in which every array and number must be equal.
"""

import os
import sys
from dataclasses import dataclass

out, toolkit = sys.argv[1:]
os.environ["KERAS_BACKEND"] = toolkit

from launch import join_torch, leave_gloo, save

if toolkit == "torch":
    rank, size = join_torch("torch")
    import torch

    array = torch.tensor
    MODES = ("eager",)
else:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    array = tf.constant
    MODES = ("eager", "graph")

import keras
import numpy as np

import grace
import grace.keras
from grace.policies.auto import Auto

METHODS = {
    "topk": {"compressor": "topk", "compress_ratio": 0.3},
    "stochastic": {
        "compressor": "blockint",
        "bits": 4,
        "rounding": "stochastic",
        "block_size": 16,
        "communicator": "twostage",
        "memory": "residual",
    },
    "none": {"compressor": "none"},
}
SHAPES = {"a": (20, 32), "b": (32, 10)}
STEPS, SPOILED = 8, {2: ("a", 1), 5: ("b", 0)}  # by step, the tensor and the worker that overflow
found = {}


def cells(name, wanted):
    """Pairs of a method and a mode; few in graph mode, since tracing takes long."""
    graphs = METHODS if name == "scaler" else [] if name in ("scaler with accumulation", "uncounted") else ["topk"]
    return [(method, mode) for method in wanted for mode in MODES if mode == "eager" or method in graphs]


def gradients(step, overflow=0.0):
    rng = np.random.default_rng([step, rank])
    made = {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}
    name, worker = SPOILED.get(step, ("", 0))
    if overflow and name and rank == worker:
        made[name][3, 4] = overflow
    return list(made.values())


class Loop:
    """Trains two variables with one optimizer."""

    def __init__(self, optimizer, method, mode, wrap=True):
        rng = np.random.default_rng(0)
        make = rng.standard_normal
        self.variables = [keras.Variable(make(shape).astype("float32"), name=name) for name, shape in SHAPES.items()]
        self.grace = grace.grace_from_params({"min_numel": 0, **method})
        self.optimizer, self.wrapped, self.mode = optimizer, wrap, mode
        if wrap:  # a scaler, or the optimizer inside it
            grace.keras.DistributedOptimizer(getattr(optimizer, "wraps", optimizer), self.grace)
        self.begin()

    def begin(self):
        """Trace the graph again."""
        self.call = tf.function(self.apply) if self.mode == "graph" else self.apply

    def apply(self, *given):
        given = list(given)
        if not self.wrapped:
            given = grace.keras.average_gradients(self.grace, given, self.variables)
        self.optimizer.apply(given, self.variables)

    def step(self, step, overflow=0.0):
        self.call(*map(array, gradients(step, overflow)))

    def state(self):
        """Everything that an exchange and a step change, by name, and the number of steps."""
        state = self.grace.state_dict()
        found = {name: variable.numpy().copy() for name, variable in zip(SHAPES, self.variables, strict=True)}
        for place, variable in enumerate(self.optimizer.variables):
            found[f"optimizer {place}"] = np.array(keras.ops.convert_to_numpy(variable))
        for name, arrays in state["tensors"].items():
            found |= {f"{name} {key}": np.array(value) for key, value in arrays.items()}
        if policy := state["policy"]:
            for book in ("sums", "held"):
                found |= {f"{book} {name}": np.array(value) for name, value in policy.get(book, {}).items()}
            found["levels"] = dict(policy["levels"])
        return found | {"steps": self.grace.steps}


def scaler(inner=None, outside=False):
    made = keras.optimizers.LossScaleOptimizer(
        inner or keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=8.0, dynamic_growth_steps=2
    )
    if outside:  # the scaler itself is not wrapped, as after Model.compile
        object.__setattr__(made, "wraps", made.inner_optimizer)
    return made


def without(loop):
    """Update the oracle's scaler as for a skipped step."""
    if hasattr(loop.optimizer, "dynamic_scale"):
        loop.optimizer.dynamic_scale.assign(loop.optimizer.dynamic_scale * 0.5)
        loop.optimizer.step_counter.assign(0)


class Skips(keras.optimizers.SGD):
    """Skips steps with a large gradient, and counts them."""

    def build(self, variables):
        super().build(variables)
        self.skips = self.add_variable((), name="skips", initializer="zeros")

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        plain = super().apply

        def skip():
            self.skips.assign(self.skips + 1.0)
            return keras.ops.convert_to_tensor(0)

        def step():
            plain(grads, trainable_variables)
            return keras.ops.convert_to_tensor(0)

        large = keras.ops.any(keras.ops.stack([keras.ops.max(keras.ops.abs(grad)) > 100.0 for grad in grads]))
        keras.ops.cond(large, skip, step)


class Raises(keras.optimizers.SGD):
    """Raises an error on demand, before it changes anything."""

    broken = False

    def apply(self, grads, trainable_variables=None):
        if self.broken:
            raise ArithmeticError("no step")
        super().apply(grads, trainable_variables)


class Uncounted(keras.optimizers.SGD):
    """Steps without counting."""

    def apply(self, grads, trainable_variables=None):
        for grad, variable in zip(grads, trainable_variables, strict=True):
            variable.assign(variable - 0.1 * grad)


class Adds(keras.optimizers.SGD):
    """Sums two gradients for each step that Keras counts."""

    def build(self, variables):
        super().build(variables)
        self.totals = [self.add_variable(v.shape, name="total", initializer="zeros") for v in variables]
        self.turn = self.add_variable((), name="turn", initializer="zeros")

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        plain = super().apply
        for total, grad in zip(self.totals, grads, strict=True):
            total.assign(total + grad)
        self.turn.assign(1.0 - self.turn)

        def step():
            plain([keras.ops.convert_to_tensor(total) for total in self.totals], trainable_variables)
            for total in self.totals:
                total.assign(keras.ops.zeros(total.shape))
            return keras.ops.convert_to_tensor(0)

        keras.ops.cond(self.turn < 0.5, step, lambda: keras.ops.convert_to_tensor(0))


# -- discarded: the loop without these steps --------------------------------------------------------------------------
SKIPPING = {
    "scaler": (scaler, np.inf),
    "scaler around it": (lambda: scaler(outside=True), np.nan),
    "scaler with accumulation": (lambda: scaler(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), np.inf),
    "skips inside": (lambda: Skips(0.1), 1e4),
}
for name, (make, overflow) in SKIPPING.items():
    for method, mode in cells(name, METHODS if name in ("scaler", "skips inside") else ["topk"]):
        loop, oracle = (Loop(make(), METHODS[method], mode) for _ in range(2))
        pairs = []
        for step in range(STEPS):
            loop.step(step, overflow)
            if step not in SPOILED:
                oracle.step(step)
            else:
                without(oracle)
            pairs.append((loop.state(), oracle.state()))
            if name == "skips inside":  # its own counter of skips differs
                for state in pairs[-1]:
                    del state["optimizer 2"]
        found[name, method, mode] = pairs
        found["discarded", name, method, mode] = (loop.grace.report().discarded, oracle.grace.report().discarded)

for method, mode in cells("raises", METHODS):
    loop, oracle = (Loop(Raises(0.1), METHODS[method], mode) for _ in range(2))
    pairs, raised = [], 0
    for step in range(4):
        loop.optimizer.broken = step == 2
        if step == 2:
            loop.begin()
        try:
            loop.step(step)
        except Exception as error:  # in a graph, one of AutoGraph's errors
            raised += "no step" in str(error)
            loop.begin()
        if step != 2:
            oracle.step(step)
        pairs.append((loop.state(), oracle.state()))
    found["raises", method, mode] = [*pairs, ({"raised": raised}, {"raised": 1})]

# -- applied: the exchange by hand, and a plain optimizer -------------------------------------------------------------
APPLIED = {
    "rate 0 with moments": lambda: keras.optimizers.Adam(0.1),
    "rate 0 without": lambda: keras.optimizers.SGD(0.1),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
    "uncounted": lambda: Uncounted(0.1),
    "adds": lambda: Adds(0.1),
}
for name, make in APPLIED.items():
    for method, mode in cells(name, ["topk", "stochastic"] if name in ("accumulation", "adds") else ["topk"]):
        loop, oracle = Loop(make(), METHODS[method], mode), Loop(make(), METHODS[method], mode, wrap=False)
        pairs = []
        for step in range(STEPS):
            for each in (loop, oracle):
                if name.startswith("rate"):
                    each.optimizer.learning_rate = 0.0 if step in (2, 5) else 0.1
                each.step(step)
            pairs.append((loop.state(), oracle.state()))
        found[name, method, mode] = pairs


# -- policies: a graph is traced once, at the first level -------------------------------------------------------------
@grace.register("steady")
@dataclass(frozen=True)
class Steady(Auto):
    """`auto` with fake times, without predictions: each method is faster than the previous ones."""

    def on_trial_end(self, decision, workers, seconds, noise=None, costs=None):
        return super().on_trial_end(decision, workers, 1.0 / (1 + sum(decision.levels.values())), noise)


POLICIES = {
    "accordion": {**METHODS["topk"], "policy": "accordion", "window": 1, "k_low": 0.6, "norm_source": "aggregated"},
    "own gradients": {**METHODS["topk"], "policy": "accordion", "window": 2, "k_low": 0.6},
    "auto": {
        "compressor": "none",
        "policy": "steady",
        "effort": "fast",
        "candidates": [{**METHODS["topk"], "memory": "residual"}, METHODS["stochastic"]],
    },
}
for name, method in POLICIES.items():
    for mode in MODES:
        loop, oracle = (Loop(scaler(), method, mode) for _ in range(2))
        pairs = []
        for step in range(14):
            bad = step in (4, 7, 9, 12)
            SPOILED = {step: ("a", 1)} if bad else {}
            if step == 2:  # trace anew: "own gradients" were not summed in this epoch, but will be in the next
                loop.begin()
            loop.step(step, np.inf)
            if not bad:
                oracle.step(step)
            else:
                without(oracle)
            for each in (loop, oracle):
                each.grace.tune()
                if step % 2:
                    each.grace.end_epoch(0.1, 0.1)
            pairs.append((loop.state(), oracle.state()))
        found["policy", name, mode] = pairs
        found["levels", name, mode] = [pair[0]["levels"] for pair in pairs]
SPOILED = {2: ("a", 1), 5: ("b", 0)}

# -- saved after a skipped step, loaded in another object; released --------------------------------------------------
for mode in MODES:
    whole, resumed = (Loop(scaler(), METHODS["topk"], mode) for _ in range(2))
    for step in range(3):
        whole.step(step, np.inf)
    resumed.step(0)
    resumed.grace.load_state_dict(grace.checkpoint.from_bytes(grace.checkpoint.to_bytes(whole.grace.state_dict())))
    for mine, theirs in zip(
        [*resumed.variables, *resumed.optimizer.variables], [*whole.variables, *whole.optimizer.variables], strict=True
    ):
        mine.assign(keras.ops.convert_to_tensor(theirs))
    pairs = []
    for step in range(3, STEPS):
        for loop in (whole, resumed):
            loop.step(step, np.inf)
        pairs.append((resumed.state(), whole.state()))
    grace.keras.release(whole.optimizer)
    before = whole.state()
    whole.optimizer.inner_optimizer.apply([array(np.zeros(shape, "float32")) for shape in SHAPES.values()])
    pairs.append(({"steps": whole.state()["steps"]}, {"steps": before["steps"]}))
    found["resumed", mode] = pairs

# -- worker 1 traces a graph more often than worker 0, before an eager step -------------------------------------------
if toolkit == "tensorflow":
    loop, oracle = Loop(scaler(), METHODS["topk"], "graph"), Loop(scaler(), METHODS["topk"], "graph")
    for step in range(3):
        if rank == 1:
            loop.begin()
        for each in (loop, oracle):
            each.step(step, np.inf)
    for each in (loop, oracle):
        each.mode = "eager"
        each.begin()
        each.step(3)
    found["traced more often"] = [(loop.state(), oracle.state())]

# -- the last: worker 1 alone fails, and goes on ----------------------------------------------------------------------
loop = Loop(Raises(0.1), METHODS["topk"], "eager")
loop.step(0)
loop.optimizer.broken = rank == 1
found["alone"] = []
for step in (1, 2):
    try:
        loop.step(step)
    except (ArithmeticError, RuntimeError) as error:
        found["alone"].append(f"{type(error).__name__}: {error}")
    loop.optimizer.broken = False
save(out, rank, found)
if toolkit == "torch":
    leave_gloo()
