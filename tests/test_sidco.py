"""SIDCo: distributions, stages, whole exchanges and a training; and the other selectors' thresholds."""

import math
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
from methods import BACKENDS, backend, context, host, lockstep, normal, receive, same, send, states, workers
from methods import method_of as method

from grace.compressors.selectors import SELECTORS
from grace.compressors.studies.sidco import SIDCo
from grace.ops import distributions as tails
from grace_bench import sidco as bench
from grace_bench import sidco_show

N = 100_000
RATIOS = (0.1, 0.01, 0.001)
MATCHED = {"e": "Laplace", "gp": "gamma, shape 0.5", "p": "Pareto, xi 0.25"}


def one(xp, *values):
    return [xp.asarray([value], "float64") for value in values]


def number(xp, array):
    (found,) = xp.to_numpy(array).tolist()
    return found


def draw(law, n, seed=0):
    """Numbers with magnitudes of a law and random signs."""
    rng = np.random.default_rng([seed, 7])
    x = bench.LAWS[law](rng, n).astype(np.float32)
    return np.where(rng.random(n) < 0.5, -x, x)


def stages(xp, many):
    return xp.full(1, many, "int32")


def chosen(xp, compressor, x, state=None):
    """The positions in x that a compressor or selector chooses, and its next state."""
    ctx = context(xp, len(x))
    found, state = compressor.choose(xp.asarray(x, "float32"), compressor.init(ctx) if state is None else state, ctx)
    return np.array(xp.to_numpy(found)), state


# -- laws -------------------------------------------------------------------------------------------------------------
def test_closed_forms(xp):
    # S1, worked out by hand: ln 100; 4 (100 ** 0.25 - 1); half of chi squared's 1 % quantile, one degree of freedom.
    mean, share = one(xp, 1.0, math.log(0.01))
    assert number(xp, tails.exponential(xp, mean, share)) == pytest.approx(math.log(100), rel=1e-12)
    mean, variance = one(xp, 1 / 0.75, 1 / (0.75**2 * 0.5))  # scale 1 and xi = 0.25
    assert number(xp, tails.pareto_shape(xp, mean, variance)) == pytest.approx(0.25, rel=1e-12)
    assert number(xp, tails.pareto(xp, mean, variance, share)) == pytest.approx(4 * (100**0.25 - 1), rel=1e-9)
    (shape,) = one(xp, 0.5)
    assert number(xp, tails.gamma_quantile(xp, shape, share)) == pytest.approx(6.634896601021214 / 2, rel=1e-9)


def test_a_pareto_law_of_no_shape_is_exponential(xp):
    mean, share = one(xp, 2.0, math.log(0.001))
    for variance in (4.0, 4.0 * (1 + 1e-7), 4.0 * (1 - 1e-7)):  # xi = 0, and xi = +-5e-8
        found = number(xp, tails.pareto(xp, mean, *one(xp, variance), share))
        assert found == pytest.approx(2 * math.log(1000), rel=1e-6)


@pytest.mark.parametrize("shape", [0.01, 0.05, 0.3, 0.5, 0.8, 1.0, 1.2, 3.0, 20.0, 100.0])
def test_gamma_quantiles_against_scipy(xp, shape):
    scipy = pytest.importorskip("scipy.special")
    shares = [0.9, 0.5, 0.25, 0.1, 0.01, 1e-3, 1e-5, 1e-7]
    found = tails.gamma_quantile(xp, xp.full(8, shape, "float64"), xp.asarray(np.log(shares), "float64"))
    np.testing.assert_allclose(xp.to_numpy(found), scipy.gammainccinv(shape, shares), rtol=1e-6, atol=1e-300)


def test_parameters_are_recovered():
    # S2, with 1e6 numbers.
    xp, n = backend("numpy"), 10**6
    rng = np.random.default_rng(1)
    number_, total, _ = xp.excess((3 * rng.exponential(size=n)).astype(np.float32), np.zeros(1, np.float32))
    assert total / number_ == pytest.approx(3, rel=0.01)
    for shape in (0.3, 0.5, 0.8, 1.0):
        x = rng.gamma(shape, size=n).astype(np.float32)
        log = SIDCo(sid="gp")._log(xp, x, xp.excess(x, np.zeros(1, np.float32)))
        assert number(xp, tails.gamma_shape(xp, log)) == pytest.approx(shape, rel=0.03)
    for xi in (-0.5, -0.1, 0.1, 0.25):
        x = (((1 - rng.random(n)) ** -xi - 1) / xi).astype(np.float32)
        _, total, squares = xp.excess(x, np.zeros(1, np.float32))
        mean, variance = one(xp, total / n, squares / n - (total / n) ** 2)
        assert number(xp, tails.pareto_shape(xp, mean, variance)) == pytest.approx(xi, abs=0.03)


def test_the_closed_form_chooses_too_few():
    # The paper's closed form for the gamma law, on gamma draws, selects 0.43 of k at 1 %; the exact quantile is right.
    x = draw("gamma, shape 0.5", 10**6)
    settings = {closed: SIDCo(0.01, "gp", stages=1, closed_form=closed) for closed in (True, False)}
    many = {closed: len(chosen(backend("numpy"), compressor, x)[0]) for closed, compressor in settings.items()}
    assert many[True] / 10_000 == pytest.approx(0.43, abs=0.03)
    assert many[False] / 10_000 == pytest.approx(1, abs=0.08)


def with_zeros(law, n, share, seed=0):
    """Draws from a law with a share of zeros, like gradients of unused inputs."""
    x = draw(law, n, seed)
    x[np.random.default_rng([seed, 8]).random(n) < share] = 0
    return x


@pytest.mark.parametrize("zeros", [0.0, 0.1, 0.3])
def test_the_gamma_law_is_fitted_as_the_authors_do(xp, zeros):
    # The authors' code divides magnitudes by the vector's norm and adds 2 ** -52.
    scipy = pytest.importorskip("scipy.special")
    x = with_zeros("Laplace", N, zeros)
    a = abs(x).astype(np.float64) / np.linalg.norm(x.astype(np.float64))
    s = np.log(a.mean()) - np.log(a + 2.0**-52).mean()
    shape = (3 - s + np.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    for ratio in (0.25, 0.01):
        wanted = np.linalg.norm(x) * a.mean() / shape * scipy.gammainccinv(shape, ratio)
        found = number(xp, SIDCo(ratio, "gp", stages=1).threshold(xp, xp.asarray(x, "float32"), stages(xp, 1)))
        assert found == pytest.approx(wanted, rel=1e-4)


def test_zeros_and_the_number_of_elements():
    # Wanted K / k at 1 % in two stages is the authors'. With the floor relative to the mean: 1.70, 2.46 and 1.98.
    for zeros, wanted in ((0.0, 1.0), (0.1, 1.52), (0.3, 2.26), (0.5, 1.93)):
        x = with_zeros("Laplace", 10**6, zeros)
        many = len(chosen(backend("numpy"), SIDCo(0.01, "gp", stages=2), x)[0])
        assert many / 10**4 == pytest.approx(wanted, abs=0.03), zeros


# -- stages -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ratio", [*RATIOS, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("many", [1, 2, 3, 7])
def test_shares_of_the_stages_multiply_to_the_ratio(xp, ratio, many):
    if ratio >= 0.25 and many > 1:
        return  # there is only one stage
    shares = [number(xp, SIDCo(ratio).share(xp, stages(xp, m), stages(xp, many))) for m in range(1, many + 1)]
    assert math.exp(math.fsum(shares)) == pytest.approx(ratio, rel=1e-12)
    if many > 1:
        assert shares[0] == pytest.approx(math.log(0.25), rel=1e-12)


@pytest.mark.parametrize("sid", ["e", "gp", "p"])
def test_the_right_law_chooses_as_many_as_wanted(sid):
    # S3: with any number of stages, the mean of 5 draws of 1e6 numbers is within a tenth of k.
    xp, n = backend("numpy"), 10**6
    draws = [draw(MATCHED[sid], n, seed) for seed in range(5)]
    for ratio in RATIOS:
        for many in (1, 2, 3):
            compressor = SIDCo(ratio, sid, stages=many)
            found = [len(chosen(xp, compressor, x)[0]) / (ratio * n) for x in draws]
            assert 0.9 <= np.mean(found) <= 1.1, (ratio, many, found)


@pytest.mark.parametrize("sid", ["e", "gp", "p"])
def test_each_stage_is_higher_than_the_one_before(xp, sid):
    # Thresholds of the first stages, as the loop computes them before the last stage.
    x = xp.asarray(draw("Student, 4 degrees", N), "float32")
    compressor, thresholds = SIDCo(0.001, sid), []
    shares = [number(xp, compressor.share(xp, stages(xp, m), stages(xp, 5))) for m in range(1, 6)]
    for last in range(1, 6):
        part = SIDCo(math.exp(sum(shares[:last])), sid)
        thresholds.append(number(xp, part.threshold(xp, x, stages(xp, last))))
    assert all(low < high for low, high in pairwise(thresholds)), thresholds


class Controller:
    """The rules of the number of stages in plain Python."""

    def __init__(self, rule, most, q=5, eps=0.2):
        self.rule, self.most, self.q, self.eps = rule, most, q, eps
        self.stages, self.window, self.errors = 1, [], {}

    def observe(self, ratio):
        self.window.append(ratio)
        if len(self.window) < self.q:
            return
        r, self.window = sum(self.window) / self.q, []
        step = (r < 1 - self.eps) - (r > 1 + self.eps)
        if self.rule == "paper":
            self.stages = min(max(self.stages + step, 1), self.most)
            return
        miss = abs(math.log(r))
        self.errors[self.stages] = (self.errors.get(self.stages, miss) + miss) / 2
        self.errors = {number: 0.9 * error for number, error in self.errors.items()}
        for other in (self.stages + step, self.stages - step) if step else ():
            if 1 <= other <= self.most and self.errors.get(other, -1) < self.errors[self.stages]:
                self.stages = other
                return


@pytest.mark.parametrize("rule", ["robust", "paper"])
@pytest.mark.parametrize("ratio, q", [(0.1, 5), (0.01, 1), (0.001, 5), (0.001, 2)])
def test_the_number_of_stages_follows_the_rule(xp, rule, ratio, q):
    rng = np.random.default_rng(0)
    compressor = SIDCo(ratio, stage_rule=rule, q=q)
    state, expected = compressor.init(context(xp, N)), Controller(rule, compressor.most, q)
    seen = set()
    for step in range(40 * q):
        r = np.float32(rng.lognormal(0.3 * (step // (10 * q)) - 0.5, 0.5))
        state = compressor._observed(xp, xp.asarray([r], "float32"), state)
        expected.observe(float(r))
        assert int(number(xp, state["stages"])) == expected.stages, step
        seen.add(expected.stages)
    assert len(seen) > 2


def test_the_most_stages_are_those_of_the_paper():
    assert [SIDCo(ratio).most for ratio in RATIOS] == [4, 7, 10]
    assert [SIDCo(ratio).most for ratio in (0.25, 0.5, 1.0)] == [1, 1, 1]
    assert (SIDCo(0.001, max_stages=3).most, SIDCo(0.001, stages=5).most) == (3, 5)
    assert SIDCo(0.001, stages=5).init(context(backend("numpy"), N)) == {}


# -- laws that are not the right ones ---------------------------------------------------------------------------------
@cache
def draws(law):
    return [abs(draw(law, N, seed)) for seed in range(8)]


@pytest.mark.parametrize("law", bench.LAWS)
@pytest.mark.parametrize("sid, ratios", [("p", RATIOS), ("gp", RATIOS), ("e", RATIOS[:2])])
def test_the_robust_rule_settles_near_the_ratio(law, sid, ratios):
    # `grace bench sidco` runs this with 1e6 elements. It includes "e" at 0.001, which misses these bounds.
    for ratio in ratios:
        found, last = bench.settled(SIDCo(ratio, sid), draws(law))
        assert 0.8 <= np.mean(found) <= 1.25, (ratio, last)


def test_the_papers_rule_stays_at_one_stage_where_that_lets_too_many_through():
    found, last = bench.settled(SIDCo(0.001, "e", "paper"), draws("gamma, shape 0.5"))
    assert last == 1
    assert np.mean(found) > 6
    _, last = bench.settled(SIDCo(0.001, "e"), draws("gamma, shape 0.5"))
    assert last > 1


# -- a training -------------------------------------------------------------------------------------------------------
EPOCHS, SEEDS = 20, (0, 1)


@cache
def trained(label, ratio):
    compressor = {**bench.methods(ratio), "dense": None}[label]
    return [bench.train(compressor, ratio, seed, EPOCHS) for seed in SEEDS]


def kept(label, ratio):
    return [share for run in trained(label, ratio) for share in run.kept[bench.WARM :]]


def accuracy(label, ratio):
    return np.mean([run.accuracy for run in trained(label, ratio)])


@pytest.mark.slow
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_training_keeps_the_ratio_and_the_accuracy(ratio):
    assert 0.8 <= np.mean(kept("SIDCo-P robust", ratio)) <= 1.25
    assert accuracy("SIDCo-P robust", ratio) >= accuracy("dense", 1.0) - 0.015


def width(label):
    found = bench.band(kept(label, 0.001))
    return found["high"] - found["low"]


@pytest.mark.slow
def test_it_is_steadier_than_one_small_sample_but_not_than_ours():
    # The paper compares with a sample of 1 %. GRACE's sample is larger, and counting corrects its threshold.
    assert width("SIDCo-P robust") < width("one sample of 1%")
    assert width("DGC sampling") < width("SIDCo-P robust")


@pytest.mark.slow
def test_one_stage_fails():
    assert np.mean(kept("SIDCo-P one stage", 0.001)) < 0.2
    assert accuracy("SIDCo-P one stage", 0.001) < accuracy("SIDCo-P robust", 0.001) - 0.1


# -- toolkits ---------------------------------------------------------------------------------------------------------
def functions(name):
    """The ways in which a toolkit calls a function of arrays: eagerly, and traced if it has graphs."""
    if name != "tensorflow":
        return [lambda f: f]
    import tensorflow as tf

    return [lambda f: f, partial(tf.function, autograph=False)]


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "numpy"])
@pytest.mark.parametrize("sid", ["e", "gp", "p"])
@pytest.mark.parametrize("law", ["Laplace", "Student, 4 degrees"])
def test_toolkits_find_the_same_threshold_and_the_same_elements(name, sid, law):
    one_, xp, x = backend("numpy"), backend(name), draw(law, N)
    for ratio, many in ((0.1, 1), (0.01, 3), (0.001, 2)):
        compressor = SIDCo(ratio, sid, stages=many)
        expected = compressor.threshold(one_, x, stages(one_, many))
        positions, _ = chosen(one_, compressor, x)
        near = np.flatnonzero(abs(abs(x) / expected - 1) < 1e-5)

        def both(x, compressor=compressor, many=many):
            return compressor.threshold(xp, x, stages(xp, many)), compressor.choose(x, {}, context(xp, N))[0]

        for wrapped in functions(name):
            threshold, found = host(xp, wrapped(both)(xp.asarray(x, "float32")))
            np.testing.assert_allclose(threshold, expected, rtol=1e-5)
            assert set(found.tolist()) ^ set(positions.tolist()) <= set(near.tolist())


@pytest.mark.parametrize("selector", SELECTORS)
def test_toolkits_select_the_same_elements(xp, selector):
    x, selected = draw("Student, 4 degrees", N), SELECTORS[selector](0.01)
    expected, _ = chosen(backend("numpy"), selected, x)
    for wrapped in functions(xp.name):
        choose = wrapped(lambda x: selected.choose(x, selected.init(context(xp, N)), context(xp, N)))
        assert np.array_equal(xp.to_numpy(choose(xp.asarray(x, "float32"))[0]), expected)


# -- whole exchanges (over real processes: test_processes.py) ---------------------------------------------------------
EXCHANGED = [{"compressor": "sidco", "sid": sid} for sid in ("e", "gp", "p")]
EXCHANGED += [{"compressor": "topk", "selector": "sidco"}]


@pytest.mark.parametrize("params", EXCHANGED, ids=str)
def test_workers_with_different_numbers_of_elements(xp, params):
    size, q = 2, 2
    params = {**params, "compress_ratio": 0.01, **({"q": q} if params["compressor"] == "sidco" else {})}
    graces = workers(params, size)
    compressor = graces[0].method.compressor
    for grace in graces:
        grace.build({"w": xp.zeros(N)})
    estimator = compressor if isinstance(compressor, SIDCo) else SIDCo(0.01)
    controllers = [estimator.init(context(backend("numpy"), N)) for _ in range(size)]
    residuals = np.zeros((size, N), np.float32)
    counts = []
    for step in range(6):
        gradients = [draw("normal" if rank else "Pareto, xi 0.25", N, 10 * step + rank) for rank in range(size)]
        means = lockstep(graces, [{"w": xp.asarray(g.copy(), "float32")} for g in gradients])
        found = [np.array(xp.to_numpy(worker["w"])) for worker in means]
        assert same(found[:1], found[1:])
        total = np.zeros(N)
        for rank in range(size):
            x = residuals[rank] + gradients[rank]
            positions, controllers[rank] = chosen(backend("numpy"), estimator, x, controllers[rank])
            total[positions] += x[positions]
            residuals[rank] = x
            residuals[rank][positions] = 0
            counts.append(len(positions))
        np.testing.assert_allclose(found[0], total / size, rtol=1e-6, atol=1e-6)
    assert len(set(counts)) > 6, "all workers sent as many at all steps"
    for state, expected in zip(states(graces), controllers, strict=True):
        for key, array in expected.items():
            np.testing.assert_allclose(state["w", f"compressor/{key}"], array, rtol=1e-4)


def test_one_state_for_the_whole_model(xp):
    (grace,) = workers({"compressor": "sidco", "fuse": "model"}, 1)
    grace.build({"a": xp.zeros((300, 40)), "b": xp.zeros(7), "c": xp.zeros(5000)})
    kept_ = {key for _, key in states([grace])[0]}
    assert kept_ == {"memory/residual", *(f"compressor/{key}" for key in ("stages", "sum", "count", "errors"))}
    assert len(states([grace])[0]) == 5


# -- edges ------------------------------------------------------------------------------------------------------------
SETTINGS = [SIDCo(0.01, sid, stages=many) for sid in ("e", "gp", "p") for many in (1, 3)] + [
    SIDCo(0.01, "gp", closed_form=True),
    SIDCo(0.01, cap_factor=4 / 3),
    *(SELECTORS[name](0.01) for name in ("gaussian", "bisect", "trim")),
]


@pytest.mark.parametrize("compressor", SETTINGS, ids=str)
def test_degenerate_gradients(xp, compressor):
    for n in (5000, 100_000):
        spike = np.zeros(n, np.float32)
        spike[n // 3] = -2
        assert chosen(xp, compressor, spike)[0].tolist() == [n // 3]
        assert len(chosen(xp, compressor, np.zeros(n, np.float32))[0]) <= 1
        for size in (1e-30, 1.0, 1e30):
            found, _ = chosen(xp, compressor, np.full(n, size, np.float32))
            assert len(found) in (1, n)  # all are equal: one is sent, or all
            found, _ = chosen(xp, compressor, size * normal(n))
            assert 1 <= len(found) <= n / 5
        for bad in (np.nan, np.inf, -np.inf):
            x = normal(n)
            x[n // 7] = bad
            with xp.quiet():
                found, _ = chosen(xp, compressor, x)
            assert n // 7 in found
            assert len(found) <= n / 5


@pytest.mark.parametrize("n", [0, 1, 99, 4095])
def test_small_tensors_have_the_largest(xp, n):
    x = draw("Laplace", n)
    expected = np.sort(np.argsort(-abs(x), kind="stable")[: min(n, max(1, n // 20))])
    for sid in ("e", "gp", "p"):
        assert np.array_equal(chosen(xp, SIDCo(0.05, sid), x)[0], expected)
    x = draw("Laplace", 31_999)  # k = 31: too few for an estimate
    assert np.array_equal(chosen(xp, SIDCo(0.001), x)[0], np.sort(np.argsort(-abs(x), kind="stable")[:31]))


@pytest.mark.parametrize("sid", ["e", "gp", "p"])
def test_a_ratio_of_one_sends_everything(xp, sid):
    for n in (1, 5000):
        x = normal(n)
        x[::3] = 0
        found = method(compressor="sidco", compress_ratio=1.0, sid=sid)
        ctx = context(xp, n)
        assert np.array_equal(receive(found, xp, send(found, xp, x, ctx)[0], ctx), x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_of_other_dtypes(xp, dtype):
    if dtype == "bfloat16" and xp.name == "numpy":
        return
    (grace,) = workers({"compressor": "sidco", "compress_ratio": 0.1}, 1)
    g = xp.cast(xp.asarray(draw("Laplace", 50_000), "float32"), dtype)
    grace.build({"w": g})
    (means,) = lockstep([grace], [{"w": g}])
    assert xp.dtype(means["w"]) == dtype
    many = (np.array(xp.to_numpy(xp.cast(means["w"], "float32"))) != 0).sum()
    assert many / 5000 == pytest.approx(1, abs=0.2)


def test_a_cap_keeps_the_largest(xp):
    x = draw("Pareto, xi 0.25", N)
    loose, _ = chosen(xp, SIDCo(0.001, "e", stages=1), x)
    capped, _ = chosen(xp, SIDCo(0.001, "e", stages=1, cap_factor=4 / 3), x)
    assert len(loose) > 500
    assert capped.tolist() == np.sort(np.argsort(-abs(x), kind="stable")[:100]).tolist()
    same_, _ = chosen(xp, SIDCo(0.001, "e", stages=1, cap_factor=20.0), x)
    assert same_.tolist() == loose.tolist()
    x[5] = np.nan
    with xp.quiet():
        assert 5 in chosen(xp, SIDCo(0.001, "e", stages=1, cap_factor=1.0), x)[0]


# -- the other selectors ----------------------------------------------------------------------------------------------
def test_chunks_have_their_share_and_see_what_is_not_finite(xp):
    n = 5 * 4096 + 100
    x = normal(n)
    for ratio, most in ((0.01, 43), (0.1, 412), (0.0002, 1)):
        found, _ = chosen(xp, SELECTORS["chunk"](ratio), x)
        assert len(found) == max(1, int(ratio * n))
        assert found.tolist() == sorted(set(found.tolist()))
        assert max(np.bincount(found // 4096)) <= most
        for place in (0, 7000, n - 1):
            bad = x.copy()
            bad[place] = np.inf
            assert place in chosen(xp, SELECTORS["chunk"](ratio), bad)[0]


def test_gaussian_takes_the_normal_quantile(xp):
    x = (3 * normal(N) + 0.0).astype(np.float32)
    for ratio in RATIOS:
        found, _ = chosen(xp, SELECTORS["gaussian"](ratio), x)
        assert len(found) == pytest.approx(ratio * N, rel=0.1, abs=4 * math.sqrt(ratio * N))
    # Heavy tails need a correction: too many pass, so the threshold grows 1.5-fold, up to three times.
    x = draw("Pareto, xi 0.25", N)
    many = len(chosen(xp, SELECTORS["gaussian"](0.001), x)[0])
    quantile = 3.2905267 * x.astype(np.float64).std() + abs(x.astype(np.float64).mean())
    tried = [(abs(x) > quantile * 1.5**power).sum() for power in range(4)]
    wanted = next((each for each in tried if 2 / 3 <= each / 100 <= 4 / 3), tried[-1])
    assert tried[0] > 133
    assert many == wanted


def test_selectors_serve_every_sparsifier_that_takes_them():
    for selector, cls in SELECTORS.items():
        for compressor in ("topk", "dgc"):
            made = method(compressor=compressor, selector=selector, memory="residual").compressor
            assert (made.traits.variable_length, cls(0.1).count(1000) is None) == (
                made.elements.count(1000) is None,
            ) * 2
    assert method(compressor="chain", selector="chunk").compressor.sparsifier.selector == "chunk"
    assert method(compressor="dgc").compressor.selector == "sampled"


@pytest.mark.slow
# -- the command ------------------------------------------------------------------------------------------------------
def test_the_command_measures_and_shows():
    pytest.importorskip("typer", reason="the grace command needs the extra [cli]")
    from rich.console import Console
    from typer.testing import CliRunner

    from grace.cli.app import app

    results = bench.Results()
    bench.measure(results, epochs=0, seeds=1, size=5000, backends=["numpy"], sizes=[5000])
    assert len(results.laws) == len(bench.LAWS) * 3 * 6
    assert len(results.speed) == 3 * 11
    assert all(record["faster"] > 0 for record in results.speed)
    console = Console(width=160, record=True)
    sidco_show.render(results, console)
    shown = console.export_text()
    assert all(name in shown for name in (*bench.LAWS, "P robust", "SIDCo-E, 2 stages"))
    refused = CliRunner().invoke(app, ["bench", "sidco", "--epochs", "0", "--plot", "x.png"])
    assert refused.exit_code == 2
