"""The mean of gradients over the devices along axes of a mesh, as a function."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from grace.backends import get_backend
from grace.backends.jax import TRACED, wide
from grace.core import Array, Program, name_of
from grace.core.collectives import Reduce
from grace.core.method import materialize
from grace.engine.meter import Meter
from grace.engine.report import Report, TensorReport
from grace.engine.scheduler import RoundScheduler
from grace.engine.trace import Trace
from grace.jax.plan import Axes, Leaf, Plan, plan_of
from grace.transports.jax_axis import JaxAxisTransport

DENSE = "dense"
P = jax.sharding.PartitionSpec
Config = Mapping[str, Any]
VARY = "jax.lax.pcast(params, {!r}, to='varying')"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """What the devices keep between steps: arrays with a leading axis, one row for each device."""

    tensors: dict[str, dict[str, Any]]
    """By tensor and key."""
    axes: Axes = field(metadata={"static": True})
    """The axes of the mesh over which the rows are spread."""


def specs(state: Any) -> Any:
    """The `jax.P` of each array in a state that contains `Residuals`, for ``in_specs`` and ``out_specs`` of shard_map.

    Residuals differ by device, so their spec names the axes; all else is replicated: P().
    """

    def of(part: Any) -> Any:
        return jax.tree.map(lambda _: P(part.axes), part) if isinstance(part, Residuals) else P()

    return jax.tree.map(of, state, is_leaf=lambda part: isinstance(part, Residuals))


def init(params: Any, config: Config, axis_name: str | Axes = "data", mesh: Any = None) -> Residuals:
    """The initial `Residuals` of a tree of parameters, made on their devices. Call it outside of shard_map.

    ``params``: arrays, or `jax.ShapeDtypeStruct`. ``mesh``: by default that of `jax.set_mesh`. If the processes'
    settings or shapes differ, each of them raises ValueError.
    """
    axes, mesh = _axes(axis_name), mesh or jax.sharding.get_mesh()
    plan = plan_of(config, axes, _sizes(mesh, axes))
    leaves = plan.leaves(params)
    agree(plan.describe(leaves))

    def made() -> Residuals:
        with wide():
            rank = lax.axis_index(axes).astype(jnp.int64)
            states = {name: plan.init(leaf, rank) for name, leaf in leaves.items()}
        rows = {name: {key: array[None] for key, array in state.items()} for name, state in states.items() if state}
        return Residuals(rows, axes)

    abstract = jax.eval_shape(jax.shard_map(made, mesh=mesh, in_specs=(), out_specs=P(axes), check_vma=False))
    if not jax.tree.leaves(abstract):
        return Residuals({}, axes)
    return jax.jit(jax.shard_map(made, mesh=mesh, in_specs=(), out_specs=P(axes), check_vma=False))()


def mean(
    grads: Any, residuals: Residuals, key: Any, config: Config, axis_name: str | Axes = "data"
) -> tuple[Any, Residuals]:
    """Average a tree of gradients over the devices along an axis, compressed; returns the means and next residuals.

    Call it inside shard_map. ``grads``: this device's own gradients: with ``check_vma=True`` JAX sums gradients of
    replicated parameters by itself, so cast these with `jax.lax.pcast` first, else ValueError is raised. ``key``: a key
    of `jax.random`, or an integer, such as the step; equal on all devices, and another one in each step. Each device
    folds its index into it. ``config``: as for `grace.grace_from_params`. ``axis_name``: an axis of the mesh, or two,
    machines first, then the devices of each.

    A mean that is not finite leaves its tensor's residuals unchanged; with ``nonfinite="zero"`` it becomes 0.
    """
    means, residuals, _ = averaged(grads, residuals, _number(key), config, _axes(axis_name))
    return means, residuals


def averaged(
    grads: Any, residuals: Residuals, step: Any, config: Config, axes: Axes, meters: list[Any] | None = None
) -> tuple[Any, Residuals, Array]:
    """`mean`, and the number of means that are not finite, int32[]. ``meters`` receives the counts of bytes."""
    plan = plan_of(config, axes, tuple(map(lax.axis_size, axes)))
    leaves = plan.leaves(grads)
    values, structure = jax.tree.flatten(grads)
    given = dict(zip(leaves, values, strict=True))
    xp: Any = get_backend("jax", TRACED)
    with wide():
        transport = JaxAxisTransport(xp, axes)
        _check_varying(given, transport)
        rank, step = transport.index.astype(jnp.int64), jnp.asarray(step).astype(jnp.int64)
        programs = _programs(plan, leaves, given, residuals, rank, step)
        scheduler = RoundScheduler("jax", programs, transport, Trace())
        while not scheduler.advance():
            pass
        if meters is not None:
            meters.append(_counted(plan, leaves, scheduler, transport))
        means, states, bad = {}, {}, jnp.zeros((), jnp.int32)
        dense = iter(scheduler.results.get(DENSE, ()))
        for name, leaf in leaves.items():
            old = _own(residuals, name)
            if leaf.reason:
                found, new = next(dense), old
                if old:
                    ctx = plan.context(leaf, rank, step)
                    found, new = plan.method.memory.after_dense_mean(found.astype("float32").reshape(-1), old, ctx)
            else:
                found, new = scheduler.results[name]
            found = materialize(found).reshape(leaf.shape)
            ok = xp.finite(found)
            _check_replicated(plan, name, found, transport)
            bad = bad + (~ok).astype(jnp.int32)
            found = jnp.where(ok, found, 0) if plan.options.nonfinite == "zero" else found
            means[name] = found.astype(leaf.dtype)
            if old:
                states[name] = {key: jnp.where(ok, new[key], old[key])[None] for key in old}
    return jax.tree.unflatten(structure, means.values()), Residuals(states, axes), bad


def report(params: Any, config: Config, axis_name: str | Axes = "data", mesh: Any = None) -> Report:
    """The bytes of one step, from shapes alone: nothing is compiled or run. Arguments as for `init`.

    ``steps`` is 1. Bytes are those that one device passes to the collectives.
    """
    axes, mesh = _axes(axis_name), mesh or jax.sharding.get_mesh()
    plan = plan_of(config, axes, _sizes(mesh, axes))
    leaves = plan.leaves(params)
    counts: list[dict[str, list[int]]] = []
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)

    def step(grads: Any) -> Any:
        with wide():
            rank = lax.axis_index(axes).astype(jnp.int64)
            states = {name: plan.init(leaf, rank) for name, leaf in leaves.items()}
            rows = {n: {key: array[None] for key, array in state.items()} for n, state in states.items() if state}
        return averaged(grads, Residuals(rows, axes), 0, config, axes, counts)[0]

    jax.eval_shape(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), shapes)
    (found,) = counts
    method = name_of(plan.method.compressor)
    rows = [
        TensorReport(n, leaf.shape, DENSE if leaf.reason else method, leaf.reason, found[n][0], leaf.dense_bytes, None)
        for n, leaf in leaves.items()
    ]
    sent, received = (sum(row[place] for row in found.values()) for place in (0, 1))
    dense = sum(leaf.dense_bytes for leaf in leaves.values())
    how = " + ".join([method, name_of(plan.method.memory), name_of(plan.communicator)])
    return Report(1, jax.process_index(), plan.workers, how, sent, received, dense, rows)


def agree(text: str) -> None:
    """Raise ValueError in all processes, naming one that differs, unless all of them pass the same text."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    own = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8).astype(np.int32)
    all_ = np.asarray(multihost_utils.process_allgather(own)).reshape(jax.process_count(), -1)
    if odd := [process for process, other in enumerate(all_) if not np.array_equal(other, all_[0])]:
        raise ValueError(
            f"process {odd[0]} has other settings, parameters or axes than process 0: give all processes the same "
            f"config and model. Here, in process {jax.process_index()}: {text:.400}"
        )


def _programs(
    plan: Plan, leaves: Mapping[str, Leaf], given: Mapping[str, Array], residuals: Residuals, rank: Any, step: Any
) -> dict[str, Program[Any]]:
    programs: dict[str, Program[Any]] = {}
    dense = tuple(given[name] for name, leaf in leaves.items() if leaf.reason)
    if dense:
        programs[DENSE] = _reduced(dense)
    for name, leaf in leaves.items():
        if not leaf.reason:
            x = given[name].astype("float32").reshape(-1)
            ctx = plan.context(leaf, rank, step)
            programs[name] = plan.communicator.reduce(x, plan.method, _own(residuals, name), ctx)
    return programs


def _reduced(arrays: tuple[Array, ...]) -> Program[tuple[Array, ...]]:
    found = yield Reduce(arrays, "mean")
    return found


def _own(residuals: Residuals, name: str) -> dict[str, Array]:
    # This device's state of a tensor, without the leading axis.
    return {key: array.reshape(array.shape[1:]) for key, array in residuals.tensors.get(name, {}).items()}


def _counted(
    plan: Plan, leaves: Mapping[str, Leaf], scheduler: RoundScheduler, transport: JaxAxisTransport
) -> dict[str, list[int]]:
    # Bytes sent, bytes received and exchanges, by tensor.
    dense = {name: leaf.dense_bytes for name, leaf in leaves.items() if leaf.reason}
    asked = [each for each in scheduler.asked if each[0] != DENSE]
    return Meter(transport.xp).count(leaves, asked, lambda group: 0, dense)


def _varying(x: Any) -> frozenset[str]:
    # The axes over which JAX takes a value to differ; empty with check_vma=False.
    return frozenset(jax.typeof(x).mat.varying)


def _check_varying(given: Mapping[str, Array], transport: JaxAxisTransport) -> None:
    # With check_vma, a gradient that does not vary over the axes has been summed over them already.
    if not _varying(transport.index):
        return
    for name, array in given.items():
        if not set(transport.axes) <= _varying(array):
            axes = transport.axes if len(transport.axes) > 1 else transport.axes[0]
            raise ValueError(
                f"the gradient of {name!r} is the sum over {axes!r} already, uncompressed, because its parameter is "
                f"replicated: cast the parameters before jax.grad, params = {VARY.format(axes)}, or pass "
                "check_vma=False to shard_map"
            )


def _check_replicated(plan: Plan, name: str, found: Array, transport: JaxAxisTransport) -> None:
    if set(transport.axes) & set(_varying(found)):
        raise ValueError(
            f"the mean of {name!r} contains state of the memory {name_of(plan.method.memory)!r}, which is equal on all "
            "devices, but not to JAX's knowledge: pass check_vma=False to shard_map, or use memory 'residual'"
        )


def _axes(axis_name: str | Iterable[str]) -> Axes:
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def _sizes(mesh: Any, axes: Axes) -> tuple[int, ...]:
    if mesh is None or mesh.empty:
        raise ValueError("there is no mesh: call jax.set_mesh(jax.make_mesh(...)) first, or pass mesh=")
    if odd := [axis for axis in axes if axis not in mesh.shape]:
        raise ValueError(f"the mesh has no axis {odd[0]!r}, but {', '.join(map(repr, mesh.shape))}: set axis_name")
    return tuple(mesh.shape[axis] for axis in axes)


def _number(key: Any) -> Array:
    # A key of jax.random as an integer: its last word, of uint32.
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.bits(key)
    key = jnp.asarray(key)
    return key if key.ndim == 0 else jax.random.bits(key)
