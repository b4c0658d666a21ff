"""What the tests of planned exchanges share with their workers: one tensor for each strategy, in one exchange."""

from dataclasses import dataclass

import numpy as np

from grace.core import Compressor

SHAPES = [(13, 21), (5,), (67,), (3, 4, 5)]


def plan_of(chosen):
    """A plan under which tensor number i takes strategy number i, on machines of two workers."""
    plan = {"tensors": {f"{i}": {"option": str(option)} for i, option in enumerate(chosen)}}
    return {"plan": plan, "node_size": 2}


def gradients(chosen, rank, step=0):
    """A tensor for each strategy. Small numbers, so that 1e-6 is what float32 can be asked for."""
    rng = np.random.default_rng([rank, step])
    shapes = [SHAPES[i % len(SHAPES)] for i in range(len(chosen))]
    return {f"{i}": rng.uniform(-1, 1, shape).astype(np.float32) for i, shape in enumerate(shapes)}


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends everything, as bytes; payloads can only be gathered."""

    memory = "none"

    def compress(self, x, state, ctx):
        return (ctx.xp.to_bytes(x),), {}

    def decompress(self, payload, ctx):
        return ctx.xp.from_bytes(payload[0], "float32", (ctx.size,))


LOSSLESS = [{"compressor": Identity()}, {"compressor": "topk", "compress_ratio": 1.0}, {"compressor": "none"}]
