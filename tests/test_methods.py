"""Every method of the table: the laws of grace.testing, and its bytes, declarations and means by its own formula."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from methods import (
    BACKENDS,
    EXCHANGES,
    MATRICES,
    SIZES,
    VOTES,
    alone,
    backend,
    context,
    exchanges,
    handed_over,
    host,
    lockstep,
    normal,
    parts,
    receive,
    rows,
    rows_everywhere,
    same,
    send,
    spread,
    states,
    unchanged,
    workers,
)
from streams import fold
from support.cases import hold
from table import ROWS
from table.row import Where

from grace import grace_from_params
from grace.core import Combine
from grace.core.method import Method
from grace.core.registry import communicators, compressors
from grace.memories.none import NoMemory
from grace.testing import compressor_laws
from grace.testing.exchanges import LAWS as exchange_laws
from grace.transports.local import LocalTransport


def shapes(row):
    return MATRICES if row.matrix else [(n,) for n in SIZES]


ELSEWHERE = {"auto", "hierarchical", "planned", "reducescatter"}
"""Those that carry what others do, or rows of it: tests of scale, hierarchical, plan_execution and fsdp."""


# -- the table -----------------------------------------------------------------------------------------------------
def test_everything_registered_is_in_the_table():
    assert set(compressors) == {row.name for row in ROWS}
    assert set(communicators) - ELSEWHERE == {name for row in ROWS for name in row.communicators}


@rows()
def test_the_table_names_every_communicator_that_fits(row):
    for name in set(communicators) - ELSEWHERE:
        params = {**row.params, "communicator": name}
        if (row, name) in EXCHANGES:
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
            else:
                assert said == pytest.approx(expected(n))
    assert (compressor.traits.variable_length, compressor.traits.sends_exact_values) == (row.ragged, row.mask)
    assert compressor.traits.family in ("quantisation", "sparsification", "hybrid", "low rank")
    if compressor.traits.unbiased:
        assert row.variance is not None


ALWAYS = {"toolkits_agree_with_numpy", "a_step_is_traced_once"}
"""Laws that TensorFlow is held to with every row: what NumPy is held to follows for it, and graphs are its own."""
OF_EXCHANGES = set(exchange_laws) - ALWAYS
"""Laws that depend on a method's kind more than on its settings."""


def laws():
    """Pairs of a row and the laws to check, for one toolkit.

    The rows of a method share the laws of exchanges, and all but two on TensorFlow, whose eager operations take twenty
    times as long as NumPy's: each row checks some of them. The remaining checks are marked exhaustive.
    """
    for name in BACKENDS:
        of_method = Counter()
        for row in ROWS:
            checks = list(compressor_laws(parts(row).compressor, [name])) if name == "numpy" or row.everywhere else []
            if not checks:
                continue
            turn = of_method[row.name]
            count = sum(name == "numpy" or other.everywhere for other in ROWS if other.name == row.name)
            shared = {check.law for check in checks} - ALWAYS if name == "tensorflow" else OF_EXCHANGES
            few = [each for i, each in enumerate(checks) if each.law not in shared or i % count == turn]
            of_method[row.name] += 1
            rest = [each for each in checks if each not in few]
            yield pytest.param(row, few, id=f"{name}-{row}")
            if rest:
                yield pytest.param(row, rest, id=f"{name}-{row}-rest", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("row, checks", list(laws()))
def test_laws(row, checks):
    backend(checks[0].backend)
    hold((str(check), check.run) for check in checks)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_method_is_held_to_every_law(name):
    tried = {}
    for item in laws():
        if not item.marks:
            row, checks = item.values
            tried.setdefault(row.name, set()).update(check.law for check in checks if check.backend == name)
    for row in ROWS:
        if row.everywhere:
            laws_of = {check.law for check in compressor_laws(parts(row).compressor, [name])}
            assert tried[row.name] == laws_of


# -- payloads ------------------------------------------------------------------------------------------------------
@rows_everywhere(lambda row: row.nbytes)
def test_payloads_have_exactly_the_bytes_of_the_table(row, xp):
    method = parts(row)
    for shape in shapes(row):
        x = spread(*shape)
        ctx = context(xp, shape)
        payload, _ = send(method, xp, x, ctx)
        if method.compressor.traits.combine is Combine.AGREED:  # then it exchanges data while it compresses
            state, array = method.compressor.init(ctx), xp.asarray(x.reshape(-1).copy(), "float32")
            payload = handed_over(lambda ctx: method.compressor.compress(array, state, ctx), ctx)
        assert sum(array.nbytes for array in host(xp, payload)) == row.nbytes(x)
        assert {xp.dtype(array) for array in payload} <= {"uint8", "int8", "int32", "float16", "float32"}
        assert all(len(xp.shape(array)) >= 1 for array in payload)


@rows_everywhere(lambda row: not row.matrix)
def test_same_key_same_payload_and_another_step_another_one(row, xp):
    method, n = parts(row), 1000
    x = spread(n)
    shared = method.compressor.traits.combine is not Combine.GATHER
    sent = {}
    for step, rank, seed in ((5, 1, 0), (6, 1, 0), (5, 2, 0), (5, 1, 1)):
        ctx = context(xp, n, step=step, rank=rank, seed=seed)
        payload = host(xp, send(method, xp, x, ctx)[0])
        assert same(payload, host(xp, send(method, xp, x, ctx)[0]))
        if (
            method.compressor.traits.combine is Combine.AGREED
        ):  # compare the decoded results: payloads may hold a worker's own part
            payload = [receive(method, xp, send(method, xp, x, ctx)[0], ctx)]
        sent[step, rank, seed] = payload
    first = sent.pop((5, 1, 0))
    differs = row.random and row.params.get("compress_ratio") != 1.0
    for (_, rank, _), payload in sent.items():
        # Workers must draw positions alike if they do not send them, but round independently.
        assert same(first, payload) == (not differs or (rank == 2 and shared))


@rows(lambda row: row.name in VOTES)
def test_a_zero_votes_plus(row, xp):
    for n in SIZES:
        payload, _ = send(parts(row), xp, np.array([0.0, -0.0] * n, np.float32)[:n], context(xp, n))
        assert (receive(parts(row), xp, payload, context(xp, n)) == 1).all()


def test_noise_of_different_workers_is_independent():
    # If rounding were the same on all workers, averaging would not reduce its noise.
    xp, n, size = backend("numpy"), 20_000, 8
    method, x = parts(next(row for row in ROWS if row.name == "qsgd")), normal(20_000)
    found = []
    for rank in range(size):
        ctx = context(xp, n, rank=rank)
        found.append(receive(method, xp, send(method, xp, x, ctx)[0], ctx) - x)
    alone_, mean = np.mean([(e**2).sum() for e in found]), (np.mean(found, 0) ** 2).sum()
    assert mean == pytest.approx(alone_ / size, rel=0.1)


# -- not finite ----------------------------------------------------------------------------------------------------
BAD = {
    f"{value} {where}": (value, where)
    for value, where in ((math.nan, 0), (math.nan, 0.5), (math.nan, 1), (math.inf, 0.5), (-math.inf, 1))
}


@rows_everywhere()
def test_a_lone_bad_element_is_seen(row, xp):
    # All other elements are zero: a sparse method need not send any of them.
    method = parts(row)
    for shape in MATRICES[2:] if row.matrix else ((603,), (5000,)):
        for place, value in ((0, np.nan), (0.5, np.inf), (1, -np.inf)):
            x, ctx = np.zeros(shape, np.float32), context(xp, shape)
            x.reshape(-1)[int(place * (x.size - 1))] = value
            with xp.quiet():
                payload, _ = send(method, xp, x, ctx)
                assert not np.isfinite(receive(method, xp, payload, ctx)).all()


@exchanges(lambda row, communicator: row.params.get("compress_ratio") != 1.0, few=True)
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


# -- means, against formulas written once more in NumPy ------------------------------------------------------------
class Formula:
    """Simulated workers and their residuals, by the papers' formulas: no payloads, no communication."""

    def __init__(self, row, communicator, size, n):
        self.row, self.size, self.n = row, size, n
        self.feedback = parts(row).memory.feedback
        self.residuals, self.momenta = np.zeros((2, size, n), np.float32)
        self.twostage, self.server = communicator == "twostage", np.zeros(n, np.float32)
        compressor = parts(row).compressor
        unit = 1 if compressor.traits.needs_shape else math.lcm(8, compressor.traits.block_size or 1)
        self.full = math.ceil(n / (unit * size)) * unit
        self.whole = "twostage" in row.communicators or not self.twostage  # otherwise each shard is encoded by itself

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
            found = [self.sent(x, step, rank) for rank, x in enumerate(compensated)]
            mean = self.combine(found)
        self.residuals = np.array([x - sent for x, sent in zip(compensated, found, strict=True)], np.float32)
        if not self.twostage:
            return mean
        out = []
        for owner, mine in enumerate(self.shards()):
            x = mean[mine] + self.server[mine] if self.feedback else mean[mine]
            out.append(self.row.formula(x, Where("w/server", step, owner, mine.start)))
            self.server[mine] = x - out[-1]
        return np.concatenate(out)

    def shards(self):
        ends = [min(owner * self.full, self.n) for owner in range(self.size + 1)]
        return [slice(*pair) for pair in pairwise(ends)]

    def sent(self, x, step, rank):
        if self.whole:
            return self.row.formula(x, Where("w", step, rank))
        return np.concatenate([self.row.formula(x[mine], Where("w", step, rank, mine.start)) for mine in self.shards()])


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
    own = {"powersgd", "acpsgd", "gradzip", "atomo", "dion", "adacomp", "variance", "gradiveq"}
    assert {row.name for row in ROWS if not (row.formula or row.agreed)} == own


# Quantile means are often equal, so rounding decides in which bucket of a second sketch they are.
@exchanges(lambda row, communicator: (row.formula or row.agreed) and (row.name, communicator) != ("sketch", "twostage"))
def test_means_follow_the_formula(row, communicator, xp):
    for size in (1, 2, 5) if xp.name == "numpy" else (3,):
        check_formula(row, communicator, xp, size, 1003)


# Means of powers of 1.5 are often half-way between two powers, so that rounding decides.
@pytest.mark.parametrize(
    "row", [row for row in ROWS if "twostage" in row.communicators and row.params.get("beta") != 1.5], ids=str
)
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
    # Payloads of different lengths, one of them empty.
    for communicator in ("allgather", "broadcast"):
        graces = workers({"compressor": "threshold", "threshold": 0.5, "communicator": communicator}, 3)
        gradients = [np.full(1003, 0.1, np.float32), np.full(1003, -3, np.float32), spread(1003)]
        for grace in graces:
            grace.build({"w": xp.zeros(1003)})
        expected = np.mean([np.where(abs(g) >= 0.5, g, 0) for g in gradients], 0)
        for worker in lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in gradients]):
            np.testing.assert_allclose(xp.to_numpy(worker["w"]), expected, rtol=1e-5, atol=1e-6)


def test_keys_of_the_tests_are_those_of_the_specification():
    assert fold(fold(0, 0, 1, 0x72C28D05, 5, 0), 1) == 0xB57AC67E


# -- absent gradients ----------------------------------------------------------------------------------------------
@exchanges(
    lambda row, communicator: row.params.get("compress_ratio") != 1.0 and "quantum_num" not in row.params, few=True
)
def test_absent_gradients(row, communicator, xp):
    shape = (20, 30) if row.matrix else (603,)
    graces, reference = (workers({**row.params, "communicator": communicator}, 3) for _ in range(2))
    gradients = [{"a": spread(*shape, seed=rank), "b": spread(*shape, seed=9 + rank)} for rank in range(3)]
    arrays = [{name: xp.asarray(x, "float32") for name, x in worker.items()} for worker in gradients]
    for grace in (*graces, *reference):
        grace.build(arrays[0])
    for grace in graces:
        grace.track_missing = True
    # If only one worker lacks the gradient, it counts as zero.
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
