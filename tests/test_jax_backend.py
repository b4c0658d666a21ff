"""Methods on JAX: payloads of compiled code have NumPy's bits, and the laws of the test kit hold."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from methods import backend, parts, spread
from support.cases import hold
from table import ROWS

from grace import simulate
from grace.backends import backend_of, get_backend
from grace.core import Combine, Context
from grace.core.program import run_local
from grace.core.registry import compressors
from grace.testing import compressor_laws, installed
from grace.testing.cases import send, shape_of

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

SUMS = {"demo", "eden", "kashin"}
"""Methods with floats that the order of a sum decides: the table of docs/jax.md."""


def firsts(chosen):
    """The first row of each method for which ``chosen`` is true."""
    found = {}
    for row in ROWS:
        if row.everywhere and chosen(parts(row).compressor):
            found.setdefault(row.name, row)
    return pytest.mark.parametrize("row", found.values(), ids=list(found))


@firsts(lambda each: not each.traits.variable_length and each.traits.combine is not Combine.AGREED)
def test_compiled_payloads_have_the_bits_of_numpy(row):
    """Rank and step are symbolic, as inside shard_map."""
    from grace.backends.jax import TRACED, wide

    compressor, xp = parts(row).compressor, get_backend("jax", TRACED)
    shape = shape_of(compressor)
    x, ctx = spread(*shape), Context(get_backend("numpy"), "w", shape, rank=2, step=3, world_size=4)
    expected, _ = send(compressor, ctx.xp, x, ctx)

    @jax.jit
    def compress(x, rank, step):
        with wide():
            traced = replace(ctx, xp=xp, rank=rank.astype("int64"), step=step.astype("int64"))
            return run_local(compressor.compress(x, compressor.init(traced), traced), compressor)[0]

    payload = compress(x.reshape(-1), np.int32(2), np.int32(3))
    for found, one in zip(payload, expected, strict=True):
        assert (found.dtype, found.shape) == (one.dtype, one.shape)
        if row.name in SUMS and one.dtype.kind == "f":
            np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-6)
        else:
            assert np.asarray(found).tobytes() == one.tobytes()


@pytest.mark.parametrize("n", [10, 4096, 5000, 100_003])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_maximum_is_not_a_number_where_an_element_is_none(n, compiled):
    xp = get_backend("jax")
    for place in (0, n // 2, n - 1):
        x = np.ones((2, n), np.float32)
        x[1, place] = np.nan
        for axis, expected in ((1, [1.0, np.nan]), (None, np.nan)):
            largest = partial(xp.max, axis=axis)
            found = (jax.jit(largest) if compiled else largest)(xp.asarray(x, "float32"))
            np.testing.assert_array_equal(found, np.asarray(expected, np.float32))


@pytest.mark.exhaustive
@firsts(lambda each: not each.traits.variable_length)
def test_laws(row):
    backend("jax")
    checks = compressor_laws(parts(row).compressor, ["jax"])
    if row.name == "kashin":  # the next test bounds by how much it breaks this law
        checks = [check for check in checks if check.law != "pieces_of_whole_blocks_make_the_whole_payload"]
    hold((str(check), check.run) for check in checks)


def test_pieces_of_kashin_differ_by_the_order_of_a_sum():
    """XLA sums a row in an order that depends on the number of rows: the last bits of a sum, rarely a code."""
    compressor, xp = compressors["kashin"](bits=4, block_size=64), backend("jax")
    n, cut = 64 * 79, 64 * 30
    x, ctx = spread(n), Context(xp, "w", (n,), rank=1, step=2, world_size=2)
    whole, first, second = (
        [np.asarray(array) for array in send(compressor, xp, x[start:stop], ctx.piece(start, stop - start))[0]]
        for start, stop in ((0, n), (0, cut), (cut, n))
    )
    codes, scales = (
        (np.concatenate([one, two]), expected) for one, two, expected in zip(first, second, whole, strict=True)
    )
    assert np.mean(codes[0] != codes[1]) < 0.001
    np.testing.assert_allclose(*scales, rtol=1e-6)


FEW = ["payloads_can_travel", "damaged_payloads_are_refused", "streams_are_keyed", "toolkits_agree_with_numpy"]


@pytest.mark.parametrize("name", ["none", "signsgd", "topk"])
def test_some_laws_of_some_methods(name):
    checks = [check for check in compressor_laws(compressors[name](), ["jax"]) if check.law in FEW]
    assert len(checks) == len(FEW)
    hold((str(check), check.run) for check in checks)


def test_laws_run_on_jax_if_it_is_named():
    assert "jax" not in installed()


@pytest.mark.parametrize("params", [{"compressor": "topk", "compress_ratio": 0.1}, {"compressor": "none"}], ids=str)
def test_simulating_on_jax(params):
    gradients = [{"w": spread(2000, seed=rank), "few": spread(7, seed=rank)} for rank in range(3)]
    found, expected = (simulate(params, gradients, backend=name, steps=2) for name in ("jax", "numpy"))
    for name, mean in expected.means[0].items():
        np.testing.assert_allclose(found.means[0][name], mean, rtol=1e-6, atol=1e-6)
    assert found.report.bytes_sent == expected.report.bytes_sent


def test_float64_stays_float64_and_the_program_stays_at_32_bits():
    gradients = [{"w": np.full(3, 1 + 2.0**-40)}] * 2
    assert simulate({"compressor": "none"}, gradients, backend="jax").means[0]["w"].tolist() == [1 + 2.0**-40] * 3
    assert not jax.config.jax_enable_x64


def test_backends_inside_and_outside_of_a_trace():
    seen = []

    @jax.jit
    def look(x):
        seen.append(backend_of(x))
        return x

    look(jax.numpy.zeros(3))
    (inside,), outside = seen, backend_of(jax.numpy.zeros(3))
    assert outside is get_backend("jax")
    assert (inside.name, inside.traced, outside.traced) == ("jax", True, False)
    for refused in (lambda: inside.nonzero(inside.zeros(3) > 0), lambda: inside.cell(0)):
        with pytest.raises(TypeError, match=r"cannot be traced by JAX: inside jit use grace\.jax\.exchange"):
            refused()


# -- settings ------------------------------------------------------------------------------------------------------
def test_methods_of_varying_length_are_refused_with_the_names_of_those_that_can():
    from grace.jax.plan import UNLIKE, fixed, plan_of

    able = fixed()
    assert {"topk", "eden", "blockint", "powersgd"} <= set(able)
    for name, cls in compressors.items():
        params = {"compressor": name}
        assert (name in able) == (not cls().traits.variable_length and name not in UNLIKE)
        if name not in able:
            with pytest.raises(ValueError, match=f"cannot trace compressor '{name}', whose .*: use .*blockint, .*topk"):
                plan_of(params, ("data",), (2,))


@pytest.mark.parametrize(
    "params, words",
    [
        ({"compressor": "auto"}, "a compiled step has one method"),
        ({"compressor": "topk", "policy": "warmup"}, "a compiled step has one method"),
        ({"compressor": "topk", "fuse": "bucket"}, "'fuse' has no meaning in JAX: leave it out"),
        ({"compressor": "topk", "nonfinite": "raise"}, "read the state's `nonfinite`"),
    ],
    ids=str,
)
def test_settings_without_a_meaning_are_refused(params, words):
    import grace.jax

    with jax.set_mesh(jax.make_mesh((1,), ("data",))), pytest.raises(ValueError, match=words):
        grace.jax.exchange(params).init({"w": np.zeros(2000, np.float32)})


def test_axes_and_gradients_are_checked():
    import grace.jax

    exchange = grace.jax.exchange({"compressor": "topk"}, "model")
    with pytest.raises(ValueError, match="there is no mesh"):
        exchange.init({"w": np.zeros(2000, np.float32)})
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        with pytest.raises(ValueError, match="the mesh has no axis 'model', but 'data'"):
            exchange.init({"w": np.zeros(2000, np.float32)})
        with pytest.raises(TypeError, match=r"'a\.n' is int32, and gradients are"):
            grace.jax.init({"a": {"n": np.zeros(3, np.int32)}}, {"compressor": "topk"})


def test_the_report_needs_no_device_and_no_step():
    import grace.jax

    params = {"w": jax.ShapeDtypeStruct((256, 1024), "float32"), "b": jax.ShapeDtypeStruct((7,), "bfloat16")}
    config = {"compressor": "topk", "compress_ratio": 0.01, "communicator": "allgather"}
    mesh = jax.sharding.AbstractMesh((64,), ("data",))
    report = grace.jax.report(params, config, mesh=mesh)
    assert (report.world_size, report.steps, report.bytes_dense) == (64, 1, 4 * 2**18 + 14)
    assert report.bytes_sent == 8 * round(2**18 * 0.01) + 14
    assert {each.name: each.method for each in report.tensors} == {"w": "topk", "b": "dense"}
