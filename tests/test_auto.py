"""The compressor "auto": its trials, its choice, and that nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from launch import launch

import grace.engine.policy_runner
from grace import grace_from_params, simulate
from grace.policies import Decision
from grace.policies.auto import DENSE, FIRST, FLUSH, Auto
from grace.simulate import Gradients
from grace.transports.local import LocalTransport, World

SHAPES = {"w": (60, 50), "v": (2000,), "small": (10,)}
AUTO = {
    "compressor": "auto",
    "trial_steps": 2,
    "candidates": ["topk", {"compressor": "efsignsgd", "block_size": 512}, "powersgd"],
}
TRIAL = 4  # steps: the decision, a warm-up, two timed ones
STEPS = 1 + 4 * TRIAL + 4


def gradients(steps: int = STEPS, workers: int = 2) -> list[Gradients]:
    draw = np.random.default_rng(0).standard_normal
    return [[{n: draw(s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(workers)] for _ in range(steps)]


@pytest.fixture
def clock(monkeypatch):
    """Given, not measured, seconds of a step at each level."""
    taken: dict[int, float] = {}

    class Clock:
        now = 0.0
        level = staticmethod(lambda: DENSE)

        def __call__(self) -> float:
            self.now += taken[self.level()]
            return self.now

    monkeypatch.setattr(grace.engine.policy_runner, "perf_counter", found := Clock())
    found.taken = taken
    return found


# -- the choice --------------------------------------------------------------------------------------------------------
def decide(policy: Auto, seconds: dict[int, float], decision: Decision | None = None, workers: int = 2) -> list[int]:
    """The sequence of levels for given step times."""
    decision = decision or Decision({"w": 0})
    found = []
    while policy.trial(decision, workers) is not None:
        decision = policy.on_trial_end(decision, workers, seconds[decision.levels["w"]])
        found.append(decision.levels["w"])
    return found


@pytest.mark.parametrize(
    "seconds, last",
    [
        ({2: 0.5, 3: 0.7}, [2]),
        ({2: 0.7, 3: 0.5}, [3]),
        ({2: 0.98, 3: 0.99}, [FLUSH, DENSE]),  # too little faster to justify a loss
        ({2: 2.0, 3: 3.0}, [FLUSH, DENSE]),
    ],
)
def test_the_fastest_method_is_chosen_and_dense_unless_one_is_clearly_faster(seconds, last):
    policy = Auto(candidates=("topk", "powersgd"))
    assert decide(policy, {DENSE: 1.0, FLUSH: 1.0, **seconds}) == [DENSE, 2, 3, *last]


def test_what_memories_hold_is_sent_before_a_method_without_one_goes_on():
    assert decide(Auto(candidates=("fp16", "topk")), {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.7}) == [0, 2, 3, FLUSH, 2]


def test_another_number_of_workers_is_tried_anew():
    policy = Auto(candidates=("topk",))
    seconds = {DENSE: 1.0, FLUSH: 1.0, FIRST: 0.5}
    settled = Decision({"w": FIRST}, memo={"workers": 2, "chosen": FIRST, "seconds": {}})
    assert decide(policy, seconds, settled) == []
    assert decide(policy, seconds, settled, workers=3) == [DENSE, FIRST, FIRST]


@pytest.mark.parametrize("backend", ["numpy", "torch", "tensorflow"])
def test_steps_are_timed_and_the_report_says_what_was_tried(backend, clock):
    clock.taken.update({DENSE: 4.0, FLUSH: 4.0, 2: 3.0, 3: 1.0, 4: 2.0})
    world = World(1)
    grc = grace_from_params(AUTO, LocalTransport(world, 0))
    clock.level = lambda: grc.schedule.level("w")
    given = gradients(workers=1)
    xp = grace.backends.get_backend(backend)
    grc.build({name: xp.zeros(shape) for name, shape in SHAPES.items()})
    for (worker,) in given:
        grc.step({name: xp.asarray(value, "float32") for name, value in worker.items()})
        grc.tune()
        grc.tune()  # reported twice, counted once
    report = grc.report()
    tried = {"none": 4.0, "topk": 3.0, "efsignsgd, block_size=512": 1.0, "powersgd": 2.0}
    assert {**report.trials} == tried
    assert report.method == "efsignsgd + residual + allgather"
    (w,) = (tensor for tensor in report.tensors if tensor.name == "w")
    starts = [1 + TRIAL * trial for trial in range(5)]
    assert w.levels == [
        (0, {"compressor": "none"}),
        (starts[1], {"compressor": "topk"}),
        (starts[2], AUTO["candidates"][1]),
        (starts[3], {"compressor": "powersgd"}),
        (starts[4], AUTO["candidates"][1]),
    ]
    assert "tried: none 4000.0 ms  topk 3000.0 ms" in str(report)


def test_a_training_that_tells_of_no_steps_is_told_so():
    grc = grace_from_params(AUTO, LocalTransport(World(1), 0))
    grc.build({"w": np.zeros((60, 50), np.float32)})
    grc.step({"w": np.ones((60, 50), np.float32)})
    assert "call Grace.tune()" in str(grc.report())


# -- nothing is lost ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["numpy", "torch", "tensorflow"])
def test_what_was_sent_and_what_is_kept_add_up_to_all_gradients(backend):
    given = gradients()
    for steps in (1 + TRIAL, 1 + 2 * TRIAL, 1 + 2 * TRIAL + 2, STEPS):  # in the middle of trials, and at the end
        out = simulate(AUTO, given[:steps], backend)
        assert all(np.array_equal(a, out.means[1][name]) for name, a in out.means[0].items())
        for name in ("w", "v"):
            sent = sum(step[0][name] for step in out.history).reshape(-1)
            kept = sum(np.asarray(state["tensors"].get(name, {}).get("memory/residual", 0.0)) for state in out.state)
            everything = sum(worker[name] for workers in given[:steps] for worker in workers).reshape(-1) / 2
            np.testing.assert_allclose(sent + kept / 2, everything, atol=2e-4)


def test_a_candidate_alone_gives_what_the_method_gives():
    given = gradients(1 + 3 * TRIAL)
    auto = simulate({**AUTO, "candidates": ["topk"]}, given)
    plain = simulate({"compressor": "topk"}, given[1 + TRIAL :])
    for step in range(TRIAL):  # of the second trial
        for name in SHAPES:
            np.testing.assert_array_equal(auto.history[1 + TRIAL + step][0][name], plain.history[step][0][name])


def test_a_dense_trial_is_the_plain_mean_in_one_message():
    out = simulate(AUTO, given := gradients(3))
    for step, workers in enumerate(given):
        for name in SHAPES:
            np.testing.assert_allclose(out.history[step][0][name], (workers[0][name] + workers[1][name]) / 2, rtol=1e-6)
    assert out.report.bytes_sent == out.report.bytes_dense


@pytest.mark.parametrize("saved", [1 + TRIAL + 1, 1 + 2 * TRIAL, STEPS - 1])
def test_a_run_goes_on_from_the_middle_of_the_trials(saved, clock):
    clock.taken.update(dict.fromkeys(range(5), 1.0))
    given = gradients(workers=1)

    def run(grc, steps):
        means = []
        for (worker,) in steps:
            means.append(grc.step(worker))
            grc.tune()
        return means

    def new():
        grc = grace_from_params(AUTO, LocalTransport(World(1), 0))
        grc.build({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
        return grc

    first, second = new(), new()
    run(first, given[:saved])
    second.load_state_dict(first.state_dict())
    # Those that follow within the trial: it is timed anew, and so may end later.
    rest = given[saved : saved + 2]
    for a, b in zip(run(first, rest), run(second, rest), strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize(
    "memo",
    [
        {"workers": 1},
        {"workers": 1, "seconds": {}},
        {"workers": "1", "seconds": {}, "chosen": None},
        {"workers": 1, "seconds": {"1": 0.5}, "chosen": None},
        {"workers": 1, "seconds": {"0": "fast"}, "chosen": None},
        {"workers": 1, "seconds": {}, "chosen": 9},
        {"workers": 1, "seconds": [], "chosen": None},
    ],
)
def test_a_choice_that_cannot_have_been_made_is_not_believed(memo):
    grc = grace_from_params(AUTO, "local")
    grc.build({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    state = grc.state_dict()
    state["policy"]["memo"] = memo
    with pytest.raises(ValueError, match="'memo' is"):
        grc.load_state_dict(state)


def test_what_is_kept_follows_the_number_of_workers():
    out = simulate(AUTO, gradients(1 + 2 * TRIAL))
    kept = sum(state["tensors"]["w"]["memory/residual"] for state in out.state)
    assert np.abs(kept).max() > 0
    world = World(4)
    graces = [grace_from_params(AUTO, LocalTransport(world, rank)) for rank in range(4)]
    for grc in graces:
        grc.build({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
        new, _ = grc.check_state(*out.state)
        (residual,) = (
            a for _, _, cell, a in new if cell is grc._setup.store.held({"w": FIRST})["w"]["memory/residual"]
        )
        np.testing.assert_allclose(residual, kept / 4, rtol=1e-6)


# -- graphs ------------------------------------------------------------------------------------------------------------
def test_a_graph_tries_all_methods_without_being_traced_again(clock):
    import tensorflow as tf

    clock.taken.update({DENSE: 4.0, FLUSH: 4.0, 2: 3.0, 3: 1.0, 4: 2.0})
    grc = grace_from_params(AUTO, LocalTransport(World(1), 0))
    clock.level = lambda: grc.schedule.level("w")
    given = gradients(workers=1)
    grc.build({name: tf.zeros(shape) for name, shape in SHAPES.items()})
    traces = []

    @tf.function(autograph=False)
    def step(worker):
        traces.append(1)
        return grc.step(worker)

    sent = 0
    for (worker,) in given:
        sent = sent + step({name: tf.constant(value) for name, value in worker.items()})["w"].numpy()
        grc.tune()
    assert len(traces) == 1
    assert grc.report().method == "efsignsgd + residual + allgather"
    kept = grc.state_dict()["tensors"]["w"]["memory/residual"].reshape(60, 50)
    np.testing.assert_allclose(sent + kept, sum(worker["w"] for (worker,) in given), atol=2e-4)


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "params, message",
    [
        ({"memory": "residual"}, "give 'memory' to its candidates"),
        ({"communicator": "twostage"}, "give 'communicator' to its candidates"),
        ({"policy": "warmup"}, "give 'policy' to its candidates"),
        ({"candidates": "topk"}, "give a list"),
        ({"candidates": []}, "give a list"),
        ({"candidates": ["topkk"]}, "did you mean 'topk'"),
        ({"candidates": [{"compressor": "topk", "ratio": 0.1}]}, "compress_ratio"),
        ({"candidates": [{"compressor": "blockint", "communicator": "twostage"}]}, "use allreduce or allgather"),
        ({"candidates": ["dgc"]}, "use residual or none"),
        ({"trial_steps": 0}, "at least 1"),
        ({"margin": 1.0}, r"\[0, 1\)"),
        ({"compress_ratio": 0.1}, "compress_ratio"),
    ],
)
def test_refusals_name_the_remedy(params, message):
    with pytest.raises(ValueError, match=message):
        grace_from_params({"compressor": "auto", **params}, LocalTransport(World(2), 0))


# -- real workers ------------------------------------------------------------------------------------------------------
@pytest.mark.processes
@pytest.mark.parametrize(
    "name, door",
    [("torchrun", "torch"), ("torchrun", "ddp"), ("horovodrun", "torch"), ("horovodrun", "keras")],
)
def test_workers_try_and_choose_alike(name, door, tmp_path):
    first, second = launch(name, 2, "auto.py", tmp_path, door)
    assert first == second  # weights, levels, trials and bytes
    assert set(first["trials"]) == {"none", "topk", "slow"}
    assert first["trials"]["slow"] > first["trials"]["none"] + 0.03  # it sleeps for 50 ms
    assert first["chosen"] in ("none", "topk")
    assert max(map(len, first["levels"])) >= 4
