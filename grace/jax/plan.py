"""What an exchange does with each leaf of a tree, settled from names, shapes and the sizes of the axes."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax

from grace.backends import get_backend
from grace.backends.jax import TRACED
from grace.core import Context, State, name_of
from grace.core.communicator import Communicator
from grace.core.dtypes import ITEMSIZE
from grace.core.method import Method
from grace.core.registry import compressors
from grace.engine.options import Options
from grace.engine.session import FLOATS
from grace.factory import grace_from_params
from grace.jax.communicators import for_one_program
from grace.transports.local import LocalTransport, World

Axes = tuple[str, ...]
USED = ("min_numel", "nonfinite", "seed")
"""The settings of `Options` that have a meaning here."""


class Leaf(NamedTuple):
    """One tensor of a tree."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    reason: str
    """Why it goes dense; empty if it is compressed."""

    @property
    def dense_bytes(self) -> int:
        return Context(None, self.name, self.shape).size * ITEMSIZE[self.dtype]


class _Mesh(LocalTransport):
    # The workers of a mesh, to settle a method and a communicator for them. It exchanges nothing.
    def __init__(self, sizes: tuple[int, ...]):
        super().__init__(World(sizes[0] * sizes[-1] if len(sizes) == 2 else sizes[0]))
        self._node, self._two = sizes[-1], len(sizes) == 2

    @property
    def node_size(self) -> int:
        return self._node if self._two else self.size

    @property
    def splits(self) -> bool:
        return self._two

    def split(self, node_size: int) -> None:
        if not self._two or node_size != self._node:
            raise ValueError(
                f"node_size={node_size} needs a mesh with two axes, the first over machines and the second over the "
                f"{node_size} devices of each: axis_name=('cross', 'node')"
            )


@dataclass(frozen=True)
class Plan:
    """A method and its communicator for the devices along some axes."""

    method: Method
    communicator: Communicator
    options: Options
    axes: Axes
    sizes: tuple[int, ...]

    @property
    def workers(self) -> int:
        """Number of devices along the axes."""
        return self.sizes[0] * (self.sizes[1] if len(self.sizes) == 2 else 1)

    def leaves(self, tree: Any) -> dict[str, Leaf]:
        """The tensors of a tree, by name, in the order of its leaves."""
        found = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            dtype = leaf.dtype.name
            if dtype not in FLOATS:
                raise TypeError(
                    f"{name!r} is {dtype}, and gradients are {', '.join(FLOATS)}: pass the tree of trainable "
                    "parameters only, as nnx.state(model, nnx.Param)"
                )
            found[name] = Leaf(name, tuple(leaf.shape), dtype, self._dense(name, tuple(leaf.shape)))
        return found

    def context(self, leaf: Leaf, rank: Any, step: Any) -> Context:
        """The context of a tensor in one step."""
        return Context(
            xp=get_backend("jax", TRACED),
            name=leaf.name,
            shape=leaf.shape,
            rank=rank,
            world_size=self.workers,
            step=step,
            seed=self.options.seed,
            wire=leaf.dtype,
        )

    def init(self, leaf: Leaf, rank: Any) -> State:
        """A device's initial state of a tensor."""
        ctx = self.context(leaf, rank, 0)
        return self.method.memory.init_dense(ctx) if leaf.reason else self.communicator.init(self.method, ctx)

    def describe(self, leaves: Mapping[str, Leaf]) -> str:
        """All that must be equal in each process, as text."""
        parts = [self.method.compressor, self.method.memory, self.communicator, self.options]
        return json.dumps([*map(repr, parts), self.axes, self.sizes, [list(leaf) for leaf in leaves.values()]])

    def _dense(self, name: str, shape: tuple[int, ...]) -> str:
        ctx = Context(get_backend("jax", TRACED), name, shape, world_size=self.workers)
        if ctx.size == 0:
            return "empty"
        if ctx.size < self.options.min_numel:
            return f"fewer than min_numel={self.options.min_numel} elements"
        return "" if self.communicator.applies(self.method, ctx) else self.communicator.reason(self.method, ctx)


def plan_of(config: Mapping[str, Any], axes: Axes, sizes: tuple[int, ...]) -> Plan:
    """Settle the method and the communicator for the devices along ``axes``, whose sizes are ``sizes``.

    ValueError, naming the remedy, for what JAX cannot trace and for what this integration does not have.
    """
    if len(axes) not in (1, 2):
        raise ValueError(f"axis_name={axes!r}: name one axis of the mesh, or two: machines first, then their devices")
    if "policy" in config or "plan" in config or config.get("compressor") == "auto":
        raise ValueError("a compiled step has one method: leave policy, plan and compressor 'auto' out in JAX")
    unused = {field.name for field in fields(Options)} - set(USED)
    if odd := sorted(unused & config.keys()):
        raise ValueError(f"{odd[0]!r} has no meaning in JAX: leave it out; settings here are {', '.join(USED)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        transport = _Mesh(sizes)
        grace = grace_from_params(config, transport)
    method = grace.method
    if not traceable(method.compressor):
        name = name_of(method.compressor)
        raise ValueError(f"JAX cannot trace compressor {name!r}, {_why(method.compressor)}: use {', '.join(fixed())}")
    grace.communicator.create_groups(transport)
    communicator = for_one_program(grace.communicator)
    return Plan(method, communicator, grace.setup.options, axes, sizes)


UNLIKE = {
    "acpsgd": "whose messages have another length in every second step",
    "gradiveq": "whose messages are longer in the steps in which it learns",
    "gtopk": "whose workers send to different workers, round by round",
}
"""Compressors of fixed length that one program for all devices and steps cannot run, and the reason."""


def traceable(compressor: Any) -> bool:
    """Return whether payloads have a length that JAX knows while it traces, equal on all devices and in all steps."""
    return not compressor.traits.variable_length and name_of(compressor) not in UNLIKE


def fixed() -> list[str]:
    """Names of the compressors that JAX can trace."""
    return sorted({name for name, cls in compressors.items() if traceable(cls())})


def _why(compressor: Any) -> str:
    return UNLIKE.get(name_of(compressor), "whose payloads differ in length from step to step")
