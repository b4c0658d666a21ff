"""Low-rank layers for Keras 3, and how a dense layer becomes one and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from grace.factorize.algebra import svd_factor

__all__ = ["LowRank", "LowRankLSTMCell", "LowRankMultiHeadAttention"]

CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
PROJECTIONS = ("_query_dense", "_key_dense", "_value_dense", "_output_dense")
register = keras.saving.register_keras_serializable(package="grace")


@register
class LowRank(layers.Layer):
    """Two layers in place of a Dense, EinsumDense or Conv: ``u`` maps to the rank, without bias; ``v`` maps from it.

    ``layer``: the dense layer, as serialised by ``keras.saving.serialize_keras_object``. ``v`` has its bias and
    activation. For a convolution, ``u`` has the kernel, strides, padding and dilation, and ``v`` is 1 x 1. A kernel
    regulariser acts on both factors.
    """

    def __init__(self, layer: Mapping[str, Any], rank: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.rank = rank
        self._layer = json.dumps(layer)  # text, since Keras would wrap a dictionary
        self.u, self.v = _pair(self.dense_layer(), rank)
        self.supports_masking = self.u.supports_masking

    def dense_layer(self) -> layers.Layer:
        """Return the dense layer, not built."""
        return keras.saving.deserialize_keras_object(json.loads(self._layer))

    @property
    def ranks(self) -> tuple[int]:
        return (self.rank,)

    def build(self, input_shape: Any) -> None:
        self.u.build(input_shape)
        self.v.build(self.u.compute_output_shape(input_shape))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.v(self.u(inputs))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return self.v.compute_output_shape(self.u.compute_output_shape(input_shape))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "layer": json.loads(self._layer), "rank": self.rank}


@register
class LowRankLSTMCell(layers.LSTMCell):
    """A low-rank LSTMCell: each gate's matrices are factorised separately.

    ``ranks``: two, for the matrices of the input and of the hidden state. Weights: instead of ``kernel``, ``kernel_u``
    [input, 4 rank] and ``kernel_v`` [rank, 4 units], gates concatenated; likewise for ``recurrent_kernel``; ``bias`` as
    in LSTMCell.
    """

    def __init__(self, units: int, ranks: Sequence[int], **kwargs: Any):
        super().__init__(units, **kwargs)
        self.ranks = tuple(ranks)

    def build(self, input_shape: Any) -> None:
        inputs = ("", input_shape[-1], self.kernel_regularizer)
        hidden = ("recurrent_", self.units, self.recurrent_regularizer)
        for (prefix, width, regularizer), rank in zip((inputs, hidden), self.ranks, strict=True):
            for part, shape in (("u", (width, 4 * rank)), ("v", (rank, 4 * self.units))):
                name = f"{prefix}kernel_{part}"
                weight = self.add_weight(name=name, shape=shape, initializer="zeros", regularizer=regularizer)
                setattr(self, name, weight)
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(4 * self.units,),
                initializer="zeros",
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )

    def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
        hidden, carry = states
        inputs = self._dropped(inputs, self.get_dropout_mask, self.dropout if training else 0)
        hidden = self._dropped(hidden, self.get_recurrent_dropout_mask, self.recurrent_dropout if training else 0)
        gates = self._gates(inputs, self.kernel_u, self.kernel_v)
        gates = gates + self._gates(hidden, self.recurrent_kernel_u, self.recurrent_kernel_v)
        if self.bias is not None:
            gates = gates + self.bias
        i, f, c, o = ops.split(gates, 4, axis=1)
        carry = self.recurrent_activation(f) * carry + self.recurrent_activation(i) * self.activation(c)
        output = self.recurrent_activation(o) * self.activation(carry)
        return output, [output, carry]

    @staticmethod
    def _dropped(x: Any, mask_of: Callable[[Any], Any], rate: float) -> Any:
        # Keras makes one mask for all gates. With implementation=1, which recurrent dropout implies, it makes a list of
        # four, one per gate; the result then has shape [n, 4, width].
        if not 0 < rate < 1:
            return x
        mask = mask_of(x)
        return ops.stack([x * one for one in mask], axis=1) if isinstance(mask, (list, tuple)) else x * mask

    def _gates(self, x: Any, u: Any, v: Any) -> Any:
        # [n, width] or, per gate, [n, 4, width] -> [n, 4 units]: narrow products, then wide ones.
        rank = v.shape[0]
        if len(x.shape) == 2:
            narrow = ops.reshape(ops.matmul(x, u), (-1, 4, rank))
        else:
            narrow = ops.einsum("ngw,wgr->ngr", x, ops.reshape(u, (-1, 4, rank)))
        wide = ops.einsum("ngr,rgh->ngh", narrow, ops.reshape(v, (rank, 4, self.units)))
        return ops.reshape(wide, (-1, 4 * self.units))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "ranks": list(self.ranks)}


@register
class LowRankMultiHeadAttention(layers.MultiHeadAttention):
    """MultiHeadAttention with four low-rank projections, each for all heads together.

    ``ranks``: four, for the projections of query, key, value and output.
    """

    def __init__(self, *args: Any, ranks: Sequence[int], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.ranks = tuple(ranks)

    def build(self, *args: Any, **kwargs: Any) -> None:
        super().build(*args, **kwargs)
        for key, rank in zip(PROJECTIONS, self.ranks, strict=True):
            to_low_rank(getattr(self, key), rank, "zeros")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "ranks": list(self.ranks)}


# -- shared helpers -------------------------------------------------------------------------------------------------
def _pair(layer: layers.Layer, rank: int) -> tuple[layers.Layer, layers.Layer]:
    # Returns the layers u and v, unbuilt, with the settings of a dense layer.
    config = {key: value for key, value in layer.get_config().items() if key not in ("lora_rank", "lora_alpha")}
    narrow = {**config, "name": "u", "activation": None, "activity_regularizer": None}
    wide = {**config, "name": "v", "activity_regularizer": None}
    if isinstance(layer, layers.EinsumDense):
        inner, outer, shape = _equations(config["equation"], rank)
        narrow |= {"equation": inner, "output_shape": shape, "bias_axes": None}
        wide |= {"equation": outer}
    else:
        narrow["use_bias"] = False
        if isinstance(layer, CONVOLUTIONS):
            narrow["filters"] = rank
            ones = [1] * len(config["kernel_size"])
            wide |= {"kernel_size": ones, "strides": ones, "dilation_rate": ones, "padding": "valid"}
        else:
            narrow["units"] = rank
    return type(layer).from_config(narrow), type(layer).from_config(wide)


def kernel_axes(equation: str) -> tuple[str, str, str, str] | None:
    """Labels of the input, the kernel, and the kernel's columns and rows; None if the kernel is not one matrix."""
    inputs, rest = equation.replace(" ", "").split(",")
    kernel, outputs = rest.split("->")
    columns = "".join(label for label in kernel if label in inputs and label not in outputs)
    rows = "".join(label for label in kernel if label in outputs and label not in inputs)
    kept = set(inputs) - set(columns)
    one = columns and rows and sorted(columns + rows) == sorted(set(kernel)) == sorted(kernel)
    return (inputs, kernel, columns, rows) if one and kept == set(outputs) - set(rows) else None


def _equations(equation: str, rank: int) -> tuple[str, str, tuple[int | None, ...]]:
    # Returns the equations of u and v, and the output shape of u.
    axes = kernel_axes(equation)
    assert axes is not None
    inputs, _, columns, rows = axes
    outputs = equation.replace(" ", "").split("->")[1]
    label = next(letter for letter in "rstuvwxyzabcdefghijklmnopq" if letter not in equation)
    kept = "".join(letter for letter in inputs if letter not in columns)
    batch = sum(letter != "." for letter in kept) - ("." not in kept)
    shape = (*[None] * batch, rank)
    return f"{inputs},{columns}{label}->{kept}{label}", f"{kept}{label},{label}{rows}->{outputs}", shape


def _matrix(layer: layers.Layer) -> np.ndarray:
    # Returns the kernel of a built dense layer as [outputs, inputs].
    kernel = np.asarray(layer.kernel)
    if isinstance(layer, layers.EinsumDense):
        _, labels, columns, rows = kernel_axes(layer.equation) or ("", "", "", "")
        kernel = kernel.transpose([labels.index(label) for label in columns + rows])
        return kernel.reshape(math.prod(kernel.shape[: len(columns)]), -1).T
    return kernel.reshape(-1, kernel.shape[-1]).T


def _factors(weight: np.ndarray, rank: int, init: str) -> tuple[np.ndarray, np.ndarray]:
    # Returns u[rank, n] and v[m, rank] for weight[m, n].
    if init == "svd":
        return svd_factor(weight, rank)
    shapes = ((rank, weight.shape[1]), (weight.shape[0], rank))
    if init == "zeros":
        return np.zeros(shapes[0], np.float32), np.zeros(shapes[1], np.float32)
    # The product then has the variance of the given weight.
    scale = (np.square(weight.astype(np.float32)).mean() / rank) ** 0.25
    u, v = (np.asarray(keras.random.normal(shape)) * scale for shape in shapes)
    return u, v


def _become(layer: layers.Layer, template: layers.Layer, build: Callable[[], None]) -> None:
    # Turn a built layer into the type of ``template``, in place: its name and all references to it stay valid.
    mine = {id(variable) for variable in layer.variables} | {id(inner) for inner in layer._layers}
    tracker = layer._tracker
    tracker.unlock()
    try:
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            layer._untrack_variable(variable)
        for inner in list(layer._layers):
            tracker.untrack(inner)
        for key in [key for key, value in vars(layer).items() if id(value) in mine]:
            object.__delattr__(layer, key)
        layer.__class__ = type(template)
        common = vars(layers.Layer())
        for key, value in vars(template).items():
            what_it_takes = key.startswith("_call_")  # such as the arguments of call
            if what_it_takes or (key not in common and not isinstance(value, keras.random.SeedGenerator)):
                setattr(layer, key, value)
        with layer._open_name_scope():
            build()
    finally:
        tracker.lock()


def to_low_rank(layer: layers.Layer, rank: int, init: str) -> None:
    """Change a dense layer to a `LowRank`, in place. ``init``: "svd", "random" or "zeros"."""
    u, v = _factors(_matrix(layer), rank, init)
    bias = None if layer.bias is None else np.asarray(layer.bias)
    shape = _built_for(layer)
    described = keras.saving.serialize_keras_object(layer)
    described = {key: value for key, value in described.items() if key != "build_config"}
    _become(layer, LowRank(described, rank), lambda: LowRank.build(layer, shape))
    kernels = (u.T, v.T)
    for inner, kernel in zip((layer.u, layer.v), kernels, strict=True):
        inner.kernel.assign(kernel.reshape(inner.kernel.shape))
    if bias is not None:
        layer.v.bias.assign(bias)


def to_dense(layer: LowRank) -> None:
    """Change a low-rank layer back to the dense layer, in place."""
    template = layer.dense_layer()
    product = np.asarray(layer.u.kernel).reshape(-1, layer.rank) @ np.asarray(layer.v.kernel).reshape(layer.rank, -1)
    bias = None if layer.v.bias is None else np.asarray(layer.v.bias)
    shape = _built_for(layer)
    _become(layer, template, lambda: type(template).build(layer, shape))
    kernel = layer.kernel
    if isinstance(layer, layers.EinsumDense):
        _, labels, columns, rows = kernel_axes(layer.equation) or ("", "", "", "")
        order = [labels.index(label) for label in columns + rows]
        product = product.reshape([kernel.shape[axis] for axis in order]).transpose(np.argsort(order))
    kernel.assign(product.reshape(kernel.shape))
    if bias is not None:
        layer.bias.assign(bias)


def _built_for(layer: layers.Layer) -> Any:
    return layer.get_build_config()["input_shape"]


def cell_to_low_rank(cell: layers.LSTMCell, ranks: Sequence[int], init: str) -> None:
    """Change an LSTM's cell to a `LowRankLSTMCell`, in place."""
    weights = {"": np.asarray(cell.kernel), "recurrent_": np.asarray(cell.recurrent_kernel)}
    bias = None if cell.bias is None else np.asarray(cell.bias)
    template = LowRankLSTMCell.from_config({**cell.get_config(), "ranks": ranks})
    _become(cell, template, lambda: LowRankLSTMCell.build(cell, (None, len(weights[""]))))
    for (prefix, weight), rank in zip(weights.items(), ranks, strict=True):
        pairs = [_factors(gate.T, rank, init) for gate in np.split(weight, 4, axis=1)]
        getattr(cell, f"{prefix}kernel_u").assign(np.concatenate([u.T for u, _ in pairs], axis=1))
        getattr(cell, f"{prefix}kernel_v").assign(np.concatenate([v.T for _, v in pairs], axis=1))
    if bias is not None:
        cell.bias.assign(bias)


def cell_to_dense(cell: LowRankLSTMCell) -> None:
    """Change a low-rank cell back to the dense cell, in place."""
    weights = {}
    for prefix in ("", "recurrent_"):
        u, v = (np.asarray(getattr(cell, f"{prefix}kernel_{part}")) for part in "uv")
        gates = zip(np.split(u, 4, axis=1), np.split(v, 4, axis=1), strict=True)
        weights[f"{prefix}kernel"] = np.concatenate([a @ b for a, b in gates], axis=1)
    if cell.bias is not None:
        weights["bias"] = np.asarray(cell.bias)
    template = layers.LSTMCell.from_config({k: v for k, v in cell.get_config().items() if k != "ranks"})
    _become(cell, template, lambda: layers.LSTMCell.build(cell, (None, len(weights["kernel"]))))
    for key, weight in weights.items():
        getattr(cell, key).assign(weight)
