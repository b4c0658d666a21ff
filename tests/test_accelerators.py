"""Accelerators: the table names GRACE's methods, and each entry gives the results of the plain functions."""

import warnings
from collections import defaultdict

import numpy as np
import pytest
from methods import alone, backend, built, context, host, spread
from table import ROWS

from grace import grace_from_params
from grace.core import Memory
from grace.core.method import Method, materialize
from grace.core.registry import compressors, memories
from grace.engine.accelerators import Accelerator, MemoryAccelerator, accelerator_of, memory_accelerator_of
from grace.engine.accelerators.table import FAMILIES, table
from grace.engine.encoders import FastMethod
from grace.engine.lazy_mean import DeferredResidual
from grace.engine.workspace import Workspace
from grace.memories.decoupled import DecoupledMomentum
from grace.memories.dgc import DGC
from grace.memories.lowpass import LowPass
from grace.memories.momentum import Momentum
from grace.memories.none import NoMemory
from grace.memories.residual import Residual
from grace.transports.local import LocalTransport

PLAIN = {"none", "fp16", "dion", "adaptive_random", "damped", "geometric", "kashin"}
"""Compressors without kernels: casts and matrix products, which every toolkit has, and methods for studies."""
ROUNDED = {"demo", "thc"}
"""Their kernels sum in another order: tests/test_cosines.py and tests/test_kernels.py check bounds."""
HOOKS = {
    "encode",
    "compress",
    "compensated",
    "compensate",
    "update",
    "residual",
    "split_residual",
    "mean",
    "decode",
    "decode_into",
    "aggregate",
    "aggregate_into",
    "add_decoded",
}


def entries():
    """The methods of the table, with their accelerators."""
    return {kind: accelerator for family in FAMILIES for kind, accelerator in table(family).items()}


def hooks(accelerator):
    """What an accelerator overrides."""
    base = Accelerator if isinstance(accelerator, Accelerator) else MemoryAccelerator
    return {name for name in HOOKS & set(dir(base)) if getattr(type(accelerator), name) is not getattr(base, name)}


def test_the_table_names_the_methods_of_grace():
    for family, modules in FAMILIES.items():
        assert {kind.__module__ for kind in table(family)} == {f"grace.{module}" for module in modules}, family
    registered = {
        cls
        for registry in (compressors, memories)
        for cls in registry.values()
        if cls.__module__.startswith(("grace.compressors.", "grace.memories."))
    }
    assert set(entries()) <= registered
    ours = {cls for cls in compressors.values() if cls.__module__.startswith("grace.compressors.")}
    assert {cls.registered_name for cls in ours - set(entries())} == PLAIN
    assert {type(made(row)).registered_name for row in ROWS} == {cls.registered_name for cls in ours}


def test_a_subclass_has_the_default_accelerator():
    for kind in entries():
        if issubclass(kind, Memory):
            assert type(memory_accelerator_of(type("Own", (kind,), {})())) is MemoryAccelerator
        else:
            assert type(accelerator_of(type("Own", (kind,), {})())) is Accelerator


def made(row):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without error feedback")
        return grace_from_params({**row.params, "memory": "none"}, LocalTransport()).method.compressor


def fitting(compressor):
    """Memories that the engine fuses with a compressor."""
    found = [NoMemory(), Momentum()]
    if not (compressor.traits.majority_vote or compressor.traits.internal_feedback):
        found += [Residual(), Residual(beta=0.5), DecoupledMomentum(), LowPass()]
    return found + [DGC()] * compressor.traits.sends_exact_values


def steps(method, xp, shape, fast, in_place=False):
    """Payloads, states and means of two steps, in NumPy. ``in_place``: with a rollback log."""
    found, state = [], method.init(context(xp, shape))
    agreed, n = method.compressor.traits.combine.value == "agreed", context(xp, shape).size
    for step in range(2):
        ctx = context(xp, shape, rank=1, step=step, _workspace=Workspace([]) if in_place else None)
        x = xp.asarray(spread(n, seed=step), "float32")

        def program(ctx, x=x, state=state):
            own = {key: xp.buffers.copy(value) for key, value in state.items()}
            return method.encode(xp.buffers.copy(x), own, ctx, defer=fast)

        payload, state = alone(program, ctx)
        residual = state.get("memory/residual")
        if isinstance(residual, DeferredResidual):
            residual.into(out := xp.zeros(n))
            state["memory/residual"] = out
        state = {key: xp.buffers.copy(value) for key, value in state.items()}
        means = [method.mean([payload], ctx, agreed=True), *([] if agreed else [method.mean([payload] * 3, ctx)])]
        arrays = [np.array(xp.to_numpy(materialize(mean))) for mean in means]
        for mean, array in zip(means if fast else [], arrays, strict=False):
            assert np.array_equal(xp.to_numpy(mean.into(xp.zeros(n))), array)
        found.append([host(xp, payload), host(xp, state.values()), arrays])
    return found


def assert_equal(found, expected, rounded, label):
    for one, other in zip(found, expected, strict=True):
        for kind, mine, plain in zip(("payload", "state", "mean"), one, other, strict=True):
            assert len(mine) == len(plain), f"{label}: {kind}"
            for a, b in zip(mine, plain, strict=True):
                if a.dtype == np.float32:  # sums are of float64 numbers, in any order
                    largest = abs(b).max(initial=0)
                    rtol, atol = (1e-3, 1e-4 * largest) if rounded else (1e-6, 1e-6 * largest)
                    np.testing.assert_allclose(a, b, rtol, atol, err_msg=f"{label}: {kind}")
                else:
                    np.testing.assert_array_equal(a, b, f"{label}: {kind}")


def noting(hook, called):
    def noted(*args):
        found = hook(*args)
        if found is not None or hook.__name__ == "split_residual":
            called.add(hook.__name__)
        return found

    return noted


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_what_an_accelerator_takes_over_equals_the_plain_functions(name, monkeypatch):
    built()
    xp, called = backend(name), defaultdict(set)
    for kind, accelerator in entries().items():
        for hook in hooks(accelerator):
            monkeypatch.setattr(accelerator, hook, noting(getattr(accelerator, hook), called[kind]))
    for row in ROWS:
        compressor = made(row)
        shape = (48, 64) if compressor.traits.needs_shape else (5003,)
        if type(compressor) not in entries() or not compressor.applies(context(xp, shape)):
            continue
        for memory in fitting(compressor):
            monkeypatch.setenv("GRACE_KERNELS", "off")
            expected = steps(Method(compressor, memory), xp, shape, fast=False)
            for kernels, in_place in (("off", False), ("off", True), ("on", False), ("on", True)):
                monkeypatch.setenv("GRACE_KERNELS", kernels)
                found = steps(FastMethod(compressor, memory), xp, shape, True, in_place)
                label = f"{row}, {memory}, kernels {kernels}, in place {in_place}"
                assert_equal(found, expected, row.params["compressor"] in ROUNDED, label)
    missed = {kind.__name__: hooks(each) - called[kind] for kind, each in entries().items()}
    assert not any(missed.values()), {kind: each for kind, each in missed.items() if each}
