"""Codecs of one tensor: the table names GRACE's methods, and each entry gives the results of the plain functions."""

import warnings

import numpy as np
import pytest
from methods import alone, backend, built, context, host, spread
from table import ROWS

from grace import grace_from_params
from grace.compressors.measured.efsignsgd import EFSignSGD
from grace.core.method import Method, materialize
from grace.core.registry import compressors
from grace.engine.codecs import TensorCodec, calls_of
from grace.engine.codecs.table import FAMILIES, Calls, table
from grace.memories.decoupled import DecoupledMomentum
from grace.memories.dgc import DGC
from grace.memories.lowpass import LowPass
from grace.memories.momentum import Momentum
from grace.memories.none import NoMemory
from grace.memories.residual import Residual
from grace.transports.local import LocalTransport

PLAIN = {
    *("none", "dion", "adaptive_random", "damped", "geometric", "kashin"),
    *("adacomp", "arctopk", "gradiveq", "gtopk", "oktopk", "sketch_sgd", "variance", "wangni"),
}
"""Compressors without kernels: matrix products, which toolkits have, and methods that no page recommends."""
ROUNDED = {"demo", "thc"}
"""Their kernels sum in another order: tests/test_cosines.py and tests/test_kernels.py check bounds."""


def entries():
    """The functions of each method in the table."""
    return {kind: calls for family in FAMILIES for kind, calls in table(family).items()}


def test_the_table_names_the_methods_of_grace():
    for family, modules in FAMILIES.items():
        assert {kind.__module__ for kind in table(family)} == {f"grace.compressors.{module}" for module in modules}, (
            family
        )
    ours = {cls for cls in compressors.values() if cls.__module__.startswith("grace.compressors.")}
    assert set(entries()) <= ours
    assert {cls.registered_name for cls in ours - set(entries())} == PLAIN
    assert {type(made(row)).registered_name for row in ROWS} == {cls.registered_name for cls in ours}


def test_a_subclass_runs_its_own_functions():
    for kind in entries():
        assert calls_of(type("Own", (kind,), {})) == Calls()


def test_a_step_draws_once_for_each_place_of_a_tensor():
    drawn = []

    def draw():
        drawn.append(len(drawn))
        return drawn[-1]

    ctx = context(backend("numpy"), (30,), _draws={})
    places = [(ctx, "a"), (ctx, "b"), (ctx.piece(0, 10), "a"), (ctx.piece(10, 10), "a"), (ctx.stage("server"), "a")]
    first = [each.once(label, draw) for each, label in places]
    assert first == [each.once(label, draw) for each, label in places] == list(range(5))
    other = context(backend("numpy"), (30,))
    assert [other.once("a", draw), other.once("a", draw)] == [5, 6]


def test_a_method_need_not_be_hashable():
    class Own(EFSignSGD):
        __hash__ = None

    xp, ctx = backend("numpy"), context(backend("numpy"), (30,))
    method = TensorCodec(Own(block_size=8), LowPass())
    payload, _ = alone(lambda ctx: method.encode(xp.asarray(spread(30), "float32"), method.init(ctx), ctx), ctx)
    assert len(payload) == 2


def made(row):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without error feedback")
        return grace_from_params({**row.params, "memory": "none"}, LocalTransport()).method.compressor


def fitting(compressor):
    """The memories that may be combined with a compressor."""
    found = [NoMemory(), Momentum()]
    if not (compressor.traits.majority_vote or compressor.traits.internal_feedback):
        found += [Residual(), Residual(beta=0.5), DecoupledMomentum(), LowPass()]
    return found + [DGC()] * compressor.traits.sends_exact_values


def steps(method, xp, shape, drawn_once=False):
    """Payloads, states and means of two steps, in NumPy."""
    found, state = [], method.init(context(xp, shape))
    agreed, n = method.compressor.traits.combine.value == "agreed", context(xp, shape).size
    for step in range(2):
        ctx = context(xp, shape, rank=1, step=step, _draws={} if drawn_once else None)
        x = xp.asarray(spread(n, seed=step), "float32")
        before = {key: np.array(xp.to_numpy(value)) for key, value in state.items()}

        def program(ctx, x=x, state=state):
            return method.encode(xp.buffers.copy(x), state, ctx)

        payload, after = alone(program, ctx)
        for key, value in before.items():
            assert np.array_equal(xp.to_numpy(state[key]), value, equal_nan=True), "the state before stays as it is"
        state = {key: xp.buffers.copy(value) for key, value in after.items()}
        means = [method.mean([payload], ctx, agreed=True), *([] if agreed else [method.mean([payload] * 3, ctx)])]
        arrays = [np.array(xp.to_numpy(materialize(mean))) for mean in means]
        for mean, array in zip(means if isinstance(method, TensorCodec) else [], arrays, strict=False):
            assert np.array_equal(xp.to_numpy(mean.array(xp.full(n, 7.0))), array)
        found.append([host(xp, payload), host(xp, state.values()), arrays])
    return found


def assert_equal(found, expected, rounded, label):
    for one, other in zip(found, expected, strict=True):
        for kind, mine, plain in zip(("payload", "state", "mean"), one, other, strict=True):
            assert len(mine) == len(plain), f"{label}: {kind}"
            for a, b in zip(mine, plain, strict=True):
                if a.dtype == np.float32:
                    # float64 sums may be in another order; the QR of small columns amplifies the difference
                    largest = abs(b).max(initial=0)
                    rtol, atol = (1e-3, 1e-4 * largest) if rounded else (1e-6, 4e-6 * largest)
                    np.testing.assert_allclose(a, b, rtol, atol, err_msg=f"{label}: {kind}")
                else:
                    np.testing.assert_array_equal(a, b, f"{label}: {kind}")


def noting(call, called):
    def noted(*args):
        found = call(*args)
        if found is not None:
            called.add(call)
        return found

    return noted


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_each_call_equals_the_plain_function(name, monkeypatch):
    built()
    xp, called, known = backend(name), set(), entries()
    for family in FAMILIES:
        for kind, calls in dict(table(family)).items():
            noted = (call and noting(call, called) for call in calls)
            monkeypatch.setitem(table(family), kind, Calls(*noted))
    calls_of.cache_clear()
    try:
        for row in ROWS:
            compressor = made(row)
            shape = (48, 64) if compressor.traits.needs_shape else (5003,)
            if type(compressor) not in known or not compressor.applies(context(xp, shape)):
                continue
            for memory in fitting(compressor):
                monkeypatch.setenv("GRACE_KERNELS", "off")
                expected = steps(Method(compressor, memory), xp, shape)
                for kernels, once in (("off", False), ("off", True), ("on", False), ("on", True)):
                    monkeypatch.setenv("GRACE_KERNELS", kernels)
                    found = steps(TensorCodec(compressor, memory), xp, shape, once)
                    label = f"{row}, {memory}, kernels {kernels}, drawn once {once}"
                    assert_equal(found, expected, row.params["compressor"] in ROUNDED, label)
    finally:
        calls_of.cache_clear()
    missed = {kind.__name__: {call for call in calls if call} - called for kind, calls in known.items()}
    assert not any(missed.values()), {kind: each for kind, each in missed.items() if each}
