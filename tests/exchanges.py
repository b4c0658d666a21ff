"""Methods and gradients that several real workers exchange, shared by the workers and the test that judges them."""

import numpy as np

STEPS = 3
SHAPES = {
    "conv.weight": (16, 8, 3, 3),
    "conv.bias": (16,),
    "fc.weight": (60, 70),
    "fc.bias": (60,),
    "scalar": (),
    "one": (1,),
    "wide": (20_000,),  # so large that TensorFlow calls NumPy's functions
}
ALL = {"min_numel": 0}  # compress even the smallest tensors, unless a row says otherwise
ROWS = [
    {"compressor": "none"},
    {"compressor": "none", "communicator": "allgather", **ALL},
    {"compressor": "none", "communicator": "twostage", **ALL},
    {"compressor": "fp16", **ALL},
    {"compressor": "bf16", **ALL},
    {"compressor": "bf16", "rounding": "stochastic", "communicator": "twostage", **ALL},
    {"compressor": "topk", "compress_ratio": 0.05},
    {"compressor": "topk", "compress_ratio": 0.05, "communicator": "broadcast", **ALL},
    {"compressor": "topk", "compress_ratio": 0.05, "fuse": "bucket", "bucket_mb": 0.02},
    {"compressor": "topk", "compress_ratio": 0.05, "fuse": "model", **ALL},
    {"compressor": "randomk", "compress_ratio": 0.1, **ALL},
    {"compressor": "randomk", "compress_ratio": 0.1, "communicator": "allgather", "bucket_mb": 0.01},
    {"compressor": "threshold", "threshold": 1.5, **ALL},
    {"compressor": "threshold", "threshold": 1.5, "communicator": "broadcast", **ALL},
    {"compressor": "threshold", "threshold": 100.0, "memory": "residual"},
    {"compressor": "qsgd", **ALL},
    {"compressor": "qsgd", "quantum_num": 7, "communicator": "twostage", **ALL},
    {"compressor": "qsgd", "quantum_num": 10, "bucket_size": 0, "communicator": "broadcast"},
    {"compressor": "signsgd", **ALL},
    {"compressor": "signsgd", "communicator": "twostage", **ALL},
    {"compressor": "signsgd", "packed": False, "communicator": "allreduce", **ALL},
    {"compressor": "efsignsgd", **ALL},
    {"compressor": "efsignsgd", "block_size": 256, "communicator": "twostage", **ALL},
    {"compressor": "powersgd"},
    {"compressor": "powersgd", "compress_rank": 2, "bucket_mb": 0.01, **ALL},
    {"compressor": "onebit", **ALL},
    {"compressor": "terngrad", "clip": 2.5, "block_size": 512, "communicator": "twostage", **ALL},
    {"compressor": "natural", **ALL},
    {"compressor": "dettmers8", "table": "nf4", "block_size": 64, "communicator": "twostage", **ALL},
    {"compressor": "signum", **ALL},
    # Machines of two workers: two workers are one machine, four are two.
    {"compressor": "topk", "compress_ratio": 0.05, "communicator": "hierarchical", "node_size": 2, **ALL},
    {"compressor": "powersgd", "communicator": "hierarchical", "node_size": 2},
    {
        "compressor": "efsignsgd",
        "block_size": 256,
        "communicator": "hierarchical",
        "outer": "twostage",
        "node_size": 2,
        **ALL,
    },
    {"compressor": "acpsgd", **ALL},
    {"compressor": "gradzip", **ALL},
    {"compressor": "dion", "rank_fraction": 0.1, **ALL},
    {"compressor": "atomo", **ALL},
    {"compressor": "demo", **ALL},
    {"compressor": "topk", "compress_ratio": 0.05, "index_coding": "elias_fano", **ALL},
    {"compressor": "threshold", "threshold": 1.5, "index_coding": "bitmap", **ALL},
    {"compressor": "topk", "compress_ratio": 0.05, "memory": "dgc", "gradient_clipping": 1.0},
    {"compressor": "topk", "compress_ratio": 0.05, "memory": "ef21", **ALL},
    {"compressor": "qsgd", "memory": "diana", **ALL},
    {"compressor": "randomk", "memory": "lowpass", **ALL},
    {"compressor": "efsignsgd", "memory": "efsignsgd", **ALL},
    {
        "compressor": "efsignsgd",
        "block_size": 256,
        "memory": "onebit_adam",
        "freeze_step": 2,
        "communicator": "twostage",
        **ALL,
    },
    {"compressor": "stc", "compress_ratio": 0.05, **ALL},
    {"compressor": "wangni", "compress_ratio": 0.1, **ALL},
    {"compressor": "adacomp", **ALL},
    {"compressor": "variance", "alpha": 1.0, **ALL},
    {"compressor": "gtopk", "compress_ratio": 0.05, **ALL},
    {"compressor": "oktopk", "compress_ratio": 0.05, "thresholds_every": 2, **ALL},
    {"compressor": "cltk", "compress_ratio": 0.05, **ALL},
    {"compressor": "chunktopk", "chunk_size": 256, "chunk_k": 16, "communicator": "twostage", **ALL},
    {"compressor": "fp8", "format": "e5m2", "communicator": "twostage", **ALL},
    {"compressor": "blockint", "communicator": "twostage", **ALL},
    {"compressor": "natural_dithering", **ALL},
    {"compressor": "eden", "bits": 2, "block_size": 256, "communicator": "twostage", **ALL},
    {"compressor": "shared_int", **ALL},
    {"compressor": "shared_int", "dtype": "int32"},
    {"compressor": "thc", **ALL},
    {"compressor": "sketch", **ALL},
    {"compressor": "3lc", **ALL},
    {"compressor": "inceptionn", **ALL},
    {"compressor": "dgc", "compress_ratio": 0.02, **ALL},
    {"compressor": "sidco", "compress_ratio": 0.05, "fuse": "model", "q": 1, **ALL},
    {"compressor": "sidco", "compress_ratio": 0.02, "sid": "gp", **ALL},
    {"compressor": "topk", "compress_ratio": 0.05, "selector": "gaussian", **ALL},
    {"compressor": "adaq", "compress_ratio": 0.05, **ALL},
    {"compressor": "arctopk", "compress_ratio": 0.1, **ALL},
    {"compressor": "sketch_sgd", "compress_ratio": 0.01},
    {"compressor": "chain", "sparsifier": "randomk", "compress_ratio": 0.1, "quantizer": "natural", **ALL},
    {"compressor": "qsparse", "compress_ratio": 0.05, **ALL},
    {"compressor": "randomk", "compress_ratio": 0.1, "mode": "bernoulli", **ALL},
    {"compressor": "kashin", "block_size": 64, "communicator": "twostage", **ALL},
    {"compressor": "adaptive_random", "compress_ratio": 0.05, "memory": "econtrol", "refresh": 3, **ALL},
    {"compressor": "geometric", "memory": "ef21", "momentum": 0.5, **ALL},
    {"compressor": "damped", "method": "natural_dithering", "base": 3, "s": 3, "communicator": "twostage", **ALL},
    {
        "compressor": "gradiveq",
        "slice_size": 16,
        "compress_ratio": 0.25,
        "train_steps": 2,
        "compressed_steps": 1,
        **ALL,
    },
    # Two stages: shards of fixed and of variable length, on all workers or on a few. Without atomo: its payload has
    # equal singular values, so rounding decides what the second stage draws.
    {"compressor": "topk", "compress_ratio": 0.05, "communicator": "twostage", **ALL},
    {"compressor": "sidco", "compress_ratio": 0.05, "communicator": "twostage", "min_shard": 256, **ALL},
    {"compressor": "3lc", "communicator": "twostage", **ALL},
    {"compressor": "onebit", "communicator": "twostage", "min_shard": 256, **ALL},
]
# Rows that cover every way to exchange a payload once.
FEW = [2, 5, 6, 10, 12, 13, 16, 20, 22, 24, 30, 33, 51, -4, -3, -1]
WHOLE = [("torch", "torch", 4), ("torch", "horovod", 2)]


def rows(toolkit: str, transport: str, size: int) -> list[int]:
    """The rows that a launch exchanges: all of them once over each transport, and a few in every other launch.

    Four workers that trace graphs on few cores take minutes: they exchange half of these, a hierarchy among them.
    """
    few = [index % len(ROWS) for index in FEW]
    if toolkit == "tensorflow" and size == 4:
        return sorted({*few[1::2], 30})
    return list(range(len(ROWS))) if (toolkit, transport, size) in WHOLE else few


def gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    """One worker's gradients: heavy-tailed, different at every step and on every worker."""
    rng = np.random.default_rng([step, rank])
    return {name: np.asarray(rng.standard_t(3, shape), np.float32) for name, shape in SHAPES.items()}
