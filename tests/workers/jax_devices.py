"""Four forced devices in one process: what the compiled steps of grace.jax contain, and what they compute."""

import os
import re
import sys
from math import prod

FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compiles in half the time
os.environ["NPROC"] = "16"  # threads: with as many as devices, one that compiles or computes can keep a sum from ending
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=4 {FAST}"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P
from launch import error_of, save

import grace
import grace.jax

jax.config.update("jax_cpu_enable_async_dispatch", False)  # steps in flight at once wait for each other's threads
SHAPES = {"a": (64, 256), "b": (256,), "c": (32, 1024)}
GRADIENT = sum(map(prod, SHAPES.values()))
METHODS = {
    "eden": {"compressor": "eden", "bits": 3},
    "blockint": {"compressor": "blockint", "block_size": 64},
    "topk": {"compressor": "topk", "compress_ratio": 0.05},
    "powersgd": {"compressor": "powersgd"},
    "ef21": {"compressor": "topk", "compress_ratio": 0.05, "memory": "ef21"},
}
WORKERS = 4


def gradients(seed=0):
    rng = np.random.default_rng(seed)
    return [{n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(WORKERS)]


def spread(mesh, axes, workers):
    stacked = {name: np.stack([each[name] for each in workers]) for name in SHAPES}
    return jax.device_put(stacked, jax.NamedSharding(mesh, P(axes)))


def exchanged(config, axes, mesh, steps, check_vma):
    """The means of ``steps`` exchanges, without a model."""
    exchange = grace.jax.exchange(config, axes)
    state = exchange.init(gradients()[0])

    def step(stacked, state):
        return exchange.update(jax.tree.map(lambda rows: rows[0], stacked), state)

    sharded = grace.jax.specs(state)
    step = jax.jit(jax.shard_map(step, in_specs=(P(axes), sharded), out_specs=(P(), sharded), check_vma=check_vma))
    found = []
    for number in range(steps):
        means, state = step(spread(mesh, axes, gradients(number)), state)
        found.append(jax.tree.map(np.asarray, means))
    return found, exchange.report(gradients()[0])


def training(config, check_vma=True, cast=True):
    """A training step of a network with two layers, its state and a batch. The list counts traces."""
    tx = optax.chain(grace.jax.exchange(config), optax.adamw(1e-3))
    params = {name: jnp.asarray(array) / 16 for name, array in gradients()[0].items() if name != "c"}
    params["c"] = jnp.ones((256, 128)) / 16
    state, traces = tx.init(params), []

    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["a"] + params["b"]) @ params["c"] - y) ** 2)

    def step(params, state, x, y):
        traces.append(1)
        local = jax.lax.pcast(params, "data", to="varying") if check_vma and cast else params
        grads = jax.grad(loss)(local, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sharded = grace.jax.specs(state)
    step = jax.shard_map(
        step, in_specs=(P(), sharded, P("data"), P("data")), out_specs=(P(), sharded), check_vma=check_vma
    )
    rng = np.random.default_rng(0)
    batch = [rng.standard_normal((32, n)).astype(np.float32) for n in (64, 128)]
    batch = [jax.device_put(each, jax.NamedSharding(jax.sharding.get_mesh(), P("data"))) for each in batch]
    return jax.jit(step, donate_argnums=(0, 1)), params, state, batch, traces


def collectives(text):
    """The collectives of a compiled program: operation, dtype, elements of the result."""
    found = []
    for line in text.splitlines():
        match = re.search(
            r"= (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(-start)?\(", line
        )
        for dtype, shape in re.findall(r"([a-z]+\d+)\[([\d,]*)\]", match[1]) if match else ():
            found.append((match[2], dtype, prod(int(n) for n in shape.split(",") if n)))
    return found


def compiled(config):
    """What a compiled step contains."""
    step, params, state, batch, _ = training(config)
    found = step.lower(params, state, *batch).compile()
    memory = found.memory_analysis()
    residuals = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state[0].residuals)]
    replicated = [x.nbytes for x in jax.tree.leaves((params, state[1]))]
    report = grace.jax.report(params, config)
    return {
        "collectives": collectives(found.as_text()),
        "donated": memory.alias_size_in_bytes,
        "residuals": sum(residuals),
        "replicated": sum(replicated),
        "output": memory.output_size_in_bytes,
        "gradient": sum(x.size for x in jax.tree.leaves(params)),
        "sent": report.bytes_sent,
        "tensors": [(each.name, each.method, each.bytes_sent) for each in report.tensors],
    }


def hundred_steps():
    step, params, state, batch, traces = training(METHODS["blockint"])
    for _ in range(100):
        params, state = step(params, state, *batch)
    return len(traces), step._cache_size(), int(state[0].count), int(state[0].nonfinite)


def parameters(check_vma):
    step, params, state, batch, _ = training(METHODS["blockint"], check_vma)
    for _ in range(3):
        params, state = step(params, state, *batch)
    copies = [[np.asarray(shard.data).tobytes() for shard in x.addressable_shards] for x in jax.tree.leaves(params)]
    return [np.asarray(x) for x in jax.tree.leaves(params)], all(len(set(each)) == 1 for each in copies)


def not_finite(mesh, **more):
    config = {**METHODS["topk"], "communicator": "allgather", **more}
    exchange = grace.jax.exchange(config)
    state = exchange.init(gradients()[0])

    def step(stacked, state):
        return exchange.update(jax.tree.map(lambda rows: rows[0], stacked), state)

    sharded = grace.jax.specs(state)
    step = jax.jit(jax.shard_map(step, in_specs=(P("data"), sharded), out_specs=(P(), sharded)))
    _, state = step(spread(mesh, "data", gradients()), state)
    before = jax.tree.map(np.asarray, state.residuals.tensors)
    bad = gradients(1)
    bad[2]["a"][3, 4] = np.nan
    means, state = step(spread(mesh, "data", bad), state)
    after = jax.tree.map(np.asarray, state.residuals.tensors)
    kept = {name: np.array_equal(before[name]["memory/residual"], after[name]["memory/residual"]) for name in before}
    return int(state.nonfinite), kept, {name: bool(np.isfinite(x).all()) for name, x in means.items()}


def by_function(mesh):
    """Two steps of `grace.jax.mean` with the step as key, and one with a key of jax.random."""
    config = METHODS["blockint"]
    residuals = grace.jax.init(gradients()[0], config)

    def step(stacked, residuals, key):
        return grace.jax.mean(jax.tree.map(lambda rows: rows[0], stacked), residuals, key, config)

    sharded = grace.jax.specs(residuals)
    step = jax.jit(jax.shard_map(step, in_specs=(P("data"), sharded, P()), out_specs=(P(), sharded)))
    found = []
    for number in range(2):
        means, residuals = step(spread(mesh, "data", gradients(number)), residuals, number)
        found.append(jax.tree.map(np.asarray, means))
    means, _ = step(spread(mesh, "data", gradients(2)), residuals, jax.random.key(7))
    return found, jax.tree.map(np.asarray, means)


def mixed(mesh):
    """Gradients in bfloat16 and float16, and small ones, which go dense: dtypes of the means, and their reasons."""
    tree = {
        "half": jnp.ones((4, 64, 64), jnp.float16),
        "brain": jnp.ones((4, 2048), jnp.bfloat16),
        "few": jnp.ones((4, 9)),
    }
    tree = jax.device_put(tree, jax.NamedSharding(mesh, P("data")))
    one = jax.tree.map(lambda rows: jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype), tree)
    exchange = grace.jax.exchange(METHODS["blockint"])
    state = exchange.init(one)

    def step(stacked, state):
        return exchange.update(jax.tree.map(lambda rows: rows[0], stacked), state)

    sharded = grace.jax.specs(state)
    means, _ = jax.jit(jax.shard_map(step, in_specs=(P("data"), sharded), out_specs=(P(), sharded)))(tree, state)
    reasons = {each.name: each.reason for each in exchange.report(one).tensors}
    return {name: (x.dtype.name, float(jnp.max(jnp.abs(x - 1)))) for name, x in means.items()}, reasons


def summed_already():
    step, params, state, batch, _ = training(METHODS["topk"], cast=False)
    step.lower(params, state, *batch)


def main(out):
    found = {}
    mesh = jax.make_mesh((4,), ("data",))
    with jax.set_mesh(mesh):
        for name in ("blockint", "topk", "powersgd", "ef21"):
            found[f"means {name}"] = exchanged(METHODS[name], "data", mesh, 2, name != "ef21")
        found["compiled two stages"] = compiled(METHODS["blockint"])
        found["compiled gathered"] = compiled({**METHODS["eden"], "memory": "residual", "communicator": "allgather"})
        found["hundred"] = hundred_steps()
        found["parameters"] = [parameters(check_vma) for check_vma in (True, False)]
        found["not finite"], found["zeroed"] = not_finite(mesh), not_finite(mesh, nonfinite="zero")
        found["function"] = by_function(mesh)
        found["mixed"] = mixed(mesh)
        found["summed"] = error_of(summed_already)
        found["ef21 checked"] = error_of(exchanged, METHODS["ef21"], "data", mesh, 1, True)
    mesh = jax.make_mesh((2, 2), ("cross", "node"))
    with jax.set_mesh(mesh):
        config = {**METHODS["blockint"], "communicator": "hierarchical"}
        found["hierarchical"] = exchanged(config, ("cross", "node"), mesh, 2, True)
        found["two axes"] = grace.jax.report(gradients()[0], METHODS["blockint"], ("cross", "node")).method
    save(out, 0, found)


if __name__ == "__main__":
    main(sys.argv[1])
