"""Broadcasts of parameters and of optimizer state."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from grace.backends import get_backend
from grace.core import Transport
from grace.core.collectives import Broadcast
from grace.engine.session import Grace
from grace.torch.checks import check_grace, check_optimizer, entries, is_wrapper, kind_of, ordinary
from grace.torch.named import check_order
from grace.transports import get_transport

CHUNK_BYTES = 64 * 2**20
"""Largest size of a broadcast message in bytes; a larger tensor is sent alone."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By element size in bytes, the integer dtype as which the elements' bits are sent."""
NUMPY = "\0numpy"
"""Key of an encoded NumPy number or array; the value holds its dtype, shape and bytes."""
WRAPPER = "\0wrapper"
"""Key of an encoded tensor subclass; the value holds its class, inner tensors, context, size and stride."""


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0, grace: Grace | None = None
) -> None:
    """Copy worker ``root_rank``'s values to all workers, in place.

    ``params``: ``model.state_dict()`` or ``model.named_parameters()``; tensors of any dtype. Of tensor subclasses with
    `__tensor_flatten__`, such as torchao's quantised weights, the inner tensors are copied. ``grace``: the Grace whose
    transport to use; by default, the initialised transport.

    Every worker must make this call. The workers first compare names, shapes and dtypes; if these differ, or a tensor
    cannot be copied (it is sparse, quantised, a shard, or on the meta device), all workers raise ValueError, and
    nothing changes. Raises TypeError if ``params`` has no names. Values that are not tensors (a module's extra
    state) are not copied, and a warning names them.
    """
    named, extra = _tensors(params)
    transport = transport_of(grace, next(iter(named.values()), None))
    targets, error = {}, ""
    try:
        targets = {name: _target(name, tensor) for name, tensor in named.items()}
    except (TypeError, ValueError) as found:
        error = str(found)
    about = {name: f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.") for name, tensor in named.items()}
    about |= {name: f"{text} expanded" for name, text in about.items() if name in targets and targets[name][1]}
    _compare(transport, root_rank, about, error, "Make the same model on every worker")
    if extra:
        warnings.warn(
            f"{', '.join(map(repr, extra[:3]))} is no tensor and stays each worker's own: where it must be equal, give "
            "it to the others yourself, as by torch.distributed.broadcast_object_list and load_state_dict",
            stacklevel=2,
        )
    if transport.size == 1:
        return
    device = transport.xp.device  # type: ignore[attr-defined]
    for chunk in _chunks([target for target, _ in targets.values()]):
        sent = [Broadcast((target.to(device).contiguous(),), root_rank) for target in chunk]
        with ordinary():
            received = transport.start(sent, "parameters")()
        if transport.rank != root_rank:
            for target, (value,) in zip(chunk, received, strict=True):
                target.copy_(value)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, grace: Grace | None = None) -> None:
    """Copy worker ``root_rank``'s optimizer state to all workers, including those without state.

    State and settings may hold tensors, numbers (NumPy's too), text, lists and dictionaries of these, and classes
    registered by `torch.serialization.add_safe_globals`, such as torchao's states. Parameters are matched by the
    optimizer's own names (``torch.optim.SGD(model.named_parameters())``), else by position. ``grace``: as in
    `broadcast_parameters`. Every worker must make this call. If the workers' optimizers or parameters differ, equal
    weights are in another order, or there are values of other types, all workers raise ValueError; nothing changes.
    """
    check_optimizer(optimizer, "broadcast_optimizer_state(optimizer)")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    transport = transport_of(grace, parameters[0])
    saved, error = io.BytesIO(), ""
    if transport.rank == root_rank:
        try:
            torch.save(_plain(optimizer.state_dict(), "state_dict()"), saved)
        except (TypeError, ValueError) as found:
            error = str(found)
    about = {"the optimizer": type(optimizer).__name__}
    named = all("param_names" in group for group in optimizer.param_groups)
    for number, group in enumerate(optimizer.param_groups):
        shapes = [f"{p.dtype}{list(p.shape)}" for p in group["params"]]
        if named:
            shapes = sorted(f"{name!r} {shape}" for name, shape in zip(group["param_names"], shapes, strict=True))
        about[f"parameter group {number}"] = ", ".join(shapes)
    _compare(transport, root_rank, about, error, "Make the same optimizer on every worker")
    if transport.size == 1:
        return
    if not named:
        check_order(parameters, transport)
    device = transport.xp.device  # type: ignore[attr-defined]
    data = torch.frombuffer(bytearray(saved.getvalue() or b"\0"), dtype=torch.uint8).to(device)
    with ordinary():
        ((received,),) = transport.start([Broadcast((data,), root_rank, ragged=True)], "optimizer")()
    state: Any = None
    if transport.rank != root_rank:
        try:
            content = io.BytesIO(received.cpu().numpy().tobytes())
            place = _Place(parameters[0].device)
            state = _restored(torch.load(content, map_location=place, weights_only=True))
        except Exception as found:  # another PyTorch version, or out of memory: tell all workers
            error = f"cannot read worker {root_rank}'s state: {found}"
    _compare(transport, root_rank, {}, error, "")
    if transport.rank != root_rank:
        if named:
            for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
                numbers = dict(zip(group["param_names"], group["params"], strict=True))
                group["param_names"] = own["param_names"]
                group["params"] = [numbers[name] for name in own["param_names"]]
        optimizer.load_state_dict(state)


def transport_of(grace: Grace | None, example: torch.Tensor | None) -> Transport:
    """Return the transport of ``grace``, or the initialised one, bound to the device of ``example`` if unbound."""
    if grace is not None:
        check_grace(grace, "pass it as grace=grc")
    transport = get_transport() if grace is None else grace.transport
    if getattr(transport, "xp", None) is not None:
        return transport
    device = example.device if example is not None and example.device.type != "meta" else _usual_device(transport)
    return transport.bind(get_backend("torch", str(device)))


def _usual_device(transport: Transport) -> torch.device:
    from grace.transports.torch_distributed import TorchDistributedTransport

    # The device of messages without an example tensor: NCCL cannot send CPU tensors.
    nccl = isinstance(transport, TorchDistributedTransport) and "cpu" not in torch.distributed.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


class _Place:
    """``map_location`` for `torch.load`: loads any accelerator's tensors to ``device``; CPU tensors stay on the CPU."""

    def __init__(self, device: torch.device):
        self._device = device

    def __call__(self, storage: Any, location: str) -> Any:
        if location == "cpu":
            return storage
        return torch.serialization.default_restore_location(storage, str(self._device))


def _tensors(params: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    # The tensors by sorted name, and the names of values that are not tensors.
    named: dict[str, Any] = {}
    for name, value in entries(params, "params", "pass model.state_dict() or model.named_parameters()"):
        if named.setdefault(name, value) is not value:
            raise ValueError(f"two tensors are named {name!r}: broadcast the models one after the other")
    own = {n: v for n, v in named.items() if isinstance(v, torch.Tensor) and not n.endswith("_extra_state")}
    extra = [n for n, v in named.items() if n not in own and v is not None]
    return dict(pair for name in sorted(own) for pair in _inner(name, own[name])), extra


def _inner(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    # Yields the tensors that hold a tensor's values: the tensor itself, or the inner tensors of a wrapper.
    if is_wrapper(tensor) and hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _inner(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


def _target(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    # Returns a writable integer view of a tensor's bits, each element once, and whether the tensor is expanded.
    if (kind := kind_of(tensor)) is not None:
        raise TypeError(f"{name!r} is {kind}, which cannot be broadcast: leave it out, and load it on each worker")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name!r} was made in torch.inference_mode(), and only there it can be written to")
    target = tensor.detach()
    try:
        target = torch.view_as_real(target) if target.is_complex() else target
        target = target.view(BITS[target.element_size()])
    except (RuntimeError, KeyError) as error:
        raise TypeError(f"{name!r} of dtype {tensor.dtype} cannot be broadcast: clone() it first ({error})") from error
    shared = [dim for dim, stride in enumerate(target.stride()) if stride == 0 and target.shape[dim] > 1]
    for dim in shared:
        target = target.narrow(dim, 0, 1)
    reach = 0  # elements spanned by the dimensions with smaller strides
    for stride, length in sorted(zip(target.stride(), target.shape, strict=True)):
        if length > 1 and stride <= reach and target.numel():
            raise ValueError(f"{name!r} has elements that share memory: clone() it first")
        reach += stride * (length - 1)
    return target, bool(shared)


def _compare(transport: Transport, root: Any, about: Mapping[str, str], error: str, remedy: str) -> None:
    """Raise ValueError on all workers if their calls differ, or if one has an error, naming the worker and why.

    ``about``: a description of each named part of the call; ``error``: this worker's own error, or empty;
    ``remedy``: ends the message about a difference.
    """
    if not hasattr(root, "__index__") or isinstance(root, bool):
        error = error or f"root_rank={root!r} is {type(root).__name__}, not an integer"
    elif not 0 <= root < transport.size:
        error = error or f"root_rank={root} must be a worker's rank, 0 .. {transport.size - 1}"
    texts = [json.dumps([str(root), about, error])]
    if transport.size > 1:
        with ordinary():
            texts = transport.exchange(texts[0])
    told = [json.loads(text) for text in texts]
    if errors := {rank: why for rank, (_, _, why) in enumerate(told) if why}:
        rank, why = next(iter(errors.items()))
        raise ValueError(why if len(errors) == len(told) else f"worker {rank}: {why}")
    first_root, first, _ = told[0]
    for rank, (other_root, other, _) in enumerate(told):
        if other_root != first_root:
            raise ValueError(f"worker 0 gives root_rank={first_root} and worker {rank} gives {other_root}")
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                one, two = first.get(name, "missing"), other.get(name, "missing")
                raise ValueError(
                    f"worker 0 and worker {rank} differ: {name!r} is {one} on worker 0 and {two} on worker {rank}. "
                    f"{remedy}"
                )


def _chunks(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    room = CHUNK_BYTES
    for tensor in tensors:
        if chunk and tensor.nbytes > room:
            yield chunk
            chunk, room = [], CHUNK_BYTES
        chunk.append(tensor)
        room -= tensor.nbytes
    if chunk:
        yield chunk


_REFUSED = (
    "{} is {}, which cannot be broadcast: keep tensors, numbers and text in the optimizer, or allow the class on all "
    "workers by torch.serialization.add_safe_globals([{}])"
)


def _plain(value: Any, path: str) -> Any:
    """Encode a value so that `torch.load` reads it without running code. TypeError if impossible, naming ``path``."""
    if isinstance(value, np.generic | np.ndarray) and not value.dtype.hasobject:
        return {NUMPY: [value.dtype.str, list(value.shape), value.tobytes().hex(), isinstance(value, np.ndarray)]}
    if isinstance(value, torch.Tensor):
        if (kind := kind_of(value)) is None:
            return value.detach()
        if not is_wrapper(value) or not hasattr(value, "__tensor_flatten__"):
            raise TypeError(f"{path} is {kind}, which cannot be broadcast")
        if type(value) not in _allowed().values():
            raise TypeError(_REFUSED.format(path, _name(type(value)), type(value).__name__))
        names, context = value.__tensor_flatten__()
        inner = {name: _plain(getattr(value, name), f"{path}.{name}") for name in names}
        return {WRAPPER: [_name(type(value)), inner, _plain(context, path), list(value.shape), list(value.stride())]}
    if type(value) in (dict, list, tuple):
        if type(value) is dict:
            return {key: _plain(each, f"{path}[{key!r}]") for key, each in value.items()}
        return type(value)(_plain(each, f"{path}[{index}]") for index, each in enumerate(value))
    if value is not None and type(value) not in (bool, int, float, str):
        content = io.BytesIO()
        try:
            torch.save(value, content)
            torch.load(io.BytesIO(content.getvalue()), weights_only=True)
        except Exception as error:  # pickling may raise anything
            raise TypeError(_REFUSED.format(path, _name(type(value)), type(value).__name__)) from error
    return value


def _allowed() -> dict[str, Any]:
    # The classes that the user allows torch.load to read, by name.
    allowed = (each[0] if isinstance(each, tuple) else each for each in torch.serialization.get_safe_globals())
    return {_name(each): each for each in allowed}


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _restored(value: Any) -> Any:
    if type(value) is dict and value.keys() == {WRAPPER}:
        name, inner, context, size, stride = _restored(value[WRAPPER])
        if name not in _allowed():
            raise ValueError(f"{name} is not allowed here by torch.serialization.add_safe_globals")
        return _allowed()[name].__tensor_unflatten__(inner, context, torch.Size(size), tuple(stride))
    if type(value) is dict and value.keys() == {NUMPY}:
        dtype, shape, content, is_array = value[NUMPY]
        array = np.frombuffer(bytes.fromhex(content), np.dtype(dtype)).reshape(shape).copy()
        return array if is_array else array[()]
    if type(value) is dict:
        return {key: _restored(each) for key, each in value.items()}
    return type(value)(map(_restored, value)) if type(value) in (list, tuple) else value
