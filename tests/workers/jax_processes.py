"""One process of several over gloo, with one device each: python jax_processes.py OUT RANK SIZE PORT."""

import sys

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_cpu_enable_async_dispatch", False)

import numpy as np
from jax import P
from launch import error_of, save

import grace.jax

LARGE = 2**20 + 2**16  # float32 elements: more than 4 MiB


def gradients(rank, step):
    return {"large": np.random.default_rng(100 * step + rank).standard_normal(LARGE).astype(np.float32)}


def exchanged(config, mesh, rank, size, steps=2):
    """This process's means, and its bytes sent in a step."""
    exchange = grace.jax.exchange(config)
    state = exchange.init(gradients(0, 0))

    def step(stacked, state):
        return exchange.update(jax.tree.map(lambda rows: rows[0], stacked), state)

    sharded = grace.jax.specs(state)
    step = jax.jit(jax.shard_map(step, in_specs=(P("data"), sharded), out_specs=(P(), sharded)))
    for number in range(steps):
        local = jax.NamedSharding(mesh, P("data"))
        own = {name: x[None] for name, x in gradients(rank, number).items()}
        stacked = {name: jax.make_array_from_process_local_data(local, x) for name, x in own.items()}
        means, state = step(stacked, state)
    return {name: np.asarray(x.addressable_shards[0].data) for name, x in means.items()}


def differing(rank):
    """The error where one process has other settings, and that where one has another parameter."""
    grace.jax.init(gradients(0, 0), {"compressor": "blockint", "bits": 4 if rank else 8})


def main(out, rank, size, port):
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank)
    mesh = jax.make_mesh((size,), ("data",))
    found = {}
    with jax.set_mesh(mesh):
        for name, config in {
            "none": {"compressor": "none"},
            "gathered": {"compressor": "blockint", "block_size": 64, "communicator": "allgather"},
            "two stages": {"compressor": "blockint", "block_size": 64, "communicator": "twostage"},
        }.items():
            found[name] = exchanged(config, mesh, rank, size)
        found["differing"] = error_of(differing, rank)
    save(out, rank, found)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
