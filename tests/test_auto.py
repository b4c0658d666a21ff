"""The compressor "auto": its trials, its choice, and that nothing is lost."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as law
from hypothesis import strategies as st
from launch import launch

import grace.engine.policy_runner
from grace import grace_from_params, simulate
from grace.core.registry import triple
from grace.engine.level_costs import level_costs
from grace.engine.policy_runner import WARM_UP
from grace.engine.probe import NoiseProbe, positions
from grace.engine.setup import SAMPLE
from grace.policies import Cost, Decision, Noise
from grace.policies.auto import (
    CANDIDATES,
    CHECKS,
    DELAY_FACTOR,
    DENSE,
    EFFORTS,
    FACTOR,
    FIRST,
    FLUSH,
    Auto,
    noise_ratio,
    relative_error,
)
from grace.simulate import Gradients
from grace.transports.local import LocalTransport, World

ROOT = Path(__file__).parents[1]
SHAPES = {"w": (60, 50), "v": (2000,), "small": (10,)}
SIZES = {"w": 3000, "v": 2000}
"""Elements of the tensors that are compressed; powersgd does not apply to "v"."""
AUTO = {
    "compressor": "auto",
    "effort": "fast",
    "trial_steps": 3,
    "candidates": ["topk", {"compressor": "efsignsgd", "block_size": 512}, "powersgd"],
}
TOPK = [{"compressor": "topk", "compress_ratio": ratio} for ratio in (0.1, 0.01)]
TRIAL = 3  # steps
ENDS = [0, *(1 + TRIAL * trials for trials in range(1, 5))]
"""Numbers of steps after so many trials: here only the first step is a warm-up (see `every`)."""
STEPS = ENDS[4] + 4


def gradients(steps: int = STEPS, workers: int = 2) -> list[Gradients]:
    draw = np.random.default_rng(0).standard_normal
    return [[{n: draw(s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(workers)] for _ in range(steps)]


@pytest.fixture(autouse=True)
def every(monkeypatch):
    """Without predictions all candidates are tried, in order, here from the second step on: most tests are on that."""
    monkeypatch.setattr(Auto, "predicts", False)
    monkeypatch.setattr(grace.engine.policy_runner, "WARM_UP", 1)


@pytest.fixture
def clock(monkeypatch):
    """Sets the seconds of a step at each level, which are otherwise measured."""
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
def outcome(
    policy: Auto,
    seconds: dict[int, float],
    noise: dict[int, float] | None = None,
    decision: Decision | None = None,
    workers: int = 2,
    costs: list[Cost] | None = None,
) -> tuple[list[int], Decision]:
    """The levels until one is chosen, given the seconds of a step, the noise ratio and the cost at each level."""
    decision = decision or Decision({"w": policy.first_level})
    found: list[int] = []
    while decision.memo.get("workers") != workers or decision.memo["chosen"] != decision.levels["w"]:
        level = decision.levels["w"]
        decision = policy.on_trial_end(
            decision, workers, seconds[level], told(policy, level, (noise or {}).get(level, 0)), costs
        )
        found.append(decision.levels["w"])
        assert len(found) < 20, "it never chooses"
    return found, decision


def told(policy: Auto, level: int, ratio: float) -> dict[str, Noise]:
    """The statistics that a trial reports for this noise ratio."""
    feeds_back = level >= FIRST and triple(policy.candidates[level - FIRST])[0].memory.feedback
    noise = {"w": Noise(ratio, 1.0 + ratio * feeds_back)}
    assert noise_ratio(relative_error(noise), feeds_back) == pytest.approx(ratio)
    return noise


def decide(*args, **kwargs) -> list[int]:
    return outcome(*args, **kwargs)[0]


@pytest.mark.parametrize(
    "seconds, last",
    [
        ({2: 0.5, 3: 0.7}, [2]),
        ({2: 0.7, 3: 0.5}, [3]),
        ({2: 0.98, 3: 0.99}, [FLUSH, DENSE]),  # hardly faster: not worth the loss
        ({2: 2.0, 3: 3.0}, [FLUSH, DENSE]),
    ],
)
def test_the_fastest_method_is_chosen_and_dense_unless_one_is_clearly_faster(seconds, last):
    policy = Auto(candidates=("topk", "powersgd"))
    assert decide(policy, {DENSE: 1.0, FLUSH: 1.0, **seconds}) == [2, 3, *last]


def test_what_memories_hold_is_sent_before_a_method_without_one_goes_on():
    assert decide(Auto(candidates=("fp16", "topk")), {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.7}) == [DENSE, 3, FLUSH, 2]


def test_methods_that_hold_nothing_are_tried_before_those_that_do():
    policy = Auto(candidates=("topk", "fp16"))
    assert decide(policy, {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.7}) == [DENSE, 2, 2]


def test_another_number_of_workers_is_tried_anew():
    policy = Auto(candidates=("topk",))
    seconds = {DENSE: 1.0, FLUSH: 1.0, FIRST: 0.5}
    _, settled = outcome(policy, seconds)
    assert settled.levels == {"w": FIRST}
    assert decide(policy, seconds, decision=settled) == []
    assert decide(policy, seconds, decision=settled, workers=3) == [FLUSH, DENSE, FIRST, FIRST]


@pytest.mark.parametrize(
    "effort, chosen",
    [
        ("safe", "fp16"),  # 0.6 s; the noise of all others is above 0.05
        ("balanced", "eden"),  # 0.4 (1 + 0.08 / 2) = 0.416 s
        ("fast", "topk"),  # 0.2 (1 + 0.15 1.9) = 0.26 s
    ],
)
def test_the_least_seconds_per_effective_step_are_chosen_within_the_effort(effort, chosen):
    policy = Auto(candidates=("fp16", "eden", "topk", "signsgd"), effort=effort)
    seconds = {DENSE: 1.0, FLUSH: 1.0, 2: 0.6, 3: 0.4, 4: 0.2, 5: 0.1}
    noise = {2: 0.0, 3: 0.08, 4: 1.9, 5: 3.0}
    levels, decision = outcome(policy, seconds, noise)
    names = ["dense", "flush", *policy.candidates]
    assert names[levels[-1]] == chosen
    for level, forecast in policy.forecasts(decision).items():
        factor = DELAY_FACTOR if names[level] == "topk" else FACTOR
        assert forecast.seconds == pytest.approx(seconds[level] * (1 + factor * noise.get(level, 0)))
    assert policy.why(decision, names).startswith(f"{chosen}: the least seconds per effective step of ")


def test_coarse_candidates_are_for_those_in_a_hurry():
    names = {effort: [triple(each)[0].compressor for each in Auto(effort=effort).candidates] for effort in EFFORTS}
    assert names["safe"] == names["balanced"] == names["fast"][:5]
    assert {compressor.registered_name for compressor in names["fast"][5:]} == {"eden", "powersgd", "topk"}


def test_a_training_begins_with_integers_of_4_bits_and_goes_on_with_16_bits():
    decision = Decision({"w": Auto().first_level})
    assert Auto().candidates[decision.levels["w"] - FIRST] == CANDIDATES[2]
    # A fast network: 16 bits stay though they were tried second, unless others are cheaper by the margin.
    seconds = {DENSE: 1.0, FLUSH: 1.0, 2: 0.9, 3: 1.0, 4: 0.89, 5: 1.1, 6: 1.2}
    assert decide(Auto(), seconds, costs=costs(seconds)) == [2, 2]
    assert Auto(candidates=("fp16", "eden")).first_level == FIRST
    assert Auto(candidates=("eden", CANDIDATES[2])).first_level == FIRST + 1
    assert decide(Auto(candidates=("eden", CANDIDATES[2])), {0: 1.0, 1: 1.0, 2: 2.0, 3: 0.5})[0] == DENSE


# -- predictions -------------------------------------------------------------------------------------------------------
BYTES = {DENSE: 32.0, FLUSH: 32.0, 2: 16.0, 3: 8.5, 4: 4.5, 5: 3.5, 6: 1.0}
ERRORS = {2: 5e-8, 3: 7e-5, 4: 0.023, 5: 0.034, 6: 0.98}
"""Bytes and errors of the default candidates: fp16, blockint of 8 and 4 bits, eden of 3 bits, powersgd."""


def costs(compression: dict[int, float]) -> list[Cost]:
    return [Cost(size, compression.get(level, 0.0), ERRORS.get(level, 0.0)) for level, size in BYTES.items()]


@law(
    computation=st.floats(0.01, 10),
    rate=st.floats(0.001, 10),
    compression=st.lists(st.floats(0, 2), min_size=5, max_size=5),
    noise=st.floats(0.1, 4),
    delay=st.floats(0.01, 4),
    effort=st.sampled_from(sorted(EFFORTS)),
)
def test_no_better_method_is_left_out(computation, rate, compression, noise, delay, effort):
    policy = Auto(candidates=CANDIDATES, effort=effort)
    taken = dict(zip(range(FIRST, FIRST + 5), compression, strict=True))
    seconds = {level: computation + rate * size + taken.get(level, 0.0) for level, size in BYTES.items()}
    ratios = {level: noise * error for level, error in ERRORS.items()} | {6: delay}
    levels, decision = outcome(policy, seconds, ratios, costs=costs(taken))
    true = {
        level: seconds[level] * (1 + (DELAY_FACTOR if level == 6 else FACTOR) * ratios.get(level, 0.0))
        for level in (DENSE, *ERRORS)
        if ratios.get(level, 0.0) <= EFFORTS[effort]
    }
    assert true[levels[-1]] <= min(true.values()) / (1 - policy.margin) ** 2 * (1 + 1e-9)
    tried = set(policy.trials(decision))
    assert policy.first_level in tried
    assert len(tried) <= 5


@pytest.mark.parametrize(
    "rate, compression, tried",
    [
        (1.0, {}, {4, 2, 5, 6}),  # a slow link: the fewest bytes without error feedback, then those with it
        (0.1, {6: 2.0}, {4, 2, 5}),  # powersgd computes for longer than it saves
        (0.005, {}, {4, 2}),  # by the rate that two methods give, fewer bytes would save less than the margin
        (0.0, {2: 0.1, 3: 1.0, 4: 1.0, 5: 1.0, 6: 1.0}, {4, 2, DENSE}),  # bytes cost nothing
    ],
)
def test_few_methods_are_tried(rate, compression, tried):
    policy = Auto()
    seconds = {level: 1.0 + rate * size + compression.get(level, 0.0) for level, size in BYTES.items()}
    levels, decision = outcome(policy, seconds, {4: 0.02, 5: 0.03, 6: 0.08}, costs=costs(compression))
    assert set(policy.trials(decision)) == tried
    assert len(levels) <= 4


def test_what_is_coarser_than_a_method_of_too_much_noise_is_not_tried():
    # In proportion to the errors of samples, and at least as much for the same compressor with error feedback.
    policy = Auto(candidates=("fp16", *({"compressor": "eden", "bits": bits} for bits in (3, 2, 1)), *TOPK))
    size = {DENSE: 32.0, FLUSH: 32.0, 2: 16.0, 3: 3.5, 4: 2.5, 5: 1.5, 6: 2.0, 7: 0.3}
    error = {2: 5e-8, 3: 0.034, 4: 0.128, 5: 0.56, 6: 0.56, 7: 0.92}
    told_costs = [Cost(bytes_, 0.0, error.get(level, 0.0)) for level, bytes_ in size.items()]
    seconds = {level: 1 + bytes_ for level, bytes_ in size.items()}
    noise = {3: 0.02, 4: 0.08, 5: 0.34, 6: 0.7, 7: 9.0}
    _, decision = outcome(policy, seconds, noise, costs=told_costs)
    assert set(policy.trials(decision)) == {2, 5, 4, 6}  # the fewest bytes first; of topk the finest first
    assert decision.levels == {"w": 4}


@pytest.mark.parametrize("noise, level, chosen", [(0.11, 4, 4), (0.2, 3, None)])  # then integers of 8 bits are tried
def test_another_method_goes_on_where_the_noise_of_the_chosen_one_rises(noise, level, chosen):
    policy = Auto()
    seconds = {level: 1.0 + size for level, size in BYTES.items()}
    found = costs({})
    levels, decision = outcome(policy, seconds, {4: 0.02, 5: 0.03, 6: 3.0}, costs=found)
    assert levels[-1] == 5
    decision = policy.on_trial_end(decision, 2, seconds[5], told(policy, 5, noise), found)
    assert (decision.levels, decision.memo["chosen"]) == ({"w": level}, chosen)
    rise = noise / 0.03  # all noise without error feedback rises alike
    ratios = {each: forecast.noise_ratio for each, forecast in policy.forecasts(decision).items()}
    assert ratios == pytest.approx({2: 0.0, 4: 0.02 * rise, 5: noise, 6: 3.0}, abs=1e-6)
    assert policy.remembers(decision.memo)


def test_an_untried_method_is_tried_where_the_noise_of_the_chosen_one_rises():
    policy = Auto(candidates=(CANDIDATES[0], CANDIDATES[3], {"compressor": "eden", "bits": 4, "block_size": 64}))
    seconds = {DENSE: 33.0, FLUSH: 33.0, 2: 17.0, 3: 4.5, 4: 5.5}
    found = [
        Cost(size - 1, 0.0, error) for size, error in zip(seconds.values(), (0, 0, 5e-8, 0.034, 0.01), strict=True)
    ]
    levels, decision = outcome(policy, seconds, {3: 0.03}, costs=found)
    assert levels[-1] == 3
    decision = policy.on_trial_end(decision, 2, seconds[3], told(policy, 3, 0.11), found)
    assert (decision.levels, decision.memo["chosen"]) == ({"w": 4}, None)  # expected: 0.11 * 0.01 / 0.034 = 0.03
    assert policy.trial(decision, 2) == policy.trial_steps
    decision = policy.on_trial_end(decision, 2, seconds[4], told(policy, 4, 0.04), found)
    assert (decision.levels, decision.memo["chosen"]) == ({"w": 4}, 4)
    assert policy.remembers(decision.memo)


def test_the_seconds_of_a_long_watch_replace_those_of_the_trial():
    policy = Auto()
    seconds = {level: 1.0 + 0.1 * size for level, size in BYTES.items()}
    _, decision = outcome(policy, seconds, {5: 0.03, 6: 3.0}, costs=costs({}))
    assert decision.levels == {"w": 5}
    decision = policy.on_trial_end(decision, 2, seconds[4] * 1.1, told(policy, 5, 0.03), costs({}))
    assert decision.levels == {"w": 4}


@pytest.mark.parametrize("again, chosen", [(0.9, 2), (1.1, 5)])
def test_the_closest_rival_is_timed_again(again, chosen):
    policy = Auto()
    memo = {"workers": 2, "chosen": 5, "seconds": {"0": 1.5, "2": 1.15, "5": 1.0}}
    decision = Decision({"w": 5}, memo={**memo, "errors": {"0": 0.0, "2": 0.0, "5": 0.03}})
    decision = policy.on_trial_end(decision, 2, 1.0, told(policy, 5, 0.03), costs({}))
    assert (decision.levels, decision.memo["chosen"]) == ({"w": 2}, 5)
    assert policy.trial(decision, 2) == 10
    assert policy.remembers(decision.memo)
    decision = policy.on_trial_end(decision, 2, again, told(policy, 2, 0.0), costs({}))
    assert (decision.levels, decision.memo["chosen"]) == ({"w": chosen}, chosen)
    rival = 7 - chosen
    for interval in (20, 40, 80):
        assert policy.trial(decision, 2) == interval
        decision = policy.on_trial_end(decision, 2, 1.0, told(policy, chosen, 0.0), costs({}))
        assert (decision.levels, policy.trial(decision, 2)) == ({"w": rival}, 10)
        decision = policy.on_trial_end(decision, 2, 1.1, told(policy, rival, 0.0), costs({}))
        assert decision.levels == {"w": chosen}
        assert policy.remembers(decision.memo)
    assert policy.trial(decision, 2) == 100
    assert policy.on_trial_end(decision, 2, 1.0, told(policy, chosen, 0.0), costs({})).levels == {"w": chosen}


@pytest.mark.parametrize("seconds", [{2: 1.25, 5: 1.0}, {2: 1.15, 6: 1.0}], ids=["far", "residuals would be sent"])
def test_no_other_rival_is_timed_again(seconds):
    policy, (_, chosen) = Auto(), seconds
    memo = {"workers": 2, "chosen": chosen, "errors": {str(level): 0.0 for level in seconds}}
    memo["seconds"] = {str(level): value for level, value in seconds.items()}
    decision = Decision({"w": chosen}, memo=memo)
    decision = policy.on_trial_end(decision, 2, 1.0, told(policy, chosen, 0.0), costs({}))
    assert (decision.levels, policy.trial(decision, 2)) == ({"w": chosen}, 20)


def test_a_lucky_trial_of_dense_gradients_is_corrected():
    policy = Auto()
    seconds = {level: 1.0 + 0.1 * size for level, size in BYTES.items()}
    _, decision = outcome(policy, {**seconds, 4: 2.59, DENSE: 2.5}, costs=costs({}))
    assert decision.levels == {"w": DENSE}
    assert policy.trial(decision, 2) == 10
    decision = policy.on_trial_end(decision, 2, seconds[DENSE], {}, costs({}))
    assert decision.levels == {"w": 4}


def test_the_first_steps_of_a_training_do_not_count_against_its_first_method(clock, monkeypatch):
    monkeypatch.setattr(Auto, "predicts", True)
    monkeypatch.setattr(grace.engine.policy_runner, "WARM_UP", WARM_UP)
    taken = {**dict.fromkeys((DENSE, FLUSH, 2, 3, 5, 6), 2.2), 4: 2.0}
    grc = grace_from_params({"compressor": "auto"}, LocalTransport(World(1), 0))

    def level():  # steps up to 4 take longer
        found = grc.schedule.level("w")
        clock.taken.update({each: seconds * (1.5 if grc.steps <= 4 else 1) for each, seconds in taken.items()})
        return found

    clock.level = level
    grc.build({"w": np.zeros((200, 150), np.float32)})
    for step in range(12):
        grc.step({"w": np.random.default_rng(step).standard_normal((200, 150), np.float32)})
        grc.tune()
    assert grc.report().trials["blockint, bits=4, rounding=stochastic, block_size=64"] == pytest.approx(2.0)
    assert grc.schedule.level("w") == 4


@pytest.mark.parametrize("backend", ["numpy", "torch", "tensorflow"])
def test_the_costs_of_levels_are_those_of_their_messages(backend, monkeypatch):
    monkeypatch.setattr(Auto, "predicts", True)
    # powersgd sends rank (rows + columns) numbers of a matrix, and the vector as it is.
    shapes = {"w": (200, 150), "v": (2000,)}
    grc = grace_from_params({"compressor": "auto", "trial_steps": 1}, LocalTransport(World(1), 0))
    xp = grace.backends.get_backend(backend)
    grc.build({name: xp.zeros(shape) for name, shape in shapes.items()})
    found = level_costs(grc.setup, grace.Grace)
    draw = np.random.default_rng(1).standard_normal
    exact = [{name: draw(shape).astype(np.float32) for name, shape in shapes.items()}]
    for level, (settings, cost) in enumerate(zip(grc.schedule.levels, found, strict=True)):
        sent = simulate(settings, exact).report.bytes_sent
        assert cost.bytes == pytest.approx(sent, rel=0.02), settings
        if level > FLUSH and settings["compressor"] != "powersgd":
            mean = simulate(settings, exact).means[0]
            error = sum(((mean[name] - exact[0][name]) ** 2).sum() for name in shapes) / 32_000
            assert cost.error == pytest.approx(error, rel=0.1), settings
            assert cost.seconds > 0
    assert [cost.bytes for cost in found[:2]] == [128_000, 128_000]
    assert found[-1].bytes == 4 * (16 * (200 + 150) + 2000)


def test_a_training_that_predicts_tries_few_methods(clock, monkeypatch):
    monkeypatch.setattr(Auto, "predicts", True)
    clock.taken.update({DENSE: 33.0, FLUSH: 33.0, 2: 17.0, 3: 9.5, 4: 5.5, 5: 4.5, 6: 2.0})
    grc = grace_from_params({"compressor": "auto"}, LocalTransport(World(1), 0))
    clock.level = lambda: grc.schedule.level("w")
    grc.build({"w": np.zeros((200, 150), np.float32)})
    for step in range(12):
        grc.step({"w": np.random.default_rng(step).standard_normal((200, 150), np.float32)})
        grc.tune()
    assert grc.report().method == "eden + none + allgather"
    int4, eden = "blockint, bits=4, rounding=stochastic, block_size=64", "eden, bits=3, block_size=64"
    assert list(grc.report().trials) == [int4, "fp16", eden]
    assert grc.schedule.history["w"][0] == (0, FIRST + 2)


def test_the_choice_follows_the_noise():
    policy = Auto(candidates=("fp16", "eden", {"compressor": "eden", "bits": 1}), watch_steps=7)
    seconds, noise = {DENSE: 1.0, 2: 0.6, 3: 0.4, 4: 0.3}, {2: 1e-4, 3: 0.02, 4: 0.07}
    _, decision = outcome(policy, seconds, noise)
    assert decision.levels == {"w": 4}
    assert policy.trial(decision, 2) == 7
    later = replace(policy, watch_steps=50)
    for steps in (10, 20, 40, 50, 50):  # checks are frequent at first, when the noise may change soon
        assert later.trial(decision, 2) == steps
        decision = later.on_trial_end(decision, 2, 0.3, told(policy, 4, 0.07))
        assert decision.levels == {"w": 4}
        assert later.remembers(decision.memo)

    def after(ratio):
        """The decision when a check of the chosen method finds this noise ratio."""
        return policy.on_trial_end(decision, 2, 0.3, told(policy, decision.levels["w"], ratio))

    decision = after(0.1)
    assert decision.levels == {"w": 4}
    decision = after(0.105)
    assert decision.levels == {"w": 3}
    decision = after(0.01)
    assert decision.levels == {"w": 3}, "the noise of one bit is known to be too large"
    decision = after(0.2)
    assert decision.levels == {"w": 2}
    decision = after(0.3)
    assert decision.levels == {"w": DENSE}
    assert policy.trial(decision, 2) == 7  # its seconds are measured again, too
    assert replace(policy, watch_steps=0).trial(decision, 2) is None


def test_another_method_must_be_clearly_cheaper_to_replace_the_chosen_one():
    policy = Auto(candidates=("fp16", "eden"))
    _, decision = outcome(policy, {DENSE: 1.0, 2: 0.4, 3: 0.385}, {2: 0.0, 3: 0.01})
    assert decision.levels == {"w": 3}
    decision = replace(decision, memo={**decision.memo, "watched": CHECKS})  # no rival is timed again
    decision = policy.on_trial_end(decision, 2, 0.385, told(policy, 3, 0.09))  # 0.385 (1 + 0.09 / 2) = 0.402 s
    assert decision.levels == {"w": 3}
    policy = replace(policy, margin=0.0)
    assert policy.on_trial_end(decision, 2, 0.385, told(policy, 3, 0.09)).levels == {"w": 2}


@pytest.mark.parametrize("noise", [{}, {"w": Noise(0.0, 0.0)}], ids=str)
def test_steps_without_a_gradient_change_no_choice(noise):
    policy = Auto(candidates=("fp16", "eden"))
    _, decision = outcome(policy, {DENSE: 1.0, 2: 0.6, 3: 0.4}, {2: 1e-7, 3: 0.02})
    assert decision.levels == {"w": 3}
    after = policy.on_trial_end(decision, 2, 0.4, noise)
    assert after.levels == {"w": 3}
    assert policy.forecasts(after) == policy.forecasts(decision)


def test_what_is_held_is_sent_where_noise_rises_beyond_what_is_allowed():
    policy = Auto(candidates=("fp16", "topk"))
    _, decision = outcome(policy, {DENSE: 1.0, 2: 0.6, 3: 0.4})
    decision = policy.on_trial_end(decision, 2, 0.4, told(policy, 3, 2.0))
    assert decision.levels == {"w": FLUSH}
    assert policy.trial(decision, 2) == 0
    assert policy.on_trial_end(decision, 2, 1.0, {}).levels == {"w": 2}


def test_a_noise_that_is_no_number_is_the_worst():
    for error, wanted in ((1.0, 0.0), (np.nan, 1.0), (1.0, np.nan), (np.inf, np.inf)):
        for feeds_back in (False, True):
            assert noise_ratio(relative_error({"w": Noise(error, wanted)}), feeds_back) == 1e9
    assert noise_ratio(1.0, feeds_back=True) == 1e9  # a method that sends nothing


# -- the noise ---------------------------------------------------------------------------------------------------------
def noisy(workers: int, steps: int) -> list[Gradients]:
    """Gradients whose mean has mean square 0.5; each worker adds noise of mean square 1."""
    draw = np.random.default_rng(0).standard_normal
    mean = np.sqrt(0.5) * draw((300, 1000))
    return [[{"w": (mean + draw(mean.shape)).astype("float32")} for _ in range(workers)] for _ in range(steps)]


# eden's relative error is 0.133 (normal numbers, Lloyd-Max, 2 bits, unbiased), of gradients with mean square 1.5. Two
# stages also compress the mean, whose mean square is 0.5 + 1 / 4. A random quarter has error (1 - 1/4) / (1/4).
@pytest.mark.parametrize(
    "params, workers, ratio",
    [
        ({"compressor": "eden", "bits": 2}, 2, 0.133 * 1.5 / 2 / (0.5 + 1 / 2)),
        ({"compressor": "eden", "bits": 2}, 4, 0.133 * 1.5 / 4 / (0.5 + 1 / 4) + 0.133),
        ({"compressor": "randomk", "compress_ratio": 0.25, "memory": "residual"}, 2, 3.0),
        ("fp16", 2, 0.0),
    ],
)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_the_noise_of_an_exchange_is_measured(params, workers, ratio, backend):
    auto = {"compressor": "auto", "candidates": [params], "trial_steps": 30, "effort": "fast"}
    out = simulate(auto, noisy(workers, 1), backend, steps=63)
    (found,) = (value for name, value in out.report.noise.items() if name != "none")
    assert found == pytest.approx(ratio, rel=0.15, abs=1e-5)


@pytest.mark.parametrize("backend", ["numpy", "tensorflow"])
@pytest.mark.parametrize("workers", [2, 4])  # gathered, and in two stages
def test_what_is_held_of_the_sample_is_what_memories_hold(backend, workers):
    given = [[{"w": x["w"][:60, :500]} for x in step] for step in noisy(workers, 12)]
    auto = {"compressor": "auto", "candidates": [{"compressor": "topk", "compress_ratio": 0.05}], "trial_steps": 6}
    out = simulate(auto, given, backend)
    sampled = positions("w", 30_000)
    for state in out.state:
        np.testing.assert_allclose(state["policy"]["held"]["w"], held(out.state, "w", 30_000)[sampled], atol=1e-5)
    assert np.abs(held(out.state, "w", 30_000)[sampled]).max() > 1


def held(states, name, size):
    """All residuals in units of the mean: those of the first stage are divided by the number of workers."""
    total = np.zeros(size)
    for state in states:
        arrays = {key: x for key, x in state["tensors"].get(name, {}).items() if "compressor" not in key}
        for key, array in arrays.items():
            point = key.removesuffix("memory/residual").removesuffix("/")
            start, count = (0, size) if key == "carried" else state["points"][name][point]
            total[start : start + count] += np.asarray(array) / (1 if point == "server" else len(states))
    return total


@pytest.mark.parametrize("name", ["dense/bias", "decoder.bias", "b"])  # names decide which elements a sample has
def test_the_norm_of_a_small_tensor_does_not_depend_on_the_sample(xp, name):
    """The gradient of a softmax's bias: a few words have nearly all of its norm, and integers round the others."""
    exact = np.full(2000, 1e-3)
    exact[:3] = 1.0, -0.5, 0.5
    mean = exact + np.random.default_rng(0).choice([-2e-3, 2e-3], 2000)
    probe = NoiseProbe()
    probe.extend({name: 2000, "matrix": 30_000}, xp)
    assert (probe.count(name), probe.count("matrix")) == (2000, 256)
    given = {name: xp.asarray(exact, "float32")}
    probe.observe(probe.sample(given), {name: xp.asarray(mean, "float32")}, [0.0])
    assert relative_error(probe.noise()) == pytest.approx(2000 * 4e-6 / (1.5 + 1997e-6), rel=1e-4)


def test_a_discarded_exchange_is_not_measured():
    grc = grace_from_params(AUTO, LocalTransport(World(1), 0))
    grc.build({"w": np.zeros((60, 50), np.float32)})
    grc.defer_commit = True
    for step, worker in enumerate(gradients(12, workers=1)):
        before = grc.state_dict()["policy"]["held"]["w"]
        grc.step({"w": worker[0]["w"]})
        if step % 3 == 2:
            grc.rollback()
            np.testing.assert_array_equal(grc.state_dict()["policy"]["held"]["w"], before)
        else:
            grc.commit()
            grc.tune()
    assert np.abs(before).max() > 0


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
    assert w.levels == [
        (0, {"compressor": "none"}),
        (ENDS[1], {"compressor": "topk"}),
        (ENDS[2], AUTO["candidates"][1]),
        (ENDS[3], {"compressor": "powersgd"}),
        (ENDS[4], AUTO["candidates"][1]),
    ]
    assert "tried: none 4000.0 ms  topk 3000.0 ms" in str(report)


def test_one_slow_step_of_a_trial_of_two_does_not_count(clock):
    seconds = {"none": 4.0, "topk": 1.0, "powersgd": 2.0}
    calls: list[int] = []

    def level():
        found = grc.schedule.level("w")
        calls.append(found)
        slow = found >= FIRST and calls.count(found) == 2  # the first call records when the level began
        clock.taken[found] = [*seconds.values()][max(found - 1, 0)] * (10 if slow else 1)
        return found

    clock.level = level
    auto = {"compressor": "auto", "effort": "fast", "candidates": ["topk", "powersgd"]}
    grc = grace_from_params(auto, LocalTransport(World(1), 0))
    grc.build({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    for (worker,) in gradients(7, workers=1):
        grc.step(worker)
        grc.tune()
    assert calls[3:9] == [2, 2, 2, 3, 3, 3]
    assert grc.report().trials == seconds


def test_a_training_that_tells_of_no_steps_is_told_so():
    grc = grace_from_params(AUTO, LocalTransport(World(1), 0))
    grc.build({"w": np.zeros((60, 50), np.float32)})
    grc.step({"w": np.ones((60, 50), np.float32)})
    assert "call Grace.tune()" in str(grc.report())


# -- nothing is lost ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["numpy", "torch", "tensorflow"])
def test_what_was_sent_and_what_is_kept_add_up_to_all_gradients(backend):
    given = gradients()
    for steps in (ENDS[1], ENDS[2], ENDS[2] + 2, STEPS):  # in the middle of trials, and at the end
        out = simulate(AUTO, given[:steps], backend)
        assert all(np.array_equal(a, out.means[1][name]) for name, a in out.means[0].items())
        for name in ("w", "v"):
            sent = sum(step[0][name] for step in out.history).reshape(-1)
            everything = sum(worker[name] for workers in given[:steps] for worker in workers).reshape(-1) / 2
            np.testing.assert_allclose(sent + held(out.state, name, len(sent)), everything, atol=2e-4)


@pytest.mark.parametrize("saved", [ENDS[1] + 2, ENDS[2] + 1, ENDS[3], STEPS + TRIAL])
def test_nothing_is_lost_where_candidates_hold_it_in_different_places(saved):
    # With four workers powersgd has residuals of whole tensors; the other methods have residuals of different shards.
    sparse = {"compressor": "topk", "compress_ratio": 0.05}
    auto = {**AUTO, "candidates": [sparse, "powersgd", {"compressor": "efsignsgd", "block_size": 512}]}
    given = gradients(STEPS + TRIAL, workers=4)[:saved]
    out = simulate(auto, given)
    exchanges = {way.communicator.registered_name for way in _ways(auto, 4)}
    assert exchanges == {"allreduce", "twostage"}
    sent = sum(step[0]["w"] for step in out.history).reshape(-1)
    everything = sum(worker["w"] for workers in given for worker in workers).reshape(-1) / 4
    np.testing.assert_allclose(sent + held(out.state, "w", len(sent)), everything, atol=4e-4)


def _ways(params, workers):
    return grace_from_params(params, LocalTransport(World(workers), 0)).setup.ways


@pytest.mark.parametrize("backend", ["numpy", "torch", "tensorflow"])
def test_a_tensor_is_uncompressed_only_at_the_levels_that_do_not_apply_to_it(backend):
    given = gradients(ENDS[4] - 1)
    candidates = [{"compressor": "eden", "bits": 4}, "topk", "powersgd"]  # powersgd cannot compress a vector
    out = simulate({**AUTO, "candidates": candidates}, given, backend)
    means = [step[0]["v"] for step in out.history]
    exact = [sum(worker["v"] for worker in workers) / 2 for workers in given]
    errors = [np.abs(mean - wanted).max() for mean, wanted in zip(means, exact, strict=True)]
    powersgd = range(ENDS[3], len(given))
    compressed = range(ENDS[1], powersgd[0])
    assert min(errors[step] for step in compressed) > 1e-3
    assert errors[powersgd[0]] > 1e-3  # also sends topk's residual
    assert max(errors[step] for step in powersgd[1:]) < 1e-6
    (tensor,) = (tensor for tensor in out.report.tensors if tensor.name == "v")
    assert [level["compressor"] for _, level in tensor.levels] == ["none", "eden", "topk", "none"]
    assert "'powersgd' does not apply to shape [2000]" in tensor.reason
    alone = simulate({**AUTO, "candidates": ["powersgd"]}, given[:3], backend).report
    (tensor,) = (tensor for tensor in alone.tensors if tensor.name == "v")
    assert (tensor.method, tensor.levels) == ("dense", [])
    assert "does not apply" in tensor.reason


def test_a_candidate_alone_gives_what_the_method_gives():
    given, start = gradients(3 * TRIAL), ENDS[1]
    auto = simulate({**AUTO, "candidates": ["topk"]}, given)
    plain = simulate({"compressor": "topk"}, given[start:])
    for step in range(TRIAL):  # steps of the second trial
        for name in SHAPES:
            np.testing.assert_array_equal(auto.history[start + step][0][name], plain.history[step][0][name])


HOLDING = {"compressor": "topk", "compress_ratio": 0.6}


@pytest.mark.parametrize(
    "candidate, chosen", [({"compressor": "eden", "bits": 4}, 2), (HOLDING, 2), ("fp16", 0)], ids=str
)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_noise_is_measured_only_where_it_is_used(candidate, chosen, backend, clock, monkeypatch):
    clock.taken.update({DENSE: 4.0, FLUSH: 4.0, 2: 1.0 if chosen else 4.0})
    auto = {"compressor": "auto", "effort": "fast", "candidates": [candidate], "trial_steps": 2, "watch_steps": 30}
    grc = grace_from_params(auto, LocalTransport(World(1), 0))
    clock.level = lambda: grc.schedule.level("w")
    xp, measured = grace.backends.get_backend(backend), set()
    grc.build({name: xp.zeros(shape) for name, shape in SHAPES.items()})
    sample = grc.schedule.probe.sample
    monkeypatch.setattr(grc.schedule.probe, "sample", lambda *args: (measured.add(grc.steps), sample(*args))[1])
    for (worker,) in gradients(80, workers=1):
        grc.step({name: xp.asarray(value, "float32") for name, value in worker.items()})
        grc.tune()
    assert grc.schedule.level("w") == chosen
    trials = 1 + 2 * 2  # trials of dense gradients and of the candidate
    assert measured & set(range(trials)) == ({0, 1, 2} if candidate == "fp16" else {3, 4})  # the candidate's
    # Intervals of 10, 20 and 30 steps; the last ten steps of each are measured.
    ends = [trials + 10, trials + 30, trials + 60]
    wanted = {4: {step for end in ends for step in range(end - 10, end)}, 0.6: {*range(trials, ends[-1])}}
    # Of dense gradients none; their rival is timed again for ten steps after each interval.
    wanted[None] = {*range(trials + 10, trials + 20), *range(trials + 40, trials + 50)}
    found = {step for step in measured if trials <= step < ends[-1]}
    assert found == wanted[None if chosen == DENSE else [*candidate.values()][-1]]


def test_a_dense_trial_is_the_plain_mean_in_one_message():
    out = simulate(AUTO, given := gradients(3))
    for step, workers in enumerate(given):
        for name in SHAPES:
            np.testing.assert_allclose(out.history[step][0][name], (workers[0][name] + workers[1][name]) / 2, rtol=1e-6)
    assert out.report.bytes_sent == out.report.bytes_dense


@pytest.mark.parametrize("saved", [ENDS[1] + 1, ENDS[2], STEPS - 1])
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
    np.testing.assert_array_equal(*(grc.state_dict()["policy"]["held"]["w"] for grc in (first, second)))
    # Only the next two steps of the trial: it is timed anew, so it may end later.
    rest = given[saved : saved + 2]
    for a, b in zip(run(first, rest), run(second, rest), strict=True):
        for name in SHAPES:
            np.testing.assert_array_equal(a[name], b[name])


MEMO = {"workers": 1, "seconds": {}, "errors": {}, "chosen": None}


@pytest.mark.parametrize(
    "memo",
    [
        {"workers": 1},
        {"workers": 1, "seconds": {}, "chosen": None},
        {**MEMO, "workers": "1"},
        {**MEMO, "seconds": {"1": 0.5}, "errors": {"1": 0.5}},
        {**MEMO, "seconds": {"0": "fast"}, "errors": {"0": 0.0}},
        {**MEMO, "seconds": {"0": 1.0}},
        {**MEMO, "seconds": {"0": 1.0}, "errors": {"0": -1.0}},
        {**MEMO, "noise": {}},
        {**MEMO, "chosen": 9},
        {**MEMO, "chosen": 2},
        {**MEMO, "seconds": []},
    ],
)
def test_a_choice_that_cannot_have_been_made_is_not_believed(memo):
    grc = grace_from_params(AUTO, "local")
    grc.build({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    state = grc.state_dict()
    state["policy"]["memo"] = {**MEMO, "seconds": {"0": 1.0}, "errors": {"0": 0.0}, "chosen": 0}
    grc.load_state_dict(state)
    state["policy"]["memo"] = memo
    with pytest.raises(ValueError, match="'memo' is"):
        grc.load_state_dict(state)


def test_what_is_kept_follows_the_number_of_workers():
    out = simulate(AUTO, gradients(ENDS[2]))
    kept = sum(state["tensors"]["w"]["memory/residual"] for state in out.state)
    assert np.abs(kept).max() > 0
    world = World(4)
    graces = [grace_from_params(AUTO, LocalTransport(world, rank)) for rank in range(4)]
    for grc in graces:
        grc.build({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
        new = grc.check_state(*out.state).fitted  # two workers gather; four use two stages, with one shard
        (residual,) = (a for unit, key, _, a in new if (unit, key) == ("w", "worker/memory/residual"))
        np.testing.assert_allclose(residual, kept / 4, rtol=1e-6)


@pytest.mark.parametrize("saved", [ENDS[1] + 2, ENDS[2], ENDS[2] + 2])  # in two stages, in the change, in one round
@pytest.mark.parametrize("workers", [2, 4])
def test_nothing_is_lost_where_fewer_workers_go_on_with_other_exchanges(saved, workers):
    auto = {**AUTO, "candidates": [{"compressor": "topk", "compress_ratio": 0.05}, "powersgd"]}
    given = gradients(saved + 3, workers=4)
    out = simulate(auto, given[:saved])
    before = {name: held(out.state, name, size) * 4 for name, size in SIZES.items()}
    assert np.abs(before["w"]).max() > 0
    world = World(workers)
    graces = [grace_from_params(auto, LocalTransport(world, rank)) for rank in range(workers)]
    for grc in graces:
        grc.build({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
        grc.load_state_dict(*(out.state if workers != 4 else [out.state[grc.rank]]))
    states = [grc.state_dict() for grc in graces]
    for name, size in SIZES.items():
        np.testing.assert_allclose(held(states, name, size) * workers, before[name], atol=1e-4)


@dataclass(frozen=True)
class Turns(Auto):
    """Changes the level in every step, without first sending what memories hold."""

    def trial(self, decision, workers):
        return 0

    def on_trial_end(self, decision, workers, seconds, noise=None, costs=None):
        level = (decision.levels["w"] + 1) % len(self.levels(None))
        return replace(decision, levels=dict.fromkeys(decision.levels, level))


@pytest.mark.parametrize("again", [0, 4, 5, 7])
def test_nothing_is_lost_where_levels_follow_in_any_order(again):
    # The levels by number: dense, flush, topk in two stages, powersgd (exact for the vector "v"), none, efsignsgd in
    # two stages. ``again``: the step whose saved state is loaded afterwards.
    sparse = {"compressor": "topk", "compress_ratio": 0.05}
    turns = Turns(candidates=(sparse, "powersgd", "none", {"compressor": "efsignsgd", "block_size": 512}))
    world = World(4)
    graces = [grace_from_params({"compressor": "none", "policy": turns}, LocalTransport(world, r)) for r in range(4)]
    for grc in graces:
        grc.build({name: np.zeros(SHAPES[name], np.float32) for name in SIZES})
    saved, total = [], {name: np.zeros(size) for name, size in SIZES.items()}

    def finished(flights):
        while [flight for flight in flights if not flight.advance()]:
            pass

    def step(workers):
        # Add the difference between the means and the gradients' true means to the totals.
        for grc, gradient in zip(graces, workers, strict=True):
            grc.launch({name: gradient[name] for name in SIZES})
        finished(graces)
        for grc in graces:
            grc.land()
        finished([grc.tuning() for grc in graces])
        for name in SIZES:
            means = [grc.mean(name) for grc in graces]
            total[name] += (means[0] - sum(each[name] for each in workers) / 4).reshape(-1)

    for workers in gradients(10, workers=4):
        step(workers)
        saved.append(([grc.state_dict() for grc in graces], {name: x.copy() for name, x in total.items()}))
    if again:
        states, total = saved[again]
        for grc, state in zip(graces, states, strict=True):
            grc.load_state_dict(state)
    for workers in gradients(13, workers=4):
        step(workers)
        for name, size in SIZES.items():
            kept = held([grc.state_dict() for grc in graces], name, size)
            np.testing.assert_allclose(total[name] + kept, 0, atol=5e-4)


# -- what it was measured by -------------------------------------------------------------------------------------------
def test_the_page_on_noise_has_what_was_measured():
    pytest.importorskip("torch")
    from benchmarks.noise import stored, table

    rows = stored(ROOT / "benchmarks" / "results" / "noise.jsonl")
    assert table(rows) in (ROOT / "docs" / "noise.md").read_text()


def test_the_page_on_noise_has_what_bits_by_tensor_would_save():
    pytest.importorskip("torch")
    from benchmarks.bits import allocated, size, table

    rows = json.loads((ROOT / "benchmarks" / "results" / "bits.json").read_text())["rows"]
    assert table(rows) in (ROOT / "docs" / "noise.md").read_text()
    # Of all assignments of three tensors none within the noise has fewer bytes, but for what a multiplier cannot reach.
    error = {1: 0.56, 2: 0.13, 3: 0.034, 4: 0.0095}
    counts, weights = {"a": 1000, "b": 2000, "c": 500}, {"a": 1.0, "b": 0.01, "c": 5.0}
    bits = allocated(weights, counts, error)

    def noise(each):
        return sum(error[each[name]] * weights[name] for name in each)

    def sent(each):
        return sum(size(each[name]) * counts[name] for name in each)

    every = [dict(zip(counts, each, strict=True)) for each in product(error, repeat=3)]
    assert noise(bits) <= error[3] * 6.01 * (1 + 1e-6)
    assert sent(bits) <= 1.1 * min(sent(each) for each in every if noise(each) <= error[3] * 6.01)


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
    assert grc.report().noise == pytest.approx(simulate(AUTO, given).report.noise, rel=1e-3)
    kept = grc.state_dict()["tensors"]["w"]["memory/residual"].reshape(60, 50)
    np.testing.assert_allclose(sent + kept, sum(worker["w"] for (worker,) in given), atol=2e-4)


def test_a_graph_measures_noise_only_where_it_is_used(clock):
    import tensorflow as tf

    clock.taken.update({DENSE: 4.0, FLUSH: 4.0, 2: 1.0})
    candidates = [{"compressor": "eden", "bits": 4}]
    auto = {"compressor": "auto", "effort": "fast", "candidates": candidates, "trial_steps": 2, "watch_steps": 30}
    grc = grace_from_params(auto, LocalTransport(World(1), 0))
    clock.level = lambda: grc.schedule.level("w")
    grc.build({name: tf.zeros(shape) for name, shape in SHAPES.items()})
    step, counts = tf.function(grc.step, autograph=False), [0]
    for (worker,) in gradients(80, workers=1):
        step({name: tf.constant(value) for name, value in worker.items()})
        grc.tune()
        counts.append(grc.setup.meter.read()[SAMPLE][2])
    measured = {number for number, (before, after) in enumerate(pairwise(counts)) if after > before}
    ends = [15, 35, 65]  # after the trials, intervals of 10, 20 and 30 steps
    wanted = {0, 3, 4} | {number for end in ends for number in range(end - 10, end)}
    assert {number for number in measured if number < ends[-1]} == wanted
    flag = grc.schedule.probe.wanted
    assert int(flag.read()) == 0
    grc.load_state_dict(grc.state_dict())
    assert int(flag.read()) == 1, "a worker that goes on must send what a new one sends"


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
        ({"candidates": [{"compressor": "blockint", "communicator": "reducescatter"}]}, "leave it out, or use allred"),
        ({"effort": "brave"}, "choose 'safe', 'balanced', 'fast'"),
        ({"watch_steps": -1}, "or 0 for none"),
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
    first, second = launch(name, 2, "auto.py", tmp_path, door, "every")
    assert first == second  # weights, levels, trials and bytes
    assert set(first["trials"]) == {"none", "topk", "slow"}
    assert first["trials"]["slow"] > first["trials"]["none"] + 0.03  # it sleeps for 50 ms
    assert first["chosen"] in ("none", "topk")
    assert max(map(len, first["levels"])) >= 4


@pytest.mark.processes
@pytest.mark.parametrize("name, door", [("torchrun", "ddp"), ("horovodrun", "keras")])
def test_workers_predict_alike(name, door, tmp_path):
    first, second = launch(name, 2, "auto.py", tmp_path, door, "few")
    assert first == second
    assert "slow" not in first["trials"]  # its sample sleeps, too
