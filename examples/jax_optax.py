"""Data-parallel training in JAX with optax: `jax.shard_map`, replicated parameters, compressed gradients.

python examples/jax_optax.py                                                          # on all devices
XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_optax.py       # four devices on a CPU
"""

import jax
import jax.numpy as jnp
import optax
from jax import P

import grace.jax

jax.set_mesh(jax.make_mesh((jax.device_count(),), ("data",)))
exchange = grace.jax.exchange({"compressor": "eden", "bits": 3}, axis_name="data")
tx = optax.chain(exchange, optax.adamw(1e-2))
params = {"w": jnp.zeros((64, 32)), "b": jnp.zeros(32)}
state = tx.init(params)


def step(params, state, x, y):
    own = jax.lax.pcast(params, "data", to="varying")  # else JAX sums the gradients itself, uncompressed
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"] + p["b"] - y) ** 2))(own)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")


sharded = grace.jax.specs(state)
step = jax.shard_map(step, in_specs=(P(), sharded, P("data"), P("data")), out_specs=(P(), sharded, P()))
step = jax.jit(step, donate_argnums=(0, 1))

data = jax.NamedSharding(jax.sharding.get_mesh(), P("data"))
x = jax.device_put(jax.random.normal(jax.random.key(0), (64 * jax.device_count(), 64)), data)
y = jax.device_put(x @ jnp.ones((64, 32)), data)
for number in range(200):
    params, state, loss = jax.block_until_ready(step(params, state, x, y))
    if number % 50 == 49:
        print(f"step {number + 1}: loss {loss:.4f}")
print(exchange.report(params))
