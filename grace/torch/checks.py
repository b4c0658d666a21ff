"""Checks of user arguments before anything is sent, with errors in the users' terms and a remedy."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from grace.core import name_of
from grace.engine.session import FLOATS, MOMENTUM_TWICE, PLAIN_SGD, Grace
from grace.transports.launched import loaded_horovod

WRAPPED = ("optimizer", "base", "base_optimizer", "optim")
"""Attributes in which wrappers, such as Accelerate's and schedule-free's, keep their optimizer."""


@contextmanager
def ordinary() -> Iterator[None]:
    """Create ordinary tensors even inside torch.inference_mode, whose own tensors are read-only outside it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def check_grace(grace: Any, call: str) -> None:
    """Raise TypeError unless ``grace`` is a Grace. ``call``: the correct call, for the message."""
    if isinstance(grace, Grace):
        return
    if isinstance(grace, str | Mapping):
        params = {"compressor": grace} if isinstance(grace, str) else dict(grace)
        raise TypeError(f"a Grace is needed, not {grace!r}: grc = grace.grace_from_params({params!r}), then {call}")
    raise TypeError(f"a Grace is needed, not {_kind(grace)}: make one with grace.grace_from_params, then {call}")


def check_optimizer(optimizer: Any, call: str = "DistributedOptimizer(optimizer, grace=grc)") -> None:
    """Raise TypeError unless ``optimizer`` is a PyTorch optimizer, not a wrapper. ``call``: the correct call."""
    if isinstance(optimizer, type):
        raise TypeError(f"{optimizer.__name__} is a class: make an optimizer of it first, then {call}")
    if isinstance(optimizer, Grace):
        raise TypeError(f"the arguments are swapped: {call}")
    if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        raise TypeError(f"{_kind(optimizer)} schedules learning rates: pass the optimizer that it was made for")
    if isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return
    for name in WRAPPED:
        if isinstance(getattr(optimizer, name, None), torch.optim.Optimizer):
            raise TypeError(
                f"{_kind(optimizer)} wraps an optimizer: pass the inner one, optimizer.{name}, and step the wrapper as "
                "before"
            )
    if type(optimizer).__module__.split(".")[0] in ("keras", "tf_keras", "tensorflow"):
        raise TypeError(f"{_kind(optimizer)} is Keras's: use grace.tensorflow.DistributedOptimizer")
    raise TypeError(f"a torch.optim.Optimizer is needed, not {_kind(optimizer)}: {call}")


def check_momentum(grace: Grace, optimizer: Any, stacklevel: int) -> None:
    """Warn if both the memory and the optimizer have momentum: SGD's ``momentum``, or Adam's first beta.

    Raises ValueError if the method returns updates instead of gradients and the optimizer keeps momentum or moments
    for matrices.
    """
    compressor, memory = grace.method.compressor, grace.method.memory
    if compressor.traits.update_direction:
        for group in optimizer.param_groups:
            moments = group.get("momentum") or "betas" in group
            if moments and any(p.ndim > 1 and p.requires_grad for p in group["params"]):
                raise ValueError(PLAIN_SGD.format(name_of(compressor), type(optimizer).__name__))
    elif memory.includes_momentum and any(
        group.get("momentum") or (group.get("betas") or (0.0,))[0] for group in optimizer.param_groups
    ):
        warnings.warn(MOMENTUM_TWICE.format(name_of(memory)), stacklevel=stacklevel + 1)


def named_pairs(named: Any) -> list[tuple[str, torch.Tensor]] | None:
    """``named_parameters`` as a list of names and tensors; None stays None. Raises TypeError if names are missing."""
    if named is None:
        return None
    remedy = "pass model.named_parameters()"
    pairs = entries(named, "named_parameters", remedy)
    for name, p in pairs:
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"named_parameters gives {name!r} as {_kind(p)}, not as a tensor: {remedy}")
    return pairs


def entries(named: Any, what: str, remedy: str) -> list[tuple[str, Any]]:
    """Names and values of a dictionary or an iterable of pairs. Raises TypeError for other types, naming the remedy."""
    if isinstance(named, torch.nn.Module):
        raise TypeError(f"{what} is a module, {type(named).__name__}: {remedy}")
    if isinstance(named, Mapping):
        named = named.items()
    if isinstance(named, str | torch.Tensor) or not isinstance(named, Iterable):
        raise TypeError(f"{what} is {_kind(named)}: {remedy}")
    pairs = []
    for pair in named:
        if isinstance(pair, torch.Tensor):
            raise TypeError(f"{what} has tensors without names, as model.parameters() gives: {remedy}")
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"{what} has {pair!r:.80}, which is no pair of a name and a tensor: {remedy}")
        pairs.append((pair[0], pair[1]))
    return pairs


def check_parameters(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
    """Raise TypeError or ValueError, naming the parameter, if the gradient of a trained one cannot be averaged."""
    if named is not None and not named:
        raise ValueError(
            "named_parameters is empty: a generator can be used once, so call model.named_parameters() again"
        )
    names = {p: name for name, p in named or ()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in enumerate(parameters):
        check_parameter(names.get(p, f"parameter{number}"), p)


def check_parameter(name: str, p: torch.Tensor) -> None:
    """Raise TypeError for a tensor type whose gradient cannot be averaged, ValueError for a tensor without values.

    Frozen tensors have no gradient, and may be of any type: call this again when one is unfrozen.
    """
    if not p.requires_grad:
        return
    if _is_dtensor(p):
        raise TypeError(
            f"{name!r} is a DTensor, of which this worker holds a shard: for fully_shard (FSDP2) use "
            "grace.torch.fsdp(model, grc) and the plain optimizer"
        )
    if isinstance(p, torch.nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"{name!r} has no shape yet: call a lazy model on one batch first")
    if p.is_meta:
        raise ValueError(
            f"{name!r} is on the meta device, without values: call model.to_empty(device=...) and initialise it first"
        )
    if (kind := kind_of(p)) is not None:
        raise TypeError(f"{name!r} is {kind}: parameters must be plain, dense tensors (gradients may be sparse)")
    dtype = str(p.dtype).removeprefix("torch.")
    if p.is_complex():
        raise TypeError(
            f"{name!r} has dtype {dtype}: train its real view, torch.view_as_real, which has as many numbers"
        )
    if dtype not in FLOATS:
        raise TypeError(f"{name!r} has dtype {dtype}: only {', '.join(FLOATS)} gradients can be averaged")
    if p.is_inference():
        raise ValueError(f"{name!r} was made in torch.inference_mode(), so it has no gradient: make the model outside")


def kind_of(tensor: torch.Tensor) -> str | None:
    """Describe a tensor that is not a plain dense array of values; None for an ordinary tensor."""
    if _is_dtensor(tensor):
        return "a DTensor, of which this worker holds a shard"
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return "a lazy parameter without a shape"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})"
    if is_wrapper(tensor):
        return f"a {_kind(tensor)}, a tensor subclass whose values lie elsewhere"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}"
    return "a tensor on the meta device, without values" if tensor.is_meta else None


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that keeps its values in other tensors, as quantised weights and states do."""
    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return dispatches and not tensor.is_nested and not _is_dtensor(tensor)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # a program with DTensors has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def check_unique(named: Iterable[tuple[str, torch.Tensor]] | None) -> None:
    """Raise ValueError if two different tensors share a name."""
    owners: dict[str, torch.Tensor] = {}
    for name, p in named or ():
        if owners.setdefault(name, p) is not p:
            raise ValueError(
                f"two parameters are named {name!r}: names key the state, so give each module a prefix, as "
                "named_parameters(prefix='encoder')"
            )


def check_horovod(
    grace: Grace,
    compression: Any = None,
    op: Any = "average",
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
) -> None:
    """Raise ValueError if an argument of Horovod's DistributedOptimizer does not match GRACE's behaviour."""
    given = {
        "compression": (compression, _plain_compression(compression), _compression_remedy(compression)),
        "op": (op, _averages(op), "GRACE averages"),
        "gradient_predivide_factor": (gradient_predivide_factor, gradient_predivide_factor == 1, "scale the loss"),
        "num_groups": (num_groups, num_groups == 0, "set bucket_mb in grace_from_params"),
        "groups": (groups, groups is None, "set bucket_mb in grace_from_params"),
        "process_set": (
            process_set,
            _same_workers(process_set, grace),
            "grace_from_params(..., transport=HorovodTransport(process_set))",
        ),
    }
    for key, (value, allowed, remedy) in given.items():
        if not allowed:
            raise ValueError(f"{key}={value!r} is not for GRACE's DistributedOptimizer: {remedy}")


def check_passes(passes: Any) -> None:
    """Raise TypeError or ValueError unless ``backward_passes_per_step`` is a positive integer."""
    if not isinstance(passes, int) or isinstance(passes, bool):
        raise TypeError(f"backward_passes_per_step={passes!r} must be an integer")
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes!r} must be at least 1")


def _averages(op: Any) -> bool:
    if op is None:
        return True
    if isinstance(op, int) and not isinstance(op, bool):  # Horovod's operations are integers
        return any(op == module.Average for module in loaded_horovod())
    name = getattr(op, "__name__", str(op)).lower()
    return name.endswith("average") or name.split(".")[-1] in ("avg", "mean")


def _plain_compression(compression: Any) -> bool:
    # Returns whether this is Horovod's Compression.none, for any of its toolkits.
    kind = compression if isinstance(compression, type) else type(compression)
    return compression is None or kind.__name__ == "NoneCompressor"


def _compression_remedy(compression: Any) -> str:
    kind = compression if isinstance(compression, type) else type(compression)
    method = " such as {'compressor': 'fp16'}" if kind.__name__ == "FP16Compressor" else ""
    return f"name the method in grace_from_params{method}"


def _same_workers(process_set: Any, grace: Grace) -> bool:
    if process_set is None:
        return True
    transport = grace.transport
    held = getattr(transport, "_process_set", None)
    if held is None or held.process_set_id == 0:  # the default: all workers
        return getattr(process_set, "process_set_id", None) == 0
    return getattr(process_set, "process_set_id", None) == held.process_set_id


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
