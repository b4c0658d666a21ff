"""Pufferfish: trains a smaller model, with low-rank factors instead of its weight matrices.

Wang, Agarwal, Papailiopoulos: "Pufferfish: Communication-efficient Models At No Extra Cost", MLSys 2021,
arXiv:2103.03936. Works on PyTorch and Keras 3 models; neither toolkit is imported before a function gets a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grace.factorize.models import toolkit_of
from grace.factorize.plan import LayerPlan, NameMap, Plan, decide
from grace.factorize.warmup import WarmUp

__all__ = ["LayerPlan", "NameMap", "Plan", "WarmUp", "defactorize", "factorize", "load_dense", "plan", "recalibrate"]


def plan(model: Any, *, example: Any = None, **settings: Any) -> Plan:
    """Preview `factorize` with these settings; changes nothing.

    ``rank_ratio`` (0.25): a matrix of m rows and n columns gets rank ``rank_ratio`` x min(m, n), rounded down. For a
    convolution m is the number of output channels and n the number of input channels times the kernel's size; an LSTM
    has separate matrices for each gate.
    ``keep_first`` (1): number of layers that stay dense, counted in the model's order over all layers with a matrix,
    including embeddings; or their names. ``keep_last`` (True): keep the last layer with a matrix dense.
    ``include``: names of the only layers to factorise; ``exclude`` (none): layers to leave dense. A name is that
    of a layer or of a parent of layers ("layer4"), or a pattern ("*.shortcut.*").
    ``ranks``: by name, the rank of a layer, or a rank for each of its matrices in the order of the plan; these layers
    are factorised regardless of the other settings.
    ``min_numel`` (1024): layers of fewer weights stay dense, as do layers whose factors would not be smaller.
    ``example``: an input (or a tuple of inputs) for a call of the model that counts multiply-adds.

    Raises ValueError for a name that no layer has. Layers of other kinds, and frozen or shared weights, stay unchanged;
    the plan says why.
    """
    toolkit = toolkit_of(model)
    return decide(toolkit.survey(model), None if example is None else toolkit.positions(model, example), **settings)


def factorize(model: Any, *, init: str = "svd", plan: Plan | None = None, **settings: Any) -> tuple[Any, NameMap]:
    """Replace a model's matrices by factors, in place. Returns the model and a map from old to new parameter names.

    Nothing else changes: other tensors keep their values and identity. A PyTorch model that is itself one layer cannot
    be changed in place, and a new object is returned. Create optimizers and graphs again: they hold the old parameters.

    ``init``: "svd", the best approximation of the present weights; or "random", factors of normally distributed
    numbers, whose product has the variance of the present weights. ``plan``: the result of `plan`; by default made from
    ``settings``, as in `plan`.
    """
    if init not in ("svd", "random"):
        raise ValueError(f"init={init!r}: choose 'svd' or 'random'")
    if plan is not None and settings:
        raise ValueError(f"pass a plan or settings, not both: {', '.join(settings)}")
    toolkit = toolkit_of(model)
    plan = decide(toolkit.survey(model), **settings) if plan is None else plan
    return toolkit.replace(model, plan.ranks, init)


def defactorize(model: Any) -> tuple[Any, NameMap]:
    """Undo `factorize`, in place: replace all factors by dense layers with the products as weights."""
    return toolkit_of(model).restore(model)


def load_dense(model: Any, checkpoint: Any) -> None:
    """Load an ordinary checkpoint of the dense model into the factorised one, by SVD at its ranks.

    ``checkpoint``: PyTorch: the dense model's ``state_dict()``; Keras: the path of its ``.weights.h5``. The names must
    be the dense model's. A Keras model must be compiled again.
    """
    toolkit_of(model).load_dense(model, checkpoint)


def recalibrate(model: Any, batches: Iterable[Any]) -> None:
    """Recompute BatchNorm's means and variances over some batches of inputs, since factorisation has changed them.

    Each worker uses its own batches; broadcast the model's buffers if all must agree.
    """
    toolkit_of(model).recalibrate(model, batches)
