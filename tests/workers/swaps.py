"""Gathers of Horovod with small and large buffers: OUT TOOLKIT (torch, tensorflow or graph)."""

import importlib
import sys

import numpy as np

SIZES = (1, 2**14 - 1, 2**14, 2**14 + 1, 2**14 + 3, 10**6 + 2)  # two workers swap messages of 2**14 bytes and more


def values(rank, size):
    return np.random.default_rng(100 * rank + size).integers(0, 256, size).astype(np.uint8)


def main():
    toolkit = "torch" if sys.argv[2] == "torch" else "tensorflow"
    hvd = importlib.import_module(f"horovod.{toolkit}")
    from launch import save

    import grace

    hvd.init()
    xp = grace.backends.get_backend(toolkit)
    transport = grace.transports.get_transport("horovod").bind(xp)
    summed, begin = [], transport.reduce_wide
    transport.reduce_wide = lambda *args: (summed.append(args), begin(*args))[1]

    def gather(buffers):
        # Slices from the second byte on, which are not aligned.
        waits = [transport.gather(buffer[1:], f"of.{size}") for buffer, size in zip(buffers, SIZES, strict=True)]
        return [wait() for wait in waits]

    if sys.argv[2] == "graph":
        import tensorflow as tf

        gather = tf.function(gather, autograph=False)
    given = [xp.asarray(np.append(np.uint8(0), values(hvd.rank(), size)), "uint8") for size in SIZES]
    found = [[xp.to_numpy(buffer) for buffer in buffers] for buffers in gather(given)]
    save(sys.argv[1], hvd.rank(), {"gathered": found, "summed": len(summed)})


if __name__ == "__main__":
    main()
