"""The models of `torch_models` in Keras, without an LSTM's second bias; inputs and logits have the same shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from grace_bench.tasks.data import Arrays
from grace_bench.tasks.tasks import Task


def _conv(x: Any, out: int, kernel: int = 3, stride: int = 1) -> Any:
    x = layers.Conv2D(out, kernel, stride, padding="same", use_bias=False, kernel_initializer="he_uniform")(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def resnet(side: int, classes: int, width: int, blocks: int) -> keras.Model:
    """See `torch_models.ResNet`."""
    images = keras.Input((side, side, 3))
    x = layers.ReLU()(_conv(images, width, stride=2))
    into = width
    for stage in range(4):
        out = min(width * 2**stage, 4 * width)
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            shortcut = _conv(x, out, 1, stride) if stride > 1 or into != out else x
            x = _conv(layers.ReLU()(_conv(x, out, stride=stride)), out)
            x = layers.ReLU()(layers.add([x, shortcut]))
            into = out
    return keras.Model(images, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


def lstm(words: int, length: int, width: int, layers: int) -> keras.Model:
    """See `torch_models.LSTM`."""
    pieces = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(words, width)(pieces)
    for _ in range(layers):
        x = keras.layers.LSTM(width, return_sequences=True)(x)
    return keras.Model(pieces, keras.layers.Dense(words)(x))


class _Places(layers.Layer):
    # Adds a learnt vector for each position.
    def __init__(self, length: int, width: int):
        super().__init__()
        self.places = self.add_weight((length, width), "random_uniform", name="places")

    def call(self, x: Any) -> Any:
        return x + self.places


class _Attention(layers.Layer):
    # Causal self-attention with four square matrices, as in PyTorch. The kernels of keras.layers.MultiHeadAttention
    # have three dimensions, so methods would compress other matrices.
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (layers.Dense(width) for _ in range(4))
        for dense in (self.query, self.key, self.value, self.out):
            dense.build((None, None, width))

    def call(self, x: Any) -> Any:
        ops = keras.ops
        _, length, width = x.shape

        def split(y: Any) -> Any:
            return ops.transpose(ops.reshape(y, (-1, length, self.heads, width // self.heads)), (0, 2, 1, 3))

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * (width // self.heads) ** -0.5
        later = ops.triu(ops.ones((length, length)), 1) * -1e9
        mixed = ops.transpose(ops.matmul(ops.softmax(scores + later), v), (0, 2, 1, 3))
        return self.out(ops.reshape(mixed, (-1, length, width)))


def transformer(words: int, length: int, width: int, layers: int, heads: int) -> keras.Model:
    """See `torch_models.Transformer`."""

    def norm(x: Any) -> Any:
        return keras.layers.LayerNormalization(epsilon=1e-5)(x)

    pieces = keras.Input((length,), dtype="int32")
    x = _Places(length, width)(keras.layers.Embedding(words, width)(pieces))
    for _ in range(layers):
        x = keras.layers.add([x, _Attention(width, heads)(norm(x))])
        wide = keras.layers.Dense(4 * width, activation="gelu")(norm(x))
        x = keras.layers.add([x, keras.layers.Dense(width)(wide)])
    return keras.Model(pieces, keras.layers.Dense(words)(norm(x)))


def ncf(users: int, items: int, width: int) -> keras.Model:
    """See `torch_models.NCF`."""
    who, what = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
    a, b, c, d = (
        layers.Embedding(rows, width)(ids) for rows, ids in ((users, who), (items, what), (users, who), (items, what))
    )
    x = layers.concatenate([c, d])
    for out in (2 * width, width, width // 2):
        x = layers.Dense(out, activation="relu")(x)
    score = layers.Dense(1)(layers.concatenate([layers.multiply([a, b]), x]))
    return keras.Model([who, what], layers.Reshape(())(score))


def unet(side: int, classes: int, width: int, levels: int) -> keras.Model:
    """See `torch_models.UNet`."""

    def pair(x: Any, out: int) -> Any:
        for _ in range(2):
            x = layers.ReLU()(_conv(x, out))
        return x

    images = keras.Input((side, side, 3))
    x, kept = images, []
    for level in range(levels):
        x = pair(layers.MaxPooling2D(2)(x) if level else x, width * 2**level)
        kept.append(x)
    kept.pop()
    for level in reversed(range(levels - 1)):
        wider = layers.Conv2DTranspose(width * 2**level, 2, 2)(x)
        x = pair(layers.concatenate([kept.pop(), wider]), width * 2**level)
    return keras.Model(images, layers.Conv2D(classes, 1)(x))


MODELS: dict[str, Callable[..., keras.Model]] = {
    "resnet": resnet,
    "lstm": lstm,
    "transformer": transformer,
    "ncf": ncf,
    "unet": unet,
}


def optimizer_of(task: Task, lr: float, momentum: float) -> keras.Optimizer:
    """The optimizer that a task names."""
    if task.optimizer == "adam":
        return keras.optimizers.Adam(lr, beta_1=momentum)
    return keras.optimizers.SGD(lr, momentum)


def loss_of(task: Task) -> keras.Loss:
    """The loss of logits."""
    losses = keras.losses
    return (losses.BinaryCrossentropy if task.binary else losses.SparseCategoricalCrossentropy)(from_logits=True)


def one_or_list(inputs: Arrays) -> Any:
    """Inputs in the form that a model takes."""
    return list(inputs) if len(inputs) > 1 else inputs[0]
