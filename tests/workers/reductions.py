"""Collectives of torch.distributed with small and large buffers of several dtypes: OUT."""

import sys

import numpy as np

SIZES = (1, 2, 5, 1001, 2**18 + 3)  # the last one is too large for GRACE's own reduction
# gloo's collective gathers the first one; the others use a ring
GATHERED = (10, 2**14 + 5, 2**20 + 7, 2**20 + 1, 3 * 2**20)
BESIDE = ((10_001, 101), (10_001, 1001), (2**20 + 1, 2**15 + 1))  # gathered bytes, summed elements
PASSED = (0, 10, 2**18 + 1, 2**20)  # sizes of messages from one worker to another
DTYPES = ("int8", "int64", "float16", "float32", "float64")


def values(rank, dtype, size):
    return (np.random.default_rng(100 * rank + size).normal(size=size) * 10).astype(dtype)


def passed(call, sender, receiver):
    size = PASSED[(call + sender + 2 * receiver) % len(PASSED)]
    return values(10 * sender + receiver, "int8", size).view(np.uint8)


def carried(transport, rank, gathered, summed):
    """The results of a round: gathered arrays, a mean of two arrays and a sum; and the number of reductions."""
    import torch

    from grace.core.collectives import Gather, Reduce

    numbers, begin = torch.from_numpy(values(rank, "float32", summed)), transport.reduce
    codes = torch.from_numpy(values(rank, "int8", gathered).view(np.uint8))
    reduced = []
    transport.reduce = lambda *args: (reduced.append(args), begin(*args))[1]
    try:
        asked = (
            Gather((codes, numbers[:3])),
            Reduce((numbers[:7], numbers[7:].reshape(-1, 2))),
            Reduce((numbers,), "sum"),
        )
        payloads, mean, total = transport.start(asked, "round")()
    finally:
        del transport.reduce
    payloads = [[array.numpy() for array in payload] for payload in payloads]
    return payloads, [array.numpy() for array in mean], [array.numpy() for array in total], len(reduced)


def main():
    import torch
    import torch.distributed as dist
    from launch import leave_gloo, save

    import grace

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), range(dist.get_world_size())
    transport = grace.transports.get_transport("torch").bind(grace.backends.get_backend("torch"))
    found = {}
    for dtype in DTYPES:
        for op in ("sum", "min", "max"):
            # All collectives are in flight at once.
            waits = [transport.reduce(torch.from_numpy(values(rank, dtype, n)), op, "it") for n in SIZES]
            found[dtype, op] = [wait().numpy() for wait in waits]
    # Two optimizers share a process group and make the same calls.
    pair = [grace.transports.get_transport("torch").bind(transport.xp) for _ in range(2)]
    waits = []
    for call, n in enumerate(GATHERED):
        for transport in pair:
            waits.append(transport.gather(torch.from_numpy(values(rank, "int8", n).view(np.uint8)), "it"))
            mine = [torch.from_numpy(passed(call, rank, worker)) for worker in workers]
            waits.append(transport.all_to_all(mine, [len(passed(call, worker, rank)) for worker in workers], "it"))
            transport.reduce(torch.ones(5), "sum", "between")()
    last_first = [[buffer.numpy() for buffer in wait()] for wait in waits[::-1]]
    found["gathered"], found["passed"] = last_first[::-1][::2], last_first[::-1][1::2]
    found["carried"] = [carried(transport, rank, *sizes) for sizes in BESIDE]
    save(sys.argv[1], rank, found)
    leave_gloo()


if __name__ == "__main__":
    main()
