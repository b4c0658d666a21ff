"""The cases, each a way to average gradients or to train locally. Add a row to measure another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from grace.communicators.auto import MIN_SHARD
from grace_bench.lab.network import LabError

TORCHRUN, HOROVODRUN = "torchrun", "horovodrun"
DENSE = ("ddp-fp32", "hvd-fp32")
"""Names of the baselines."""
ALONE = ("alone", "hvd-alone")
"""Names of the cases without communication. The bound uses the first."""


@dataclass(frozen=True)
class Case:
    """One way to train."""

    name: str
    door: str
    """The exchange of gradients: a function of doors.py."""
    launcher: str
    params: dict[str, Any] = field(default_factory=dict)
    """The function's arguments; for GRACE, the dictionary of ``grace_from_params``."""
    rounds: int = 1
    """Dependent rounds per step; the bound allows 15 ms for each."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the launch."""
    nodes: bool = False
    """Whether it needs several workers on each host."""

    @property
    def period(self) -> int:
        """Steps from one exchange to the next."""
        return int(self.params.get("local", {}).get("sync_every", 1))

    @property
    def ours(self) -> bool:
        """Whether GRACE exchanges."""
        return self.door.startswith("grace")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "period": self.period}


LEVELS = {"communicator": "twostage", "levels": 2, "min_shard": MIN_SHARD}
# (name, parameters, rounds with three or more hosts) of each method.
METHODS: list[tuple[str, dict[str, Any], int]] = [
    ("none", {"compressor": "none"}, 1),
    ("fp16", {"compressor": "fp16"}, 1),
    ("topk", {"compressor": "topk", "compress_ratio": 0.01}, 2),
    ("topk-ef", {"compressor": "topk", "compress_ratio": 0.01, "index_coding": "elias_fano"}, 2),
    ("dgc", {"compressor": "dgc", "memory": "dgc", "compress_ratio": 0.01}, 2),
    ("dgc-unmasked", {"compressor": "dgc", "memory": "dgc", "compress_ratio": 0.01, "masking": False}, 2),
    ("sign", {"compressor": "efsignsgd", "block_size": 512, "communicator": "allgather"}, 1),
    ("sign-2stage", {"compressor": "efsignsgd", "block_size": 512, "communicator": "twostage"}, 2),
    ("onebit", {"compressor": "onebit"}, 2),
    ("int8-default", {"compressor": "blockint", "bits": 8}, 2),
    ("int4-default", {"compressor": "blockint", "bits": 4}, 2),
    ("eden2", {"compressor": "eden", "bits": 2}, 2),
    ("eden3", {"compressor": "eden", "bits": 3}, 2),
    ("int8", {"compressor": "blockint", "bits": 8, "communicator": "allgather"}, 1),
    ("int8-2stage", {"compressor": "blockint", "bits": 8, "communicator": "twostage"}, 2),
    ("int4", {"compressor": "blockint", "bits": 4, "communicator": "allgather"}, 1),
    ("int4-2stage", {"compressor": "blockint", "bits": 4, "communicator": "twostage"}, 2),
    ("int4-2levels", {"compressor": "blockint", "bits": 4, **LEVELS}, 4),
    ("eden3-2levels", {"compressor": "eden", "bits": 3, **LEVELS}, 4),
    ("qsgd", {"compressor": "qsgd", "communicator": "allgather"}, 1),
    ("qsgd-2stage", {"compressor": "qsgd", "communicator": "twostage"}, 2),
    ("powersgd", {"compressor": "powersgd", "compress_rank": 4}, 2),
    ("acpsgd", {"compressor": "acpsgd", "compress_rank": 4}, 1),
    ("auto", {"compressor": "auto"}, 2),  # timed after the trials of auto
]

ONE_ROUND = ("atomo", "gradiveq", "gtopk", "randomk", "variance")
TWO_ROUNDS = (
    *("3lc", "adacomp", "adaptive_random", "adaq", "arctopk", "bf16", "chain", "chunktopk", "cltk", "damped", "demo"),
    *("dettmers8", "dion", "eden", "fp8", "geometric", "gradzip", "inceptionn", "kashin", "natural"),
    *("natural_dithering", "qsparse", "shared_int", "sidco", "signsgd", "signum"),
    *("sketch", "sketch_sgd", "stc", "terngrad", "thc", "wangni"),
)
OTHERS: list[tuple[str, dict[str, Any], int]] = [
    *((name, {"compressor": name}, 1) for name in ONE_ROUND),
    *((name, {"compressor": name}, 2) for name in TWO_ROUNDS),
    ("oktopk", {"compressor": "oktopk"}, 5),  # in most steps 4
    ("threshold", {"compressor": "threshold", "threshold": 0.012}, 2),  # 1 % of the mlp's gradients exceed it
]
"""The other compressors with their defaults: over torch.distributed only."""

BASELINES = [
    Case(ALONE[0], "alone", TORCHRUN, rounds=0),
    # Horovod's thread polls all workers many times a second, which takes processor time.
    Case(ALONE[1], "alone", HOROVODRUN, rounds=0),
    Case("hvd-fp32", "horovod", HOROVODRUN),
    Case("hvd-fp16", "horovod", HOROVODRUN, {"compression": "fp16"}),
    Case("ddp-fp32", "ddp", TORCHRUN),
    Case("ddp-fp16", "ddp", TORCHRUN, {"hook": "fp16"}),
    Case("ddp-powersgd", "ddp", TORCHRUN, {"hook": "powersgd", "rank": 4}, rounds=3),
    # With several buckets this hook aborted in gloo (its callbacks start collectives in different orders).
    Case("ddp-powersgd-1bucket", "ddp", TORCHRUN, {"hook": "powersgd", "rank": 4, "bucket_mb": 1000}, rounds=3),
]

# Needs --peer. Upstream's efsignsgd sums over the workers and divides by lr: with the number of workers as lr, the
# result is a mean.
UPSTREAM = [
    Case("upstream-topk", "upstream", TORCHRUN, {"compressor": "topk", "compress_ratio": 0.01}),
    Case("upstream-sign", "upstream", TORCHRUN, {"compressor": "efsignsgd", "lr": "world_size"}),
    Case("upstream-qsgd", "upstream", TORCHRUN, {"compressor": "qsgd", "quantum_num": 127, "memory": "none"}),
]

OURS = [
    Case(f"{prefix}-{name}", door, launcher, params, rounds)
    for prefix, door, launcher in (
        ("grace-hvd", "grace", HOROVODRUN),
        ("grace-torch", "grace", TORCHRUN),
        ("grace-ddp", "grace_ddp", TORCHRUN),
    )
    for name, params, rounds in (*METHODS, *(OTHERS if prefix == "grace-torch" else ()))
]

NODES = [
    Case(
        f"grace-{label}-node-{name}",
        "grace",
        launcher,
        {**params, "communicator": "hierarchical", "outer": outer},
        rounds + 2,
        {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if label == "hvd" else {},
        nodes=True,
    )
    for label, launcher in (("hvd", HOROVODRUN), ("torch", TORCHRUN))
    for name, params, rounds, outer in (
        ("fp16", {"compressor": "fp16"}, 1, "allreduce"),
        ("topk", {"compressor": "topk", "compress_ratio": 0.01}, 1, "allgather"),
        ("sign", {"compressor": "efsignsgd", "block_size": 512}, 1, "allgather"),
        ("powersgd", {"compressor": "powersgd", "compress_rank": 4}, 2, "allreduce"),
    )
]

DELAYED = {"sync_every": 100, "fragment_sync_delay": 40}
LOCAL = [
    Case(f"grace-local-{name}", "grace_local", TORCHRUN, params, rounds=0)  # exchanges are rare or hidden
    for name, params in (
        ("sgd-fp16", {"local": {"preset": "localsgd", "sync_every": 100}, "compressor": "fp16"}),
        ("diloco-int8", {"local": {"sync_every": 100}, "compressor": "blockint"}),
        (
            "streaming-int4",
            {"local": {**DELAYED, "preset": "streaming", "fragments": 2}, "compressor": "blockint", "bits": 4},
        ),
        ("sparseloco", {"local": {**DELAYED, "preset": "sparseloco"}}),
    )
]
"""Local training: exchanges every 100 steps; those with a delay overlap with 40 of them."""

CASES = [*BASELINES, *UPSTREAM, *OURS, *NODES, *LOCAL]

SETS = {
    "all": ["*"],
    "baselines": [case.name for case in BASELINES],
    "upstream": [case.name for case in UPSTREAM],
    "ours": ["grace-*"],
    "local": ["grace-local-*"],
    "methods": [*DENSE, *(f"grace-torch-{name}" for name, _, _ in (*METHODS, *OTHERS))],
    "quick": [
        *("alone", "hvd-fp32", "hvd-fp16", "ddp-*", "upstream-*"),
        *(
            f"grace-{door}-{name}"  # with their default communicators
            for door in ("hvd", "torch")
            for name in ("topk", "onebit", "int8-default", "int4-default", "eden2", "powersgd")
        ),
    ],
}


def select(patterns: Sequence[str], workers_per_host: int = 1, peer: bool = True) -> list[Case]:
    """The applicable cases that match the patterns: names, with * and ?, or names of `SETS`.

    ``alone`` is always included: the bound needs it. Cases for several workers per host are omitted if there is one,
    upstream's cases if there is no checkout.
    """
    globs = [glob for pattern in patterns for glob in SETS.get(pattern, [pattern])]
    for glob in globs:
        if not any(fnmatchcase(case.name, glob) for case in CASES):
            raise LabError(f"no case is named {glob!r}: see `cases` for names, or choose a set: {', '.join(SETS)}")
    named = [case for case in CASES if case.name == ALONE[0] or any(fnmatchcase(case.name, glob) for glob in globs)]
    return [c for c in named if (workers_per_host > 1 or not c.nodes) and (peer or c.door != "upstream")]
