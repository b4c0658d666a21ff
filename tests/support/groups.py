"""Workers in this process whose tensors form groups."""

import numpy as np
from methods import lockstep

from grace.factory import grace_from_params
from grace.transports.local import LocalTransport, World

SIZES = (1, 7, 8, 9, 511, 512, 513, 1025, 5000, 70001)
"""Around the block sizes of the methods, of a byte, and of a row of noise."""
METHODS = {
    "int4": {"compressor": "blockint"},
    "int2 stochastic": {"compressor": "blockint", "bits": 2, "rounding": "stochastic", "memory": "none"},
    "int8, one scale": {"compressor": "blockint", "bits": 8, "block_size": 0},
    "signs": {"compressor": "efsignsgd"},
    "signs, one scale": {"compressor": "efsignsgd", "block_size": 0},
    "onebit": {"compressor": "onebit"},
    "qsgd": {"compressor": "qsgd"},
    "terngrad": {"compressor": "terngrad", "clip": 0},
    "votes": {"compressor": "signsgd"},
    "natural": {"compressor": "natural"},
    "natural, a fixed window": {"compressor": "natural", "window": "grace"},
    "eden": {"compressor": "eden", "bits": 3},
    "drive with a residual": {"compressor": "eden", "bits": 1, "biased": True, "block_size": 64},
    "topk": {"compressor": "topk", "compress_ratio": 0.05, "index_coding": "int32"},
    "topk, coded": {"compressor": "topk", "compress_ratio": 0.01, "index_coding": "elias_fano"},
    "powersgd": {"compressor": "powersgd", "compress_rank": 3},
    "signum": {"compressor": "signum"},
    "qsgd of a momentum": {"compressor": "qsgd", "memory": "momentum", "momentum": 0.7},
    "natural, ef21": {"compressor": "natural", "memory": "ef21"},
    "topk, coded, ef21": {"compressor": "topk", "index_coding": "elias_fano", "memory": "ef21", "momentum": 0.3},
    "signs, lowpass": {"compressor": "efsignsgd", "memory": "lowpass", "reset_every": 2},
    "topk, decoupled": {"compressor": "topk", "index_coding": "int32", "memory": "decoupled_momentum"},
    "int4, a weighted residual": {"compressor": "blockint", "memory": "residual", "beta": 0.9},
    "randomk": {"compressor": "randomk", "compress_ratio": 0.05},
    "randomk, unbiased": {"compressor": "randomk", "compress_ratio": 0.3, "memory": "none", "unbiased_scale": True},
    "randomk, ef21": {"compressor": "randomk", "memory": "ef21"},
    "uncompressed momentum": {"compressor": "none", "memory": "momentum"},
}
SUMMED = ("powersgd", "randomk", "randomk, unbiased", "randomk, ef21", "uncompressed momentum")
"""Methods that communicator "allreduce" carries."""
MATRICES = ((40, 50), (50, 40), (16, 8, 3, 3), (40, 50, 1), (200, 130))
CARRIERS = {
    "gathered": {"communicator": "allgather"},
    "two stages": {"communicator": "twostage", "min_shard": 600},
    "machines": {"communicator": "hierarchical", "outer": "allgather", "node_size": 2},
    "machines, two stages": {"communicator": "hierarchical", "outer": "twostage", "node_size": 3},
}
WORKERS = {
    "gathered": (1, 2, 3, 5),
    "two stages": (1, 2, 3, 5),
    "machines": (2, 4, 6),
    "machines, two stages": (3, 6, 9),
}


def drawn(step, rank, sizes=SIZES):
    draws = {size: np.random.default_rng([step, rank, size]) for size in sizes}
    return {f"t{size}": draw.standard_normal(size).astype("float32") for size, draw in draws.items()}


def tensors(method):
    """Sizes or shapes of tensors that a method compresses."""
    return MATRICES if method == "powersgd" else SIZES


def carries(method, carrier):
    """Whether a method's groups can use this carrier."""
    one_stage = METHODS[method].get("memory") != "ef21" or "two stages" not in carrier
    return carrier == "gathered" if method in SUMMED else one_stage


def carried(method, carrier):
    """The settings of a method, with the communicator of this carrier."""
    return METHODS[method] | ({} if method in SUMMED else CARRIERS[carrier])


def team(params, workers, xp, sizes=SIZES, **options):
    """A Grace for each worker, all in this process, and the function that makes their gradients."""
    world = World(workers)
    made = [grace_from_params({"min_numel": 0, **params, **options}, LocalTransport(world, n)) for n in range(workers)]
    for grace in made:
        grace.build({name: xp.asarray(x, "float32") for name, x in drawn(0, 0, sizes).items()})
    return made


def step(graces, xp, number, change=None, sizes=SIZES):
    gradients = [{n: xp.asarray(x, "float32") for n, x in drawn(number, r, sizes).items()} for r in range(len(graces))]
    if change is not None:
        change(gradients)
    return [
        {n: m if m is None else np.array(xp.to_numpy(m)) for n, m in found.items()}
        for found in lockstep(graces, gradients)
    ]


def equal(one, two):
    for mine, other in zip(one, two, strict=True):
        for name, mean in mine.items():
            np.testing.assert_array_equal(mean, other[name], err_msg=name)


def groups_of(grace):
    table = grace.setup.table
    return grace.setup.groups.of(grace.setup.levels([unit for bucket in table.buckets for unit in bucket.units]))
