"""Local training (DiLoCo) in JAX: devices train alone for some steps, then exchange what they changed, compressed.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/local_jax.py

`grace.local` needs PyTorch or Keras. In JAX it is a recipe: an inner `jax.shard_map` without collectives, in which
each device has parameters of its own, and an outer step of `grace.jax.mean` and Nesterov momentum.
Douillard et al., "DiLoCo", 2023, arXiv:2311.08105.
"""

import jax
import jax.numpy as jnp
import optax
from jax import P

import grace.jax

INNER, ROUNDS = 10, 20
CONFIG = {"compressor": "blockint", "bits": 4}
jax.config.update("jax_cpu_enable_async_dispatch", False)  # devices of one CPU: steps in flight may block each other
jax.set_mesh(jax.make_mesh((jax.device_count(),), ("data",)))
inner, outer = optax.adamw(3e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)
params = {"w": jnp.zeros((64, 32)), "b": jnp.zeros(32)}  # of the last outer step, equal on all devices


def own(tree):
    """One copy for each device, along a leading axis."""
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (jax.device_count(), *x.shape)), tree)
    return jax.device_put(rows, jax.NamedSharding(jax.sharding.get_mesh(), P("data")))


def loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def inner_steps(params, state, x, y):
    """INNER steps on each device alone: no collectives."""
    row = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
    params, state = jax.lax.pcast(params, "data", to="varying"), row(state)
    for _ in range(INNER):
        updates, state = inner.update(jax.grad(loss)(params, x, y), state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda x: x[None], (params, state))


def outer_step(params, moved, momentum, residuals, number):
    """The mean of what the devices changed is the gradient of the outer optimizer."""
    change = jax.tree.map(lambda old, new: old - new[0], params, moved)
    mean, residuals = grace.jax.mean(change, residuals, number, CONFIG, axis_name="data")
    updates, momentum = outer.update(mean, momentum, params)
    return optax.apply_updates(params, updates), momentum, residuals


state, momentum, residuals = own(inner.init(params)), outer.init(params), grace.jax.init(params, CONFIG)
rows, kept = P("data"), grace.jax.specs(residuals)
inner_steps = jax.jit(jax.shard_map(inner_steps, in_specs=(P(), rows, rows, rows), out_specs=(rows, rows)))
outer_step = jax.jit(
    jax.shard_map(outer_step, in_specs=(P(), rows, P(), kept, P()), out_specs=(P(), P(), kept)), donate_argnums=(2, 3)
)
x = jax.random.normal(jax.random.key(0), (64 * jax.device_count(), 64))
x = jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), P("data")))
y = x @ jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)
for number in range(ROUNDS):
    moved, state = inner_steps(params, state, x, y)
    params, momentum, residuals = outer_step(params, moved, momentum, residuals, number)
    if number % 5 == 4:
        print(f"{(number + 1) * INNER} steps, {number + 1} exchanges: loss {loss(params, x, y):.4f}")
