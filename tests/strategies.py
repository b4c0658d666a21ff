"""Shared by tests of planned exchanges and their workers: a tensor per strategy, and a model to plan for."""

from dataclasses import dataclass

import numpy as np

from grace.core import Compressor, Traits
from grace.planner import plan
from grace.planner.costs import Cluster, Codec, Costs, Curve, Link, Speed
from grace.planner.profile import Profile, TensorProfile

SHAPES = [(13, 21), (5,), (67,), (3, 4, 5)]


def plan_of(chosen):
    """A plan under which tensor number i takes strategy number i, on machines of two workers."""
    plan = {"tensors": {f"{i}": {"option": str(option)} for i, option in enumerate(chosen)}}
    return {"plan": plan, "node_size": 2}


def gradients(chosen, rank, step=0):
    """A tensor for each strategy, with numbers small enough for float32 errors below 1e-6."""
    rng = np.random.default_rng([rank, step])
    shapes = [SHAPES[i % len(SHAPES)] for i in range(len(chosen))]
    return {f"{i}": rng.uniform(-1, 1, shape).astype(np.float32) for i, shape in enumerate(shapes)}


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends everything, as bytes; payloads can only be gathered."""

    traits = Traits(memory="none")

    def compress(self, x, state, ctx):
        return (ctx.xp.buffers.to_bytes(x),), {}

    def decompress(self, payload, ctx):
        return ctx.xp.buffers.from_bytes(payload[0], "float32", (ctx.size,))


LOSSLESS = [{"compressor": Identity()}, {"compressor": "topk", "compress_ratio": 1.0}, {"compressor": "none"}]


# -- a model whose plan depends on the number of workers, on their machines and on the level ---------------------------
PROFILE = Profile(
    (
        TensorProfile("out", (40, 100), 2e-4),
        TensorProfile("middle", (100, 120), 4e-4),
        TensorProfile("in", (120, 300), 1e-3),
    ),
    "measured",
)
PARAMETERS = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in PROFILE.tensors[::-1]}


def priced(ratio, **params):
    """Costs of top-k, in proportion to the elements."""
    rates = (Curve((1.0,), (seconds,)) for seconds in (2e-9, 1e-9, 5e-10))
    wire = Curve((1.0,), (8.0 * ratio,))
    return Codec({"compressor": "topk", "compress_ratio": ratio, **params}, wire, {"gpu": Speed(*rates)}, "given")


def cluster(workers, per_node=1):
    """Machines with slow links between them."""
    return Cluster(workers // per_node, per_node, Link(20e-6, 1e8), Link(2e-6, 2e9), "measured")


def planned(workers, per_node=1, ratio=0.01, levels=(), **params):
    """The plan of `PROFILE` for these workers, with the costs of the ratios in ``levels`` as well."""
    costs = Costs(cluster(workers, per_node), priced(ratio, **params))
    return plan.make(PROFILE, costs, others=[priced(level, **params) for level in levels]).plan
