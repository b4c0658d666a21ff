"""One exchange of ResNet-50's 161 gradients between local workers over gloo, against a plain bucketed allreduce.

    torchrun --nproc_per_node 2 -m benchmarks.exchange [--peer CHECKOUT_OF_UPSTREAM] [--only ROW ...] [--json FILE]

Everything is measured in the same rounds, in shuffled order: GRACE with and without native kernels, the float32
allreduce of 25 MiB buckets that training does without compression, and upstream GRACE tensor by tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grace import grace_from_params
from grace.bench.plan import resnet50

BUCKET = 25 * 2**20 // 4
INT8 = {"compressor": "blockint", "bits": 8, "rounding": "stochastic", "memory": "residual"}
OURS: dict[str, dict[str, Any]] = {
    "sign, block 512": {"compressor": "efsignsgd", "block_size": 512},
    "sign, per tensor": {"compressor": "efsignsgd"},
    "int8, stochastic": INT8,
    "int8, two-stage": {**INT8, "communicator": "twostage"},
    "top-k 1%": {"compressor": "topk", "compress_ratio": 0.01},
    "PowerSGD rank 4": {"compressor": "powersgd", "compress_rank": 4},
}
UPSTREAM: dict[str, dict[str, Any]] = {
    "upstream sign": {"compressor": "efsignsgd", "lr": 0.1, "memory": "residual"},
    "upstream qsgd": {"compressor": "qsgd", "quantum_num": 127, "memory": "residual"},
    "upstream top-k 1%": {"compressor": "topk", "compress_ratio": 0.01, "memory": "residual"},
}
PAIRS = {
    "sign, block 512": "upstream sign",
    "sign, per tensor": "upstream sign",
    "int8, stochastic": "upstream qsgd",
    "int8, two-stage": "upstream qsgd",
    "top-k 1%": "upstream top-k 1%",
}


def plain(gradients: list[torch.Tensor]) -> Callable[[], None]:
    """Return a function that averages a flat gradient in buckets, as if gradients were views of the buckets."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])

    def exchange() -> None:
        parts = flat.split(BUCKET)
        for work in [dist.all_reduce(part, async_op=True) for part in parts]:
            work.wait()
        flat.div_(dist.get_world_size())

    return exchange


def ours(gradients: list[torch.Tensor], params: dict[str, Any], kernels: str) -> Callable[[], None]:
    """Return a function that exchanges as the optimizer does: gradients arrive last to first, and become means."""
    names = list(resnet50())
    os.environ["GRACE_KERNELS"] = kernels
    grc = grace_from_params(params, transport="torch")
    grc.build(dict(zip(names, gradients, strict=True)))

    def exchange() -> None:
        os.environ["GRACE_KERNELS"] = kernels
        for name, gradient in zip(names[::-1], gradients[::-1], strict=True):
            grc.start(name, gradient, spent=True)
        grc.flush()
        for name, gradient in zip(names, gradients, strict=True):
            mean = grc.mean(name)
            if mean is not None and mean.data_ptr() != gradient.data_ptr():
                gradient.copy_(mean)

    return exchange


def upstream(gradients: list[torch.Tensor], params: dict[str, Any]) -> Callable[[], None]:
    """Return a function that exchanges with upstream GRACE, tensor by tensor."""
    from grace_dl.dist.helper import grace_from_params as made

    method = made({"communicator": "allgather", "world_size": dist.get_world_size(), **params})

    def exchange() -> None:
        for name, gradient in zip(resnet50(), gradients, strict=True):
            gradient.copy_(method.step(gradient, name))

    return exchange


def main() -> None:
    """Measure, and print on worker 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a checkout of upstream GRACE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="rows to measure beside plain fp32 allreduce")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    shapes = list(resnet50().values())
    sources = [[torch.randn(shape, generator=generator) * 1e-3 for shape in shapes] for _ in range(2)]
    gradients = [torch.empty(shape) for shape in shapes]
    makers: dict[str, Callable[[], Callable[[], None]]] = {}
    for name, params in OURS.items():
        makers[name] = partial(ours, gradients, params, "on")
        makers[f"{name}, no kernels"] = partial(ours, gradients, params, "off")
    if options.peer:
        sys.path.insert(0, options.peer)
        makers |= {name: partial(upstream, gradients, params) for name, params in UPSTREAM.items()}
    chosen = options.only or list(makers)
    if unknown := [name for name in chosen if name not in makers]:
        parser.error(f"no rows {unknown}: choose from {list(makers)}")
    cases = {"plain fp32 allreduce": plain(sources[0]), **{name: makers[name]() for name in chosen}}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    order = random.Random(0)  # the same on all workers
    for turn in range(options.rounds + 2):
        for name in order.sample(list(cases), len(cases)):
            for gradient, source in zip(gradients, sources[turn % 2], strict=True):
                gradient.copy_(source)
            dist.barrier()
            began = time.perf_counter()
            cases[name]()
            slowest = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn > 1:  # the first steps create state and connections
                seconds[name].append(slowest.item())
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    if rank == 0:
        dense = medians["plain fp32 allreduce"]
        print(f"{size} local workers over gloo, ResNet-50's gradients, one thread each; medians of {options.rounds}")
        for name, median in medians.items():
            peer = medians.get(PAIRS.get(name.removesuffix(", no kernels"), ""))
            against = f"  {peer / median:5.1f}x faster than upstream" if peer else ""
            print(f"{name:30} {median * 1e3:8.1f} ms  {median / dense:5.2f}x plain{against}")
        if options.json:
            options.json.write_text(json.dumps({"workers": size, "seconds": seconds}, indent=1))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort during Python's shutdown


if __name__ == "__main__":
    main()
