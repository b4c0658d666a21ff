"""The laws that every registered method is held to, over the table in methods.py."""

import math
from itertools import pairwise

import numpy as np
import pytest
from methods import (
    BACKENDS,
    EXCHANGES,
    SIZES,
    VOTES,
    alone,
    backend,
    context,
    exchanges,
    handed_over,
    host,
    lockstep,
    method_of,
    normal,
    parts,
    receive,
    rows,
    same,
    send,
    spread,
    states,
    workers,
)
from streams import fold
from table import ROWS
from table.row import Where, share

from grace import grace_from_params
from grace.compressors.chain import Chain
from grace.compressors.qsgd import QSGD
from grace.compressors.randomk import RandomK
from grace.compressors.topk import TopK
from grace.core import Combine, Method
from grace.memories.none import NoMemory
from grace.registry import communicators, compressors
from grace.transports.local import LocalTransport, World

MATRICES = ((3, 5), (8, 8), (40, 25), (4, 3, 3, 8))


def shapes(row):
    return MATRICES if row.matrix else [(n,) for n in SIZES]


# -- the table -----------------------------------------------------------------------------------------------------
def test_everything_registered_is_in_the_table():
    assert set(compressors) == {row.name for row in ROWS}
    # What is hierarchical carries whatever its outer communicator does: test_hierarchical.py.
    assert set(communicators) - {"hierarchical"} == {name for row in ROWS for name in row.communicators}


@rows()
def test_the_table_names_every_communicator_that_fits(row):
    for name in set(communicators) - {"hierarchical"}:
        params = {**row.params, "communicator": name}
        if name in row.communicators:
            assert grace_from_params(params, LocalTransport()).communicator == communicators[name]()
        else:
            with pytest.raises(ValueError, match=f"communicator '{name}' cannot"):
                grace_from_params(params, LocalTransport())


@rows()
def test_what_a_method_says_of_itself(row):
    compressor = parts(row).compressor
    for n in (1, 7, 64, 1000, 100_000):
        for said, expected in ((compressor.contraction(n), row.contraction), (compressor.variance(n), row.variance)):
            if expected is None:
                assert said is None or row.mask
            elif said is not None:
                assert said == pytest.approx(expected(n))
    assert (compressor.ragged, compressor.mask) == (row.ragged, row.mask)
    assert compressor.family in ("quantisation", "sparsification", "hybrid", "low rank")
    if compressor.unbiased:
        assert row.variance is not None


# -- payloads ------------------------------------------------------------------------------------------------------
@rows(lambda row: row.nbytes)
def test_payloads_have_exactly_the_bytes_of_the_table(row, xp):
    method = parts(row)
    for shape in shapes(row):
        x = spread(*shape)
        ctx = context(xp, shape)
        payload, _ = send(method, xp, x, ctx)
        if method.compressor.combine is Combine.AGREED:  # the exchange happens while it compresses
            state, array = method.compressor.init(ctx), xp.asarray(x.reshape(-1).copy(), "float32")
            payload = handed_over(lambda ctx: method.compressor.compress(array, state, ctx), ctx)
        assert sum(array.nbytes for array in host(xp, payload)) == row.nbytes(x)
        assert {xp.dtype(array) for array in payload} <= {"uint8", "int8", "int32", "float16", "float32"}
        assert all(len(xp.shape(array)) >= 1 for array in payload)


@rows()
def test_any_worker_decodes_to_the_same_bits(row, xp):
    method = parts(row)
    for shape in shapes(row):
        payload, _ = send(method, xp, spread(*shape), context(xp, shape, rank=1, step=3))
        mine, *others = (receive(method, xp, payload, context(xp, shape, rank=rank, step=3)) for rank in (1, 0, 3))
        assert same([mine, mine], others)


@rows()
def test_arguments_are_left_alone_and_twice_is_the_same(row, xp):
    method = parts(row)
    for shape in shapes(row):
        ctx, x = context(xp, shape), spread(*shape)
        array = xp.asarray(x.reshape(-1).copy(), "float32")
        state = method.compressor.init(ctx)
        before = host(xp, state.values())
        payload, _ = alone(lambda ctx: method.compressor.compress(array, state, ctx), ctx)
        again, _ = alone(lambda ctx: method.compressor.compress(array, state, ctx), ctx)
        assert same(host(xp, [array]), [x.reshape(-1)])
        assert same(host(xp, state.values()), before)
        assert same(host(xp, payload), host(xp, again))
        copied = host(xp, payload)
        found = [receive(method, xp, payload, ctx) for _ in range(2)]
        assert same(found[:1], found[1:])
        means = [np.array(xp.to_numpy(method.compressor.aggregate([payload, payload, payload], ctx))) for _ in range(2)]
        assert same(means[:1], means[1:])
        left = method.compressor.residual(array, payload, ctx)
        assert xp.shape(left) == (ctx.size,)
        assert same(host(xp, payload), copied)
        assert same(host(xp, [array]), [x.reshape(-1)])


@rows(lambda row: not row.matrix)
def test_same_key_same_payload_and_another_step_another_one(row, xp):
    method, n = parts(row), 1000
    x = spread(n)
    shared = method.compressor.combine is not Combine.GATHER
    sent = {}
    for step, rank, seed in ((5, 1, 0), (6, 1, 0), (5, 2, 0), (5, 1, 1)):
        ctx = context(xp, n, step=step, rank=rank, seed=seed)
        payload = host(xp, send(method, xp, x, ctx)[0])
        assert same(payload, host(xp, send(method, xp, x, ctx)[0]))
        if method.compressor.combine is Combine.AGREED:  # on what follows from it: a worker's own part may be beside it
            payload = [receive(method, xp, send(method, xp, x, ctx)[0], ctx)]
        sent[step, rank, seed] = payload
    first = sent.pop((5, 1, 0))
    differs = row.random and row.params.get("compress_ratio") != 1.0
    for (_, rank, _), payload in sent.items():
        # Positions that are not sent must be drawn alike by all workers; rounding by each on its own.
        assert same(first, payload) == (not differs or (rank == 2 and shared))


def in_eighths(*shape, seed=0):
    """Numbers whose sums are exact even in half precision."""
    return (np.random.default_rng(seed).integers(-64, 65, shape) / 8).astype(np.float32)


@rows(lambda row: parts(row).compressor.combine is Combine.MEAN)
@pytest.mark.parametrize("values", [in_eighths, spread])
def test_payloads_that_are_averaged_are_linear(row, xp, values):
    compressor = parts(row).compressor
    for n in SIZES:
        ctx = context(xp, n)
        payloads = [send(parts(row), xp, values(n, seed=rank), context(xp, n, rank=rank))[0] for rank in range(4)]
        sums = [sum(array.astype(np.float64) for array in arrays) for arrays in zip(*(host(xp, p) for p in payloads))]  # noqa: B905
        if compressor.summed:
            dtype, magnitude = compressor.summed
            assert {xp.dtype(array) for array in payloads[0]} == {dtype}
            assert max(abs(array).max() for array in sums) <= 4 * magnitude
        else:
            sums = [array / 4 for array in sums]
        wire = tuple(xp.asarray(a, xp.dtype(like)) for a, like in zip(sums, payloads[0], strict=True))
        reduced = np.array(xp.to_numpy(compressor.reduced(wire, ctx)))
        expected = np.array(xp.to_numpy(compressor.aggregate(payloads, ctx)))
        if values is in_eighths and not row.params.get("unbiased_scale"):
            assert np.array_equal(reduced, expected)
        half = row.name == "fp16"
        np.testing.assert_allclose(reduced, expected, rtol=2**-10 if half else 1e-6, atol=1e-6)


# -- error feedback ------------------------------------------------------------------------------------------------
@rows(lambda row: not parts(row).compressor.vote)
def test_what_is_sent_and_what_is_kept_add_up(row, xp):
    compressor = parts(row).compressor
    for shape in shapes(row):
        # One worker: what all agree on is what it sent.
        ctx, x = context(xp, shape, world_size=1), spread(*shape).reshape(-1)
        payload, _ = send(parts(row), xp, x, ctx)
        found = receive(parts(row), xp, payload, ctx)
        kept = np.array(xp.to_numpy(compressor.residual(xp.asarray(x.copy(), "float32"), payload, ctx)))
        if row.mask:
            assert np.array_equal(found + kept, x)
            assert ((found == 0) | (kept == 0)).all()
        else:
            np.testing.assert_allclose(found + kept, x, atol=1e-6 * abs(x).max() + 2e-7 * abs(found).max())


@rows(lambda row: parts(row).memory.feedback)
def test_nothing_is_lost_in_fifty_steps(row, xp):
    method = parts(row)
    shape = (20, 30) if row.matrix else (600,)
    ctx = context(xp, shape, world_size=1)
    state = method.init(ctx)
    carried, given = np.zeros(600), np.zeros(600)
    for step in range(50):
        ctx, g = context(xp, shape, step=step, world_size=1), spread(600, seed=step)
        before = np.array(xp.to_numpy(state["memory/residual"]))
        payload, state = alone(lambda ctx: method.encode(xp.asarray(g.copy(), "float32"), state, ctx), ctx)
        found, kept = receive(method, xp, payload, ctx), np.array(xp.to_numpy(state["memory/residual"]))
        if row.mask:
            assert np.array_equal(found + kept, g + before)
        carried += found
        given += g
        assert abs(carried + kept - given).max() < 1e-5 * max(1, abs(given).max()) * (step + 1)


@pytest.mark.parametrize("beta, gamma", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.25), (0.9, 2.0)])
def test_residual_is_weighted(xp, beta, gamma):
    params = {"compressor": "topk", "compress_ratio": 0.1, "beta": beta, "gamma": gamma}
    method = grace_from_params(params, LocalTransport()).method
    residual = np.zeros(1003, np.float32)
    state = method.init(context(xp, 1003))
    for step in range(3):
        g = spread(1003, seed=step)
        x = np.float32(beta) * residual + np.float32(gamma) * g
        payload, state = alone(
            lambda ctx: method.encode(xp.asarray(g, "float32"), state, ctx),
            context(xp, 1003, step=step),
        )
        indices = np.sort(np.argsort(-abs(x), kind="stable")[:100])
        assert host(xp, payload)[1].tolist() == indices.tolist()
        residual = x.copy()
        residual[indices] = 0
        np.testing.assert_allclose(xp.to_numpy(state["memory/residual"]), residual, rtol=1e-6)


@exchanges()
def test_state_keeps_its_keys_shapes_and_dtypes(row, communicator, xp):
    graces = workers({**row.params, "communicator": communicator}, 2)
    shape = (20, 30) if row.matrix else (601,)
    for grace in graces:
        grace.build({"w": xp.zeros(shape)})

    def described():
        return [
            {key: (tuple(array.shape), str(array.dtype)) for key, array in grace.state_dict()["tensors"]["w"].items()}
            for grace in graces
            if cells(grace)
        ]

    before = described()
    for x in (spread(*shape), np.zeros(shape, np.float32), np.full(shape, np.nan, np.float32), 9 * spread(*shape)):
        lockstep(graces, [{"w": xp.asarray(x.copy(), "float32")} for _ in graces])
        assert described() == before
    kept = {*row.state, *(() if parts(row).memory == NoMemory() else ("residual", "momentum"))}
    assert all(key.split("/")[-1] in kept for worker in before for key in worker)


# -- what goes in and what comes out -------------------------------------------------------------------------------
def patterns(n):
    spike = np.zeros(n, np.float32)
    spike[n // 2] = -3
    signs = np.where(np.arange(n) % 2, np.float32(1), np.float32(-1))
    found = {"zeros": np.zeros(n, np.float32), "spike": spike, "signs": signs, "alternating": signs * spread(n) ** 2}
    for size in (1e-45, 1e-40, 1e-38, 1e-30, 1e-8, 1.0, 6e4, 1e15, 1e30):
        found |= {f"{size}": np.full(n, size, np.float32), f"-{size}": np.full(n, -size, np.float32)}
        found |= {f"some {size}": (spread(n) / 50 * np.float32(size)).astype(np.float32)}
        found |= {f"spike of {size}": spike / 3 * np.float32(size)}
    return found


@rows()
def test_finite_in_finite_out(row, xp):
    method = parts(row)
    for shape in ((3, 5), (40, 25)) if row.matrix else ((1,), (9,), (1000,))[0 if xp.name == "numpy" else 2 :]:
        for what, x in patterns(math.prod(shape)).items():
            if abs(x).max() > row.largest:
                continue
            state = method.init(context(xp, shape))
            for step in range(2):
                ctx = context(xp, shape, step=step)
                payload, state = alone(lambda ctx: method.encode(xp.asarray(x.copy(), "float32"), state, ctx), ctx)
                found = receive(method, xp, payload, ctx)
                mean = xp.to_numpy(method.compressor.aggregate([payload, payload], ctx))
                assert np.isfinite(found).all(), what
                assert np.isfinite(mean).all(), what
                assert all(np.isfinite(array).all() for array in host(xp, state.values())), what


@rows(lambda row: row.name not in VOTES)
def test_zero_stays_zero(row, xp):
    method = parts(row)
    for shape in shapes(row):
        x = np.zeros(shape, np.float32)
        for value in (x, -x):
            ctx = context(xp, shape)
            payload, _ = send(method, xp, value, ctx)
            assert (receive(method, xp, payload, ctx) == 0).all()


@rows(lambda row: row.name in VOTES)
def test_a_zero_votes_plus(row, xp):
    for n in SIZES:
        payload, _ = send(parts(row), xp, np.array([0.0, -0.0] * n, np.float32)[:n], context(xp, n))
        assert (receive(parts(row), xp, payload, context(xp, n)) == 1).all()


@rows()
@pytest.mark.parametrize("name", ["torch", "tensorflow"])
def test_toolkits_agree_with_numpy(row, name):
    one, two = backend("numpy"), backend(name)
    method = parts(row)
    for shape in shapes(row):
        x = spread(*shape)
        payload, _ = send(method, one, x, context(one, shape, step=3, rank=2))
        other, _ = send(method, two, x, context(two, shape, step=3, rank=2))
        for a, b in zip(host(one, payload), host(two, other), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if a.dtype.kind in "iu":
                assert np.array_equal(a, b)
            elif not row.matrix:
                np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6 * max(abs(a).max(initial=0), 1e-30))
        # The factors of a matrix are unique up to signs; their product is unique.
        found = receive(method, two, other, context(two, shape, step=3))
        expected = receive(method, one, payload, context(one, shape, step=3))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=(1e-4 if row.matrix else 1e-6) * abs(x).max())


@exchanges()
def test_shapes_and_dtypes_are_kept_and_all_workers_agree(row, communicator, xp):
    size = 5 if communicator == "twostage" else 3
    graces = workers({**row.params, "communicator": communicator}, size)
    dtypes = ["float16", "float32", "float64", *(["bfloat16"] if xp.name == "torch" else [])]
    kinds = {"()": (), "(0,)": (0,), "(1,)": (1,), "(7,)": (7,), "(3, 5)": (3, 5), "(4, 3, 3, 8)": (4, 3, 3, 8)}

    def made(seed):
        made = {
            kind: xp.asarray(np.asarray(spread(*shape, seed=seed), np.float32), "float32")
            for kind, shape in kinds.items()
        }
        return {f"{dtype} {kind}": xp.cast(array, dtype) for dtype in dtypes for kind, array in made.items()}

    gradients = [made(rank) for rank in range(size)]
    for grace in graces:
        grace.build(gradients[0])
    before = [host(xp, worker.values()) for worker in gradients]
    for _ in range(2):
        means = lockstep(graces, gradients)
    # The gradients are the user's: neither memory nor exchange may write into them.
    assert all(same(host(xp, worker.values()), copy) for worker, copy in zip(gradients, before, strict=True))
    for name in gradients[0]:
        dtype, kind = name.split(" ", 1)
        for worker in means:
            assert xp.shape(worker[name]) == kinds[kind]
            assert xp.dtype(worker[name]) == dtype
        found = [host(xp, [worker[name]]) for worker in means]
        assert all(same(found[0], other) for other in found)
        assert np.isfinite(found[0][0].astype(np.float64)).all()


# -- expectations --------------------------------------------------------------------------------------------------
def spiky(n):
    x = np.full(n, 0.01, np.float32)
    x[3] = 5
    return x


KINDS = {"spiky": spiky, "uniform": lambda n: normal(n) % 1, "normal": normal}


@rows(lambda row: row.variance is not None)
@pytest.mark.parametrize("kind", KINDS)
def test_unbiased_methods_are_unbiased_with_the_stated_variance(row, kind):
    xp, n, draws = backend("numpy"), 64, 2000
    shape = (8, 8) if row.matrix else 64
    x, w, method = KINDS[kind](n).astype(np.float64), row.variance(64), parts(row)
    total, square = np.zeros(n), 0.0
    for step in range(draws):
        ctx = context(xp, shape, step=step)
        found = receive(method, xp, send(method, xp, x.astype(np.float32), ctx)[0], ctx).astype(np.float64)
        total += found
        square += ((found - x) ** 2).sum()
    norm = (x**2).sum()
    rounding = n * (1e-6 * abs(x).max()) ** 2
    assert ((total / draws - x) ** 2).sum() <= 9 * w * norm / draws + rounding
    assert square / draws <= w * norm * (1 + 4 / math.sqrt(draws)) + rounding
    if row.attained:
        assert square / draws >= w * norm * (1 - 4 / math.sqrt(draws))


def test_noise_of_different_workers_is_independent():
    # What is rounded up on one worker must not be rounded up on all: only then does averaging reduce the noise.
    xp, n, size = backend("numpy"), 20_000, 8
    method, x = parts(next(row for row in ROWS if row.name == "qsgd")), normal(20_000)
    found = []
    for rank in range(size):
        ctx = context(xp, n, rank=rank)
        found.append(receive(method, xp, send(method, xp, x, ctx)[0], ctx) - x)
    alone_, mean = np.mean([(e**2).sum() for e in found]), (np.mean(found, 0) ** 2).sum()
    assert mean == pytest.approx(alone_ / size, rel=0.1)


@rows(lambda row: row.contraction is not None)
def test_contractions_contract(row):
    xp, n, method = backend("numpy"), 64, parts(row)
    bound = (1 - row.contraction(n)) * (1 + 1e-5)
    for seed in range(300):
        x = np.random.default_rng(seed).standard_t(1.5, n).astype(np.float32)
        ctx = context(xp, (8, 8) if row.matrix else n, step=seed)
        error = (x - receive(method, xp, send(method, xp, x, ctx)[0], ctx)).astype(np.float64)
        assert (error**2).sum() <= bound * (x.astype(np.float64) ** 2).sum() + 1e-12


@rows(lambda row: row.name == "randomk" and not row.params.get("unbiased_scale"))
def test_random_positions_contract_in_expectation(row):
    xp, n, method, draws = backend("numpy"), 64, parts(row), 2000
    x = np.random.default_rng(0).standard_t(3, n).astype(np.float32)
    errors = []
    for step in range(draws):
        ctx = context(xp, n, step=step)
        errors.append(((x - receive(method, xp, send(method, xp, x, ctx)[0], ctx)) ** 2).sum() / (x**2).sum())
    d = share(row.params["compress_ratio"], n) / n
    assert np.mean(errors) == pytest.approx(1 - d, abs=float(5 * np.std(errors) / math.sqrt(draws) + 1e-9))


@rows(lambda row: row.mask)
def test_masks_change_no_element(row, xp):
    method, x = parts(row), spread(5000)
    ctx = context(xp, 5000)
    found = receive(method, xp, send(method, xp, x, ctx)[0], ctx)
    assert ((found == 0) | (found == x)).all()


@rows(lambda row: parts(row).compressor.block is not None)
@pytest.mark.parametrize("name", BACKENDS)
def test_pieces_of_whole_blocks_make_the_whole_payload(row, name):
    xp, method = backend(name), parts(row)
    unit = math.lcm(8, method.compressor.block)
    n = 4 * unit + 5 if unit > 1000 else 5000
    x = spread(n)
    whole = host(xp, send(method, xp, x, context(xp, n, step=2, rank=1))[0])
    for cuts in ([unit], [2 * unit, 3 * unit], [unit, n]):
        pieces, ends = [], [0, *cuts, n]
        for start, stop in pairwise(ends):
            ctx = context(xp, n, step=2, rank=1).piece(start, stop - start)
            pieces.append(host(xp, send(method, xp, x[start:stop], ctx)[0]))
        assert same([np.concatenate(arrays) for arrays in zip(*pieces, strict=True)], whole)


# -- not finite ----------------------------------------------------------------------------------------------------
BAD = {
    f"{value} {where}": (value, where)
    for value, where in ((math.nan, 0), (math.nan, 0.5), (math.nan, 1), (math.inf, 0.5), (-math.inf, 1))
}


def poisoned(row, name, seed):
    x = spread(20, 30, seed=seed) if row.matrix else spread(603, seed=seed)
    value, where = BAD[name]
    x.reshape(-1)[int(where * (x.size - 1))] = value
    return x


def unchanged(one, two):
    return [{key: a.tobytes() for key, a in worker.items()} for worker in one] == [
        {key: a.tobytes() for key, a in worker.items()} for worker in two
    ]


@exchanges()
def test_one_bad_element_is_seen_by_all_and_changes_no_state(row, communicator, xp):
    graces = workers({**row.params, "communicator": communicator}, 3)
    shape = (20, 30) if row.matrix else (603,)

    def fine(step):
        made = [xp.asarray(spread(*shape, seed=step + rank), "float32") for rank in range(3)]
        return [dict.fromkeys(BAD, array) for array in made]

    for grace in graces:
        grace.build(fine(0)[0])
    lockstep(graces, fine(10))
    before = states(graces)
    bad = fine(20)
    bad[1] = {name: xp.asarray(poisoned(row, name, 21), "float32") for name in BAD}
    means = lockstep(graces, bad)
    for name in BAD:
        found = [np.array(xp.to_numpy(worker[name])) for worker in means]
        assert [bool(np.isfinite(mean).all()) for mean in found] == [False] * 3, name
    assert unchanged(states(graces), before)
    skipped = len(BAD) if before[0] and not xp.traced else 0
    assert [grace.report().skipped for grace in graces] == [skipped] * 3
    means = lockstep(graces, fine(30))
    assert all(np.isfinite(xp.to_numpy(mean)).all() for worker in means for mean in worker.values())
    if before[0] and row.params.get("compress_ratio") != 1.0:
        assert not unchanged(states(graces), before)


@rows()
def test_a_lone_bad_element_is_seen(row, xp):
    # Among zeros, of which a sparse method need not send any.
    method = parts(row)
    for shape in MATRICES[2:] if row.matrix else ((603,), (5000,)):
        for place, value in ((0, np.nan), (0.5, np.inf), (1, -np.inf)):
            x, ctx = np.zeros(shape, np.float32), context(xp, shape)
            x.reshape(-1)[int(place * (x.size - 1))] = value
            with xp.quiet():
                payload, _ = send(method, xp, x, ctx)
                assert not np.isfinite(receive(method, xp, payload, ctx)).all()


def cells(grace):
    return any(grace.state_dict()["tensors"].values())


@exchanges(lambda row, communicator: row.params.get("compress_ratio") != 1.0)
def test_a_bad_mean_can_be_zero_or_an_error(row, communicator, xp):
    shape = (20, 30) if row.matrix else (603,)
    gradients = [{"w": spread(*shape, seed=rank), "v": spread(*shape, seed=rank)} for rank in range(2)]
    gradients[1]["w"].reshape(-1)[7] = np.nan
    gradients = [{name: xp.asarray(x, "float32") for name, x in worker.items()} for worker in gradients]
    params = {**row.params, "communicator": communicator, "nonfinite": "zero"}
    graces = workers(params, 2)
    for grace in graces:
        grace.build(gradients[0])
    before = states(graces)
    for worker in lockstep(graces, gradients):
        assert (xp.to_numpy(worker["w"]) == 0).all()
        assert (xp.to_numpy(worker["v"]) != 0).any()
    kept = [{key: array for key, array in worker.items() if key[0] == "w"} for worker in states(graces)]
    assert unchanged(kept, [{key: worker[key] for key in worker if key[0] == "w"} for worker in before])
    graces = workers({**params, "nonfinite": "raise"}, 2)
    for grace in graces:
        grace.build(gradients[0])
    for grace, mine in zip(graces, gradients, strict=True):
        grace.launch(mine)
    while [grace for grace in graces if not grace.advance()]:
        pass
    for grace in graces:
        with pytest.raises(FloatingPointError, match="'w' is not finite"):
            grace.land()
    # After the error the next step can be taken.
    for worker in lockstep(graces, [{"w": worker["v"], "v": worker["v"]} for worker in gradients]):
        assert np.isfinite(xp.to_numpy(worker["w"])).all()


def test_nan_and_infinity_on_different_workers(xp):
    for params in ({"compressor": "fp16"}, {"compressor": "topk", "compress_ratio": 0.1}, {"compressor": "signsgd"}):
        graces = workers(params, 2)
        gradients = [{"w": spread(1003)}, {"w": spread(1003, seed=1)}]
        gradients[0]["w"][5], gradients[1]["w"][5] = np.inf, -np.inf
        for grace in graces:
            grace.build({"w": xp.zeros(1003)})
        for worker in lockstep(graces, [{"w": xp.asarray(g["w"], "float32")} for g in gradients]):
            assert not np.isfinite(xp.to_numpy(worker["w"])).all()


# -- graphs --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row, communicator", [pair for pair in EXCHANGES if pair[0].everywhere], ids=str)
def test_a_step_is_traced_once(row, communicator):
    xp = backend("tensorflow")
    import tensorflow as tf

    shape = (10, 12) if row.matrix else (120,)
    params = {**row.params, "communicator": communicator, "min_numel": 0}
    inside, outside = (grace_from_params(params, LocalTransport()) for _ in range(2))
    for grace in (inside, outside):
        grace.build({"w": xp.zeros(shape)})
    traces = []

    @tf.autograph.experimental.do_not_convert
    def exchange(g):
        traces.append(1)
        return inside.step({"w": g})["w"]

    graph = tf.function(exchange)
    for step in range(3):
        g = tf.constant(spread(*shape, seed=step))
        np.testing.assert_allclose(graph(g), outside.step({"w": g})["w"], rtol=1e-5, atol=1e-5)
    assert len(traces) == 1
    assert inside.state_dict()["step"] == 3
    one, two = states([inside]), states([outside])
    for key in one[0]:
        np.testing.assert_allclose(one[0][key], two[0][key], rtol=1e-4, atol=1e-5)
    assert inside.report().bytes_sent == outside.report().bytes_sent
    # Graphs are rewritten before they run: what is not finite must get through that too, and change no state.
    for value in (np.nan, np.inf, -np.inf):
        bad = spread(*shape)
        bad.reshape(-1)[77] = value
        assert not np.isfinite(graph(tf.constant(bad))).all(), value
        assert unchanged(states([inside]), one)
    assert np.isfinite(graph(tf.constant(spread(*shape)))).all()
    assert len(traces) == 1


# -- means, against formulas written once more in NumPy ------------------------------------------------------------
class Formula:
    """Workers with their residuals, as the papers put it: no payloads, no programs."""

    def __init__(self, row, communicator, size, n):
        self.row, self.size, self.n = row, size, n
        self.feedback = parts(row).memory.feedback
        self.residuals, self.momenta = np.zeros((2, size, n), np.float32)
        self.twostage, self.server = communicator == "twostage", np.zeros(n, np.float32)
        unit = math.lcm(8, parts(row).compressor.block or 1)
        self.full = math.ceil(n / (unit * size)) * unit

    def combine(self, found):
        if self.row.name in VOTES:
            return np.where(np.sum(found, 0) >= 0, 1, -1).astype(np.float32)
        return np.mean(np.asarray(found, np.float64), 0).astype(np.float32)

    def step(self, gradients, step):
        compensated = []
        for rank, g in enumerate(gradients):
            x = g + self.residuals[rank] if self.feedback else g
            if self.row.name == "signum":
                x = self.momenta[rank] = (0.9 * self.momenta[rank] + 0.1 * g).astype(np.float32)
            compensated.append(x)
        if self.row.agreed:
            mean, found = self.row.agreed(compensated, Where("w", step))
        else:
            found = [self.row.formula(x, Where("w", step, rank)) for rank, x in enumerate(compensated)]
            mean = self.combine(found)
        self.residuals = np.array([x - sent for x, sent in zip(compensated, found, strict=True)], np.float32)
        if not self.twostage:
            return mean
        out = []
        for owner in range(self.size):
            mine = slice(min(owner * self.full, self.n), min((owner + 1) * self.full, self.n))
            x = mean[mine] + self.server[mine] if self.feedback else mean[mine]
            out.append(self.row.formula(x, Where("w/server", step, owner, mine.start)))
            self.server[mine] = x - out[-1]
        return np.concatenate(out)


def check_formula(row, communicator, xp, size, n, steps=2):
    graces = workers({**row.params, "communicator": communicator}, size)
    for grace in graces:
        grace.build({"w": xp.zeros(n)})
    expected = Formula(row, communicator, size, n)
    for step in range(steps):
        gradients = [spread(n, seed=100 * step + rank) for rank in range(size)]
        means = lockstep(graces, [{"w": xp.asarray(g.copy(), "float32")} for g in gradients])
        found = [np.array(xp.to_numpy(worker["w"])) for worker in means]
        assert all(same(found[:1], [other]) for other in found)
        wanted = expected.step(gradients, step)
        np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=row.loose * abs(wanted).max())


def test_every_method_has_a_formula_or_tests_of_its_own():
    own = {"powersgd", "acpsgd", "gradzip", "atomo", "adacomp"}
    assert {row.name for row in ROWS if not (row.formula or row.agreed)} == own


@exchanges(lambda row, communicator: row.formula or row.agreed)
def test_means_follow_the_formula(row, communicator, xp):
    for size in (1, 2, 3, 5) if xp.name == "numpy" else (3,):
        check_formula(row, communicator, xp, size, 1003)


@pytest.mark.parametrize("row", [row for row in ROWS if "twostage" in row.communicators], ids=str)
@pytest.mark.parametrize("size, n", [(2, 1), (5, 9), (3, 20_001), (7, 130)])
def test_shards_need_not_be_equal(row, size, n):
    check_formula(row, "twostage", backend("numpy"), size, n)


@exchanges(lambda row, communicator: row.params.get("compress_ratio") == 1.0 or row.name == "none")
def test_methods_that_keep_everything_give_the_mean(row, communicator, xp):
    graces = workers({**row.params, "communicator": communicator}, 3)
    gradients = [spread(1003, seed=rank) for rank in range(3)]
    for grace in graces:
        grace.build({"w": xp.zeros(1003)})
    for worker in lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients]):
        np.testing.assert_allclose(xp.to_numpy(worker["w"]), np.mean(gradients, 0), rtol=1e-5, atol=1e-6)


def test_workers_may_send_nothing_and_everything(xp):
    # Payloads of different lengths, one of them empty, in one exchange.
    for communicator in ("allgather", "broadcast"):
        graces = workers({"compressor": "threshold", "threshold": 0.5, "communicator": communicator}, 3)
        gradients = [np.full(1003, 0.1, np.float32), np.full(1003, -3, np.float32), spread(1003)]
        for grace in graces:
            grace.build({"w": xp.zeros(1003)})
        expected = np.mean([np.where(abs(g) >= 0.5, g, 0) for g in gradients], 0)
        for worker in lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients]):
            np.testing.assert_allclose(xp.to_numpy(worker["w"]), expected, rtol=1e-5, atol=1e-6)


# -- single methods ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packed", [True, False])
def test_vote_against_brute_force(xp, packed):
    method, n, size = method_of(compressor="signsgd", packed=packed), 1003, 6
    gradients = [np.round(spread(n, seed=rank)) for rank in range(size)]  # with zeros, and an even number of voters
    payloads = [send(method, xp, g, context(xp, n, rank=rank))[0] for rank, g in enumerate(gradients)]
    expected = []
    for votes in zip(*(g.tolist() for g in gradients), strict=True):
        plus = sum(v >= 0 for v in votes)
        expected.append(1.0 if plus >= size - plus else -1.0)
    assert xp.to_numpy(method.compressor.aggregate(payloads, context(xp, n))).tolist() == expected
    assert {1.0, -1.0} == set(expected)


def test_many_voters_do_not_overflow(xp):
    method, ctx = method_of(compressor="signsgd"), context(xp, 20)
    plus, minus = (send(method, xp, np.full(20, value, np.float32), ctx)[0] for value in (1, -1))
    for size, ayes in ((255, 255), (256, 0), (300, 151), (300, 149)):
        payloads = [plus] * ayes + [minus] * (size - ayes)
        mean = xp.to_numpy(method.compressor.aggregate(payloads, context(xp, 20, world_size=size)))
        assert (mean == (1 if 2 * ayes >= size else -1)).all()


def test_votes_summed_in_int8_are_refused_beyond_127_workers():
    xp, params = backend("numpy"), {"compressor": "signsgd", "packed": False, "communicator": "allreduce"}
    with pytest.raises(ValueError, match=r"128 workers times 1 exceed 127.*'allgather'"):
        grace_from_params(params, LocalTransport(World(128), 0))
    graces = workers(params, 127)
    for grace in graces:
        grace.build({"w": xp.zeros(3)})
    for signs in ([1, -1, 1], [-1, -1, 1]):
        gradients = [{"w": np.array(signs, np.float32)} for _ in graces]
        assert [worker["w"].tolist() for worker in lockstep(graces, gradients)] == [signs] * 127


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.3, 0.9])
def test_topk_loses_the_smallest_squares(xp, ratio):
    x, n = spread(5000).astype(np.float32), 5000
    method, ctx = method_of(compressor="topk", compress_ratio=ratio), context(xp, n)
    error = x - receive(method, xp, send(method, xp, x, ctx)[0], ctx)
    squares = sorted(v * v for v in x.tolist())
    assert (error.astype(np.float64) ** 2).sum() == pytest.approx(math.fsum(squares[: n - int(ratio * n)]), rel=1e-9)


def test_topk_takes_the_first_of_equal_elements(xp):
    method = method_of(compressor="topk", compress_ratio=0.01)
    x = np.where(np.arange(1003) % 3 == 1, np.float32(-2), np.float32(1))
    payload, _ = send(method, xp, x, context(xp, 1003))
    values, indices = host(xp, payload)
    assert indices.tolist() == [1 + 3 * i for i in range(10)]
    assert values.tolist() == [-2.0] * 10


def test_threshold_looks_at_magnitudes(xp):
    method = method_of(compressor="threshold", threshold=0.5)
    x = -abs(spread(1003))
    x[:3] = [-0.5, np.nextafter(np.float32(-0.5), np.float32(0)), 0.5]
    values, indices = host(xp, send(method, xp, x, context(xp, 1003))[0])
    expected = [i for i, v in enumerate(x.tolist()) if abs(v) >= 0.5]
    assert indices.tolist() == expected
    assert values.tolist() == x[expected].tolist()
    assert [v.shape for v in host(xp, send(method, xp, x / 1e6, context(xp, 1003))[0])] == [(0,), (0,)]


@pytest.mark.parametrize("levels", [1, 3, 127])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_qsgd_gives_a_lone_element_back(xp, levels, scale):
    # One element in each of 100 000 buckets: its level is exactly the top one, whatever is drawn.
    lone = spread(100_000) * np.float32(scale)
    lone[lone == 0] = scale
    x = np.zeros(800_000, np.float32)
    x[5::8] = lone
    method, ctx = method_of(compressor="qsgd", quantum_num=levels, bucket_size=8), context(xp, 800_000)
    found = receive(method, xp, send(method, xp, x, ctx)[0], ctx)
    assert np.array_equal(np.sign(found), np.sign(x))
    np.testing.assert_allclose(found, x, rtol=1e-6)


def test_qsgd_of_one_element_is_exact(xp):
    method = method_of(compressor="qsgd")
    for value in spread(200).tolist():
        payload, _ = send(method, xp, np.array([value], np.float32), context(xp, 1))
        assert receive(method, xp, payload, context(xp, 1)).tolist() == [value]


def test_efsignsgd_loses_what_the_formula_says(xp):
    # |x|² - |x|₁² / n, for the whole tensor.
    method, x = method_of(compressor="efsignsgd"), spread(5000)
    ctx = context(xp, 5000)
    error = x - receive(method, xp, send(method, xp, x, ctx)[0], ctx)
    wide = x.astype(np.float64)
    assert (error.astype(np.float64) ** 2).sum() == pytest.approx(
        (wide**2).sum() - abs(wide).sum() ** 2 / 5000, rel=1e-5
    )


def test_bf16_never_rounds_a_finite_number_to_infinity(xp):
    for rounding in ("nearest", "stochastic"):
        method, x = method_of(compressor="bf16", rounding=rounding), np.full(1003, 3.39e38, np.float32)
        x[::2] *= -1
        ctx = context(xp, 1003)
        found = receive(method, xp, send(method, xp, x, ctx)[0], ctx)
        assert np.isfinite(found).all()
        assert (abs(found / x - 1) < 2**-7).all()


def test_randomk_covers_everything_in_time(xp):
    # With error feedback every element is sent at last: no position is left out for ever.
    method, n = method_of(compressor="randomk", compress_ratio=0.1), 100
    seen = np.zeros(n, bool)
    for step in range(100):
        ctx = context(xp, n, step=step)
        seen |= receive(method, xp, send(method, xp, np.ones(n, np.float32), ctx)[0], ctx) != 0
    assert seen.all()


def test_keys_of_the_tests_are_those_of_the_specification():
    assert fold(fold(0, 0, 1, 0x72C28D05, 5, 0), 1) == 0xB57AC67E


# -- absent gradients ----------------------------------------------------------------------------------------------
@exchanges(lambda row, communicator: row.params.get("compress_ratio") != 1.0 and "quantum_num" not in row.params)
def test_absent_gradients(row, communicator, xp):
    shape = (20, 30) if row.matrix else (603,)
    graces, reference = (workers({**row.params, "communicator": communicator}, 3) for _ in range(2))
    gradients = [{"a": spread(*shape, seed=rank), "b": spread(*shape, seed=9 + rank)} for rank in range(3)]
    arrays = [{name: xp.asarray(x, "float32") for name, x in worker.items()} for worker in gradients]
    for grace in (*graces, *reference):
        grace.build(arrays[0])
    for grace in graces:
        grace.track_missing = True
    # Absent on one worker: as if it were zero there.
    some = [{**worker, "a": None if rank == 1 else worker["a"]} for rank, worker in enumerate(arrays)]
    zero = [{**worker, "a": xp.zeros(shape) if rank == 1 else worker["a"]} for rank, worker in enumerate(arrays)]
    for found, expected in zip(lockstep(graces, some), lockstep(reference, zero), strict=True):
        assert same(host(xp, found.values()), host(xp, expected.values()))
    assert unchanged(states(graces), states(reference))
    # Absent everywhere: no mean, and no change.
    before = states(graces)
    for found in lockstep(graces, [{**worker, "a": None} for worker in arrays]):
        assert found["a"] is None
        assert np.isfinite(xp.to_numpy(found["b"])).all()
    for one, two in zip(before, states(graces), strict=True):
        assert all(one[key].tobytes() == two[key].tobytes() for key in one if key[0] == "a")


def test_a_method_may_be_put_together_by_hand(xp):
    method = Method(parts(ROWS[4]).compressor, NoMemory())
    payload, state = alone(lambda ctx: method.encode(xp.asarray(spread(1000), "float32"), {}, ctx), context(xp, 1000))
    assert len(payload) == 2
    assert state == {}


# -- 1-bit, ternary, powers of two, momentum -----------------------------------------------------------------------
@pytest.mark.parametrize("clip", [0.0, 1.0, 2.5])
def test_terngrad_gives_constants_and_lone_elements_back(xp, clip):
    method = method_of(compressor="terngrad", clip=clip)
    for x in (np.full(1000, -0.3, np.float32), np.array([7e-4], np.float32), np.array([-2e5], np.float32)):
        ctx = context(xp, len(x))
        payload, _ = send(method, xp, x, ctx)
        np.testing.assert_allclose(receive(method, xp, payload, ctx), x, rtol=1e-6)


def test_onebit_keeps_the_sum(xp):
    method, x = method_of(compressor="onebit"), spread(5000) + np.float32(0.1)
    payload, _ = send(method, xp, x, context(xp, 5000))
    found = receive(method, xp, payload, context(xp, 5000))
    assert len(np.unique(found)) == 2
    assert found.sum(dtype=np.float64) == pytest.approx(x.sum(dtype=np.float64), rel=1e-5)


def test_natural_finds_powers_of_two_next_to_each_number(xp):
    for settings in ({}, {"stochastic": False}):
        method, x = method_of(compressor="natural", **settings), spread(5000)
        payload, _ = send(method, xp, x, context(xp, 5000))
        found = receive(method, xp, payload, context(xp, 5000)).astype(np.float64)
        assert (np.frexp(found)[0] == np.copysign(0.5, x)).all()
        assert (abs(found) > abs(x) / 2).all()
        assert (abs(found) < abs(x) * 2).all()
        if settings:
            assert (abs(found - x) <= abs(x) * (1 / 3 + 1e-6)).all()


def test_momentum_is_a_running_mean(xp):
    (grace,) = workers({"compressor": "none", "memory": "momentum", "momentum": 0.8}, 1)
    grace.build({"w": xp.zeros(50)})
    v = np.zeros(50, np.float32)
    for step in range(5):
        g = spread(50, seed=step)
        v = np.float32(0.8) * v + np.float32(1.0 - 0.8) * g
        ((mean,),) = [worker.values() for worker in lockstep([grace], [{"w": xp.asarray(g.copy(), "float32")}])]
        np.testing.assert_allclose(xp.to_numpy(mean), v, rtol=1e-5, atol=1e-6)


# -- chains --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sparsifier", ["topk", "randomk"])
@pytest.mark.parametrize("quantizer", ["none", "fp16", "natural", "dettmers8", "efsignsgd", "qsgd", "randomk"])
def test_a_chain_is_its_parts_one_after_the_other(xp, sparsifier, quantizer):
    n, k = 1003, 300
    second = method_of(compressor=quantizer).compressor
    first = method_of(compressor=sparsifier, compress_ratio=0.3).compressor
    method, ctx = Method(Chain(first, second), NoMemory()), context(xp, n, step=4, rank=2)
    x = spread(n)
    payload, _ = send(method, xp, x, ctx)
    plain = Method(first, NoMemory())
    positions = np.flatnonzero(receive(plain, xp, send(plain, xp, x, ctx)[0], ctx))
    assert len(positions) == k
    inner, alone_ = context(xp, k, name="w/values", step=4, rank=2), Method(second, NoMemory())
    expected = np.zeros(n, np.float32)
    expected[positions] = receive(alone_, xp, send(alone_, xp, x[positions], inner)[0], inner)
    assert np.array_equal(receive(method, xp, payload, ctx), expected)


def test_a_chain_may_have_three_stages(xp):
    # Random positions that do not travel, the largest of those, and levels: as in CocktailSGD.
    method = method_of(compressor="chain", sparsifier=RandomK(0.2), quantizer=Chain(TopK(0.25), QSGD(7, 24)))
    x, ctx = spread(1000), context(xp, 1000)
    payload, _ = send(method, xp, x, ctx)
    assert [len(array) for array in host(xp, payload)] == [25, 3, 50]
    found = receive(method, xp, payload, ctx)
    drawn = np.sort(np.argsort(Where().shared_words("positions", 1000), kind="stable")[:200])
    chosen = drawn[np.argsort(-abs(x[drawn]), kind="stable")[:50]]
    assert set(np.flatnonzero(found)) <= set(chosen.tolist())
    norm = np.linalg.norm(x[chosen])
    assert (abs(found - x)[chosen] <= norm / 7 * (1 + 1e-6)).all()


# -- sampled, sketched and agreed ----------------------------------------------------------------------------------
TAILS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "heavy": lambda rng, n: rng.standard_t(1.5, n),
    "mixed": lambda rng, n: rng.standard_normal(n) * np.where(np.arange(n) % 7, 1e-4, 1),
}


@pytest.mark.parametrize("kind", TAILS)
@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_dgc_sends_nearly_as_many_as_asked_for(kind, ratio):
    xp, n = backend("numpy"), 100_000
    method, k = method_of(compressor="dgc", compress_ratio=ratio), int(100_000 * ratio)
    for seed in range(20):
        x = TAILS[kind](np.random.default_rng(seed), n).astype(np.float32)
        values, positions = host(xp, send(method, xp, x, context(xp, n, step=seed))[0])
        assert 0.5 * k <= len(positions) <= 1.3 * k
        # They are the largest ones.
        rest = np.delete(x, positions)
        assert abs(values).min() >= abs(rest).max()
        if kind != "heavy":  # where few elements reach the threshold, the sample is still good enough to get close
            assert abs(len(positions) - k) <= 0.25 * k + 1


def test_dgc_cuts_ties_and_sends_no_zeros(xp):
    method, n = method_of(compressor="dgc", compress_ratio=0.01), 20_000
    ctx = context(xp, n)
    # All equal: as many as are allowed, from the front.
    _, positions = host(xp, send(method, xp, np.full(n, -3, np.float32), ctx)[0])
    assert positions.tolist() == list(range(260))
    # A few large ones are all sent before the many that are equal.
    x = np.full(n, 1e-3, np.float32)
    x[-100:] = np.linspace(1, 2, 100)
    _, positions = host(xp, send(method, xp, x, ctx)[0])
    assert positions.tolist() == [*range(160), *range(n - 100, n)]
    # Fewer than the sample can see: nothing but what is not zero.
    x = np.zeros(n, np.float32)
    x[[5, 777, 19_999]] = 1, -2, 1e-30
    _, positions = host(xp, send(method, xp, x, ctx)[0])
    assert positions.tolist() == [5, 777, 19_999]
    for size in (n, 50):
        values, positions = host(xp, send(method, xp, np.zeros(size, np.float32), context(xp, size))[0])
        assert (len(values), len(positions)) == (0, 0)


def test_adaq_keeps_the_sum_of_what_it_sends(xp):
    method, x = method_of(compressor="adaq", compress_ratio=0.1), np.round(4 * spread(1003)) / 4  # with ties and zeros
    payload, _ = send(method, xp, x, context(xp, 1003))
    means, positions = host(xp, payload)
    found = receive(method, xp, payload, context(xp, 1003))
    plus, minus = positions[positions >= 0], ~positions[positions < 0]
    assert (len(plus), len(minus)) == (math.ceil(0.1 * (x > 0).sum()), math.ceil(0.1 * (x < 0).sum()))
    assert x[plus].min() >= np.delete(x, plus).max()
    assert x[minus].max() <= np.delete(x, minus).min()
    for side, mean in ((plus, means[0]), (minus, means[1])):
        assert (found[side] == mean).all()
        assert mean == pytest.approx(x[side].astype(np.float64).mean(), rel=1e-6)
    for sign in (1, -1):  # one sign is missing
        payload, _ = send(method, xp, sign * abs(x), context(xp, 1003))
        assert host(xp, payload)[0][0 if sign < 0 else 1] == 0
        assert ((host(xp, payload)[1] >= 0) == (sign > 0)).all()


@pytest.mark.parametrize("iterations, share_", [(0, 0.85), (1, 0.98), (2, 0.999), (4, 0.9999)])
def test_wangni_sends_as_many_as_asked_for_after_some_iterations(iterations, share_):
    xp, n = backend("numpy"), 10_000
    method = method_of(compressor="wangni", iterations=iterations)
    x, counts = spread(n), []
    for step in range(40):
        payload = host(xp, send(method, xp, x, context(xp, n, step=step))[0])
        counts.append(len(payload[0]) + len(payload[2]))
        assert abs(x[payload[0]]).min() >= payload[3][0] * (1 - 1e-6)
    noise = 4 * math.sqrt(0.05 * n / 40)
    assert np.mean(counts) <= 0.05 * n + noise
    assert np.mean(counts) >= share_ * 0.05 * n - noise


class AdaComps:
    """Workers of AdaComp, as the paper puts it."""

    def __init__(self, size, n, bins):
        self.bins, self.residuals = bins, np.zeros((size, n), np.float32)

    def step(self, gradients):
        means = []
        for rank, g in enumerate(gradients):
            total = self.residuals[rank] + g
            largest = [abs(total[i : i + self.bins]).max() for i in range(0, len(g), self.bins)]
            bound = np.repeat(np.array(largest, np.float32), self.bins)[: len(g)]
            scale = np.float32(np.mean(np.array(largest, np.float64)))
            sent = np.where((abs(total + g) >= bound) & (bound > 0), np.sign(total) * scale, 0)
            self.residuals[rank] = total - sent
            means.append(sent)
        return np.mean(means, 0)


@pytest.mark.parametrize("bins", [2, 50, 128])
@pytest.mark.parametrize("communicator", ["allgather", "broadcast"])
def test_adacomp_follows_the_formula(xp, bins, communicator):
    for size in (1, 3):
        graces = workers({"compressor": "adacomp", "bin_size": bins, "communicator": communicator}, size)
        for grace in graces:
            grace.build({"w": xp.zeros(1003)})
        expected = AdaComps(size, 1003, bins)
        for step in range(5):
            gradients = [spread(1003, seed=10 * step + rank) for rank in range(size)]
            for g in gradients:
                g[::5] = 0
                g[256:512] = 0  # whole bins
            wanted = expected.step(gradients)
            for worker in lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients]):
                np.testing.assert_allclose(xp.to_numpy(worker["w"]), wanted, rtol=1e-5, atol=1e-5 * abs(wanted).max())


def test_adacomp_loses_nothing_in_fifty_steps(xp):
    method, n = method_of(compressor="adacomp"), 603
    state, carried, given = method.compressor.init(context(xp, n)), np.zeros(n), np.zeros(n)
    for step in range(50):
        g, ctx = spread(n, seed=step), context(xp, n, step=step)
        payload, state = send(method, xp, g, ctx, state)
        carried += receive(method, xp, payload, ctx)
        given += g
        kept = np.array(xp.to_numpy(state["residual"]))
        assert abs(carried + kept - given).max() < 1e-5 * abs(given).max() * (step + 1)
    assert abs(carried).max() > 0


def test_gtopk_takes_back_what_is_not_used(xp):
    # Two workers, two elements each; one of each pair is among the two largest sums.
    graces = workers({"compressor": "gtopk", "compress_ratio": 0.25}, 2)
    gradients = [np.array([8, 0, 3, 0, 0, 1, 0, 0], np.float32), np.array([0, -4, 0, 2, -1, 0, 0, 0], np.float32)]
    for grace in graces:
        grace.build({"w": xp.zeros(8)})
    for worker in lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients]):
        assert xp.to_numpy(worker["w"]).tolist() == [4, -2, 0, 0, 0, 0, 0, 0]
    kept = [state["w", "memory/residual"].tolist() for state in states(graces)]
    assert kept == [[0, 0, 3, 0, 0, 1, 0, 0], [0, 0, 0, 2, -1, 0, 0, 0]]


def test_gtopk_has_k_elements_however_many_workers(xp):
    graces = workers({"compressor": "gtopk", "compress_ratio": 0.01}, 5)
    for grace in graces:
        grace.build({"w": xp.zeros(1003)})
    for worker in lockstep(graces, [{"w": xp.asarray(spread(1003, seed=rank), "float32")} for rank in range(5)]):
        assert (xp.to_numpy(worker["w"]) != 0).sum() == 10


def test_cltk_has_another_leader_at_every_step(xp):
    graces = workers({"compressor": "cltk", "compress_ratio": 0.01, "memory": "residual"}, 3)
    spikes = [np.where(np.arange(1003) // 10 == rank, np.float32(5), np.float32(0.1)) for rank in range(3)]
    for grace in graces:
        grace.build({"w": xp.zeros(1003)})
    for step in range(4):
        for worker in lockstep(graces, [{"w": xp.asarray(x, "float32")} for x in spikes]):
            chosen = np.flatnonzero(xp.to_numpy(worker["w"]))
            assert set(chosen // 10) == {step % 3}


def heavy(n, positions):
    x = (normal(n) / 50).astype(np.float32)
    x[positions] = np.linspace(3, 5, len(positions)) * np.where(np.arange(len(positions)) % 2, 1, -1)
    return x


def test_sketches_are_linear_and_find_heavy_hitters(xp):
    n, positions = 5000, np.arange(40) * 123 + 7
    method = method_of(compressor="sketch_sgd", compress_ratio=0.008)
    ctx = context(xp, n, step=2)
    one, two = spread(n), heavy(n, positions)
    hashes = method.compressor.hashes(ctx)
    sketches = [method.compressor.sketch(xp.asarray(x, "float32"), hashes, ctx) for x in (one, two, one + two)]
    tables = host(xp, sketches)
    assert tables[0].shape == (5 * 512,)
    np.testing.assert_allclose(tables[0] + tables[1], tables[2], rtol=1e-4, atol=1e-4)
    estimate = np.array(xp.to_numpy(method.compressor.estimate(xp.asarray(tables[1], "float32"), hashes, ctx)))
    # Only where three of five rows hold another heavy one as well is an estimate far off.
    assert (abs(estimate - two) > 0.5).mean() < 0.02
    assert np.median(abs(estimate - two)) < 0.05
    values, found = host(xp, send(method, xp, two, ctx)[0])
    assert found.tolist() == positions.tolist()
    assert np.array_equal(values, two[positions])


def test_arctopk_finds_heavy_rows(xp):
    n = 5000
    method = method_of(compressor="arctopk", compress_ratio=0.05, row_size=16, sketch_size=4)
    rows = np.arange(15) * 20 + 3
    x = (normal(n) / 100).astype(np.float32)
    x.reshape(-1)[(rows[:, None] * 16 + np.arange(16)).reshape(-1)[: 15 * 16]] += normal(15 * 16)
    _, found = host(xp, send(method, xp, x, context(xp, n))[0])
    assert found.tolist() == rows.tolist()


def test_arctopk_sends_every_row_in_time(xp):
    # With error feedback no row is left out for ever, small as it is.
    method, n = method_of(compressor="arctopk", compress_ratio=0.25, row_size=8), 100
    state, seen = method.init(context(xp, n)), np.zeros(n, bool)
    g = np.linspace(0.1, 1, n).astype(np.float32)
    for step in range(60):
        ctx, before = context(xp, n, step=step), state
        payload, state = alone(lambda ctx: method.encode(xp.asarray(g.copy(), "float32"), before, ctx), ctx)
        seen |= receive(method, xp, payload, ctx) != 0
    assert seen.all()


def test_chunktopk_sends_the_largest_of_each_chunk(xp):
    method, n = method_of(compressor="chunktopk", chunk_size=512, chunk_k=8), 512 * 3 + 5
    x = spread(n)
    payload, _ = send(method, xp, x, context(xp, n))
    found = receive(method, xp, payload, context(xp, n))
    for start in range(0, n, 512):
        part, sent = x[start : start + 512], found[start : start + 512]
        largest = np.sort(np.argsort(-abs(part), kind="stable")[:8])
        assert np.flatnonzero(sent).tolist() == largest.tolist()
        assert len(set(abs(sent[largest]).tolist())) == 2
        assert np.array_equal(np.sign(sent[largest]), np.sign(part[largest]))
