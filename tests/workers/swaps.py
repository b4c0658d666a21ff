"""Gathers of Horovod with small and large buffers: OUT."""

import sys

import numpy as np

SIZES = (1, 2**14 - 1, 2**14, 2**14 + 1, 2**14 + 3, 10**6 + 2)  # two workers swap messages of 2**14 bytes and more


def values(rank, size):
    return np.random.default_rng(100 * rank + size).integers(0, 256, size).astype(np.uint8)


def main():
    import horovod.torch as hvd
    import torch
    from launch import save

    import grace

    hvd.init()
    transport = grace.transports.get_transport("horovod").bind(grace.backends.get_backend("torch"))
    summed, begin = [], transport.reduce_wide
    transport.reduce_wide = lambda *args: (summed.append(args), begin(*args))[1]
    waits = [transport.gather(torch.from_numpy(values(hvd.rank(), size)), f"of {size}") for size in SIZES]
    found = [[buffer.numpy() for buffer in wait()] for wait in waits]
    save(sys.argv[1], hvd.rank(), {"gathered": found, "summed": len(summed)})


if __name__ == "__main__":
    main()
