"""A training that starts from the same weights and sees the same batches on each Keras backend."""

import keras
import numpy as np

import grace
import grace.keras

BATCH, STEPS, EPOCHS = 8, 4, 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(seed=0):
    keras.backend.clear_session()
    layers = keras.layers
    net = keras.Sequential(
        [keras.Input((20,)), layers.Dense(30, activation="tanh", name="a"), layers.Dense(5, name="b")]
    )
    rng = np.random.default_rng(seed)
    net.set_weights([0.3 * rng.standard_normal(w.shape).astype("float32") for w in net.get_weights()])
    return net


def data(worker):
    rng = np.random.default_rng(worker)
    x = rng.standard_normal((BATCH * STEPS, 20)).astype("float32")
    return x, np.argmax(x[:, :5], 1)


def weights(net):
    return np.concatenate([w.ravel() for w in net.get_weights()])


def train(net, optimizer, grc, rank, epochs=EPOCHS, callbacks=(), **options):
    """Losses of the epochs, averaged over the workers."""
    if grc is not None:
        grace.keras.DistributedOptimizer(optimizer, grace=grc)
    net.compile(optimizer, LOSS, jit_compile=False, **options)
    callbacks = [*callbacks, grace.keras.MetricAverageCallback()]
    x, y = data(rank)
    return net.fit(x, y, BATCH, epochs, shuffle=False, verbose=0, callbacks=callbacks).history["loss"]


def dense_losses(rank):
    """The losses of several optimizers, with dense gradients."""
    makers = {
        "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "Adam clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    }
    return {
        name: train(network(), make(), grace.grace_from_params({"compressor": "none"}), rank)
        for name, make in makers.items()
    }
