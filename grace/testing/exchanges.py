"""Laws for exchanges: a compressor, its memory and a communicator together, between workers in this process."""

from __future__ import annotations

from typing import Any

import numpy as np

from grace.core import Compressor, Memory
from grace.core.communicator import Communicator
from grace.core.registry import communicators, usual_communicator
from grace.testing.cases import (
    BAD,
    Laws,
    fully,
    host,
    lockstep,
    poisoned,
    same,
    shape_of,
    spread,
    states,
    unchanged,
    workers,
)

LAWS = Laws()
DTYPES = ("float16", "float32", "float64")


@LAWS.add
def shapes_and_dtypes_are_kept_and_all_workers_agree(
    communicator: Communicator, compressor: Compressor, xp: Any, memory: Memory | None = None
) -> None:
    """Means have their gradients' shapes and dtypes, and the same bits on all workers; gradients are not changed."""
    size = 5 if fully(xp) else 3
    every_pair = fully(xp) and isinstance(communicator, communicators[usual_communicator(compressor)])
    graces = workers(compressor, memory, communicator, size)
    dtypes = [*DTYPES, *(["bfloat16"] if xp.name == "torch" else [])]
    kinds = {str(shape): shape for shape in ((), (0,), (1,), (7,), (3, 5), (4, 3, 3, 8), shape_of(compressor, 200))}

    def made(seed: int) -> dict[str, Any]:
        floats = {kind: np.asarray(spread(*shape, seed=seed), np.float32) for kind, shape in kinds.items()}
        pairs = [(d, kind) for d in dtypes for kind in floats]
        if not every_pair:  # every dtype and every shape once is enough
            pairs = [(dtypes[i % len(dtypes)], kind) for i, kind in enumerate(floats)]
        return {f"{d} {kind}": xp.cast(xp.asarray(floats[kind], "float32"), d) for d, kind in pairs}

    gradients = [made(rank) for rank in range(size)]
    for grace in graces:
        grace.build(gradients[0])
    before = [host(xp, worker.values()) for worker in gradients]
    for _ in range(2):
        means = lockstep(graces, gradients)
    after = [host(xp, worker.values()) for worker in gradients]
    assert all(map(same, after, before)), "the exchange changes the gradients that it was given"
    for name in gradients[0]:
        dtype, kind = name.split(" ", 1)
        for worker in means:
            assert (xp.dtype(worker[name]), xp.shape(worker[name])) == (dtype, kinds[kind]), f"{name} changes its kind"
        found = [host(xp, [worker[name]]) for worker in means]
        assert all(same(found[0], other) for other in found), f"workers find different means of {name}"
        assert np.isfinite(found[0][0].astype(np.float64)).all(), f"the mean of {name} is not finite"


@LAWS.add
def state_keeps_its_keys_shapes_and_dtypes(
    communicator: Communicator, compressor: Compressor, xp: Any, memory: Memory | None = None
) -> None:
    """The state keeps exactly the arrays of ``init``, so it can be counted, saved and restored."""
    graces, shape = workers(compressor, memory, communicator, 2), shape_of(compressor)
    for grace in graces:
        grace.build({"w": xp.zeros(shape)})

    def described() -> Any:
        return [{key: (array.shape, array.dtype) for key, array in worker.items()} for worker in states(graces)]

    before = described()
    for x in (spread(*shape), np.zeros(shape, np.float32), np.full(shape, np.nan, np.float32), 9 * spread(*shape)):
        lockstep(graces, [{"w": xp.asarray(x.copy(), "float32")} for _ in graces])
        assert described() == before, f"the state becomes {described()}, but init makes {before}"


@LAWS.add
def one_bad_element_is_seen_by_all_and_changes_no_state(
    communicator: Communicator, compressor: Compressor, xp: Any, memory: Memory | None = None
) -> None:
    """NaN or infinity anywhere, on one worker: all workers see it in the mean, and no state contains it."""
    graces, shape = workers(compressor, memory, communicator, 3), shape_of(compressor)
    cases = list(BAD) if fully(xp) else list(BAD)[1::3]

    def fine(step: int) -> list[dict[str, Any]]:
        made = [xp.asarray(spread(*shape, seed=step + rank), "float32") for rank in range(3)]
        return [dict.fromkeys(cases, array) for array in made]

    for grace in graces:
        grace.build(fine(0)[0])
    lockstep(graces, fine(10))
    before = states(graces)
    bad = fine(20)
    bad[1] = {name: xp.asarray(poisoned(shape, name, 21), "float32") for name in cases}
    means = lockstep(graces, bad)
    for name in cases:
        seen = [not np.isfinite(np.array(xp.to_numpy(worker[name]))).all() for worker in means]
        assert all(seen), f"{name}: only some workers see it: {seen}"
    assert unchanged(states(graces), before), "a gradient that is not finite changes the state"
    for worker in lockstep(graces, fine(30)):
        assert all(np.isfinite(xp.to_numpy(mean)).all() for mean in worker.values()), "it does not recover"


@LAWS.add
def a_checkpoint_continues_bit_for_bit(
    communicator: Communicator, compressor: Compressor, xp: Any, memory: Memory | None = None
) -> None:
    """After saving at step two and loading into new workers, the third step is the same."""
    shape = shape_of(compressor)

    def steps(graces: Any, numbers: Any) -> Any:
        for step in numbers:
            gradients = [{"w": xp.asarray(spread(*shape, seed=10 * step + r), "float32")} for r in range(2)]
            means = lockstep(graces, gradients)
        return [host(xp, worker.values()) for worker in means]

    one, two = (workers(compressor, memory, communicator, 2) for _ in range(2))
    for grace in (*one, *two):
        grace.build({"w": xp.zeros(shape)})
    steps(one, (0, 1))
    for old, new in zip(one, two, strict=True):
        new.load_state_dict(old.state_dict())
    assert all(map(same, steps(one, (2,)), steps(two, (2,)))), "the loaded workers go on differently"


@LAWS.add
def a_step_is_traced_once(
    communicator: Communicator, compressor: Compressor, xp: Any, memory: Memory | None = None
) -> None:
    """In a TensorFlow graph: one trace for all steps, the same means as in eager mode, and NaN is preserved."""
    import tensorflow as tf

    shape = shape_of(compressor, 120)
    inside, outside = (workers(compressor, memory, communicator, 1)[0] for _ in range(2))
    for grace in (inside, outside):
        grace.build({"w": xp.zeros(shape)})
    traces = []

    def exchange(g: Any) -> Any:
        traces.append(1)
        return inside.step({"w": g})["w"]

    graph = tf.function(exchange, autograph=False)
    for step in range(3):
        g = tf.constant(spread(*shape, seed=step))
        expected = np.asarray(outside.step({"w": g})["w"])
        np.testing.assert_allclose(graph(g), expected, rtol=1e-4, atol=2e-5)
    assert len(traces) == 1, "values or the step steer Python: the graph is traced anew"
    before = states([inside])
    for key, array in states([outside])[0].items():
        np.testing.assert_allclose(before[0][key], array, rtol=1e-3, atol=1e-4)
    assert inside.report().bytes_sent == outside.report().bytes_sent
    # Graphs are optimised before they run: non-finite values must survive that, and change no state.
    for value in (np.nan, np.inf, -np.inf):
        bad = spread(*shape)
        bad.reshape(-1)[77] = value
        assert not np.isfinite(graph(tf.constant(bad))).all(), f"{value} is lost in a graph"
        assert unchanged(states([inside]), before), f"{value} changes the state in a graph"
    assert np.isfinite(graph(tf.constant(spread(*shape)))).all()
    assert len(traces) == 1


a_step_is_traced_once.graphs = True  # type: ignore[attr-defined]
