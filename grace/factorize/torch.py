"""Pufferfish for PyTorch: how to find, replace and restore layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence

from grace import torch as integration
from grace.core import Transport
from grace.engine.session import Grace
from grace.factorize.plan import Layer, Matrix, NameMap
from grace.factorize.torch_layers import (
    CONVOLUTIONS,
    LOW_RANK,
    LowRank,
    LowRankLSTM,
    LowRankMultiheadAttention,
    projections,
)
from grace.torch.broadcast import transport_of as transport_for

__all__ = ["LowRank", "LowRankLSTM", "LowRankMultiheadAttention"]

KINDS = (nn.Linear, *CONVOLUTIONS, nn.LSTM, nn.MultiheadAttention)
Ranks = Mapping[str, Sequence[int]]


def survey(model: nn.Module) -> list[Layer]:
    """Return every layer that has parameters, in the model's order."""
    _refuse_wrapped(model)
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    counted: set[nn.Parameter] = set()
    layers = []
    for name, module in _walk(model):
        if any(nn.parameter.is_lazy(p) for p in module.parameters(recurse=False)):
            raise ValueError(f"{name!r} is lazy: run one batch through the model first")
        whole = isinstance(module, (*KINDS, *LOW_RANK))
        parameters = dict(module.named_parameters(recurse=whole))
        if not parameters:
            continue
        weights = {key: p for key, p in parameters.items() if p.dim() > 1}
        trained = {p for p in parameters.values() if p.requires_grad} - counted
        counted |= trained
        reason = _obstacle(module, weights)
        for key, p in weights.items():
            own = f"{name}.{key}" if name else key
            if others := [other for other in owners[p] if other != own]:
                reason = reason or f"its weight is also {others[0]}"
        shapes = [tuple(p.shape) for p in weights.values()] or [tuple(p.shape) for p in parameters.values()]
        layers.append(
            Layer(
                name=name,
                kind=type(module).__name__,
                shape=shapes[0],
                parameters=sum(p.numel() for p in trained),
                matrices=() if reason else _matrices(module),
                reason=reason,
            )
        )
    return layers


def _walk(module: nn.Module, name: str = "", seen: set[nn.Module] | None = None) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    yield name, module
    if not isinstance(module, (*KINDS, *LOW_RANK)):
        for key, child in module.named_children():
            yield from _walk(child, f"{name}.{key}" if name else key, seen)


def _refuse_wrapped(model: nn.Module) -> None:
    for attribute, what in (("module", "wrapped"), ("_orig_mod", "compiled")):
        if attribute == "_orig_mod" and hasattr(model, attribute):
            raise ValueError(f"this model is {what}: factorize model.{attribute}, then compile again")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise ValueError("this model is wrapped: factorize model.module, then wrap it again")


def _obstacle(module: nn.Module, weights: Mapping[str, torch.Tensor]) -> str:
    kind = type(module)
    if isinstance(module, LOW_RANK):
        return "factorised already"
    if isinstance(module, nn.Embedding):
        return "an embedding: its rows are looked up, not multiplied"
    if not weights and not isinstance(module, KINDS):
        return "no matrix"
    if kind not in KINDS:
        return f"{kind.__name__} is of no kind that is factorised"
    if is_parametrized(module) or not weights:
        return "its weight is computed from other tensors"
    if not all(p.requires_grad for p in weights.values()):
        return "frozen"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "it has hooks, which a new layer would not have"
    if isinstance(module, CONVOLUTIONS) and module.groups > 1:
        return "grouped: its weight is not one matrix"
    if isinstance(module, nn.LSTM) and module.proj_size:
        return "an LSTM with projections"
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        return "attention with bias_k or add_zero_attn"
    return ""


def _matrices(module: nn.Module) -> tuple[Matrix, ...]:
    if isinstance(module, nn.LSTM):
        stacks = [p for key, p in module.named_parameters() if key.startswith("weight_")]
        return tuple(Matrix(len(p) // 4, p.shape[1], 4) for p in stacks)
    weights = [module.weight] if not isinstance(module, nn.MultiheadAttention) else projections(module)
    if isinstance(module, nn.MultiheadAttention):
        weights = [*weights, module.out_proj.weight]
    return tuple(Matrix(len(w), math.prod(w.shape[1:])) for w in weights)


def positions(model: nn.Module, example: Any) -> dict[str, list[int]]:
    """By layer, how many vectors each of its matrices multiplies when the model runs an example (tensors)."""
    counts: dict[str, list[int]] = {}

    def watch(name: str, module: nn.Module) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            now = _positions(module, args, kwargs, output)
            counts[name] = [a + b for a, b in zip(counts.get(name, [0] * len(now)), now, strict=True)]

        return module.register_forward_hook(hook, with_kwargs=True)

    handles = [watch(name, module) for name, module in _walk(model) if type(module) in KINDS]
    modes = {module: module.training for module in model.modules()}
    try:
        # In evaluation without gradients, PyTorch's transformer layers would bypass their modules and the hooks.
        with torch.enable_grad():
            model.eval()(*(example if isinstance(example, (tuple, list)) else (example,)))
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    return counts


def _positions(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> list[int]:
    if isinstance(module, nn.LSTM):
        (sequence, *_) = args or (kwargs["input"],)
        data = sequence.data if isinstance(sequence, PackedSequence) else sequence
        count = 2 * module.num_layers * (2 if module.bidirectional else 1)
        return [data.numel() // module.input_size] * count
    if isinstance(module, nn.MultiheadAttention):
        q, k, v = (*args, *(kwargs[key] for key in ("query", "key", "value")[len(args) :]))[:3]
        tokens = [x.numel() // x.shape[-1] for x in (q, k, v)]
        return [*tokens, tokens[0]]
    return [output.numel() // len(module.weight)]


def replace(model: nn.Module, ranks: Ranks, init: str) -> tuple[nn.Module, NameMap]:
    """Replace the layers in ``ranks`` by factors of these ranks, in place."""
    makers = {nn.LSTM: LowRankLSTM, nn.MultiheadAttention: LowRankMultiheadAttention}
    renamed = NameMap()
    for name, module in list(_walk(model)):
        if name not in ranks:
            continue
        cls: Any = makers.get(type(module), LowRank)
        try:
            new = cls.of(module, ranks[name], init)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error
        model = _put(model, name, module, new)
        renamed.update(_prefixed(name, cls.renamed(key for key, _ in module.named_parameters())))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # the new layers do not support nested tensors
    return model, renamed


def restore(model: nn.Module) -> tuple[nn.Module, NameMap]:
    """Replace factors by dense layers, in place."""
    renamed = NameMap()
    for name, module in list(_walk(model)):
        if isinstance(module, LOW_RANK):
            new = module.dense()
            model = _put(model, name, module, new)
            renamed.update(_prefixed(name, type(module).renamed(key for key, _ in new.named_parameters())))
    return model, renamed.inverse()


def ranks_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """By name, the ranks of the factorised layers."""
    return {name: tuple(module.ranks) for name, module in _walk(model) if isinstance(module, LOW_RANK)}


def load_dense(model: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Load the dense model's state_dict into the factorised one."""
    dense, _ = restore(copy.deepcopy(model))
    dense.load_state_dict(checkpoint)
    model.load_state_dict(replace(dense, ranks_of(model), "svd")[0].state_dict())


def recalibrate(model: nn.Module, batches: Iterable[Any]) -> None:
    """Recompute the statistics of BatchNorm."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    modes = {module: module.training for module in model.modules()}
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    try:
        model.train()
        with torch.no_grad():
            for batch in batches:
                model(*(batch if isinstance(batch, (tuple, list)) else (batch,)))
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in modes.items():
            module.training = training


def _put(model: nn.Module, name: str, old: nn.Module, new: nn.Module) -> nn.Module:
    new.train(old.training)
    if not name:
        return new
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, new)
    return model


def _prefixed(name: str, names: NameMap) -> NameMap:
    dot = f"{name}." if name else ""
    return NameMap({dot + old: tuple(dot + one for one in new) for old, new in names.items()})


# -- the switch (`WarmUp`) ---------------------------------------------------------------------------------------------
def grace_of(optimizer: Any) -> Grace | None:
    """The Grace that drives an optimizer, if any."""
    driver = getattr(optimizer, "_grace", None)
    return None if driver is None else driver.grace


def transport_of(grace: Grace, model: nn.Module) -> Transport:
    """The Grace's transport, bound to the model's device."""
    return transport_for(grace, next(model.parameters()))


def broadcast(model: nn.Module, names: Iterable[str], grace: Grace) -> None:
    """Copy worker 0's values of the named parameters to all workers."""
    parameters = dict(model.named_parameters())
    integration.broadcast_parameters({name: parameters[name] for name in names}, 0, grace)


def hand_over(grace: Grace, model: nn.Module, old: Any, new: Any) -> Any:
    """Rebuild the Grace for the model's new tensors; if it drove ``old``, let it drive ``new`` (returned)."""
    trained = {p for group in new.param_groups for p in group["params"] if p.requires_grad}
    passes = old._grace.backward_passes if hasattr(old, "_grace") else None
    if passes is not None:
        integration.release(old)
    grace.rebuild({name: p for name, p in model.named_parameters() if p in trained})
    if passes is None:
        return new
    return integration.DistributedOptimizer(new, grace, model.named_parameters(), passes)
