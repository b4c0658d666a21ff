"""Native kernels and chunks give the results of the plain functions; donated gradients hold residual and mean."""

import inspect
import warnings
from itertools import accumulate, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from methods import alone, backend, context, host, method_of, spread
from table import ROWS

from grace import grace_from_params
from grace.backends import get_backend
from grace.compressors.measured.blockint import BlockInt
from grace.compressors.measured.efsignsgd import EFSignSGD
from grace.core.sharding import cut, cuts, pieces, shards, strides
from grace.engine.codecs import TensorCodec, calls_of, quantisers
from grace.engine.commit import Commit
from grace.engine.groups.native import Encoder
from grace.kernels import Library
from grace.kernels.rows import NUMBERS
from grace.memories.none import NoMemory
from grace.memories.residual import Residual
from grace.transports.local import LocalTransport

N = 20_003
HOSTS = ["numpy", "torch"]
VECTORS = [row for row in ROWS if not row.matrix]
PRODUCTS = {"demo"}
"""Send elements of matrix products, added up in any order: tests/test_cosines.py has them in float64."""


@pytest.fixture(scope="module", autouse=True)
def built():
    from grace.kernels import build

    if not build.build():
        pytest.skip("there is no C++ compiler to build the kernels with")


def made(row):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without error feedback")
        return grace_from_params({**row.params, "memory": "none"}, LocalTransport()).method.compressor


BLOCKWISE = [
    row
    for row in VECTORS
    if (compressor := made(row)).traits.block_size
    and not compressor.traits.variable_length
    and not inspect.isgeneratorfunction(compressor.compress)
]


def exchanged(xp, method, ctx, steps=3):
    """Payloads, residuals and means of some steps, in NumPy."""
    found, state = [], method.init(ctx)
    for step in range(steps):
        ctx = context(xp, N, rank=ctx.rank, step=step)
        x = xp.asarray(spread(N, seed=step), "float32")
        payload, state = alone(lambda ctx, x=x, state=state: method.encode(xp.buffers.copy(x), state, ctx), ctx)
        state = {key: xp.buffers.copy(value) for key, value in state.items()}
        mean = method.mean([payload] * 3, ctx).array(xp.zeros(N))
        assert np.array_equal(xp.to_numpy(method.mean([payload] * 3, ctx).array()), xp.to_numpy(mean))
        found.append((host(xp, payload), host(xp, state.values()), xp.to_numpy(mean).copy()))
    return found


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * abs(b).max(initial=0))


def assert_same(one, two, products=False):
    for (payload, state, mean), (payload2, state2, mean2) in zip(one, two, strict=True):
        for a, b in zip(payload, payload2, strict=True):
            assert a.dtype == b.dtype
            if a.dtype != np.float32:
                np.testing.assert_array_equal(a, b)
            elif products:
                assert_close(a, b)
            else:  # float64 sums may be in another order, so scales may differ in their last bit
                np.testing.assert_array_max_ulp(a, b, 2)
        for a, b in zip([*state, mean], [*state2, mean2], strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("feedback", [True, False], ids=["residual", "none"])
@pytest.mark.parametrize("row", [row for row in VECTORS if made(row).traits.combine.value == "gather"], ids=str)
def test_kernels_and_pieces_equal_the_plain_functions(row, feedback, name, monkeypatch):
    xp, compressor, products = backend(name), made(row), row.params["compressor"] in PRODUCTS
    if feedback and (compressor.traits.majority_vote or compressor.traits.internal_feedback):
        feedback = False
    method = TensorCodec(compressor, Residual() if feedback else NoMemory())
    monkeypatch.setenv("GRACE_KERNELS", "off")
    monkeypatch.setattr(xp, "piece", 0)
    whole = exchanged(xp, method, context(xp, N, rank=1))
    monkeypatch.setattr(xp, "piece", 4096)
    assert_same(exchanged(xp, method, context(xp, N, rank=1)), whole, products)
    monkeypatch.setenv("GRACE_KERNELS", "on")
    assert xp.kernels is not None
    assert_same(exchanged(xp, method, context(xp, N, rank=1)), whole, products)


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize(
    "params",
    [
        {"compressor": "shared_int"},
        {"compressor": "shared_int", "block_size": 512, "dtype": "int32"},
        {"compressor": "arctopk", "compress_ratio": 0.1, "row_size": 96},
    ],
    ids=str,
)
def test_methods_that_exchange_inside_are_the_same_in_pieces(params, name, monkeypatch):
    xp, ctx = backend(name), context(backend(name), N, rank=1)
    compressor = made(SimpleNamespace(params=params))
    found = []
    for piece in (0, 4096):
        monkeypatch.setattr(xp, "piece", piece)
        x = xp.asarray(spread(N), "float32")
        payload, _ = alone(lambda ctx, x=x: compressor.compress(xp.buffers.copy(x), {}, ctx), ctx)
        assert np.array_equal(xp.to_numpy(x), spread(N))
        decoded, left = compressor.decompress(payload, ctx), compressor.residual(xp.buffers.copy(x), payload, ctx)
        into = TensorCodec(compressor, NoMemory()).mean([payload], ctx, agreed=True).array(xp.zeros(N))
        assert np.array_equal(xp.to_numpy(decoded), xp.to_numpy(into))
        found.append([*host(xp, payload), xp.to_numpy(decoded), xp.to_numpy(left)])
    for whole, parts in zip(*found, strict=True):
        assert whole.dtype == parts.dtype
        assert np.array_equal(whole, parts)
    assert np.any(found[0][-1])


def test_pieces_are_whole_blocks():
    xp = get_backend("numpy")
    compressor = grace_from_params({"compressor": "blockint", "block_size": 1000}, LocalTransport()).method.compressor
    bounds = pieces(compressor, context(xp, 600_001))
    assert bounds[0] == (0, 524_000)
    assert bounds[-1][1] == 600_001
    assert all(start % 1000 == 0 for start, _ in bounds)


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize(
    "params", [{"compressor": "topk"}, {"compressor": "efsignsgd"}, {"compressor": "none"}], ids=str
)
def test_spent_gradients_hold_the_mean_and_others_are_left_alone(params, name):
    xp = backend(name)
    grc = grace_from_params({**params, "memory": "residual"}, LocalTransport())
    first = spread(5000)
    mine, given = xp.asarray(first.copy(), "float32"), xp.asarray(first.copy(), "float32")
    grc.build({"w": mine})
    mean = xp.to_numpy(grc.step({"w": mine})["w"]).copy()
    assert np.array_equal(xp.to_numpy(mine), first)
    again = grace_from_params({**params, "memory": "residual"}, LocalTransport())
    again.build({"w": given})
    again.start("w", given, spent=True)
    again.flush()
    found = again.mean("w")
    assert np.array_equal(xp.to_numpy(found), mean)
    if params["compressor"] != "none":
        assert xp.buffers.same_memory(found, given)
    residual = xp.to_numpy(grc.setup.store.held({})["w"]["memory/residual"].read())
    np.testing.assert_allclose(residual + mean, first, atol=1e-6)
    assert not xp.buffers.overlap(again.setup.store.held({})["w"]["memory/residual"].read(), given), (
        "the state lies in the gradient"
    )


@pytest.mark.parametrize("spent", [False, True])
@pytest.mark.parametrize("params", [{"compressor": "none"}, {"compressor": "fp16"}], ids=str)
@pytest.mark.parametrize("order", ["adjacent", "reversed", "apart"])
def test_adjacent_gradients_are_not_copied_if_they_are_spent(params, order, spent):
    xp, size = backend("torch"), 4000
    first = spread(3 * size).astype(np.float16).astype(np.float32)
    whole = xp.asarray(first.copy(), "float32")
    starts = {"adjacent": [0, size, 2 * size], "reversed": [2 * size, size, 0], "apart": [0, 2 * size]}[order]
    given = {f"w{start}": whole[start : start + size] for start in starts}
    grc = grace_from_params(params, LocalTransport())
    grc.build(given)
    grc.launch(given, together="all", spent=spent)
    grc.land()
    means = dict(zip(given, grc.means(given), strict=True))
    for start in starts:
        assert np.array_equal(xp.to_numpy(means[f"w{start}"]), first[start : start + size])
    assert np.array_equal(xp.to_numpy(whole), first)
    for name, mean in means.items():
        assert xp.buffers.same_memory(mean, given[name]) == (spent and order == "adjacent"), name


def test_adjacent_gradients_in_half_precision_are_averaged_in_float32():
    xp, first = backend("torch"), spread(3000).astype(np.float16)
    whole = xp.cast(xp.asarray(first.astype(np.float32), "float32"), "float16")
    given = {"v": whole[:1000], "w": whole[1000:]}
    grc = grace_from_params({"compressor": "none"}, LocalTransport())
    grc.build({name: xp.zeros(x.shape) for name, x in given.items()})
    grc.launch(given, together="all", spent=True)
    grc.land()
    means = grc.means(given)
    assert np.array_equal(np.concatenate([xp.to_numpy(mean) for mean in means]), first.astype(np.float32))


@pytest.mark.parametrize("name", HOSTS)
def test_a_mean_that_is_not_finite_leaves_the_residual_bit_for_bit(name, monkeypatch):
    xp = backend(name)
    for kernel in ("on", "off"):
        monkeypatch.setenv("GRACE_KERNELS", kernel)
        for params in (
            {"compressor": "efsignsgd", "block_size": 64},
            {"compressor": "topk"},
            {"compressor": "blockint"},
        ):
            grc = grace_from_params({**params, "memory": "residual"}, LocalTransport())
            grc.build({"w": xp.zeros(5000)})
            grc.step({"w": xp.asarray(spread(5000), "float32")})
            before = grc.state_dict()["tensors"]
            bad = spread(5000, seed=1)
            bad[4000] = np.nan
            given = xp.asarray(bad, "float32")
            grc.start("w", given, spent=True)
            grc.flush()
            assert not np.isfinite(xp.to_numpy(grc.mean("w"))).all()
            after = grc.state_dict()["tensors"]
            assert np.array_equal(np.asarray(before["w"]["memory/residual"]), np.asarray(after["w"]["memory/residual"]))
            assert grc.report().skipped == 1


@pytest.mark.parametrize("row", BLOCKWISE, ids=str)
def test_parts_of_a_payload_are_as_long_as_their_cuts(row):
    xp, compressor = get_backend("numpy"), made(row)
    for n in (1, 700, N):
        ctx = context(xp, n)
        payload, _ = alone(lambda ctx, n=n: compressor.compress(xp.asarray(spread(n), "float32"), {}, ctx), ctx)
        full = 4096 * max(1, (compressor.traits.block_size or 1) // 4096)
        ends = tuple(min(k * full, n) for k in (1, 2, 3))
        wanted = [cut(payload, strides(compressor, xp), *bounds, n) for bounds in pairwise((0, *ends, n))]
        found = cuts(compressor, xp, n, ends, tuple(len(array) for array in payload))
        assert [list(lengths) for lengths in zip(*found, strict=True)] == [[len(a) for a in part] for part in wanted]


def sharded(xp, compressor, n, workers):
    """A tensor's payload, and its shards as workers send them."""
    ctx = context(xp, n)
    payload, _ = alone(lambda ctx: compressor.compress(xp.asarray(spread(n), "float32"), {}, ctx), ctx)
    contexts = shards(compressor, ctx, workers)
    ends = tuple(accumulate(shard.size for shard in contexts[:-1]))
    sizes = cuts(compressor, xp, n, ends, tuple(xp.shape(array)[0] for array in payload))
    columns = [xp.split(array, size) for array, size in zip(payload, sizes, strict=True)]
    return ctx, payload, [tuple(parts) for parts in zip(*columns, strict=True)], contexts


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("row", BLOCKWISE, ids=str)
def test_shards_are_decoded_as_their_whole(row, kernels, monkeypatch):
    monkeypatch.setenv("GRACE_KERNELS", kernels)
    for name in (*HOSTS, "tensorflow"):
        xp, compressor = backend(name), made(row)
        for n in (700, N):
            ctx, payload, parts, contexts = sharded(xp, compressor, n, 3)
            codec = TensorCodec(compressor, NoMemory())
            whole = xp.to_numpy(codec.mean([payload], ctx, agreed=True).array())
            mean = codec.mean_of_shards(parts, ctx, contexts)
            assert np.array_equal(xp.to_numpy(mean.array()), whole)
            if xp.mutable:
                assert np.array_equal(xp.to_numpy(mean.array(xp.zeros(n))), whole)


def test_a_shard_that_does_not_fit_names_its_worker(xp):
    ctx, _, parts, contexts = sharded(xp, BlockInt(), N, 3)
    codes, scales = parts[1]
    for wrong in ((codes[:-1], scales), (codes, scales[:-1])):
        codec, sent = TensorCodec(BlockInt(), NoMemory()), [parts[0], wrong, parts[2]]
        with pytest.raises(ValueError, match=r"worker 1 of .* sent a payload for 'w'"):
            codec.mean_of_shards(sent, ctx, contexts).array()
        with pytest.raises(ValueError, match=r"worker 2 of .* sent a payload for 'w'"):
            codec.mean_of_shards(sent, ctx, contexts, (0, 2, 1)).array()


def test_steps_use_memory_again_that_they_had_before(monkeypatch):
    from grace.backends import torch, torch_bits, torch_buffers

    made = []
    pool = torch_buffers.Pool(lambda size: made.append(size) or torch_buffers._octets(size))
    for module in (torch, torch_bits, torch_buffers):
        monkeypatch.setattr(module, "POOL", pool, raising=False)
    xp = backend("torch")
    params = {"compressor": "blockint", "bits": 8, "rounding": "stochastic", "communicator": "twostage"}
    grc = grace_from_params({**params, "memory": "residual"}, LocalTransport())
    grc.build({"w": xp.zeros(2**20), "v": xp.zeros(2**19)})
    for step in range(6):
        if step == 3:
            made.clear()
        grc.step({"w": xp.zeros(2**20), "v": xp.zeros(2**19)})
    assert made == []


SWAPPING = [
    {"compressor": "efsignsgd", "block_size": 64},
    {"compressor": "topk"},
    {"compressor": "blockint"},
    {"compressor": "blockint", "communicator": "twostage"},
    {"compressor": "stc"},
    {"compressor": "randomk"},
    {"compressor": "chunktopk", "chunk_size": 64, "chunk_k": 8},
    {"compressor": "sidco"},
    {"compressor": "powersgd", "memory": "residual", "communicator": "hierarchical", "outer": "allreduce"},
    {"compressor": "cltk", "memory": "lowpass"},
    {"compressor": "gtopk"},
    {"compressor": "oktopk"},
    {"compressor": "arctopk"},
    {"compressor": "sketch_sgd"},
    {"compressor": "signum", "memory": "momentum"},
    {"compressor": "demo", "memory": "decoupled_momentum"},
]


def begun(name, params):
    """A Grace after one step, a copy of its state, and a second step whose messages are sent."""
    xp = backend(name)
    grc = grace_from_params({"memory": "residual", **params}, LocalTransport())
    grc.build({"w": xp.zeros((50, 100)), "v": xp.zeros((60, 50))})
    grc.step({"w": xp.asarray(spread(50, 100), "float32"), "v": xp.asarray(spread(60, 50), "float32")})
    before = grc.state_dict()
    given = xp.asarray(spread(50, 100, seed=1), "float32")
    grc.launch({"w": given, "v": xp.asarray(spread(60, 50, seed=1), "float32")}, spent=True)
    return xp, grc, before


def arrays(state):
    return [np.asarray(array) for unit in state["tensors"].values() for array in unit.values()]


def equal_states(one, two):
    return all(np.array_equal(a, b) for a, b in zip(arrays(one), arrays(two), strict=True))


@pytest.mark.parametrize("params", SWAPPING, ids=str)
@pytest.mark.parametrize("name", HOSTS)
def test_a_step_that_is_dropped_leaves_the_residual_bit_for_bit(name, params, monkeypatch):
    _, grc, before = begun(name, params)
    assert equal_states(before, grc.state_dict()), "while the step is under way"
    norm = grc.report().tensors[0].residual_norm
    grc.abandon()
    assert equal_states(before, grc.state_dict())
    assert grc.report().tensors[0].residual_norm == norm

    _, grc, before = begun(name, params)
    with monkeypatch.context() as patch:
        patch.setattr(Commit, "means", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            grc.land()
    assert equal_states(before, grc.state_dict())

    _, grc, before = begun(name, params)
    grc.reset(LocalTransport())
    assert equal_states(before, grc.state_dict())

    _, grc, before = begun(name, params)
    grc.land()
    assert not equal_states(before, grc.state_dict())


SIGNS = {"compressor": "efsignsgd", "block_size": 512}
SHAPES = {"a": (3, 1000), "b": (2000,), "c": (40, 50)}


def step(grace, seed):
    xp = grace.xp
    given = {name: xp.asarray(spread(*shape, seed=seed), "float32") for name, shape in SHAPES.items()}
    return {name: np.array(xp.to_numpy(mean)) for name, mean in grace.step(given).items()}


def built_on(name, params):
    xp, grace = get_backend(name), grace_from_params(params, LocalTransport())
    grace.build({name: xp.zeros(shape) for name, shape in SHAPES.items()})
    return grace


@pytest.mark.parametrize("communicator, rounds", [("allgather", 1), ("twostage", 2)])
@pytest.mark.parametrize("name", HOSTS)
def test_a_bucket_takes_one_call_for_each_encoding_and_decoding(name, communicator, rounds, monkeypatch):
    calls, plain = [], Library.rows
    names = {number: kernel for kernel, number in NUMBERS.items()}
    monkeypatch.setattr(
        Library, "rows", lambda self, *args: (calls.append((names[args[0]], args[3])), plain(self, *args))[1]
    )
    grace = built_on(name, {**SIGNS, "communicator": communicator})
    step(grace, 0)
    assert calls == [("efsignsgd_encode", len(SHAPES)), ("efsignsgd_mean", len(SHAPES))] * rounds


@pytest.mark.parametrize("communicator", ["allgather", "twostage", "broadcast"])
@pytest.mark.parametrize("name", HOSTS)
def test_an_error_while_a_bucket_is_prepared_leaves_all_residuals_alone(name, communicator, monkeypatch):
    params = {**SIGNS, "communicator": communicator}
    grace, other = built_on(name, params), built_on(name, params)
    for each in (grace, other):
        step(each, 0)
    plain, encode = quantisers.CALLS[EFSignSGD], Encoder.encode

    def failing(compressor, x, residual, ctx):
        if ctx.name == "a":  # the last tensor of the bucket
            raise RuntimeError("no")
        return plain.encode(compressor, x, residual, ctx)

    def broken(self, *args):
        encode(self, *args)
        raise RuntimeError("no")

    calls_of.cache_clear()
    monkeypatch.setitem(quantisers.CALLS, EFSignSGD, plain._replace(encode=failing))
    monkeypatch.setattr(Encoder, "encode", broken)
    with pytest.raises(RuntimeError, match="no"):
        step(grace, 1)
    calls_of.cache_clear()
    monkeypatch.setitem(quantisers.CALLS, EFSignSGD, plain)
    monkeypatch.setattr(Encoder, "encode", encode)
    grace.abandon()
    for found, expected in zip(residuals(grace), residuals(other), strict=True):
        assert np.array_equal(found, expected)
    for mean, expected in zip(step(grace, 2).values(), step(other, 2).values(), strict=True):
        assert np.array_equal(mean, expected)


def residuals(grace):
    return [np.asarray(array) for cells in grace.state_dict()["tensors"].values() for array in cells.values()]


@pytest.mark.parametrize("name", HOSTS)
def test_a_step_on_a_host_with_kernels_copies_no_residual(name, monkeypatch):
    xp, grc, _ = begun(name, SWAPPING[0])
    written, write = [], type(xp.buffers).write
    monkeypatch.setattr(type(xp.buffers), "write", lambda self, out, x: written.append(out) or write(self, out, x))
    grc.land()
    assert not written


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("kernel", ["on", "off"])
@pytest.mark.parametrize("compressor", ["powersgd", "acpsgd", "gradzip", "gtopk"])
def test_a_gradient_is_parted_in_mean_and_residual_once_both_are_kept(compressor, kernel, name, monkeypatch):
    monkeypatch.setenv("GRACE_KERNELS", kernel)
    xp, first = backend(name), spread(5000).reshape(50, 100)
    grc = grace_from_params({"compressor": compressor, "memory": "residual"}, LocalTransport())
    given = xp.asarray(first.copy(), "float32")
    grc.build({"w": given})
    grc.start("w", given, spent=True)
    grc.flush()
    mean, residual = grc.mean("w"), grc.setup.store.held({})["w"]["memory/residual"].read()
    assert xp.buffers.same_memory(mean, given)
    assert not xp.buffers.overlap(residual, given)
    assert np.linalg.norm(xp.to_numpy(residual)) > 0.1 * np.linalg.norm(first)
    np.testing.assert_allclose(xp.to_numpy(residual).reshape(50, 100) + xp.to_numpy(mean), first, atol=1e-6)
    before = xp.to_numpy(residual).copy()
    bad = spread(5000, seed=1).reshape(50, 100)
    bad[40, 3] = np.nan
    grc.start("w", xp.asarray(bad, "float32"), spent=True)
    grc.flush()
    assert not np.isfinite(xp.to_numpy(grc.mean("w"))).all()
    assert np.array_equal(xp.to_numpy(grc.setup.store.held({})["w"]["memory/residual"].read()), before)


PAIRS = [  # values and positions that no worker can have sent (k = 2)
    (2, [3, 99], "ascend"),
    (2, [4, 3], "ascend"),
    (2, [3, 3], "ascend"),
    (2, [-1, 3], "ascend"),
    (2, [1], "its positions are int32"),
    (1, [1, 2], "its values are 1, not 2"),
]


@pytest.mark.parametrize("use", ["with kernels", "without"])
@pytest.mark.parametrize(("count", "places", "why"), PAIRS)
def test_the_worker_is_named_whose_payload_does_not_fit(xp, count, places, why, use, monkeypatch):
    monkeypatch.setenv("GRACE_KERNELS", "" if use == "with kernels" else "off")
    method = method_of(compressor="topk", compress_ratio=0.2)
    good = (xp.full(2, 1.0), xp.asarray([0, 4], "int32"))
    bad = (xp.full(count, 1.0), xp.asarray(places, "int32"))
    with pytest.raises(ValueError, match=f"worker 1 of 4 sent a payload for 'w' that 'topk' cannot.*{why}"):
        method.mean([good, bad, good], context(xp, 10)).array()
    with pytest.raises(ValueError, match="the workers together sent a payload for 'w'"):
        method.mean([bad], context(xp, 10), agreed=True).array()


def test_a_graph_refuses_positions_when_it_runs():
    xp = backend("tensorflow")
    import tensorflow as tf

    method = grace_from_params({"compressor": "threshold"}, LocalTransport()).method

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.float32), tf.TensorSpec([None], tf.int32)])
    def decoded(values, positions):
        return method.compressor.decompress((values, positions), context(xp, 10))

    assert np.flatnonzero(decoded(tf.ones(2), tf.constant([3, 9]))).tolist() == [3, 9]
    for values, positions in ((2, [3, 10]), (2, [4, 3]), (2, [-1, 3]), (2, [3]), (1, [3, 4])):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"ascend|the number of its values is not"):
            decoded(tf.ones(values), tf.constant(positions))


@pytest.mark.parametrize("name", HOSTS)
def test_a_spent_gradient_may_lie_scattered_in_memory(name):
    xp = backend(name)
    means = []
    for scattered in (True, False):
        grc = grace_from_params({"compressor": "efsignsgd", "block_size": 64}, LocalTransport())
        whole = xp.asarray(spread(8000), "float32")
        given = whole[::2] if scattered else xp.buffers.copy(whole[::2])
        grc.build({"w": given})
        grc.start("w", given, spent=True)
        grc.flush()
        means.append(xp.to_numpy(grc.mean("w")).copy())
    assert np.array_equal(*means)
