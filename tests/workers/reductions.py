"""Reductions and gathers of torch.distributed, small and large, of several kinds of numbers: OUT."""

import sys

import numpy as np

SIZES = (1, 2, 5, 1001, 2**18 + 3)  # the last one is above what workers reduce directly
GATHERED = (10, 2**20 + 7, 2**20 + 1, 3 * 2**20)  # the first one is left to gloo, the others are handed on
DTYPES = ("int8", "int64", "float16", "float32", "float64")


def values(rank, dtype, size):
    return (np.random.default_rng(100 * rank + size).normal(size=size) * 10).astype(dtype)


def main():
    import torch
    import torch.distributed as dist
    from launch import leave_gloo, save

    import grace

    dist.init_process_group("gloo")
    transport = grace.transports.get_transport("torch").bind(grace.backends.get_backend("torch"))
    found = {}
    for dtype in DTYPES:
        for op in ("sum", "min", "max"):
            # All are under way at once.
            waits = [transport.reduce(torch.from_numpy(values(dist.get_rank(), dtype, n)), op, "it") for n in SIZES]
            found[dtype, op] = [wait().numpy() for wait in waits]
    waits = []
    for n in GATHERED:
        waits.append(transport.gather(torch.from_numpy(values(dist.get_rank(), "int8", n).view(np.uint8)), "it"))
        transport.reduce(torch.ones(5), "sum", "between")()
    last_first = [[buffer.numpy() for buffer in wait()] for wait in waits[::-1]]
    found["gathered"] = last_first[::-1]
    save(sys.argv[1], dist.get_rank(), found)
    leave_gloo()


if __name__ == "__main__":
    main()
