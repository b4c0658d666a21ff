"""Random numbers: golden values, equality across toolkits, and the statistics of the streams."""

import math
import random

import numpy as np
import pytest
import streams
from methods import BACKENDS, backend, built, normal

from grace import simulate
from grace.core import Context
from grace.core.rng import Rng, fnv1a, fold, mix

N = 100_000


def draw(xp, *, seed=0, label="round", name="layer", step=3, worker=1, offset=0):
    return Rng(xp, seed, label, name, step, worker, offset)


def as_words(xp, bits):
    assert xp.dtype(bits) == "int32"
    return np.array(xp.to_numpy(bits)).view(np.uint32)


def test_golden_mix():
    assert (mix(1), mix(2)) == (0x514E28B7, 0x30F4C306)


def test_mix_is_the_finaliser():
    for h in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, *random.Random(1).choices(range(2**32), k=2000)):
        assert mix(h) == streams.mix(h)


def test_golden_names():
    assert fnv1a("layer1.weight") == 0x72C28D05
    assert fnv1a("a") == 0xE40C292C
    assert fnv1a("") == 0x811C9DC5
    for name in ("weight", "größe", "層.0"):
        assert fnv1a(name) == streams.fnv1a(name)


def test_golden_keys():
    for worker, expected in ((0, (0xB57AC67E, 0x8E24081A)), (4, (0x15581AB0, 0x0F492D4A))):
        h = fold(0, 1, 0x72C28D05, 5, worker)
        assert (streams.fold(h, 1), streams.fold(h, 2)) == expected


def test_golden_words(xp):
    first = "2e7dcc10 c6b37ab1 1677d57f 6e39fcec 43f01ed0 7f1bf794 3464c686 c74f41dd"
    assert " ".join(f"{word:08x}" for word in as_words(xp, xp.random.words(1, 2, 0, 8))) == first
    far = "310cd3b7 22af7e60 bbee4c92"
    assert " ".join(f"{word:08x}" for word in as_words(xp, xp.random.words(1, 2, 2**32, 3))) == far
    u = [0.181607, 0.776176, 0.087766, 0.430572, 0.265383, 0.496520, 0.204663, 0.778553]
    np.testing.assert_allclose(xp.to_numpy(xp.random.uniform(1, 2, 0, 8)), u, atol=1e-6)


@pytest.mark.parametrize("key0, key1", [(0, 0), (1, 2), (0xFFFFFFFF, 0xFFFFFFFF), (0x80000000, 0x7FFFFFFF)])
def test_words_are_the_same_bits_on_every_toolkit(xp, key0, key1):
    assert np.array_equal(as_words(xp, xp.random.words(key0, key1, 0, N)), streams.words(key0, key1, 0, N))


@pytest.mark.parametrize("start", [1, 777, 2**31 - 50, 2**32 - 50, 2**32 + 5, 3 * 2**32 - 1, 2**40])
def test_words_from_anywhere(xp, start):
    # Includes starts where the counter exceeds 32 bits, and its lower half wraps around.
    key0, key1 = 0xDEADBEEF, 0xFFFFFFF0
    assert np.array_equal(as_words(xp, xp.random.words(key0, key1, start, 100)), streams.words(key0, key1, start, 100))
    assert xp.shape(xp.random.words(key0, key1, start, 0)) == (0,)


def test_streams_are_named_by_seed_label_tensor_step_and_worker(xp):
    for fields in ({}, {"seed": 7}, {"label": "q"}, {"name": "other"}, {"step": 12}, {"worker": 0}, {"offset": 4096}):
        rng = draw(xp, **fields)
        name = {"seed": 0, "label": "round", "name": "layer", "step": 3, "worker": 1, "offset": 0, **fields}
        offset = name.pop("offset")
        expected = streams.words(*streams.keys(**name), offset, 1003)
        assert np.array_equal(as_words(xp, rng.bits(1003)), expected)
        u = xp.to_numpy(rng.uniform(1003))
        assert u.dtype == np.float32
        assert np.array_equal(u, streams.uniform(**name, start=offset, n=1003))


def test_context_draws_for_one_worker_or_for_all(xp):
    ctx = Context(xp, "layer", (1003,), rank=2, step=9, seed=5)
    own = streams.words(*streams.keys(5, "round", "layer", 9, 3), 0, 1003)
    shared = streams.words(*streams.keys(5, "round", "layer", 9, 0), 0, 1003)
    assert np.array_equal(as_words(xp, ctx.rng("round").bits(1003)), own)
    assert np.array_equal(as_words(xp, ctx.shared_rng("round").bits(1003)), shared)
    piece = ctx.piece(100, 50)
    assert np.array_equal(as_words(xp, piece.rng("round").bits(50)), own[100:150])
    assert np.array_equal(as_words(xp, piece.piece(20, 10).rng("round").bits(10)), own[120:130])


@pytest.mark.parametrize("kind", ["bits", "uniform", "normal"])
@pytest.mark.parametrize("start", [0, 2**32 - 600])
def test_a_piece_draws_what_the_whole_draws_there(xp, kind, start):
    whole = xp.to_numpy(getattr(draw(xp, offset=start), kind)(1200))
    for first, size in ((0, 8), (8, 500), (508, 692), (599, 3)):
        piece = xp.to_numpy(getattr(draw(xp, offset=start + first), kind)(size))
        np.testing.assert_allclose(piece, whole[first : first + size], rtol=1e-5, atol=1e-6)


def test_uniform_lies_in_the_unit_interval(xp):
    u = np.asarray(xp.to_numpy(draw(xp).uniform(N)), np.float64)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * math.sqrt(1 / 12 / N)
    # (u - 1/2)² has mean 1/12 and variance 1/180.
    assert abs(((u - 0.5) ** 2).mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / N)
    assert len(np.unique(u)) > 0.99 * N


@pytest.mark.parametrize("byte", range(4))
def test_bytes_are_uniform(byte):
    values = draw(backend("numpy")).bits(N).view(np.uint8)[byte::4]
    found = np.bincount(values, minlength=256)
    chi = ((found - N / 256) ** 2 / (N / 256)).sum()
    assert abs(chi - 255) < 5 * math.sqrt(2 * 255)


OTHERS = [
    {"label": "positions"},
    {"label": "dnuor"},
    {"name": "ab"},
    {"name": "ba"},
    {"step": 4},
    {"step": 2},
    {"worker": 0},
    {"worker": 2},
    {"seed": 1},
    {"seed": 1, "step": 2},
    {"offset": 1},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_streams_are_not_correlated(other):
    xp = backend("numpy")
    base = {"name": "ab"} if other.get("name") == "ba" else {}
    one, two = (np.asarray(draw(xp, **fields).uniform(N), np.float64) for fields in (base, other))
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / math.sqrt(N)
    # Neither is one stream a shifted copy of the other.
    if "offset" not in other:
        assert not np.intersect1d(one[:1000], two[:1000]).size > 5


@pytest.mark.parametrize(
    "start, n",
    [(0, 9), (65530, 20), (3 * 65536 - 5, 140_000), (262144, 65536), (2 * 65536, 200_000), (7, 0), (2**33 + 9, 70)],
)
def test_noise_is_the_same_bits_on_every_toolkit(xp, start, n):
    for fields in ({}, {"name": "other"}, {"step": 12}, {"worker": 0}):
        name = {"seed": 0, "label": "round", "name": "layer", "step": 3, "worker": 1, **fields}
        found = xp.to_numpy(draw(xp, **fields, offset=start).noise(n))
        assert found.dtype == np.float32
        assert np.array_equal(found, streams.noise(**name, start=start, n=n) if n else [])


@pytest.mark.slow
def test_noise_of_any_two_elements_is_independent():
    # Pairs: neighbours, equal positions in different runs of 65536 elements, and different tensors.
    shared = {"seed": 0, "label": "round", "step": 3, "worker": 1, "start": 0}
    one, other = (streams.noise(name=name, n=2**18, **shared) for name in ("layer", "other"))
    assert abs(one.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 2**16)
    assert np.abs(np.histogram(one, 64, (0, 1))[0] / 2**12 - 1).max() < 5 * math.sqrt(63 / 2**16)
    errors = [(run < 0.3).mean() for run in (*one.reshape(-1, 2**16), *other.reshape(-1, 2**16))]
    assert np.abs(np.array(errors) - 0.3).max() < 5 * math.sqrt(0.21 / 2**16)
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 5 / math.sqrt(2**16)
    # Two runs share a table, so one draw of them differs by a shift. Over many draws they are independent.
    sums = []
    for step in range(400):
        u = streams.noise(0, "round", "layer", step, 1, 5, 1), streams.noise(0, "round", "other", step, 1, 5, 1)
        far = streams.noise(0, "round", "layer", step, 1, 5 + 2**16, 1)
        sums.append([u[0][0] - 0.5, u[1][0] - 0.5, far[0] - 0.5])
    correlation = np.corrcoef(np.array(sums).T) - np.eye(3)
    assert np.abs(correlation).max() < 4.5 / math.sqrt(400)


def test_rounded_numbers_are_neighbours_and_right_on_average(xp):
    rng, n = draw(xp), 100_000
    for value, lower in ((0.25, 0), (-0.25, -1), (7.125, 7), (-99.5, -100)):
        found = xp.to_numpy(rng.rounded(xp.full(n, value), n)).astype(np.float64)
        assert set(found.tolist()) == {lower, lower + 1}
        assert found.mean() == pytest.approx(value, abs=5 * 0.5 / math.sqrt(n))
        # equals floor(x + u) if the sum is exact
        assert np.array_equal(found, np.floor(value + xp.to_numpy(rng.noise(n)).astype(np.float64)))
    for whole in (0.0, -3.0, 127.0, 2.0**24 - 1):
        assert (xp.to_numpy(rng.rounded(xp.full(n, whole), n)) == whole).all()


def test_normal_has_the_moments_of_the_normal_distribution(xp):
    z = np.asarray(xp.to_numpy(draw(xp).normal(N)), np.float64)
    assert xp.dtype(draw(xp).normal(7)) == "float32"
    assert np.isfinite(z).all()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - moment) < 5 * math.sqrt(variance / N)
    assert abs(np.corrcoef(z[::2], z[1::2])[0, 1]) < 5 / math.sqrt(N / 2)
    assert abs((np.abs(z) < 1).mean() - math.erf(math.sqrt(0.5))) < 5 * math.sqrt(0.25 / N)


def test_normal_is_equal_across_toolkits_up_to_rounding(xp):
    expected = draw(backend("numpy")).normal(5000)
    np.testing.assert_allclose(xp.to_numpy(draw(xp).normal(5000)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n, k", [(1, 1), (5, 0), (5, 5), (1000, 1), (1003, 100), (N, 1000), (N, N - 1)])
def test_sample_is_distinct_and_ascending(xp, n, k):
    rng = draw(xp, label="positions", worker=0)
    found = xp.to_numpy(rng.sample(n, k))
    assert found.dtype == np.int32
    assert found.shape == (k,)
    assert (np.diff(found) > 0).all()
    assert ((found >= 0) & (found < n)).all()
    # The sample is the positions of the k smallest words.
    expected = np.sort(np.argsort(as_words(xp, rng.bits(n)).astype(np.int64))[:k])
    assert np.array_equal(found, expected)


def test_every_sample_is_equally_likely():
    xp, n, k, draws = backend("numpy"), 5, 2, 4000
    found = {}
    for step in range(draws):
        chosen = tuple(draw(xp, step=step, worker=0).sample(n, k).tolist())
        found[chosen] = found.get(chosen, 0) + 1
    assert len(found) == math.comb(n, k)
    expected = draws / len(found)
    chi = sum((count - expected) ** 2 / expected for count in found.values())
    assert chi < 9 + 5 * math.sqrt(18)


def test_every_position_is_equally_likely():
    xp, n, k, draws = backend("numpy"), 40, 10, 3000
    found = np.zeros(n)
    for step in range(draws):
        found[draw(xp, step=step, worker=0).sample(n, k)] += 1
    share = k / n
    assert np.abs(found - draws * share).max() < 5 * math.sqrt(draws * share * (1 - share))


def generators():
    """The state of every global generator."""
    import tensorflow as tf
    import torch

    kind, key, position, *rest = np.random.get_state()  # noqa: NPY002 - the global generator is what is looked at
    return [
        random.getstate(),
        (kind, key.tobytes(), position, *rest),
        torch.get_rng_state().numpy().tobytes(),
        tf.random.get_global_generator().state.numpy().tobytes(),
    ]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("compressor", ["qsgd", "randomk", "powersgd"])
def test_global_generators_are_not_touched(name, compressor):
    for each in BACKENDS:
        backend(each)
    before = generators()
    rng = draw(backend(name))
    for values in (rng.bits(9), rng.uniform(9), rng.normal(9), rng.sample(9, 3)):
        assert backend(name).shape(values)[0] > 0
    gradients = [{"w": normal(40, 30, seed=seed)} for seed in range(2)]
    simulate({"compressor": compressor}, gradients, backend=name, steps=2)
    assert generators() == before


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("step", [0, 1, 12345, 2**31 + 7, 2**32 + 1])
def test_a_step_inside_a_graph_gives_the_same_numbers(step, kernels, monkeypatch):
    built()
    monkeypatch.setenv("GRACE_KERNELS", kernels)
    xp = backend("tensorflow")
    import tensorflow as tf

    traces = []

    @tf.function(autograph=False)
    def inside(step):
        traces.append(1)
        rng = draw(xp, step=step)
        return rng.bits(1003), rng.uniform(1003), rng.normal(9), rng.sample(1003, 10)

    rng = draw(xp, step=step)
    outside = rng.bits(1003), rng.uniform(1003), rng.normal(9), rng.sample(1003, 10)
    for _ in range(2):
        found = inside(tf.constant(step, tf.int64))
        assert [a.numpy().tobytes() for a in found] == [b.numpy().tobytes() for b in outside]
    assert len(traces) == 1
    assert np.array_equal(as_words(xp, found[0]), streams.words(*streams.keys(0, "round", "layer", step, 1), 0, 1003))


def test_what_is_rounded_with_noise_is_right_up_to_half_of_2_to_the_minus_16(xp):
    """Checks the bound of `Rng.noise`: on probabilities, so also on expectations, in units of a level."""
    noise = xp.to_numpy(Rng(xp, 0, "round", "w", 3, 1).noise(200_000)).astype(np.float64) * 2**17
    assert (noise % 2 == 1).all()
    assert noise.min() >= 1
    assert noise.max() < 2**17
    every = (2 * np.arange(2**16) + 1) / 2**17
    for level in (0.0, 2.0**-18, 2.0**-17, 3e-5, 0.3, 1 / 3, 126.7):
        assert abs(np.floor(level + every).mean() - level) <= 2.0**-17


def test_qsgd_finds_small_values_down_to_that_bound(xp):
    def mean_of(level, steps):
        x = np.full(512, level / 127, np.float32)
        x[0] = 1
        given = [[{"w": x}]] * steps
        history = simulate({"compressor": "qsgd", "min_numel": 0}, given, backend=xp.name).history
        return np.mean([means["w"][1:] for (means,) in history]) * 127

    assert mean_of(5e-8 * 127, 20) == 0  # below half of 2**-16 of a level, so always rounded to 0
    assert abs(mean_of(2.0**-8, 40) - 2.0**-8) < 6 * (2.0**-8 / (40 * 511)) ** 0.5
