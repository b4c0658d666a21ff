"""The switch to factors in the middle of a Keras training, over two workers: OUT. Saves a dictionary of findings."""

import sys

import numpy as np
import tensorflow as tf
from launch import save

tf.config.threading.set_intra_op_parallelism_threads(1)

import horovod.tensorflow as hvd
import keras

import grace
import grace.factorize.keras
import grace.tensorflow
from grace.factorize import WarmUp

(out,) = sys.argv[1:]
hvd.init()
rank = hvd.rank()
found = {}
layers = keras.layers
METHODS = {
    "none": {"compressor": "none"},
    "topk": {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0},
    "powersgd": {"compressor": "powersgd", "compress_rank": 2, "min_numel": 0},
}


def network(seed=0):
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same"),
            layers.BatchNormalization(),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Reshape((16, 32)),
            layers.Dense(64, activation="relu"),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(5),
        ]
    )


def make(model):
    return keras.optimizers.SGD(0.05, momentum=0.9)


def begin(params, seed=0):
    grc = grace.grace_from_params(params)
    return network(seed), grc, grace.tensorflow.DistributedOptimizer(make(None), grc)


def train(model, optimizer, steps, eager=True):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if getattr(model, "optimizer", None) is not optimizer:
        model.compile(optimizer, loss, jit_compile=False, run_eagerly=eager)
    rngs = [np.random.default_rng([rank, number]) for number in steps]
    x = np.concatenate([rng.standard_normal((8, 8, 8, 1)).astype("float32") for rng in rngs])
    y = np.concatenate([rng.integers(0, 5, 8) for rng in rngs])
    model.fit(x, y, 8, shuffle=False, verbose=0)


def values(model):
    return {v.path: np.array(v.value) for v in model.variables if "seed" not in v.path}


for name, params in METHODS.items():
    eager = name != "none"  # tracing graphs takes long
    model, grc, optimizer = begin(params)
    train(model, optimizer, range(3), eager)
    report = grc.report()
    before, state = values(model), grc.state_dict()["tensors"]
    original = grace.factorize.keras_layers.svd_factor
    if rank == 1:
        grace.factorize.keras_layers.svd_factor = lambda matrix, r: tuple(-part for part in original(matrix, r))
    warmup = WarmUp(1)
    model, new = warmup.switch(model, optimizer, make)
    grace.factorize.keras_layers.svd_factor = original
    after, kept = values(model), grc.state_dict()["tensors"]
    fresh = not new.built
    train(model, new, range(3, 6), eager)
    found[f"switch {name}"] = {
        "before": before,
        "after": after,
        "end": values(model),
        "names": dict(warmup.names),
        "state": (state, kept),
        "fresh": fresh,
        "bytes": [sum(t.bytes_sent for t in r.tensors) / r.steps for r in (report, grc.report())],
        "parameters": (warmup.plan.parameters, warmup.plan.parameters_after),
        "grace": grc.names,
    }


# Resume before the switch, and after it.
def snapshot(model, grc, optimizer, warmup):
    model.save_weights(f"{out}/{rank}.weights.h5")
    return grc.state_dict(), [np.array(v.value) for v in optimizer.variables], warmup.state_dict()


def resumed(seed, saved, weights):
    warmup = WarmUp(1)
    model, grc, optimizer = begin(METHODS["topk"], seed)
    model = warmup.load_state_dict(saved[2], model)
    model.set_weights(weights)
    optimizer.build(model.trainable_variables)
    for variable, value in zip(optimizer.variables, saved[1], strict=True):
        variable.assign(value)
    grc.load_state_dict(saved[0])
    return model, optimizer, warmup


model, grc, optimizer = begin(METHODS["topk"])
warmup = WarmUp(1)
train(model, optimizer, range(2))
early, early_weights = snapshot(model, grc, optimizer, warmup), model.get_weights()
train(model, optimizer, range(2, 4))
model, optimizer = warmup.switch(model, optimizer, make)
train(model, optimizer, range(4, 6))
late, late_weights = snapshot(model, grc, optimizer, warmup), model.get_weights()
train(model, optimizer, range(6, 8))
whole = values(model)
model, optimizer, warmup = resumed(3, early, early_weights)
train(model, optimizer, range(2, 4))
model, optimizer = warmup.switch(model, optimizer, make)
train(model, optimizer, range(4, 8))
straddled = values(model)
model, optimizer, warmup = resumed(4, late, late_weights)
model.load_weights(f"{out}/{rank}.weights.h5")  # a file holds the same weights
train(model, optimizer, range(6, 8))
found["resume topk"] = (whole, straddled, values(model), warmup.due(9))

# A custom training loop with a tape.
model, grc, plain, losses = network(), grace.grace_from_params(METHODS["topk"]), make(None), []
warmup = WarmUp(1)
for steps in (range(3), range(3, 6)):
    if warmup.due(steps[0]):
        model, plain = warmup.switch(model, plain, make, grace=grc)
    plain.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
        tape = grace.tensorflow.DistributedGradientTape(tape, grace=grc)
        plain.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    for number in steps:
        rng = np.random.default_rng([rank, number])
        step(tf.constant(rng.standard_normal((8, 8, 8, 1)), tf.float32), tf.constant(rng.integers(0, 5, 8)))
found["tape"] = (values(model), grc.names == [v.path for v in model.trainable_variables], grc.report().steps)

model, grc, optimizer = begin(METHODS["none"])
if rank == 0:
    kernel = model.layers[2].kernel
    kernel.assign(np.full(kernel.shape, np.nan))
try:
    WarmUp(1).switch(model, optimizer, make)
except RuntimeError as error:
    found["not finite"] = str(error)
model, grc, optimizer = begin(METHODS["none"])
try:
    WarmUp(1, rank_ratio=0.25 if rank == 0 else 0.3).switch(model, optimizer, make)
except RuntimeError as error:
    found["plans"] = str(error)

save(out, rank, found)
