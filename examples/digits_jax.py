"""Handwritten digits with JAX, Flax (nnx) and optax: each device trains on its own images; gradients are compressed.

python examples/digits_jax.py --devices 2                      # two devices on this machine's CPU
python examples/digits_jax.py --devices 4 --method eden --params '{"bits": 3}'
"""

from __future__ import annotations

import argparse
import os
import time
from types import SimpleNamespace
from typing import Any

import digits
import numpy as np


def start(devices: int = 2) -> None:
    """Make the devices, before JAX starts."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["NPROC"] = str(max(16, 4 * devices))  # XLA's threads: devices of one CPU wait for each other in them
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}"
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.set_mesh(jax.make_mesh((devices,), ("data",)))


def make_model(seed: int) -> Any:
    """283,786 parameters, nearly all of them in two large tensors."""
    from flax import nnx

    rngs = nnx.Rngs(seed)
    return nnx.Sequential(
        nnx.Conv(1, 32, (3, 3), rngs=rngs),
        nnx.relu,
        lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2)),
        nnx.Conv(32, 64, (3, 3), rngs=rngs),
        nnx.relu,
        lambda x: x.reshape(x.shape[0], -1),
        nnx.Linear(64 * 4 * 4, 256, rngs=rngs),
        nnx.relu,
        nnx.Linear(256, 10, rngs=rngs),
    )


def exchange(params: dict[str, Any]) -> Any:
    """What the demo and `train` need to know of an exchange with these parameters."""
    import jax

    import grace.jax

    made = SimpleNamespace(rank=0, world_size=jax.device_count(), made=grace.jax.exchange(params), measured=None)
    made.report = lambda: made.measured
    return made


def train(grc: Any, options: argparse.Namespace, tell: digits.Tell) -> dict[str, Any]:
    """Train a new model; returns `digits.result`."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax import P

    import grace.jax

    size = grc.world_size
    each = [digits.load(rank, size) for rank in range(size)]
    images, labels = (np.stack([data[place] for data in each]) for place in (0, 1))
    test_images, test_labels = each[0][2:]
    graph, params, rest = nnx.split(make_model(options.seed), nnx.Param, ...)
    params = jax.tree.map(jnp.asarray, nnx.to_pure_dict(params))
    steps = images.shape[1] // options.batch_size
    rate = optax.cosine_decay_schedule(options.lr, options.epochs * steps)
    tx = optax.chain(grc.made, optax.sgd(rate, momentum=options.momentum))
    state = tx.init(params)

    def scores(params: Any, x: Any) -> Any:
        whole = nnx.State(jax.tree.map(lambda x: x, params))
        model = nnx.merge(graph, whole, rest)
        return model(x[..., None])

    def loss(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(scores(params, x), y).mean()

    def step(params: Any, state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
        own = jax.lax.pcast(params, "data", to="varying")
        value, grads = jax.value_and_grad(loss)(own, x[0], y[0])
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

    sharded = grace.jax.specs(state)
    specs = {"in_specs": (P(), sharded, P("data"), P("data")), "out_specs": (P(), sharded, P())}
    step = jax.jit(jax.shard_map(step, **specs), donate_argnums=(0, 1))
    evaluate = jax.jit(scores)
    rows = jax.NamedSharding(jax.sharding.get_mesh(), P("data"))
    report = grc.made.report(params)

    began, computed, sent = time.perf_counter(), 0.0, 0
    order = np.random.default_rng(options.seed)
    history: list[dict[str, Any]] = []
    for epoch in range(options.epochs):
        busy, losses = time.process_time(), 0.0
        batches = np.split(order.permutation(images.shape[1])[: steps * options.batch_size], steps)
        for number, batch in enumerate(batches, start=1):
            x, y = (jax.device_put(each[:, batch], rows) for each in (images, labels))
            params, state, value = step(params, state, x, y)
            losses, sent = losses + float(value), sent + report.bytes_sent
            if number < steps:
                tell(epoch * steps + number, options.epochs * steps, None)
        computed += (time.process_time() - busy) / size  # all devices are in this process
        found = evaluate(jax.device_get(params), test_images).argmax(1)
        accuracy = float((np.asarray(found) == test_labels).mean())
        history.append(
            {
                "epoch": epoch + 1,
                "loss": losses / steps,
                "accuracy": accuracy,
                "bytes_sent": sent,
                "computed": computed,
            }
        )
        tell((epoch + 1) * steps, options.epochs * steps, history[-1])
    grc.measured = report
    return digits.result("JAX", grc, history, time.perf_counter() - began)


def main() -> None:
    parser = digits.arguments("Handwritten digits with JAX.")
    parser.add_argument("--devices", type=int, default=2, help="devices of the CPU, each with its own images")
    options = parser.parse_args()
    start(options.devices)
    grc = exchange({"compressor": options.method, **options.params})
    with digits.progress(f"JAX {options.method}", 0) as tell:
        outcome = train(grc, options, tell)
    digits.finish(options, grc, outcome)


if __name__ == "__main__":
    main()
