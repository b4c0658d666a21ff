"""Pufferfish: train a smaller model, by factors of low rank in the place of its matrices.

Wang, Agarwal, Papailiopoulos: "Pufferfish: Communication-efficient Models At No Extra Cost", MLSys 2021,
arXiv:2103.03936. Works on PyTorch and Keras 3 models, and imports neither before it sees a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grace.factorize.models import toolkit_of
from grace.factorize.plan import LayerPlan, NameMap, Plan, decide
from grace.factorize.warmup import WarmUp

__all__ = ["LayerPlan", "NameMap", "Plan", "WarmUp", "defactorize", "factorize", "load_dense", "plan", "recalibrate"]


def plan(model: Any, *, example: Any = None, **settings: Any) -> Plan:
    """What `factorize` would do to a model with these settings: nothing is changed.

    ``rank_ratio`` (0.25): a matrix of m rows and n columns gets rank ``rank_ratio`` x min(m, n), rounded down. Of a
    convolution m is the output channels and n the input channels times the kernel; of an LSTM each gate has matrices of
    its own.
    ``keep_first`` (1): so many layers stay dense, counted in the model's order over all that have a matrix, embeddings
    too; or names. ``keep_last`` (True): the last of them does.
    ``include``: names of the only layers to factorise; ``exclude`` (none): of layers to leave alone. A name stands for
    the layer, for all layers below it ("layer4"), or is a pattern ("*.shortcut.*").
    ``ranks``: rank by name, for layers that are to be factorised whatever the other settings say.
    ``min_numel`` (1024): layers of fewer weights stay dense, as do layers whose factors would not be smaller.
    ``example``: an input (or a tuple of inputs) that the model is called with to count multiply-adds.

    ValueError for a name that no layer has. Layers of other kinds, frozen or shared weights stay as they are; the plan
    says why.
    """
    toolkit = toolkit_of(model)
    return decide(toolkit.survey(model), None if example is None else toolkit.positions(model, example), **settings)


def factorize(model: Any, *, init: str = "svd", plan: Plan | None = None, **settings: Any) -> tuple[Any, NameMap]:
    """Put factors in the place of a model's matrices, in place. Returns the model and its new parameters' names.

    Nothing else changes: other tensors keep their values and identity. A PyTorch model that is itself one layer cannot
    be changed in place and comes back as another. Make optimizers and graphs anew: they hold the old parameters.

    ``init``: "svd", the best approximation of the present weights; or "random", normal numbers whose product has the
    variance of the present weights. ``plan``: what `plan` gave; else it is made from ``settings``, which are `plan`'s.
    """
    if init not in ("svd", "random"):
        raise ValueError(f"init={init!r}: choose 'svd' or 'random'")
    if plan is not None and settings:
        raise ValueError(f"pass a plan or settings, not both: {', '.join(settings)}")
    toolkit = toolkit_of(model)
    plan = decide(toolkit.survey(model), **settings) if plan is None else plan
    return toolkit.replace(model, plan.ranks, init)


def defactorize(model: Any) -> tuple[Any, NameMap]:
    """Put dense layers, with the products as weights, in the place of all factors, in place: `factorize` undone."""
    return toolkit_of(model).restore(model)


def load_dense(model: Any, checkpoint: Any) -> None:
    """Load an ordinary checkpoint of the dense model into the factorised one, by SVD at its ranks.

    ``checkpoint``: PyTorch: the dense model's ``state_dict()``; Keras: the path of its ``.weights.h5``. The names must
    be the dense model's. A Keras model must be compiled again.
    """
    toolkit_of(model).load_dense(model, checkpoint)


def recalibrate(model: Any, batches: Iterable[Any]) -> None:
    """Measure BatchNorm's means and variances anew over some batches of inputs: truncation has made them stale.

    Each worker sees its own batches; broadcast the model's buffers if all must agree.
    """
    toolkit_of(model).recalibrate(model, batches)
