"""Numerics of each TensorFlow and Keras integration, over two workers: OUT. Saves a dictionary of findings."""

import sys

import numpy as np
import tensorflow as tf
from launch import save

tf.config.threading.set_intra_op_parallelism_threads(1)

import horovod.tensorflow as hvd
import keras

import grace

(out,) = sys.argv[1:]
hvd.init()
rank, size = hvd.rank(), hvd.size()
found = {}
DENSE = {"compressor": "none"}
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ROWS, STEPS = 8, 6
ALL = range(size)


def network(policy="float32"):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    return keras.Sequential(
        [keras.Input((20,)), dense(30, activation="tanh", name="a", dtype=policy), dense(5, name="b", dtype=policy)]
    )


def data(workers):
    """The batches of several workers, step by step."""
    made = []
    for worker in workers:
        rng = np.random.default_rng(worker)
        x = rng.standard_normal((STEPS, ROWS, 20)).astype("float32")
        made.append((x, rng.integers(0, 5, (STEPS, ROWS))))
    return [np.concatenate(parts, 1) for parts in zip(*made, strict=True)]


def weights(net):
    return np.concatenate([np.asarray(w, "float64").ravel() for w in net.get_weights()])


def distributed(optimizer, params=DENSE):
    grc = grace.grace_from_params(params)
    return grace.tensorflow.DistributedOptimizer(optimizer, grace=grc), grc


def train(net, optimizer, workers):
    """Four steps of an eager loop, which needs no tracing."""
    for x, y in list(zip(*data(workers), strict=True))[:4]:
        with tf.GradientTape() as tape:
            loss = LOSS(y, net(x, training=True))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
        )


def fit(net, optimizer, x, y, rows, **options):
    net.compile(optimizer, LOSS, jit_compile=False)
    net.fit(x.reshape(-1, 20), y.ravel(), rows, epochs=1, shuffle=False, verbose=0, **options)


def state(grc):
    tensors = grc.state_dict()["tensors"]
    return {f"{name}/{key}": value.copy() for name, kept in tensors.items() for key, value in kept.items()}


def unchanged(before, after):
    return {key for key in after if np.array_equal(before.get(key), after[key])}


# -- against one worker with all batches ------------------------------------------------------------------------------
for name, make in {
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.5, gradient_accumulation_steps=2),
}.items():
    net, whole = network(), network()
    train(net, distributed(make())[0], [rank])
    train(whole, make(), ALL)
    found[name] = (weights(net), weights(whole), weights(network()))

for policy in ("mixed_bfloat16", "mixed_float16", "float16", "float64"):
    net, whole = network(policy), network(policy)
    train(net, distributed(keras.optimizers.SGD(0.1))[0], [rank])
    train(whole, keras.optimizers.SGD(0.1), ALL)
    found[policy] = (weights(net), weights(whole), weights(network(policy)), net.variables[0].dtype)

# -- bad numbers -------------------------------------------------------------------------------------------------------
for graph in (False, True):
    for policy in ("poison", "zero", "raise"):
        net = network()
        grc = grace.grace_from_params({**TOPK, "nonfinite": policy})
        own = keras.optimizers.SGD(0.1)
        own.build(net.trainable_variables)

        def gradients(x, y, bad):
            with tf.GradientTape() as tape:
                loss = LOSS(y, net(x, training=True)) + bad * net.trainable_variables[0][3, 7]
            tape = grace.tensorflow.DistributedGradientTape(tape, grace=grc)
            return tape.gradient(loss, net.trainable_variables)

        run = tf.function(gradients) if graph else gradients
        seen, kept, message = [], set(), ""
        for step, (x, y) in enumerate(list(zip(*data([rank]), strict=True))[:4]):
            before = state(grc) if step else {}
            bad = float("nan") if step == 2 and rank == 1 else 0.0
            try:
                means = run(tf.constant(x), tf.constant(y), tf.constant(bad))
            except (FloatingPointError, tf.errors.InvalidArgumentError) as error:
                means, message = [], str(error)
            if step == 2:
                seen, kept = [mean.numpy() for mean in means], unchanged(before, state(grc))
            if means and all(np.isfinite(mean).all() for mean in means):
                own.apply_gradients(zip(means, net.trainable_variables, strict=True))
        found[f"nonfinite {policy} {'graph' if graph else 'eager'}"] = (weights(net), seen, kept, message)

# A loss scaler in model.fit, whose scale grows and falls: the inputs of worker 1 overflow in step 3.
x, y = data([rank])
x[3] *= np.inf if rank == 1 else 1
everything, labels = data(ALL)
everything[3] *= np.inf


def scaler():
    inner = keras.optimizers.SGD(0.1)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0, dynamic_growth_steps=2)


class Watch(keras.callbacks.Callback):
    def __init__(self, grc=None):
        super().__init__()
        self.scales, self.kept, self.grc, self.state = [], [], grc, {}

    def on_train_batch_end(self, batch, logs=None):
        self.scales.append(float(self.model.optimizer.dynamic_scale))
        if self.grc is not None:
            now = state(self.grc)
            self.kept.append(len(unchanged(self.state, now)))
            self.state = now


for kind, params in (("none", DENSE), ("topk", TOPK)):
    net, whole = network(), network()
    optimizer, grc = distributed(scaler(), params)
    watch = Watch(grc)
    fit(net, optimizer, x, y, ROWS, callbacks=[watch])
    if kind == "none":
        fit(whole, scaler(), everything, labels, ROWS * size)
    found[f"scaler {kind}"] = (weights(net), weights(whole), weights(network()), watch.scales, watch.kept)

# -- clipping each worker's own gradient before it is averaged ---------------------------------------------------------
net, whole = network(), network()
optimizer, _ = distributed(keras.optimizers.SGD(0.1))
alone = keras.optimizers.SGD(0.1)


def clipped(model, x, y):
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    return tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.1)[0]


own, others = data([rank]), [data([worker]) for worker in ALL]
for step in range(STEPS):
    mine = clipped(net, own[0][step], own[1][step])
    optimizer.apply_gradients(zip(mine, net.trainable_variables, strict=True))
    each = [clipped(whole, x[step], y[step]) for x, y in others]
    means = [sum(parts) / size for parts in zip(*each, strict=True)]
    alone.apply_gradients(zip(means, whole.trainable_variables, strict=True))
found["clipped before"] = (weights(net), weights(whole), weights(network()))


# -- absent, sparse, shared, frozen ------------------------------------------------------------------------------------
def variables():
    rng = np.random.default_rng(5)
    return [tf.Variable(rng.standard_normal((6, 4)).astype("float32"), name=f"w{i}") for i in range(4)]


def used(step, worker):  # which workers use a layer: 0: both; 1 and 2: one at a time; 3: none
    return [0] if step % 3 == 0 else [0, 1 + (step + worker) % 2]


def loss_at(chosen, step, worker):
    rng = np.random.default_rng([step, worker])
    return sum(tf.reduce_sum(w * rng.standard_normal((6, 4)).astype("float32")) for w in chosen)


for kind, params in (("none", DENSE), ("topk", {**TOPK, "compress_ratio": 0.2})):
    mine, grc = variables(), grace.grace_from_params(params)
    total, handed, nobody = np.zeros((4, 6, 4)), np.zeros((4, 6, 4)), []
    for step in range(5):
        with tf.GradientTape() as tape:
            loss = loss_at([mine[i] for i in used(step, rank)], step, rank)
        tape = grace.tensorflow.DistributedGradientTape(tape, grace=grc)
        means = tape.gradient(loss, mine)
        nobody.append([mean is None for mean in means])
        for i, mean in enumerate(means):
            handed[i] += 0 if mean is None else mean.numpy()
        for worker in ALL:
            for i in used(step, worker):
                rng = np.random.default_rng([step, worker])
                draws = [rng.standard_normal((6, 4)).astype("float32") for _ in used(step, worker)]
                total[i] += draws[used(step, worker).index(i)] / size
    kept = grc.state_dict()["tensors"]
    residual = np.array(
        [kept.get(f"w{i}", {}).get("memory/residual", np.zeros(24)).reshape(6, 4) for i in range(4)], "float64"
    )
    found[f"absent {kind}"] = (handed, residual, total, nobody)

keras.utils.set_random_seed(0)
words = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(300, 8, name="words")])
optimizer, grc = distributed(keras.optimizers.SGD(0.1), {**TOPK, "min_numel": 100})
for step in range(3):
    tokens = np.random.default_rng([step, rank]).integers(0, 300, (6, 4))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(words(tokens) ** 2)
    gradient = tape.gradient(loss, words.trainable_variables)
    assert isinstance(gradient[0], tf.IndexedSlices)
    optimizer.apply_gradients(zip(gradient, words.trainable_variables, strict=True))
found["sparse"] = (weights(words), {t.name: (t.method, t.reason) for t in grc.report().tensors})


class Tied(keras.Model):
    def __init__(self):
        super().__init__()
        self.words = keras.layers.Embedding(40, 8, name="tied")

    def call(self, tokens):
        return keras.ops.matmul(self.words(tokens), keras.ops.transpose(self.words.embeddings))


def tied(optimizer, workers):
    keras.utils.set_random_seed(0)
    net = Tied()
    net(np.zeros((1,), "int32"))
    start = weights(net)
    for step in range(STEPS):
        with tf.GradientTape() as tape:
            tokens = [np.random.default_rng([step, worker]).integers(0, 40, 8) for worker in workers]
            loss = sum(LOSS(t[::-1], net(t)) for t in tokens) / len(tokens)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
        )
    return weights(net), start


optimizer, grc = distributed(keras.optimizers.SGD(0.5))
mine, start = tied(optimizer, [rank])
found["tied"] = (mine, tied(keras.optimizers.SGD(0.5), ALL)[0], start, grc.names)

# A layer that is frozen for some steps and then unfrozen; its memory stays unchanged meanwhile.
net = network()
optimizer, grc = distributed(keras.optimizers.SGD(0.1), TOPK)


def first():
    return np.concatenate([w.ravel() for w in net.layers[0].get_weights()])


train(net, optimizer, [rank])
net.layers[0].trainable = False
before, kept = first(), state(grc)
grace.tensorflow.release(optimizer)
optimizer = grace.tensorflow.DistributedOptimizer(keras.optimizers.SGD(0.1), grace=grc)
train(net, optimizer, [rank])
frozen, resting = first(), {key for key in unchanged(kept, state(grc)) if "a/" in key}
net.layers[0].trainable = True
grace.tensorflow.release(optimizer)
optimizer = grace.tensorflow.DistributedOptimizer(keras.optimizers.SGD(0.1), grace=grc)
train(net, optimizer, [rank])
found["frozen"] = (weights(net), before, frozen, resting, first())

# -- complex and integer variables -------------------------------------------------------------------------------------
phase, table = tf.Variable(tf.ones((3,), tf.complex64), name="phase"), tf.Variable([1, 2], name="table")
try:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.abs(phase) ** 2)
    grace.tensorflow.DistributedGradientTape(tape, grace.grace_from_params(DENSE)).gradient(loss, [phase])
except TypeError as error:
    found["complex"] = str(error)
try:
    grace.tensorflow.average_gradients(grace.grace_from_params(DENSE), [tf.constant([1, 2])], [table])
except TypeError as error:
    found["integer"] = str(error)

save(out, rank, found)
