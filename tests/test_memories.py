"""Every memory against an independent NumPy implementation of its formula, and its guarantees."""

import math

import numpy as np
import pytest
from methods import BACKENDS, alone, backend, context, host, lockstep, normal, same, workers

from grace import Compressor, grace_from_params
from grace.core.registry import memories
from grace.memories.dgc import DGC as DGCMemory
from grace.memories.momentum import Momentum as MomentumMemory
from grace.transports.local import LocalTransport

N, SIZE = 600, 3
TOPK = {"compressor": "topk", "compress_ratio": 0.1}


def largest(x):
    """Top-k of a tenth."""
    found = np.zeros_like(x)
    chosen = np.argsort(-abs(x), kind="stable")[: len(x) // 10]
    found[chosen] = x[chosen]
    return found


class Worker:
    """One worker's memory, from the paper's formulas: what it sends for a gradient, and what it makes of the mean."""

    def __init__(self, **settings):
        self.e, self.u, self.h, self.mean = np.zeros((4, N))
        self.settings, self.lr = settings, 0.0

    def finish(self, mean):
        return mean


class NoMemory(Worker):
    def send(self, g, lr):
        return largest(g)


class Residual(Worker):
    def send(self, g, lr):
        x = self.settings.get("beta", 1) * self.e + self.settings.get("gamma", 1) * g
        self.e = x - largest(x)
        return largest(x)


class Momentum(Worker):
    def send(self, g, lr):
        self.u = 0.9 * self.u + 0.1 * g
        return largest(self.u)


class Decoupled(Worker):
    def send(self, g, lr):
        self.u = 0.999 * self.u + g
        sent = largest(self.u)
        self.u -= sent
        return sent


class DGC(Worker):
    def send(self, g, lr):
        if theta := self.settings.get("gradient_clipping"):
            g = g * min(1, theta / (math.sqrt(SIZE) * np.linalg.norm(g)))
        if self.settings.get("nesterov"):
            self.u = 0.9 * (self.u + g)
            self.e = self.e + self.u + g
        else:
            self.u = 0.9 * self.u + g
            self.e = self.e + self.u
        sent = largest(self.e)
        self.e = np.where(sent != 0, 0, self.e)
        if self.settings.get("masking", True):
            self.u = np.where(sent != 0, 0, self.u)
        return sent


class EF21(Worker):
    def send(self, g, lr):
        a = self.settings.get("momentum", 1)
        self.u = g = (1 - a) * (self.u if self.u.any() else g) + a * g
        sent = largest(g - self.h)
        self.h += sent
        return sent

    def finish(self, mean):
        self.mean += mean
        return self.mean.copy()


class EControl(EF21):
    def send(self, g, lr):
        sent = largest(self.settings.get("eta", 0.1) * self.e + g - self.h)
        self.h += sent
        self.e += g - self.h
        return sent


class Diana(Worker):
    def send(self, g, lr):
        sent = (g - self.h).astype(np.float32)  # without compression error: tests only the algebra
        self.h += self.settings["alpha"] * sent
        return sent

    def finish(self, mean):
        found = self.mean + mean
        self.mean += self.settings["alpha"] * mean
        return found


class LowPass(Worker):
    def send(self, g, lr):
        rate, x = self.settings.get("rate", 0.3), self.e + g
        sent = largest(x)
        self.e = (1 - rate) * self.e + rate * (self.e + g - sent)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == self.settings.get("reset_every"):
            self.e, self.steps = 0 * self.e, 0
        return sent


class EFSignSGD(Worker):
    def send(self, g, lr):
        # In units of the parameters: compresses lr * g + e, which the optimizer multiplies by lr again.
        if lr == 0:
            return largest(g)
        p = lr * g + self.e
        sent = largest(p)
        self.e = p - sent
        return sent / lr


BOUND = 0.1 / 0.001**0.5  # the largest step of Adam, in units of the learning rate


class OneBitAdam(Worker):
    """Adam by its own paper, then with its second moment frozen; ``learn`` takes exact means."""

    def learn(self, mean, t):
        self.u = 0.9 * self.u + 0.1 * mean
        self.h = 0.999 * self.h + 0.001 * mean**2
        self.t = t
        return self.update(self.u)

    def send(self, g, lr):
        self.u = 0.9 * self.u + 0.1 * g
        x = np.clip(self.update(self.u), -BOUND, BOUND) + self.e
        self.e = x - largest(x)
        return largest(x)

    def update(self, m):
        return m / (1 - 0.9**self.t) / (np.sqrt(self.h / (1 - 0.999**self.t)) + 1e-8)


@pytest.mark.parametrize("toolkit", [*BACKENDS, "tf.function"])
def test_onebit_adam_is_adam_and_then_frozen(toolkit):
    graph = toolkit == "tf.function"
    xp = backend("tensorflow" if graph else toolkit)
    graces = built(xp, {**TOPK, "memory": "onebit_adam", "freeze_step": 3}, size=1 if graph else SIZE)
    run = exchanged
    if graph:
        import tensorflow as tf

        step_in_graph = tf.function(lambda g: graces[0].step({"w": g})["w"], autograph=False)
        run = lambda xp, graces, tensors: [step_in_graph(tf.constant(tensors[0])).numpy()]  # noqa: E731
    expected = [OneBitAdam() for _ in graces]
    for step in range(6):
        mine = gradients(step)[: len(graces)]
        sent = graces[0].report().bytes_sent
        found = run(xp, graces, mine)
        sent = graces[0].report().bytes_sent - sent
        if step < 3:
            exact = np.mean(mine, 0, dtype=np.float64)
            wanted, *_ = [worker.learn(exact, step + 1) for worker in expected]
        else:
            pairs = zip(expected, mine, strict=True)
            wanted = np.mean([worker.send(g.astype(np.float64), 0) for worker, g in pairs], 0)
        assert sent == (4 * N if step < 3 else 0) + 8 * (N // 10)
        assert all(same(found[:1], [other]) for other in found)
        np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-5 * abs(wanted).max())


def test_onebit_adam_in_two_stages_has_a_residual_at_the_server(xp):
    params = {"compressor": "efsignsgd", "block_size": 64, "memory": "onebit_adam", "freeze_step": 2}
    graces = built(xp, {**params, "communicator": "twostage"})
    for step in range(4):
        found = exchanged(xp, graces, gradients(step))
        assert all(same(found[:1], [other]) for other in found)
        assert np.isfinite(found[0]).all()
    keys = set(graces[0].state_dict()["tensors"]["w"])
    assert keys == {"server/memory/residual"} | {
        f"worker/memory/{key}" for key in ("momentum", "residual", "second", "decay")
    }


def test_onebit_adam_of_dense_tensors(xp):
    graces = workers({**TOPK, "memory": "onebit_adam", "freeze_step": 2, "min_numel": 100}, 1)
    graces[0].build({"b": xp.zeros(50)})
    m, v = np.zeros((2, 50))
    for step in range(4):
        g = normal(50, seed=step).astype(np.float64)
        t = min(step + 1, 2)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2 if step < 2 else v
        (found,) = lockstep(graces, [{"b": xp.asarray(g, "float32")}])
        wanted = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        wanted = wanted if step < 2 else np.clip(wanted, -BOUND, BOUND)
        np.testing.assert_allclose(xp.to_numpy(found["b"]), wanted, rtol=1e-3)


def test_onebit_adam_is_bounded_where_the_warm_up_saw_no_gradient(xp):
    graces = workers({**TOPK, "memory": "onebit_adam", "freeze_step": 4, "compress_ratio": 1.0}, 1)
    graces[0].build({"rare": xp.zeros((30, 40)), "never": xp.zeros((30, 40))})
    rows = np.arange(30)[:, None] < 20
    for step in range(8):
        g = normal(1200, seed=step).reshape(30, 40) * 1e-3
        late = step >= 4
        given = {"rare": g if late else np.where(rows, g, 0), "never": g if late else 0 * g}
        (found,) = lockstep(graces, [{name: xp.asarray(x, "float32") for name, x in given.items()}])
        for mean in found.values():
            assert np.abs(xp.to_numpy(mean)).max() <= BOUND * 1.0001
        if late:  # new elements move as far as known ones
            common, rare = (np.abs(xp.to_numpy(found["rare"]))[part[:, 0]] for part in (rows, ~rows))
            assert 0 < rare.mean() < 3 * common.mean()
            assert np.abs(xp.to_numpy(found["never"])).mean() > 0.1


CASES = [
    ("none", TOPK, {}, NoMemory),
    ("residual", TOPK, {}, Residual),
    ("residual", TOPK, {"beta": 0.5, "gamma": 2.0}, Residual),
    ("momentum", TOPK, {}, Momentum),
    ("decoupled_momentum", TOPK, {}, Decoupled),
    ("dgc", TOPK, {}, DGC),
    ("dgc", TOPK, {"nesterov": True}, DGC),
    ("dgc", TOPK, {"masking": False, "gradient_clipping": 3.0}, DGC),
    ("ef21", TOPK, {}, EF21),
    ("ef21", TOPK, {"momentum": 0.3}, EF21),
    ("ef21", TOPK, {"refresh": 4}, EF21),
    ("econtrol", TOPK, {}, EControl),
    ("econtrol", TOPK, {"eta": 0.7}, EControl),
    ("econtrol", TOPK, {"refresh": 1}, EControl),
    ("diana", {"compressor": "none"}, {"alpha": 0.5}, Diana),
    ("lowpass", TOPK, {}, LowPass),
    ("lowpass", TOPK, {"rate": 1.0}, LowPass),
    ("lowpass", TOPK, {"reset_every": 2}, LowPass),
    ("efsignsgd", TOPK, {}, EFSignSGD),
]
RATES = [0.1, 0.1, 0.05, 0.0, 0.02, 0.3]


def gradients(step, n=N):
    return [normal(n, seed=100 * step + rank) * (1 + np.arange(n, dtype=np.float32) / 100) for rank in range(SIZE)]


def built(xp, params, n=N, size=SIZE):
    graces = workers(params, size)
    for grace in graces:
        grace.build({"w": xp.zeros(n)})
    return graces


def exchanged(xp, graces, tensors):
    means = lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in tensors])
    return [np.array(xp.to_numpy(worker["w"])) for worker in means]


def test_every_memory_is_here():
    assert {name for name, *_ in CASES} | {"onebit_adam", "decoupled"} == set(memories)


@pytest.mark.filterwarnings("ignore:.*without error feedback")
@pytest.mark.parametrize("name, method, settings, formula", CASES, ids=lambda value: str(value)[:40])
def test_memories_follow_their_formulas(xp, name, method, settings, formula):
    graces = built(xp, {"communicator": "allgather", **method, "memory": name, **settings})
    expected = [formula(**settings) for _ in range(SIZE)]
    for step, lr in enumerate(RATES):
        for grace in graces:
            grace.learning_rate = lambda name: lr
        found = exchanged(xp, graces, gradients(step))
        pairs = zip(expected, gradients(step), strict=True)
        mean = np.mean([worker.send(g.astype(np.float64), lr) for worker, g in pairs], 0)
        wanted = [worker.finish(mean) for worker in expected]
        assert all(same(found[:1], [other]) for other in found)
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-5 * abs(mean).max())


@pytest.mark.filterwarnings("ignore:.*without error feedback")
@pytest.mark.parametrize("name, method, settings, formula", CASES, ids=lambda value: str(value)[:40])
def test_state_keeps_its_shape_and_a_bad_step_leaves_it(xp, name, method, settings, formula):
    graces = built(xp, {**method, "memory": name, **settings})
    exchanged(xp, graces, gradients(0))
    before = [grace.state_dict()["tensors"] for grace in graces]
    bad = gradients(1)
    bad[1][7] = np.nan
    assert not any(np.isfinite(found).all() for found in exchanged(xp, graces, bad))
    for grace, old in zip(graces, before, strict=True):
        new = grace.state_dict()["tensors"]
        for unit, arrays in old.items():
            assert same([np.asarray(a) for a in arrays.values()], [np.asarray(a) for a in new[unit].values()])
    assert all(np.isfinite(found).all() for found in exchanged(xp, graces, gradients(2)))


@pytest.mark.parametrize("nesterov", [False, True])
def test_dense_tensors_get_momentum_too_with_dgc(xp, nesterov):
    graces = workers({**TOPK, "memory": "dgc", "nesterov": nesterov, "min_numel": 100}, 2)
    tensors = [{"b": xp.asarray(normal(50, seed=rank), "float32")} for rank in range(2)]
    for grace in graces:
        grace.build(tensors[0])
    mean, u = np.mean([normal(50, seed=rank) for rank in range(2)], 0), np.zeros(50)
    for _ in range(3):
        u = 0.9 * (u + mean) if nesterov else 0.9 * u + mean
        for worker in lockstep(graces, tensors):
            np.testing.assert_allclose(xp.to_numpy(worker["b"]), u + mean if nesterov else u, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("toolkit", ["numpy", "torch"])
@pytest.mark.parametrize(
    "memory", [MomentumMemory(), MomentumMemory(0.5), DGCMemory(), DGCMemory(nesterov=True)], ids=repr
)
def test_momentum_is_the_same_in_pieces(toolkit, memory, monkeypatch):
    xp, n = backend(toolkit), 1001
    monkeypatch.setenv("GRACE_KERNELS", "off")

    def steps(piece):
        monkeypatch.setattr(xp, "piece", piece)
        ctx = context(xp, n)
        state, found = memory.init(ctx), []
        for step in range(3):
            x = xp.asarray(normal(n, seed=step), "float32")
            x, state = memory.compensate(xp.buffers.copy(x), state, ctx)
            state = {key: xp.buffers.copy(value) for key, value in state.items()}
            found += [host(xp, (x, *state.values()))]
        return found

    for whole, parts in zip(steps(0), steps(64), strict=True):
        for one, other in zip(whole, parts, strict=True):
            assert np.array_equal(one, other)


def test_ef21_approaches_a_steady_gradient_as_promised(xp):
    graces = built(xp, {**TOPK, "memory": "ef21"})
    fixed = gradients(0)
    target, errors = np.mean(fixed, 0), []
    for _ in range(30):
        errors.append(np.linalg.norm(exchanged(xp, graces, fixed)[0] - target))
    worst = max(np.linalg.norm(g) for g in fixed)
    # Top-k of a tenth contracts errors by 1 - 1/10, and sends everything within ten steps.
    assert all(error <= worst * math.sqrt(0.9) ** step for step, error in enumerate(errors, 1))
    assert errors[-1] < 1e-5 * worst


@pytest.mark.parametrize("name", ["ef21", "econtrol"])
def test_every_element_of_the_tracked_mean_is_refreshed_in_turn(xp, name):
    """From a mean that is off by 1, all parts return to the mean of the estimates, ceil(n / refresh) per step."""
    every, n = 4, 1001
    graces = built(xp, {**TOPK, "memory": name, "refresh": every}, n)
    exchanged(xp, graces, gradients(0, n))
    for grace in graces:
        state = grace.state_dict()
        state["tensors"]["w"]["memory/mean"] = np.asarray(state["tensors"]["w"]["memory/mean"]) + 1
        grace.load_state_dict(state)
    off = []
    for step in range(1, every + 1):
        exchanged(xp, graces, gradients(step, n))
        held = [grace.state_dict()["tensors"]["w"] for grace in graces]
        exact = np.mean([np.asarray(each["memory/estimate"]) for each in held], 0, dtype=np.float64)
        off.append([np.abs(np.asarray(each["memory/mean"]) - exact).round(4).sum() for each in held])
    part = math.ceil(n / every)
    assert off == [[n - min(n, part * step)] * SIZE for step in range(1, every)] + [[0] * SIZE]


@pytest.mark.parametrize("n", [3, 1001])
def test_a_refresh_between_machines_changes_nothing_but_rounding(n):
    """With 3 elements one worker of each machine has a shard without elements."""
    found = []
    for refresh in (0, 2):
        params = {**TOPK, "memory": "ef21", "refresh": refresh, "communicator": "hierarchical", "node_size": 2}
        graces = built(backend("numpy"), params, n, size=4)
        for step in range(5):
            means = exchanged(backend("numpy"), graces, [*gradients(step, n), *gradients(step + 9, n)][:4])
        assert all(np.array_equal(other, means[0]) for other in means)
        found.append(means[0])
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-6 * abs(found[0]).max())


# -- three workers whose largest elements lead away from the minimum: Beznosikov et al., "On Biased Compression" -------
VECTORS = np.array([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]])


class Top1(Compressor):
    """The largest element of each row: the payload is where it is."""

    def compress(self, x, state, ctx):
        return (abs(x) == abs(x).max(1, keepdims=True),), state

    def decompress(self, payload, ctx):
        raise NotImplementedError

    def residual(self, x, payload, ctx):
        return np.where(payload[0], 0, x)


def descend(memory, steps=3000, noise=0.0, runs=1):
    """|x| of each run after each step of descent on the mean of <a_i, x>² + |x|² / 4 from (1, 1, 1), in float64."""
    xp, top, rng, x = backend("numpy"), Top1(), np.random.default_rng(0), np.ones((runs, 3))
    states = [{key: np.zeros((runs, 3)) for key in memory.init(context(xp, 3))} for _ in VECTORS]
    for step in range(steps):
        ctx, sent = context(xp, 3, step=step, world_size=3), []
        for rank, a in enumerate(VECTORS):
            g = 2 * np.outer(x @ a, a) + x / 2 + noise * rng.standard_normal(x.shape)
            g, states[rank] = memory.compensate(g, states[rank], ctx)
            payload, _ = top.compress(g, {}, ctx)
            sent.append(np.where(payload[0], g, 0))
            states[rank] = memory.update(g, payload, top, states[rank], ctx)
        mean = np.mean(sent, 0)
        for rank in range(3):
            found, states[rank] = memory.after_mean(mean, top, states[rank], ctx)
        x = x - 0.01 * found
        yield np.linalg.norm(x, axis=1)


def test_top_1_without_memory_diverges():
    assert next(step for step, (size,) in enumerate(descend(memories["none"]())) if size > 1e10) == 1237


# With the distance that noise leaves after 3000 steps, which has a standard error of about 0.0024.
FEEDBACKS = [
    ("residual", {}, 0.0184),
    ("ef21", {}, 0.0207),
    ("ef21", {"momentum": 0.1}, 0.0165),
    ("econtrol", {}, 0.0186),
]


@pytest.mark.parametrize("name, settings, _", FEEDBACKS, ids=str)
def test_error_feedback_reaches_the_minimum(name, settings, _):
    *_, (last,) = descend(memories[name](**settings))
    assert last < 2e-15


def test_momentum_has_the_least_noise():
    means = {}
    for name, settings, distance in FEEDBACKS:
        *_, found = descend(memories[name](**settings), noise=0.5, runs=200)
        means[name, str(settings)] = found.mean()
        assert found.mean() == pytest.approx(distance, abs=3 * 0.0024)
    assert min(means, key=means.get) == ("ef21", "{'momentum': 0.1}")
    assert max(means, key=means.get) == ("ef21", "{}")


def test_diana_forgets_the_noise_of_a_steady_gradient(xp):
    fixed, errors = gradients(0), {}
    for memory in ("none", "diana"):
        graces = built(xp, {"compressor": "qsgd", "quantum_num": 7, "memory": memory})
        for _ in range(60):
            found = exchanged(xp, graces, fixed)[0]
        errors[memory] = np.linalg.norm(found - np.mean(fixed, 0))
    assert errors["diana"] < 1e-3 * errors["none"]


def test_diana_learns_as_fast_as_the_variance_allows():
    method = grace_from_params({"compressor": "natural", "memory": "diana"}, LocalTransport()).method
    assert method.memory.rate(method.compressor, context(None, 100)) == pytest.approx(8 / 9)


def test_a_changing_learning_rate_is_what_efsignsgd_is_for(xp):
    # An error from rate 1 is sent at rate 1/100; parameters must move as if it had been sent at once.
    params = {"compressor": "topk", "compress_ratio": 0.5, "memory": "efsignsgd"}
    (grace,) = built(xp, params, n=2, size=1)
    moved = np.zeros(2)
    for g, lr in (([3, 1], 1.0), ([0, 0], 0.01)):
        grace.learning_rate = lambda name: lr
        moved += lr * exchanged(xp, [grace], [np.array(g, np.float32)])[0]
    np.testing.assert_allclose(moved, [3, 1], rtol=1e-5)


@pytest.mark.parametrize(
    "params, message",
    [
        (
            {"compressor": "qsgd", "memory": "dgc"},
            r"'dgc' works with methods that send elements as they are.*'qsgd'",
        ),
        ({"compressor": "topk", "memory": "diana"}, r"memory 'diana' works with unbiased methods.*'topk'.*'ef21'"),
        ({"compressor": "terngrad", "clip": 2.5, "memory": "diana"}, r"'terngrad', as it is set, is none"),
        ({"compressor": "signsgd", "memory": "ef21"}, r"memory 'ef21' cannot feed back the error of a majority vote"),
        (
            {"compressor": "efsignsgd", "block_size": 64, "memory": "ef21", "communicator": "twostage"},
            r"'twostage' cannot carry memory 'ef21' with 'efsignsgd': it tracks the mean",
        ),
        ({**TOPK, "memory": "lowpass", "rate": 0.0}, r"rate=0.0 must lie in \(0, 1\]"),
        ({**TOPK, "memory": "lowpass", "reset_every": -1}, "reset_every=-1 must be a number of steps, or 0"),
        ({**TOPK, "memory": "ef21", "momentum": 0.0}, r"momentum=0.0 must lie in \(0, 1\].* 1 for none"),
        ({**TOPK, "memory": "ef21", "refresh": -1}, r"refresh=-1 must be 0 or more.*0 never"),
        ({**TOPK, "memory": "econtrol", "eta": 0.0}, r"eta=0.0 must lie in \(0, 1\].*use memory 'ef21'"),
        ({**TOPK, "memory": "dgc", "momentum": 1.0}, r"momentum=1.0 must lie in \[0, 1\)"),
        ({**TOPK, "memory": "dgc", "gradient_clipping": -1.0}, "gradient_clipping=-1.0 must be a norm"),
        ({"compressor": "none", "memory": "diana", "alpha": 2.0}, r"alpha=2.0 must lie in \[0, 1\]"),
        ({**TOPK, "memory": "efsignsgd", "lr": 0.0}, "lr=0.0 must be positive"),
    ],
)
def test_refusals_name_the_remedy(params, message):
    with pytest.raises(ValueError, match=message):
        grace_from_params(params, LocalTransport())


def test_upstreams_key_for_no_clipping():
    method = grace_from_params({**TOPK, "memory": "dgc", "gradient_clipping": False}, LocalTransport()).method
    assert method.memory.gradient_clipping == 0.0


def test_masks_leave_momentum_where_nothing_was_sent(xp):
    method = grace_from_params({**TOPK, "memory": "dgc"}, LocalTransport()).method
    ctx, g = context(xp, N), gradients(0)[0]
    payload, state = alone(lambda ctx: method.encode(xp.asarray(g, "float32"), method.init(ctx), ctx), ctx)
    u, sent = host(xp, [state["memory/momentum"]])[0], host(xp, payload)[1]
    assert (u[sent] == 0).all()
    assert np.array_equal(np.delete(u, sent), np.delete(g, sent))


# -- what the toolkits' doors do for memories ----------------------------------------------------------------------
EF = {"compressor": "efsignsgd", "memory": "efsignsgd", "min_numel": 0}


def test_pytorch_tells_the_learning_rate_of_each_group():
    backend("torch")
    import torch

    import grace

    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[1].parameters()}]
    grc = grace_from_params(EF, LocalTransport())
    optimizer = grace.torch.DistributedOptimizer(
        torch.optim.SGD(groups, lr=0.1), grace=grc, named_parameters=net.named_parameters()
    )
    for rate in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        net(torch.ones(3, 8)).square().mean().backward()
        optimizer.step()
        kept = grc.state_dict()["tensors"]
        assert (kept["0.weight"]["memory/lr"].item(), kept["1.bias"]["memory/lr"].item()) == pytest.approx((rate, 0.1))


def test_keras_tells_the_learning_rate_of_a_schedule_in_a_graph():
    backend("tensorflow")
    import keras
    import tensorflow as tf

    import grace

    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, decay_steps=1, decay_rate=0.5)
    grc = grace_from_params(EF, LocalTransport())
    optimizer = grace.tensorflow.DistributedOptimizer(keras.optimizers.SGD(schedule), grace=grc)
    variable = tf.Variable(np.ones(16, np.float32), name="w")
    optimizer.build([variable])

    @tf.function(autograph=False)
    def step(g):
        optimizer.apply([g], [variable])

    for rate in (0.5, 0.25, 0.125):
        step(tf.constant(normal(16)))
        (kept,) = grc.state_dict()["tensors"].values()
        assert float(kept["memory/lr"][0]) == pytest.approx(rate)


@pytest.mark.parametrize("toolkit", ["torch", "tensorflow"])
@pytest.mark.parametrize("memory", ["dgc", "residual"])
@pytest.mark.parametrize("kind, momentum", [("SGD", 0.9), ("SGD", 0.0), ("Adam", 0.9), ("Adam", 0.0)])
def test_momentum_twice_is_warned_of(toolkit, memory, kind, momentum, recwarn):
    backend(toolkit)
    import grace

    grc = grace_from_params({**TOPK, "memory": memory}, LocalTransport())
    if toolkit == "torch":
        import torch

        key = {"momentum": momentum} if kind == "SGD" else {"betas": (momentum, 0.999)}
        parameter = torch.nn.Parameter(torch.ones(4))
        grace.torch.DistributedOptimizer(getattr(torch.optim, kind)([parameter], lr=0.1, **key), grace=grc)
    else:
        import keras

        key = {"momentum" if kind == "SGD" else "beta_1": momentum}
        grace.tensorflow.DistributedOptimizer(getattr(keras.optimizers, kind)(0.1, **key), grace=grc)
    warned = [str(w.message) for w in recwarn if "momentum of its own" in str(w.message)]
    assert len(warned) == (memory == "dgc" and momentum > 0)


@pytest.mark.parametrize("memory", ["dgc", "residual"])
def test_momentum_twice_is_warned_of_where_a_hook_averages(memory, recwarn):
    torch = pytest.importorskip("torch")
    import grace

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model.register_comm_hook(grc := grace_from_params({**TOPK, "memory": memory}), grace.torch.ddp_hook)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert grc.steps == 3
    finally:
        torch.distributed.destroy_process_group()
    warned = [w for w in recwarn if "momentum of its own" in str(w.message)]
    assert [w.filename for w in warned] == [__file__] * (memory == "dgc")


# -- 1-bit Adam for what its warm-up has not seen ----------------------------------------------------------------------
RARE = {"compressor": "none", "memory": "onebit_adam", "freeze_step": 20}


def rare_gradients(first, kind):
    """Gradients of 100 steps. Half of the elements (or all) have almost none before ``first``, then each fifth step."""
    for step in range(100):
        g = normal(N, seed=step).astype(np.float64)
        rare = slice(N // 2 if kind != "all" else 0, N)
        if step < first:
            g[rare] *= 1e-6 if kind == "tiny" else 0
        elif step % 5:
            g[rare] = 0
        yield g


@pytest.mark.parametrize("kind", ["half", "tiny", "all"])
@pytest.mark.parametrize("dense", [False, True])
def test_onebit_adam_stays_near_adam_where_gradients_come_late(xp, kind, dense):
    (grace,) = workers({**RARE, "min_numel": 10 * N if dense else 0}, 1)
    grace.build({"w": xp.zeros(N)})
    u, v, far, adams = np.zeros((4, N))
    for step, g in enumerate(rare_gradients(30, kind)):
        (found,) = lockstep([grace], [{"w": xp.asarray(g, "float32")}])
        found = xp.to_numpy(found["w"])
        u, v = 0.9 * u + 0.1 * g, 0.999 * v + 0.001 * g**2
        adam = u / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8)
        assert np.isfinite(found).all()
        if step < 20:
            np.testing.assert_allclose(found, adam, rtol=1e-3, atol=1e-5)
        assert abs(found).max() < 100
        if step >= 30:
            far += abs(found)
            adams += abs(adam)
    assert 0.1 < far[N // 2 :].mean() / adams[N // 2 :].mean() < 8
    assert 0.3 < far[: N // 2].mean() / adams[: N // 2].mean() < 8


def test_onebit_adam_shows_infinity_after_its_warm_up(xp):
    (grace,) = workers({**RARE, "freeze_step": 2, "min_numel": 0}, 1)
    grace.build({"w": xp.zeros(N)})
    for step in range(4):
        g = normal(N, seed=step)
        g[7] = np.inf if step == 3 else 1
        (found,) = lockstep([grace], [{"w": xp.asarray(g, "float32")}])
    assert not np.isfinite(xp.to_numpy(found["w"])[7])
