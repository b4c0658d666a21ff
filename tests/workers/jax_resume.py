"""Train on two forced devices with Orbax: python jax_resume.py OUT FOLDER STEPS [KILL].

Saves after each step; with KILL, kills itself with SIGKILL after that step. Begins at the newest saved step.
"""

import os
import signal
import sys

os.environ["NPROC"] = "16"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import P
from launch import save

import grace.jax

jax.config.update("jax_cpu_enable_async_dispatch", False)


def main(out, folder, steps, kill=-1):
    mesh = jax.make_mesh((2,), ("data",))
    jax.set_mesh(mesh)
    tx = optax.chain(grace.jax.exchange({"compressor": "blockint", "bits": 2, "block_size": 64}), optax.adam(1e-2))
    params = jax.device_put({"w": jnp.ones((64, 64)) / 64}, jax.NamedSharding(mesh, P()))
    state = jax.tree.map(
        lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)),
        *((kept := tx.init(params)), grace.jax.specs(kept)),
    )

    def step(params, state, x):
        own = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] - x[:, ::-1]) ** 2))(own)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sharded = grace.jax.specs(state)
    step = jax.jit(jax.shard_map(step, in_specs=(P(), sharded, P("data")), out_specs=(P(), sharded)))
    with ocp.CheckpointManager(folder) as manager:
        first = 0
        if (newest := manager.latest_step()) is not None:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, state))
            params, state = manager.restore(newest, args=ocp.args.StandardRestore(abstract))
            first = newest + 1
        for number in range(first, steps):
            x = np.random.default_rng(number).standard_normal((32, 64)).astype(np.float32)
            params, state = step(params, state, jax.device_put(x, jax.NamedSharding(mesh, P("data"))))
            manager.save(number, args=ocp.args.StandardSave((params, state)))
            manager.wait_until_finished()
            if number == kill:
                os.kill(os.getpid(), signal.SIGKILL)
    save(out, 0, (first, [np.asarray(x) for x in jax.tree.leaves((params, state))]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
