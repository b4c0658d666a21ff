"""Use of TensorFlow and Keras, over two workers: OUT. Saves a dictionary of findings."""

import sys

import numpy as np
import tensorflow as tf
from launch import save

tf.config.threading.set_intra_op_parallelism_threads(1)

import horovod.tensorflow as hvd
import keras
import keras_equal

import grace

(out,) = sys.argv[1:]
hvd.init()
rank, size = hvd.rank(), hvd.size()
found = {}
DENSE = {"compressor": "none"}
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BATCH, STEPS = 8, 4


def network(seed=0):
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((20,)), layers.Dense(30, activation="tanh", name="a"), layers.Dense(5, name="b")]
    )


def data(worker=rank):
    rng = np.random.default_rng(worker)
    return rng.standard_normal((BATCH * STEPS, 20)).astype("float32"), rng.integers(0, 5, BATCH * STEPS)


def weights(net):
    return np.concatenate([w.ravel() for w in net.get_weights()])


def fit(net, optimizer, **options):
    net.compile(optimizer, LOSS, jit_compile=False, **options)
    x, y = data()
    history = net.fit(x, y, BATCH, epochs=1, shuffle=False, verbose=0)
    return weights(net), history.history["loss"][0]


def distributed(optimizer, params=DENSE):
    grc = grace.grace_from_params(params)
    return grc, grace.tensorflow.DistributedOptimizer(optimizer, grace=grc)


# The same names as for Keras on PyTorch.
found["dense"] = keras_equal.dense_losses(rank)

# Dense gradients: the weights of one worker that trains on the union of the batches.
for name, make in {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "AdamW clipnorm": lambda: keras.optimizers.AdamW(0.01, clipnorm=0.5),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Lion": lambda: keras.optimizers.Lion(0.001),
}.items():
    mine, _ = fit(network(), distributed(make())[1])
    net, everybody = network(), [data(worker) for worker in range(size)]
    x, y = (
        np.concatenate([part[i].reshape(STEPS, BATCH, *part[i].shape[1:]) for part in everybody], 1) for i in (0, 1)
    )
    net.compile(make(), LOSS, jit_compile=False)
    net.fit(x.reshape(-1, 20), y.reshape(-1), BATCH * size, epochs=1, shuffle=False, verbose=0)
    found[f"optimizer {name}"] = (mine, weights(net))

# The four ways to write a loop end with the same weights.
for kind, params in (("topk", TOPK), ("powersgd", {"compressor": "powersgd", "compress_rank": 2, "min_numel": 0})):
    results = {}
    grc, optimizer = distributed(keras.optimizers.SGD(0.1), params)
    results["fit"], _ = fit(network(), optimizer)
    report = grc.report()
    found[f"report {kind}"] = (report.steps, report.bytes_sent, report.bytes_dense)
    grc, optimizer = distributed(keras.optimizers.SGD(0.1), params)
    results["several steps per call"], _ = fit(network(), optimizer, steps_per_execution=2)
    grc, optimizer = distributed(keras.optimizers.SGD(0.1), params)
    results["eager fit"], _ = fit(network(), optimizer, run_eagerly=True)
    x, y = data()
    for eager in (True, False):
        net, traces = network(), []
        grc, own = grace.grace_from_params(params), keras.optimizers.SGD(0.1)
        own.build(net.trainable_variables)

        def step(x, y):
            traces.append(1)
            with tf.GradientTape() as tape:
                loss = LOSS(y, net(x, training=True))
            tape = grace.tensorflow.DistributedGradientTape(tape, grace=grc)
            own.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True))
            return loss

        run = step if eager else tf.function(step)
        for i in range(STEPS):
            run(tf.constant(x[BATCH * i :][:BATCH]), tf.constant(y[BATCH * i :][:BATCH]))
        results["tape" if eager else "tape in a function"] = weights(net)
    found[f"traces {kind}"] = len(traces)
    net = network()
    grc, own = distributed(keras.optimizers.SGD(0.1), params)
    for i in range(STEPS):
        with tf.GradientTape() as tape:
            loss = LOSS(y[BATCH * i :][:BATCH], net(x[BATCH * i :][:BATCH], training=True))
        own.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True))
    results["optimizer"] = weights(net)
    found[f"loops {kind}"] = results

# tape.gradient with nested sources, a source without gradient, an embedding's IndexedSlices, a persistent tape.
table, unused, w = (
    tf.Variable(tf.ones((6, 3)), name="table"),
    tf.Variable([1.0], name="unused"),
    tf.Variable(2.0, name="w"),
)
with tf.GradientTape(persistent=True) as tape:
    loss = tf.reduce_sum(tf.gather(table, [rank, 5])) * w
tape = grace.tensorflow.DistributedGradientTape(tape, grace=grace.grace_from_params(DENSE))
means = tape.gradient(loss, {"table": table, "rest": [unused, w]})
found["structure"] = (
    means["table"].numpy(),
    means["rest"][0] is None,
    float(means["rest"][1]),
    float(tape.gradient(loss, w)),
)

# An overflow on worker 1 is seen by both; both skip, and the memory stays.
net = network()
grc, optimizer = distributed(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=16.0), TOPK)
trace = []
for i in range(4):
    before, kept = weights(net), grc.state_dict()["tensors"]
    x, y = data()
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(LOSS(y[:BATCH], net(x[:BATCH])))
        if i == 2 and rank == 1:
            loss = loss * float("inf")
    optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True))
    now = grc.state_dict()["tensors"]
    same = bool(kept) and all(np.array_equal(now[n][k], kept[n][k]) for n in now for k in now[n])
    trace.append((bool((weights(net) == before).all()), same))
found["scaler"] = (weights(net), trace, float(optimizer.dynamic_scale))

# Keras's own accumulation.
found["accumulation"], _ = fit(
    network(), distributed(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), TOPK)[1]
)

# Callbacks: from worker 1's weights; metrics are means.
net = network(seed=rank)
grc, optimizer = distributed(keras.optimizers.SGD(0.0, momentum=0.9))
net.compile(optimizer, LOSS, jit_compile=False)
x, y = data()
net.evaluate(x, y, verbose=0)
callbacks = [grace.tensorflow.BroadcastCallback(1, grc), grace.tensorflow.MetricAverageCallback(grc)]
history = net.fit(x, y, BATCH, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
found["callbacks"] = (weights(net), weights(network(seed=1)), history.history["loss"][0], net.evaluate(x, y, verbose=0))
try:
    net.compile(optimizer, LOSS, jit_compile=True)
    net.fit(x, y, BATCH, verbose=0, callbacks=callbacks)
except ValueError as error:
    found["jit"] = str(error)

# The optimizer is saved as a plain one, and the model continues to train without GRACE.
path = f"{out}/{rank}.keras"
net = network()
_, optimizer = distributed(keras.optimizers.Adam(0.01), TOPK)
fit(net, optimizer)
net.save(path)
loaded = keras.models.load_model(path)
found["saved"] = (
    weights(net),
    weights(loaded),
    type(loaded.optimizer) is keras.optimizers.Adam,
    hasattr(loaded.optimizer, "_grace"),
)

# With a checkpoint of each worker, the run continues.
net = network()
grc, optimizer = distributed(keras.optimizers.SGD(0.1), TOPK)
fit(net, optimizer)
saved, state = net.get_weights(), grc.state_dict()
whole, _ = fit(net, optimizer)
net = network(seed=3)
grc, optimizer = distributed(keras.optimizers.SGD(0.1), TOPK)
net.set_weights(saved)
grc.load_state_dict(state)
found["resume"] = (whole, fit(net, optimizer)[0])

# Different models: both workers raise an error that names the difference.
variables = [tf.Variable(tf.ones((3, 4 + rank)), name="kernel")]
try:
    grace.tensorflow.average_gradients(grace.grace_from_params(DENSE), [tf.ones((3, 4 + rank))], variables)
except ValueError as error:
    found["mismatch"] = str(error)

save(out, rank, found)
