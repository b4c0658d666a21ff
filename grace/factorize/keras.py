"""Pufferfish for Keras 3: how to find, replace and restore layers.

Layers change in place, so that functional, sequential and subclassed models, nested layers and models that share
layers all keep their structure. Import this module before you load a factorised model from a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
from keras import layers

from grace.core import Transport
from grace.engine.session import Grace
from grace.factorize.keras_layers import (
    CONVOLUTIONS,
    PROJECTIONS,
    LowRank,
    LowRankLSTMCell,
    LowRankMultiHeadAttention,
    cell_to_dense,
    cell_to_low_rank,
    kernel_axes,
    to_dense,
    to_low_rank,
)
from grace.factorize.plan import Layer, Matrix, NameMap

__all__ = ["LowRank", "LowRankLSTMCell", "LowRankMultiHeadAttention"]

KINDS = (layers.Dense, layers.EinsumDense, *CONVOLUTIONS, layers.LSTM, layers.MultiHeadAttention)
Ranks = Mapping[str, Sequence[int]]


def survey(model: layers.Layer) -> list[Layer]:
    """Return every layer that has weights, in the model's order."""
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
    # Returns whether a layer and its sublayers are treated as one layer.
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
    if kind is layers.EinsumDense and kernel_axes(layer.equation) is None:
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
        _, labels, columns, _ = kernel_axes(layer.equation) or ("", "", "", "")
        width = math.prod(shape[labels.index(label)] for label in columns)
        return math.prod(shape) // width, width
    return shape[-1], math.prod(shape[:-1])


def _parts(layer: layers.Layer) -> list[layers.Layer]:
    if isinstance(layer, layers.MultiHeadAttention):
        return [getattr(layer, key) for key in PROJECTIONS]
    return [layer]


def positions(model: layers.Layer, example: Any) -> dict[str, list[int]]:
    """By layer, how many vectors each of its matrices multiplies when the model runs an example (arrays)."""
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
    """Replace the weights of the layers in ``ranks`` by factors of these ranks, in place."""

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
        cell_to_low_rank(layer.cell, ranks, init)
        layer.__class__ = layers.RNN
    elif isinstance(layer, layers.MultiHeadAttention):
        for part, rank in zip(_parts(layer), ranks, strict=True):
            to_low_rank(part, rank, init)
        layer.__class__ = LowRankMultiHeadAttention
        layer.ranks = tuple(ranks)
    else:
        to_low_rank(layer, ranks[0], init)


def restore(model: layers.Layer) -> tuple[layers.Layer, NameMap]:
    """Replace factors by dense weights, in place."""

    def change(_: str, layer: layers.Layer) -> bool:
        if isinstance(layer, LowRank):
            to_dense(layer)
        elif isinstance(layer, LowRankMultiHeadAttention):
            for part in _parts(layer):
                to_dense(part)
            layer.__class__ = layers.MultiHeadAttention
        elif _low_rank_lstm(layer):
            cell_to_dense(layer.cell)
            layer.__class__ = layers.LSTM
            layer.use_cudnn = "auto"
        else:
            return False
        return True

    return model, _renamed(model, change)


def _renamed(model: layers.Layer, change: Callable[[str, layers.Layer], bool]) -> NameMap:
    # Change layers, and map the paths of their old variables to those of the new ones.
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
    # Maps kernel to u/kernel and v/kernel, and bias to v/bias, or the reverse. An LSTM's kernel becomes kernel_u and
    # kernel_v, while its bias is unchanged.
    def role(path: str) -> str:
        name = path.rpartition("/")[2]
        return name.removesuffix("_u").removesuffix("_v")

    return NameMap(
        {path: targets for path in old if (targets := tuple(n for n in new if role(n) == role(path))) != (path,)}
    )


def ranks_of(model: layers.Layer) -> dict[str, tuple[int, ...]]:
    """By name, the ranks of the factorised layers."""
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


# -- the switch (`WarmUp`) ---------------------------------------------------------------------------------------------
def grace_of(optimizer: Any) -> Grace | None:
    """The Grace that drives an optimizer, if any."""
    return getattr(optimizer, "_grace", None)


def transport_of(grace: Grace, model: layers.Layer) -> Transport:
    """The Grace's transport, bound to TensorFlow."""
    from grace.keras.broadcast import transport_of
    from grace.tensorflow.variables import TOOLKIT

    return transport_of(TOOLKIT, grace)


def broadcast(model: layers.Layer, names: Iterable[str], grace: Grace) -> None:
    """Copy worker 0's values of the named variables to all workers."""
    from grace.tensorflow import broadcast_variables

    wanted = set(names)
    if added := [v for v in model.trainable_variables if v.path in wanted]:
        broadcast_variables(added, 0, grace)


def hand_over(grace: Grace, model: layers.Layer, old: Any, new: Any) -> Any:
    """Rebuild the Grace for the model's new variables; if it drove ``old``, let it drive ``new``. Returns ``new``."""
    from grace.keras.layout import described
    from grace.keras.optimizer import DistributedOptimizer, release
    from grace.tensorflow.variables import TOOLKIT

    driven = hasattr(old, "_grace")
    if driven:
        release(old)
    grace.claimed.clear()
    grace.rebuild(described(TOOLKIT, grace, model.trainable_variables))
    return DistributedOptimizer(new, grace) if driven else new
