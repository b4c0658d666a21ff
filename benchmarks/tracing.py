"""How long a TensorFlow graph of an exchange takes: its first step, which traces it, and later steps.

    horovodrun -np 2 --gloo python -m benchmarks.tracing [--tensors 40] [--size 4096] [--methods auto,int4,eden3]
                                                         [--steps 20] [--profile FILE]

Every worker averages the gradients of ``--tensors`` variables, in a tf.function. Worker 0 prints, for each method, the
seconds of the first step, the median milliseconds of later steps, and the number of operations of the graph and of the
functions that it calls. "local": without exchange. ``--profile``: cProfile's data of the first steps.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import time
from statistics import median
from typing import Any

METHODS: dict[str, dict[str, Any] | None] = {
    "local": None,
    "none": {"compressor": "none"},
    "fp16": {"compressor": "fp16"},
    "int4": {"compressor": "blockint", "bits": 4},
    "eden3": {"compressor": "eden", "bits": 3},
    "powersgd": {"compressor": "powersgd", "compress_rank": 4},
    "auto": {"compressor": "auto", "trial_steps": 1000},
}


def measured(settings: dict[str, Any] | None, tensors: int, size: int, steps: int, profile: Any) -> list[float]:
    """Seconds of the first step, median milliseconds of later ones, number of operations."""
    import tensorflow as tf

    import grace

    shape = (size // 64, 64)
    values = [tf.random.stateless_normal(shape, (number, 1)) for number in range(tensors)]
    grc = None if settings is None else grace.grace_from_params(settings)

    def step(gradients: list[Any]) -> list[Any]:
        named = {f"t{number}": x for number, x in enumerate(gradients)}
        return [2 * x for x in named.values()] if grc is None else list(grc.step(named).values())

    if grc is not None:
        grc.build({f"t{number}": x for number, x in enumerate(values)})
    traced, times = tf.function(step, autograph=False), []
    for number in range(steps + 1):
        begin = time.perf_counter()
        if profile and not number:
            profile.enable()
        traced(values)[-1].numpy()
        if profile and not number:
            profile.disable()
        times.append(time.perf_counter() - begin)
    graph = traced.get_concrete_function(values).graph.as_graph_def()
    operations = len(graph.node) + sum(len(each.node_def) for each in graph.library.function)
    return [times[0], 1000 * median(times[1:]), operations]


def main() -> None:
    """Measure the methods that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for option, default in (("--tensors", 40), ("--size", 4096), ("--steps", 20)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--methods", default="local,none,fp16,int4,eden3,powersgd,auto")
    parser.add_argument("--profile")
    given = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import horovod.tensorflow as hvd

    hvd.init()
    profile = cProfile.Profile() if given.profile and hvd.rank() == 0 else None
    for name in ("local", *given.methods.split(",")):  # the first method's time includes the start of TensorFlow
        found = measured(METHODS[name], given.tensors, given.size, given.steps, profile)
        if hvd.rank() == 0:
            print(f"{name:10} {found[0]:7.2f} s {found[1]:8.1f} ms {found[2]:8.0f} operations", flush=True)
    if profile:
        profile.dump_stats(given.profile)


if __name__ == "__main__":
    main()
