"""Broadcasts of variables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from grace.core import Transport
from grace.core.collectives import Broadcast
from grace.engine.session import Grace
from grace.keras.checks import check_grace
from grace.keras.toolkits import Toolkit, toolkit, unconverted
from grace.transports import get_transport


@unconverted
def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, grace: Grace | None = None) -> None:
    """Assign worker ``root_rank``'s values to the variables of all workers. Call it eagerly, before training.

    ``variables``: of any shape and any numeric dtype or bool. ``root_rank``: the rank within the transport of
    ``grace``.
    All workers first compare names, shapes and dtypes. All raise ValueError if these differ, naming the difference, or
    if there are no variables (a model has none before it is built). Raises TypeError for variables of strings or
    resources, RuntimeError inside a graph.
    """
    if isinstance(root_rank, Grace):
        raise TypeError("root_rank comes before the Grace: broadcast_variables(variables, 0, grace=grc)")
    if grace is not None:
        check_grace(grace, "broadcast_variables")
    if not isinstance(variables, Iterable) or isinstance(variables, str) or hasattr(variables, "shape"):
        raise TypeError(f"broadcast_variables needs a list of variables, as model.variables, not {type(variables)}")
    variables = list(variables)
    kit = toolkit("grace.keras.broadcast_variables", variables)
    if kit.inside_graph():
        raise RuntimeError("broadcast_variables is no part of a graph: call it once, outside of tf.function")
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise TypeError(f"broadcast_variables assigns to variables, and {type(variable).__name__} is none")
    transport = transport_of(kit, grace)
    if not isinstance(root_rank, int) or not 0 <= root_rank < transport.size:
        raise ValueError(f"root_rank={root_rank!r}: there are workers 0 to {transport.size - 1}")
    if compare(kit, variables, transport, root_rank) == 0:
        raise ValueError(
            "there are no variables to broadcast: this model is built by its first batch. Call it on a batch or "
            "build it first, or use BroadcastCallback with model.fit"
        )
    if transport.size > 1:
        assign_from(kit, variables, transport, root_rank)


def compare(kit: Toolkit, variables: Sequence[Any], transport: Transport, root_rank: int) -> int:
    """Compare the workers' variables; returns their number. Raises on all workers: ValueError, naming the difference,
    if variables differ; TypeError for dtypes that cannot be sent.
    """
    mine = [[kit.path_of(v), kit.dtype_of(v), list(map(int, v.shape))] for v in variables]
    text = json.dumps([root_rank, mine])
    workers = list(map(json.loads, transport.exchange(text) if transport.size > 1 else [text]))
    first_root, first = workers[0]
    for rank, (root, other) in enumerate(workers):
        if root != first_root:
            raise ValueError(f"worker 0 broadcasts from worker {first_root}, and worker {rank} from worker {root}")
        if other != first:
            raise ValueError(f"worker 0 and worker {rank} differ: {_difference(first, other)}")
    for path, dtype, _ in first:
        if not kit.can_broadcast(dtype):
            raise TypeError(f"{path!r} has dtype {dtype}, which cannot be broadcast: leave it out")
    return len(first)


def assign_from(kit: Toolkit, variables: Sequence[Any], transport: Transport, root_rank: int) -> None:
    """Send the root's values as bytes, so that no array function needs to support the dtype."""
    ((data,),) = transport.start([Broadcast((kit.pack(variables),), root_rank)], "variables")()
    kit.unpack(variables, data)


def transport_of(kit: Toolkit, grace: Grace | None) -> Transport:
    """Return the transport of ``grace``, or the initialised one if None, bound to the toolkit's backend."""
    transport = get_transport() if grace is None else grace.transport
    bound = transport.bind(kit.backend()) if getattr(transport, "xp", None) is None else transport
    if grace is not None:
        bound.timeout = grace.options.timeout
    return bound


def _difference(first: list[Any], other: list[Any]) -> str:
    remedy = "Build the same model, in the same order, on every worker before its variables are broadcast"
    for mine, theirs in zip(first, other, strict=False):
        if mine != theirs:
            (a, kind, shape), (b, other_kind, other_shape) = mine, theirs
            return f"{a!r} is {kind}{shape} on the one where the other has {b!r}, {other_kind}{other_shape}. {remedy}"
    longer, owner = (first, "worker 0") if len(first) > len(other) else (other, "the other")
    names = [name for name, _, _ in longer[min(len(first), len(other)) :]]
    return f"only {owner} has {names[:3]}. {remedy}"
