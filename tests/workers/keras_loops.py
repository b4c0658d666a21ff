"""Unusual training loops of Keras, over two workers: OUT. Saves a dictionary of findings."""

import sys
import time
import warnings

import numpy as np
import tensorflow as tf
from launch import error_of, save

tf.config.threading.set_intra_op_parallelism_threads(1)

import horovod.tensorflow as hvd
import keras

import grace
from grace.transports.horovod import HorovodTransport

(out,) = sys.argv[1:]
alone = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
hvd.init(process_sets=alone)
rank, size = hvd.rank(), hvd.size()
found = {}
DENSE = {"compressor": "none"}
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BATCH, STEPS = 8, 6
FLOAT8 = tf.dtypes.experimental.float8_e5m2
tensorflow = grace.tensorflow


def network(seed=rank, policy="float32"):
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_global_policy(policy)
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((20,)), dense(16, activation="relu"), dense(5)])


class Unbuilt(keras.Model):
    """A model without variables before its first batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(16), keras.layers.Dense(5)

    def call(self, x):
        return self.second(self.first(x))


def data(worker=rank):
    rng = np.random.default_rng(worker)
    x = rng.standard_normal((BATCH * STEPS, 20)).astype("float32")
    return x, x[:, :5].argmax(1)


def weights(net):
    return np.concatenate([np.asarray(w, "float64").ravel() for w in net.get_weights()])


def wrapped(optimizer=None, params=TOPK, **options):
    grc = grace.grace_from_params(params, **options)
    return tensorflow.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1), grace=grc), grc


def fit(net, optimizer, callbacks=(), xy=None, **options):
    net.compile(optimizer, options.pop("loss", LOSS), metrics=options.pop("metrics", None), jit_compile=False)
    x, y = xy or data()
    return net.fit(x, y, BATCH, shuffle=False, verbose=0, callbacks=list(callbacks), **options).history


def state(grc):
    tensors = grc.state_dict()["tensors"]
    return {f"{name}/{key}": value.copy() for name, kept in tensors.items() for key, value in kept.items()}


# -- loss scaling: Keras puts a scaler around ours, or the user does; worker 1 overflows ------------------------------
class Watch(keras.callbacks.Callback):
    def __init__(self, grc):
        super().__init__()
        self.grc, self.scales, self.same, self.kept = grc, [], [], {}

    def on_train_batch_end(self, batch, logs=None):
        kept = state(self.grc)
        self.scales.append(float(self.model.optimizer.dynamic_scale))
        self.same.append(bool(self.kept) and all(np.array_equal(kept[name], self.kept[name]) for name in kept))
        self.kept = kept


for kind, bad in (("natural", 6e4), ("artificial", np.inf)):
    x, y = data()
    x[3 * BATCH : 4 * BATCH] = bad if rank == 1 else x[3 * BATCH : 4 * BATCH]
    for where in ("compile", "by hand") if kind == "natural" else ("compile",):
        net = network(0, "mixed_float16")
        optimizer, grc = wrapped()
        if where == "by hand":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**15)
        watch = Watch(grc)
        fit(net, optimizer, [tensorflow.BroadcastCallback(0), watch], (x, y))
        found[f"scaler {kind} {where}"] = (weights(net), watch.scales, watch.same, grc.report().steps)

net = network(0)
inner, grc = wrapped()
scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=16.0)
scales = []
for step in range(4):
    x, y = data()
    with tf.GradientTape() as tape:
        loss = scaler.scale_loss(LOSS(y[:BATCH], net(x[:BATCH])))
        loss = loss * (float("inf") if step == 2 and rank == 0 else 1.0)
    scaler.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True))
    scales.append(float(scaler.dynamic_scale))
found["scaler eager"] = (weights(net), scales, grc.report().steps)

# -- broadcasts -------------------------------------------------------------------------------------------------------
keras.backend.clear_session()
keras.utils.set_random_seed(rank)
net = Unbuilt()
found["nothing to broadcast"] = error_of(tensorflow.broadcast_variables, net.variables)
fit(net, wrapped(keras.optimizers.Adam(0.01))[0], [tensorflow.BroadcastCallback(0)])
found["built by its first batch"] = weights(net)
keras.backend.clear_session()
net = keras.Sequential([keras.layers.Dense(4)])
if rank == 0:
    net.build((None, 20))
found["built on one worker"] = error_of(tensorflow.broadcast_variables, net.variables)
found["other shapes"] = error_of(tensorflow.broadcast_variables, [tf.Variable(tf.ones(4 + rank), name="v")])
found["other roots"] = error_of(tensorflow.broadcast_variables, [tf.Variable(tf.ones(4))], rank)
names = "uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128 bool"
kinds = [tf.Variable(tf.cast(tf.fill((2, 3), rank), name), name=name) for name in names.split()]
kinds += [tf.Variable(tf.zeros((0, 3))), tf.Variable(float(rank)), tf.Variable(tf.cast([float(rank)] * 3, FLOAT8))]
tensorflow.broadcast_variables(kinds, 1)
found["kinds"] = [(v.dtype.name, v.shape.as_list(), tf.cast(v, tf.float32).numpy()) for v in kinds]
words = [tf.Variable(1.0), tf.Variable("a", name="words")]
found["strings"] = error_of(tensorflow.broadcast_variables, words)


# -- a GAN with a compile of its own, both of whose optimizers step in one graph --------------------------------------
class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        dense = keras.layers.Dense
        self.generator = keras.Sequential([keras.Input((20,)), dense(16, name="same"), dense(20, name="last")])
        self.critic = keras.Sequential([keras.Input((20,)), dense(16, name="same"), dense(1, name="last")])

    def compile(self, optimizers):
        super().compile(optimizer=None, jit_compile=False)
        self.optimizers = optimizers

    def train_step(self, x):
        x = x[0] if isinstance(x, tuple) else x
        with tf.GradientTape(persistent=True) as tape:
            fake = self.critic(self.generator(x))
            critic, generator = tf.reduce_mean(fake - self.critic(x)), -tf.reduce_mean(fake)
        for name, net, loss in (("critic", self.critic, critic), ("generator", self.generator, generator)):
            variables = net.trainable_variables
            self.optimizers[name].apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"critic": critic}


class Rates(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizers["critic"].learning_rate = 0.01 / (1 + epoch)


network()
net = Gan()
pairs = {
    name: wrapped(keras.optimizers.Adam(rate), {**TOPK, "record": f"{out}/{name}.jsonl", "record_every": 2})
    for name, rate in (("critic", 0.01), ("generator", 0.001))
}
net.compile({name: optimizer for name, (optimizer, _) in pairs.items()})
callbacks = [tensorflow.BroadcastCallback(1), Rates(), tensorflow.PolicyCallback(), tensorflow.RecordCallback()]
net.fit(data()[0], batch_size=BATCH, epochs=2, verbose=0, callbacks=[*callbacks, tensorflow.MetricAverageCallback()])
rates = {name: float(grc.learning_rate("any")) for name, (_, grc) in pairs.items()}
found["gan"] = (weights(net), {name: grc.report().steps for name, (_, grc) in pairs.items()}, rates)
plain = Gan()
plain.compile({"critic": keras.optimizers.SGD(0.1), "generator": keras.optimizers.SGD(0.1)})
found["gan without grace"] = error_of(plain.fit, data()[0], verbose=0, callbacks=[tensorflow.PolicyCallback()])


# -- metrics ----------------------------------------------------------------------------------------------------------
class Extra(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["ab"[rank]] = float(rank + 1)
        logs.update(
            both=rank, count=2**25 + 1 + 2 * rank, huge=1e39, none=None, text="x", bad=float("nan") if rank else 0.0
        )


x, y = data()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    history = fit(
        network(0),
        wrapped()[0],
        [tensorflow.BroadcastCallback(0), Extra(), tensorflow.MetricAverageCallback()],
        (x, keras.utils.to_categorical(y, 5)),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.F1Score(average=None, name="f1")],
        validation_data=(x, keras.utils.to_categorical(y, 5)) if rank == 0 else None,
    )
found["metrics told"] = [str(each.message) for each in told if "finite" in str(each.message)]
found["metrics"] = {name: values[0] for name, values in history.items()}
average = tensorflow.MetricAverageCallback(grace.grace_from_params(DENSE))
average.set_model(keras.Sequential())
found["metrics of other shapes"] = error_of(average.on_epoch_end, 0, {"f1": np.ones(3 + rank)})
logs = {"loss": 1.0} if rank == 0 else {}
average.on_epoch_end(0, logs)
found["metrics on one worker"] = logs

# -- callbacks follow the Grace: two sets of one worker each ----------------------------------------------------------
net = network()
before = weights(net)
optimizer, _ = wrapped(keras.optimizers.SGD(0.0), transport=HorovodTransport(alone[rank]))
history = fit(net, optimizer, [tensorflow.BroadcastCallback(0), tensorflow.MetricAverageCallback()])
found["process set"] = (before, weights(net), history["loss"][0], net.evaluate(*data(), verbose=0))
found["root outside"] = error_of(fit, net, optimizer, [tensorflow.BroadcastCallback(1)])
tape = tf.GradientTape()
grc = grace.grace_from_params(DENSE)
horovod = {"op": hvd.Average, "compression": hvd.Compression.none, "process_set": hvd.global_process_set}
tensorflow.DistributedGradientTape(tape, grc, **horovod, sparse_as_dense=True)
defaults = {**horovod, "name": "x", "backward_passes_per_step": 1, "average_aggregated_gradients": False}
tensorflow.DistributedOptimizer(keras.optimizers.SGD(0.1), grc, **defaults)
others = {"op": hvd.Sum, "compression": hvd.Compression.fp16, "process_set": alone[0], "backward_passes_per_step": 2}
found["horovod"] = {
    name: error_of(
        tensorflow.DistributedOptimizer, keras.optimizers.SGD(0.1), grace.grace_from_params(DENSE), **{name: value}
    )
    for name, value in others.items()
}

# -- a copy that was not wrapped again; one that was ------------------------------------------------------------------
net = network(0)
fit(net, wrapped()[0], [tensorflow.BroadcastCallback(0)])
net.save(f"{out}/{rank}.keras")
for kind in ("plain", "wrapped"):
    copy = keras.models.load_model(f"{out}/{rank}.keras")
    optimizer = copy.optimizer if kind == "plain" else wrapped(copy.optimizer)[0]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(copy, optimizer, [tensorflow.BroadcastCallback(0)])
    found[f"copy {kind}"] = [str(each.message) for each in told if "was averaged" in str(each.message)]

# -- constants as sources ---------------------------------------------------------------------------------------------
with tf.GradientTape() as tape:
    w, v = tf.constant([1.0, 2.0]), tf.Variable([3.0, 4.0])
    tape.watch(w)
    loss = tf.reduce_sum(w * v) * (rank + 1)
tape = tensorflow.DistributedGradientTape(tape, grace.grace_from_params(DENSE))
found["constants"] = [mean.numpy().tolist() for mean in tape.gradient(loss, [w, v])]

# -- the last: worker 0 makes a step more, and waits no longer than its time limit ------------------------------------
grc = grace.grace_from_params({**TOPK, "timeout": 4.0})
v = tf.Variable(tf.ones(2000))
if rank == 1:
    tensorflow.average_gradients(grc, [tf.ones(2000)], [v])
    time.sleep(8)  # the worker is alive, but does not answer
    found["late"] = ""
for _ in range(2 if rank == 0 else 0):
    found["late"] = error_of(tensorflow.average_gradients, grc, [tf.ones(2000)], [v])
save(out, rank, found)
