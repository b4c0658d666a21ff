"""Pufferfish for Keras 3: the low-rank layers, and how to find, replace and restore them.

Layers change in place, so that functional, sequential and subclassed models, nested layers and models that share
layers all keep their structure. Import this module before you load a factorised model from a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from grace.core import Transport
from grace.engine.session import Grace
from grace.factorize.algebra import svd_factor
from grace.factorize.plan import Layer, Matrix, NameMap

__all__ = ["LowRank", "LowRankLSTMCell", "LowRankMultiHeadAttention"]

CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
KINDS = (layers.Dense, layers.EinsumDense, *CONVOLUTIONS, layers.LSTM, layers.MultiHeadAttention)
PROJECTIONS = ("_query_dense", "_key_dense", "_value_dense", "_output_dense")
Ranks = Mapping[str, Sequence[int]]
register = keras.saving.register_keras_serializable(package="grace")


@register
class LowRank(layers.Layer):
    """Two layers in place of a Dense, EinsumDense or Conv: ``u`` maps to the rank, without bias; ``v`` maps from it.

    ``layer``: the dense one, as serialised by ``keras.saving.serialize_keras_object``. ``v`` has its bias and
    activation. For a convolution, ``u`` has the kernel, strides, padding and dilation, and ``v`` is 1 x 1. A kernel
    regulariser acts on both.
    """

    def __init__(self, layer: Mapping[str, Any], rank: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.rank = rank
        self._layer = json.dumps(layer)  # text, since Keras would wrap a dictionary
        self.u, self.v = _pair(self.dense_layer(), rank)
        self.supports_masking = self.u.supports_masking

    def dense_layer(self) -> layers.Layer:
        """The dense layer, not built."""
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

    ``ranks``: of the input's and of the hidden state's matrices. Weights: instead of ``kernel``, ``kernel_u`` [input, 4
    rank] and ``kernel_v`` [rank, 4 units], gates concatenated; likewise for ``recurrent_kernel``; ``bias`` as in
    LSTMCell.
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
        # Keras uses one mask for all gates, or (with recurrent dropout) a list of four: then the result is [n, 4,
        # width].
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

    ``ranks``: of the projections of query, key, value and output.
    """

    def __init__(self, *args: Any, ranks: Sequence[int], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.ranks = tuple(ranks)

    def build(self, *args: Any, **kwargs: Any) -> None:
        super().build(*args, **kwargs)
        for key, rank in zip(PROJECTIONS, self.ranks, strict=True):
            _to_low_rank(getattr(self, key), rank, "zeros")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "ranks": list(self.ranks)}


# -- shared helpers -------------------------------------------------------------------------------------------------
def _pair(layer: layers.Layer, rank: int) -> tuple[layers.Layer, layers.Layer]:
    # Two unbuilt layers with the settings of a dense one.
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


def _axes(equation: str) -> tuple[str, str, str, str] | None:
    # Labels of the input, the kernel, and the kernel's columns and rows; None if the kernel is not one matrix.
    inputs, rest = equation.replace(" ", "").split(",")
    kernel, outputs = rest.split("->")
    columns = "".join(label for label in kernel if label in inputs and label not in outputs)
    rows = "".join(label for label in kernel if label in outputs and label not in inputs)
    kept = set(inputs) - set(columns)
    one = columns and rows and sorted(columns + rows) == sorted(set(kernel)) == sorted(kernel)
    return (inputs, kernel, columns, rows) if one and kept == set(outputs) - set(rows) else None


def _equations(equation: str, rank: int) -> tuple[str, str, tuple[int | None, ...]]:
    # The equations of the two layers, and the output shape of the first.
    axes = _axes(equation)
    assert axes is not None
    inputs, _, columns, rows = axes
    outputs = equation.replace(" ", "").split("->")[1]
    label = next(letter for letter in "rstuvwxyzabcdefghijklmnopq" if letter not in equation)
    kept = "".join(letter for letter in inputs if letter not in columns)
    batch = sum(letter != "." for letter in kept) - ("." not in kept)
    shape = (*[None] * batch, rank)
    return f"{inputs},{columns}{label}->{kept}{label}", f"{kept}{label},{label}{rows}->{outputs}", shape


def _matrix(layer: layers.Layer) -> np.ndarray:
    # The kernel of a built dense layer as [outputs, inputs].
    kernel = np.asarray(layer.kernel)
    if isinstance(layer, layers.EinsumDense):
        _, labels, columns, rows = _axes(layer.equation) or ("", "", "", "")
        kernel = kernel.transpose([labels.index(label) for label in columns + rows])
        return kernel.reshape(math.prod(kernel.shape[: len(columns)]), -1).T
    return kernel.reshape(-1, kernel.shape[-1]).T


def _factors(weight: np.ndarray, rank: int, init: str) -> tuple[np.ndarray, np.ndarray]:
    # u[rank, n] and v[m, rank] for weight[m, n].
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
    # Turn a built layer into another type, in place: it keeps its name, its place in graphs and its users.
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


def _to_low_rank(layer: layers.Layer, rank: int, init: str) -> None:
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


def _to_dense(layer: LowRank) -> None:
    template = layer.dense_layer()
    product = np.asarray(layer.u.kernel).reshape(-1, layer.rank) @ np.asarray(layer.v.kernel).reshape(layer.rank, -1)
    bias = None if layer.v.bias is None else np.asarray(layer.v.bias)
    shape = _built_for(layer)
    _become(layer, template, lambda: type(template).build(layer, shape))
    kernel = layer.kernel
    if isinstance(layer, layers.EinsumDense):
        _, labels, columns, rows = _axes(layer.equation) or ("", "", "", "")
        order = [labels.index(label) for label in columns + rows]
        product = product.reshape([kernel.shape[axis] for axis in order]).transpose(np.argsort(order))
    kernel.assign(product.reshape(kernel.shape))
    if bias is not None:
        layer.bias.assign(bias)


def _built_for(layer: layers.Layer) -> Any:
    return layer.get_build_config()["input_shape"]


def _cell_to_low_rank(cell: layers.LSTMCell, ranks: Sequence[int], init: str) -> None:
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


def _cell_to_dense(cell: LowRankLSTMCell) -> None:
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


# -- a model --------------------------------------------------------------------------------------------------------
def survey(model: layers.Layer) -> list[Layer]:
    """Every layer that has weights, in the model's order."""
    if not model.built:
        raise ValueError("the model is not built: give it an Input, or run one batch through it first")
    owned = [(name, layer, variables) for name, layer in _walk(model) if (variables := _own(layer))]
    owners: dict[int, list[str]] = {}
    for name, _, variables in owned:
        for variable in variables:
            owners.setdefault(id(variable), []).append(name)
    found = []
    for name, layer, variables in owned:
        weights = [variable for variable in variables if len(variable.shape) > 1]
        reason = _obstacle(layer, weights)
        for other in (other for weight in weights for other in owners[id(weight)] if other != name):
            reason = reason or f"its weight is also that of {other!r}"
        trained = [variable for variable in variables if variable.trainable and owners[id(variable)][0] == name]
        found.append(
            Layer(
                name=name,
                kind=type(layer).__name__,
                shape=tuple((weights or variables)[0].shape),
                parameters=sum(math.prod(variable.shape) for variable in trained),
                matrices=() if reason else _matrices(layer),
                reason=reason,
            )
        )
    return found


def _walk(layer: layers.Layer, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, layers.Layer]]:
    seen = set() if seen is None else seen
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield name, layer
    if _whole(layer):
        return
    used: dict[str, int] = {}
    for child in layer._flatten_layers(include_self=False, recursive=False):
        used[child.name] = used.get(child.name, 0) + 1
        own = child.name if used[child.name] == 1 else f"{child.name}#{used[child.name]}"
        yield from _walk(child, f"{name}/{own}" if name else own, seen)


def _whole(layer: layers.Layer) -> bool:
    # Layers that are treated as a unit, including their sublayers.
    return isinstance(layer, (*KINDS, LowRank)) or _low_rank_lstm(layer)


def _low_rank_lstm(layer: layers.Layer) -> bool:
    return isinstance(layer, layers.RNN) and isinstance(layer.cell, LowRankLSTMCell)


def _own(layer: layers.Layer) -> list[Any]:
    if _whole(layer):
        return layer.weights
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _obstacle(layer: layers.Layer, weights: Sequence[Any]) -> str:
    kind = type(layer)
    if isinstance(layer, (LowRank, LowRankMultiHeadAttention)) or _low_rank_lstm(layer):
        return "factorised already"
    if isinstance(layer, layers.Embedding):
        return "an embedding: its rows are looked up, not multiplied"
    if not weights:
        return "no matrix"
    if kind not in KINDS:
        return f"{kind.__name__} is of no kind that is factorised"
    if not all(variable.trainable for variable in weights):
        return "frozen"
    parts = [getattr(layer, key) for key in PROJECTIONS] if kind is layers.MultiHeadAttention else [layer]
    for part in parts:
        if getattr(part, "quantization_mode", None) or getattr(part, "lora_enabled", False):
            return "quantised or with LoRA"
        if part.kernel_constraint is not None or getattr(part, "recurrent_constraint", None) is not None:
            return "its weight has a constraint"
    if isinstance(layer, CONVOLUTIONS) and layer.groups > 1:
        return "grouped: its weight is not one matrix"
    if kind is layers.EinsumDense and _axes(layer.equation) is None:
        return f"{layer.equation!r} is not a product with one matrix"
    return ""


def _matrices(layer: layers.Layer) -> tuple[Matrix, ...]:
    if isinstance(layer, layers.LSTM):
        cell = layer.cell
        return tuple(Matrix(cell.units, w.shape[0], 4) for w in (cell.kernel, cell.recurrent_kernel))
    return tuple(Matrix(*_matrix_shape(part)) for part in _parts(layer))


def _matrix_shape(layer: layers.Layer) -> tuple[int, int]:
    shape = tuple(layer.kernel.shape)
    if isinstance(layer, layers.EinsumDense):
        _, labels, columns, _ = _axes(layer.equation) or ("", "", "", "")
        width = math.prod(shape[labels.index(label)] for label in columns)
        return math.prod(shape) // width, width
    return shape[-1], math.prod(shape[:-1])


def _parts(layer: layers.Layer) -> list[layers.Layer]:
    if isinstance(layer, layers.MultiHeadAttention):
        return [getattr(layer, key) for key in PROJECTIONS]
    return [layer]


def positions(model: layers.Layer, example: Any) -> dict[str, list[int]]:
    """Number of products with each matrix of a layer when the model runs an example: an array or a tuple of arrays."""
    counts: dict[str, list[int]] = {}
    watched: list[layers.Layer] = []

    def watch(name: str, index: int, part: layers.Layer) -> None:
        call = part.call

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            if isinstance(part, layers.LSTM):
                inputs = args[0] if args else kwargs["sequences"]
                now = math.prod(inputs.shape[:-1])
                counts[name][0] += now
                counts[name][1] += now
            else:
                counts[name][index] += math.prod(output.shape) // _matrix_shape(part)[0]
            return output

        vars(part)["call"] = counted
        watched.append(part)

    for name, layer in _walk(model):
        if type(layer) in KINDS and not _obstacle(layer, [v for v in _own(layer) if len(v.shape) > 1]):
            counts[name] = [0] * len(_matrices(layer))
            for index, part in enumerate(_parts(layer)):
                watch(name, index, part)
    try:
        model(*(example if isinstance(example, (tuple, list)) else (example,)))
    finally:
        for part in watched:
            del vars(part)["call"]
    return counts


def replace(model: layers.Layer, ranks: Ranks, init: str) -> tuple[layers.Layer, NameMap]:
    """Replace these layers' weights by factors, in place."""

    def change(name: str, layer: layers.Layer) -> bool:
        if name not in ranks:
            return False
        try:
            _factorise(layer, ranks[name], init)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error
        return True

    return model, _renamed(model, change)


def _factorise(layer: layers.Layer, ranks: Sequence[int], init: str) -> None:
    if isinstance(layer, layers.LSTM):
        _cell_to_low_rank(layer.cell, ranks, init)
        layer.__class__ = layers.RNN
    elif isinstance(layer, layers.MultiHeadAttention):
        for part, rank in zip(_parts(layer), ranks, strict=True):
            _to_low_rank(part, rank, init)
        layer.__class__ = LowRankMultiHeadAttention
        layer.ranks = tuple(ranks)
    else:
        _to_low_rank(layer, ranks[0], init)


def restore(model: layers.Layer) -> tuple[layers.Layer, NameMap]:
    """Replace factors by dense weights, in place."""

    def change(_: str, layer: layers.Layer) -> bool:
        if isinstance(layer, LowRank):
            _to_dense(layer)
        elif isinstance(layer, LowRankMultiHeadAttention):
            for part in _parts(layer):
                _to_dense(part)
            layer.__class__ = layers.MultiHeadAttention
        elif _low_rank_lstm(layer):
            _cell_to_dense(layer.cell)
            layer.__class__ = layers.LSTM
            layer.use_cudnn = "auto"
        else:
            return False
        return True

    return model, _renamed(model, change)


def _renamed(model: layers.Layer, change: Callable[[str, layers.Layer], bool]) -> NameMap:
    # Change layers, and map the old variables to the new ones, layer by layer.
    names = NameMap()
    changed = False
    for name, layer in list(_walk(model)):
        parts = _parts(layer)
        before = [[v.path for v in part.trainable_variables] for part in parts]
        if not change(name, layer):
            continue
        changed = True
        for old, part in zip(before, parts, strict=True):
            names.update(_pairs(old, [v.path for v in part.trainable_variables]))
    if changed:
        for inner in [model, *model._flatten_layers()]:
            for key in ("train_function", "test_function", "predict_function"):
                if hasattr(inner, key):
                    setattr(inner, key, None)  # a graph holds the old variables
    return names


def _pairs(old: Sequence[str], new: Sequence[str]) -> NameMap:
    # kernel <-> u/kernel, v/kernel; bias <-> v/bias; in an LSTM kernel <-> kernel_u, kernel_v, and bias is unchanged.
    def role(path: str) -> str:
        name = path.rpartition("/")[2]
        return name.removesuffix("_u").removesuffix("_v")

    return NameMap(
        {path: targets for path in old if (targets := tuple(n for n in new if role(n) == role(path))) != (path,)}
    )


def ranks_of(model: layers.Layer) -> dict[str, tuple[int, ...]]:
    """Ranks of the factorised layers."""
    return {
        name: tuple(layer.cell.ranks if _low_rank_lstm(layer) else layer.ranks)
        for name, layer in _walk(model)
        if isinstance(layer, (LowRank, LowRankMultiHeadAttention)) or _low_rank_lstm(layer)
    }


def load_dense(model: keras.Model, checkpoint: str) -> None:
    """Load the dense model's weights file into the factorised one."""
    ranks = ranks_of(model)
    restore(model)
    try:
        model.load_weights(checkpoint)
    finally:
        replace(model, ranks, "svd")


def recalibrate(model: layers.Layer, batches: Iterable[Any]) -> None:
    """Recompute the statistics of BatchNormalization."""
    norms = [layer for _, layer in _walk(model) if isinstance(layer, layers.BatchNormalization)]
    momenta = [norm.momentum for norm in norms]
    try:
        for number, batch in enumerate(batches):
            for norm in norms:
                norm.momentum = number / (number + 1)  # the mean over all batches
            model(*(batch if isinstance(batch, (tuple, list)) else (batch,)), training=True)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


# -- the switch -----------------------------------------------------------------------------------------------------
def grace_of(optimizer: Any) -> Grace | None:
    """The Grace that drives an optimizer, if any."""
    return getattr(optimizer, "_grace", None)


def transport_of(grace: Grace, model: layers.Layer) -> Transport:
    """The Grace's transport, bound to TensorFlow."""
    from grace.keras.broadcast import transport_of
    from grace.tensorflow.variables import TOOLKIT

    return transport_of(TOOLKIT, grace)


def broadcast(model: layers.Layer, names: Iterable[str], grace: Grace) -> None:
    """Assign worker 0's values of these variables on all workers."""
    from grace.tensorflow import broadcast_variables

    wanted = set(names)
    if added := [v for v in model.trainable_variables if v.path in wanted]:
        broadcast_variables(added, 0, grace)


def hand_over(grace: Grace, model: layers.Layer, old: Any, new: Any) -> Any:
    """Drive ``new`` as ``old`` was driven, with a Grace rebuilt for the model's new variables."""
    from grace.keras.names import names_for
    from grace.keras.optimizer import DistributedOptimizer, release
    from grace.tensorflow.variables import TOOLKIT

    driven = hasattr(old, "_grace")
    if driven:
        release(old)
    variables = model.trainable_variables
    grace.claimed.clear()
    grace.rebuild(zip(names_for(TOOLKIT, grace, variables), variables, strict=True))
    return DistributedOptimizer(new, grace) if driven else new
