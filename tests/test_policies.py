"""Policies: the detector, levels on every toolkit, bytes, checkpoints, and integrations."""

import copy
import itertools
import math

import numpy as np
import pytest
from methods import BACKENDS, backend, lockstep, normal, states, unchanged, workers
from policies import EPOCHS, STEPS, levels_of, sequence

from grace import grace_from_params, simulate
from grace.core.registry import compressors, policies
from grace.policies import Decision, Policy, at_level
from grace.policies.accordion import Accordion, AccordionBatch, critical
from grace.policies.warmup import Warmup
from grace.simulate import end_epoch
from grace.transports.local import LocalTransport

NAN, INF = math.nan, math.inf
LOW, HIGH = 0, 1
POLICY = {"policy": "accordion", "window": 2}
TOPK = {"compressor": "topk", "compress_ratio": 0.01, "policy": "accordion", "k_low": 0.1, "window": 2}
RANK = {"compressor": "powersgd", "compress_rank": 1, "policy": "accordion", "k_low": 4, "window": 2}


def build(transport=None, **params):
    return grace_from_params(params, transport or LocalTransport())


# -- the detector -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "before, now, found",
    [
        (10, 4, True),
        (10, 6, False),
        (10, 5, True),
        (10, 15, True),
        (10, 14.9, False),
        (0, 1, True),
        (0, 0, True),
        (None, 1, True),
        (10, NAN, True),
        (NAN, 10, True),
        (INF, 10, True),
        (10, INF, True),
        (INF, INF, True),
    ],
)
def test_critical(before, now, found):
    assert critical(before, now, 0.5) is found


def course(policy, norms, rates=None):
    """The levels in each epoch, computed with the policy's functions alone."""
    names = list(norms[0])
    decision, held = Decision(dict.fromkeys(names, LOW)), []
    rates = rates or [1.0] * (len(norms) + 1)
    for epoch, found in enumerate(norms):
        held.append([decision.levels[name] for name in names])
        seen = found if policy.watches(epoch, decision) else {}
        decision = policy.on_epoch_end(decision, epoch, rates[epoch], rates[epoch + 1], seen)
    return [*held, [decision.levels[name] for name in names]]


def test_a_window_decides_and_what_lies_between_does_not():
    norms = [{"w": s} for s in (10, 999, 4, 0, 6, 999, 6.1)]  # windows: 10, 4, 6, 6.1
    assert course(Accordion(k_low=0.1, window=2), norms) == [[LOW]] * 7 + [[HIGH]]
    norms = [{"w": s} for s in (10, 10, 10, 10, 30)]
    assert course(Accordion(k_low=0.1, window=2), norms) == [[LOW]] * 3 + [[HIGH]] * 2 + [[LOW]]


def test_layers_have_levels_of_their_own_and_a_model_has_one():
    norms = [{"a": 10, "b": 1}, {"a": 10, "b": 5}]
    assert course(Accordion(k_low=0.1, window=1), norms)[-1] == [HIGH, LOW]
    assert course(Accordion(k_low=0.1, window=1, granularity="model"), norms)[-1] == [HIGH, HIGH]
    norms = [{"a": 1, "b": 10}, {"a": 1, "b": 15}]  # the model's norm goes from sqrt(101) to sqrt(226)
    assert course(Accordion(k_low=0.1, window=1, granularity="model", eta=0.49), norms)[-1] == [LOW, LOW]
    assert course(Accordion(k_low=0.1, window=1, granularity="model", eta=0.50), norms)[-1] == [HIGH, HIGH]


@pytest.mark.parametrize("lr_rule", [True, False])
def test_a_falling_rate_means_low_until_the_next_window(lr_rule):
    policy = Accordion(k_low=0.1, window=3, lr_rule=lr_rule)
    norms = [{"a": 10, "b": 10}] * 9
    rates = [1, 1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.1]  # falls after epoch 4; windows end with epochs 3 and 6
    high = [HIGH, HIGH]
    between = [LOW, LOW] if lr_rule else high
    assert course(policy, norms, rates) == [[LOW, LOW]] * 4 + [high] + [between] * 2 + [high] * 3
    rates = [1] * 6 + [1, 0.5, 0.5, 0.5]  # falls in the epoch in which a window ends
    assert course(policy, norms, rates)[7:] == [between] * 3
    rates = [1] * 5 + [2] * 5
    assert course(policy, norms, rates)[4:] == [high] * 6, "a rate that rises is no reason"


def test_batches_grow_once_and_never_shrink():
    policy, decision, seen = AccordionBatch(window=2, batch_growth=4), Decision({"w": 0}), []
    for epoch, norm in enumerate([10, 0, 3, 0, 3.1, 0, 99, 0, 1]):
        decision = policy.on_epoch_end(decision, epoch, 1.0, 0.1 if epoch == 6 else 1.0, {"w": norm})
        seen.append((decision.micro_steps, decision.lr_scale))
    assert seen == [(1, 1.0)] * 4 + [(4, 4.0)] + [(4, 1.0)] * 4
    falls = AccordionBatch(window=1).on_epoch_end(Decision({}, memo={"norm": 1.0}), 5, 1.0, 0.1, {"w": 1.0})
    assert falls.micro_steps == 1, "not in an epoch whose rate falls"


def test_warm_up_goes_down_to_the_methods_ratio():
    levels = Warmup().levels(compressors["dgc"]())
    assert [level["compress_ratio"] for level in levels] == [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    assert [each["compress_ratio"] for each in Warmup().levels(compressors["topk"](compress_ratio=0.5))] == [0.5]
    grc = build(compressor="dgc", policy="warmup", warmup_epochs=2, min_numel=0)
    grc.build({"w": np.zeros(8000, np.float32)})
    found = []
    for _ in range(12):
        found.append(grc.schedule.levels[grc.decision.levels["w"]]["compress_ratio"])
        grc.end_epoch()
    assert found == [0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.00390625] * 2 + [0.001] * 4


# -- what is summed ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", ["rank0", "mean", "aggregated"])
def test_the_norm_is_that_of_the_sum(xp, source):
    graces = workers({**TOPK, "norm_source": source, "window": 1, "compress_ratio": 1.0, "k_low": 1.0}, 2)
    v, u = normal(2000), normal(2000, seed=1)
    for grace in graces:
        grace.build({"v": xp.zeros(2000), "u": xp.zeros(2000)})
    for sign in (1, -1):
        lockstep(
            graces,
            [
                {name: xp.asarray(x * np.float32(sign * (1 + rank)), "float32") for name, x in (("v", v), ("u", u))}
                for rank in range(2)
            ],
        )
    end_epoch(graces)
    assert [grace.decision.memo["norms"] for grace in graces] == [{"u": 0.0, "v": 0.0}] * 2
    for _ in range(2):  # two equal steps: twice the vector
        lockstep(
            graces,
            [
                {name: xp.asarray(x * np.float32(1 + rank), "float32") for name, x in (("v", v), ("u", u))}
                for rank in range(2)
            ],
        )
    end_epoch(graces)
    factor = {"rank0": 1, "mean": (5 / 2) ** 0.5, "aggregated": 1.5}[source]
    expected = {
        name: pytest.approx(2 * factor * np.linalg.norm(x.astype(np.float64)), rel=1e-5)
        for name, x in (("v", v), ("u", u))
    }
    assert [grace.decision.memo["norms"] for grace in graces] == [expected] * 2


def test_raw_gradients_are_summed_and_not_what_the_memory_makes_of_them(xp):
    (grace,) = workers({**TOPK, "window": 1}, 1)
    grace.build({"w": xp.zeros(2000)})
    for _ in range(3):
        grace.start("w", xp.asarray(normal(2000), "float32"), spent=True)
        grace.flush()
    grace.end_epoch()
    assert grace.decision.memo["norms"]["w"] == pytest.approx(
        3 * np.linalg.norm(normal(2000).astype(np.float64)), rel=1e-5
    )


def test_gradients_are_summed_in_epochs_that_are_looked_at_only():
    (grace,) = workers({**TOPK, "window": 3}, 1)
    grace.build({"w": np.zeros(2000, np.float32)})
    watched = []
    for _ in range(7):
        grace.step({"w": normal(2000)})
        watched.append(bool(grace.state_dict()["policy"]["sums"]["w"].any()) if grace.schedule.watching else False)
        grace.end_epoch()
    assert watched == [True, False, False, True, False, False, True]


# -- levels in force, on every toolkit and in graphs ------------------------------------------------------------------
@pytest.mark.parametrize("params", [TOPK, RANK], ids=["topk", "powersgd"])
@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_toolkits_decide_alike(params, granularity):
    params = {**params, "granularity": granularity}
    plain = simulate(params, sequence(2), steps_per_epoch=STEPS)
    expected = levels_of(plain.report)
    assert {tuple(past) for past in expected.values()} != {((0, LOW),)}, "nothing changed: this test tests nothing"
    for name in ("torch", "tensorflow"):
        backend(name)
        found = simulate(params, sequence(2), backend=name, steps_per_epoch=STEPS)
        assert levels_of(found.report) == expected
        assert found.report.bytes_sent == plain.report.bytes_sent
        for mine, theirs in zip(found.history, plain.history, strict=True):
            for key, x in mine[0].items():
                np.testing.assert_allclose(x, theirs[0][key], rtol=2e-3, atol=2e-4)
                assert np.array_equal(x, mine[1][key])


@pytest.mark.parametrize("granularity", ["layer", "model"])
@pytest.mark.parametrize("params", [TOPK, RANK], ids=["topk", "powersgd"])
@pytest.mark.parametrize("source", ["rank0", "aggregated"])
def test_a_graph_changes_levels_without_being_traced_again(params, granularity, source):
    xp, traces = backend("tensorflow"), []
    import tensorflow as tf

    params = {**params, "granularity": granularity, "norm_source": source, "bucket_mb": 0.01}
    plain = simulate(params, sequence(1), steps_per_epoch=STEPS)
    grace = build(**params)
    grace.build({name: xp.zeros(x.shape) for name, x in sequence(1)[0][0].items()})

    @tf.function(autograph=False)
    def step(gradients):
        traces.append(1)
        return grace.step(gradients)

    for number, (gradients,) in enumerate(sequence(1)):
        means = step({name: tf.constant(x) for name, x in gradients.items()})
        for name, x in plain.history[number][0].items():
            np.testing.assert_allclose(means[name], x, rtol=2e-3, atol=2e-4)
        if (number + 1) % STEPS == 0:
            grace.end_epoch()
    assert len(traces) == 1
    assert levels_of(grace.report()) == levels_of(plain.report)
    assert [t.bytes_sent for t in grace.report().tensors] == [t.bytes_sent for t in plain.report.tensors]
    if source == "rank0":
        assert len({level for past in levels_of(plain.report).values() for _, level in past}) == 2


def test_memory_outlasts_a_change_of_level_and_factors_are_made_anew(xp):
    (grace,) = workers({**RANK, "window": 1}, 1)
    g = xp.asarray(normal(40, 30), "float32")
    grace.build({"w": g})
    grace.step({"w": g})
    grace.end_epoch()
    grace.step({"w": g})
    before = grace.state_dict()["tensors"]["w"]
    grace.end_epoch()
    assert grace.decision.levels == {"w": HIGH}
    after = grace.state_dict()["tensors"]["w"]
    assert np.array_equal(before["memory/residual"], after["memory/residual"])
    assert np.abs(np.asarray(after["memory/residual"])).sum() > 0
    assert before["compressor/q"].shape == (4, 30)
    fresh = workers({"compressor": "powersgd", "compress_rank": 1}, 1)[0]
    fresh.build({"w": g})
    assert np.array_equal(after["compressor/q"], fresh.state_dict()["tensors"]["w"]["compressor/q"])


def test_what_a_compressor_itself_did_not_send_outlasts_a_change(xp):
    (grace,) = workers({"compressor": "adacomp", "policy": "accordion", "k_low": {"bin_size": 10}, "window": 1}, 1)
    g = xp.asarray(normal(500), "float32")
    grace.build({"w": g})
    for _ in range(2):
        grace.step({"w": g})
        before = grace.state_dict()["tensors"]["w"]
        grace.end_epoch()
    assert grace.decision.levels == {"w": HIGH}
    after = grace.state_dict()["tensors"]["w"]
    assert all(np.array_equal(after[key], x) and np.asarray(x).any() for key, x in before.items())


@pytest.mark.parametrize(
    "params",
    [
        {"compressor": "qsgd", "k_low": 127, "quantum_num": 1, "communicator": "twostage"},
        {"compressor": "blockint", "k_low": 8, "bits": 2, "communicator": "twostage"},
        {"compressor": "chain", "k_low": {"compress_ratio": 0.5, "quantum_num": 127}, "compress_ratio": 0.1},
        {"compressor": "topk", "k_low": 0.5, "communicator": "hierarchical", "node_size": 2},
        {"compressor": "powersgd", "k_low": 4, "compress_rank": 1, "communicator": "hierarchical", "node_size": 2},
        {"compressor": "threshold", "k_low": {"threshold": 0.5}, "threshold": 1.5},
    ],
    ids=lambda params: f"{params['compressor']}-{params.get('communicator', '')}",
)
def test_any_field_of_any_method_is_a_level(xp, params):
    found = simulate(
        {**params, "policy": "accordion", "window": 1, "min_numel": 0}, sequence(4), xp.name, steps_per_epoch=STEPS
    )
    sizes = [tensor.bytes_sent for tensor in found.report.tensors]
    low = simulate({**{k: v for k, v in params.items() if k != "k_low"}, "min_numel": 0}, sequence(4), xp.name)
    assert all(mine > theirs for mine, theirs in zip(sizes, [t.bytes_sent for t in low.report.tensors], strict=True))
    for worker in found.means[1:]:
        assert all(np.array_equal(worker[name], x) for name, x in found.means[0].items())


# -- traffic ----------------------------------------------------------------------------------------------------------
def formula(params, shape, level):
    """The bytes that a worker sends in a step."""
    if params["compressor"] == "topk":
        return 8 * max(1, math.floor({LOW: 0.1, HIGH: 0.01}[level] * math.prod(shape)))
    return 4 * {LOW: 4, HIGH: 1}[level] * sum(shape)


@pytest.mark.parametrize("params", [TOPK, RANK], ids=["topk", "powersgd"])
@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_bytes_are_those_of_the_levels(xp, params, granularity):
    found = simulate({**params, "granularity": granularity}, sequence(2), xp.name, steps_per_epoch=STEPS)
    levels = levels_of(found.report)
    changes = {name: len(past) for name, past in levels.items()}
    assert max(changes.values()) > 2
    for tensor in found.report.tensors:
        past = levels[tensor.name]
        held = [next(level for since, level in reversed(past) if since <= epoch) for epoch in range(EPOCHS)]
        assert tensor.bytes_sent == STEPS * sum(formula(params, tensor.shape, level) for level in held)


# -- checkpoints ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("params", [TOPK, RANK], ids=["topk", "powersgd"])
@pytest.mark.parametrize("source", ["rank0", "mean"])
def test_a_run_goes_on_from_the_middle_of_a_window(xp, params, source):
    params = {**params, "norm_source": source}

    def go(graces, first, last):
        found = []
        for number in range(first, last):
            given = [{n: xp.asarray(x, "float32") for n, x in worker.items()} for worker in sequence(2)[number]]
            found = lockstep(graces, given)
            if (number + 1) % STEPS == 0:
                end_epoch(graces)
        return [{name: np.array(xp.to_numpy(x)) for name, x in worker.items()} for worker in found]

    def made():
        graces = workers(params, 2)
        for grace in graces:
            grace.build({name: xp.zeros(x.shape) for name, x in sequence(2)[0][0].items()})
        return graces

    middle = 4 * STEPS + 1  # in epoch 4, whose norms are measured
    graces = made()
    go(graces, 0, middle)
    saved = copy.deepcopy([grace.state_dict() for grace in graces])
    assert any(np.asarray(x).any() for x in saved[0]["policy"]["sums"].values())
    whole = go(graces, middle, EPOCHS * STEPS)
    again = made()
    for grace, state in zip(again, saved, strict=True):
        grace.load_state_dict(state)
    rest = go(again, middle, EPOCHS * STEPS)
    assert levels_of(again[0].report()) == levels_of(graces[0].report())
    assert all(np.array_equal(mine[n], theirs[n]) for mine, theirs in zip(rest, whole, strict=True) for n in mine)
    assert unchanged(states(again), states(graces))
    late = workers(params, 2)  # also load a state before the tensors are known
    for grace, state in zip(late, saved, strict=True):
        grace.load_state_dict(state)
        grace.build({name: xp.zeros(x.shape) for name, x in sequence(2)[0][0].items()})
    assert [grace.decision for grace in late] == [Decision(**vars(grace.decision)) for grace in late]
    assert go(late, middle, EPOCHS * STEPS)[0].keys() == whole[0].keys()
    assert unchanged(states(late), states(graces))


def test_a_state_of_other_settings_is_refused():
    shapes = {"w": np.zeros(2000, np.float32)}
    grace, other, none = (build(**params) for params in (TOPK, {**TOPK, "eta": 0.4}, {"compressor": "topk"}))
    for each in (grace, other, none):
        each.build(shapes)
    with pytest.raises(ValueError, match=r"belongs to policy Accordion\(.*eta=0.5.*but this is Accordion\(.*eta=0.4"):
        other.load_state_dict(grace.state_dict())
    with pytest.raises(ValueError, match=r"belongs to policy Accordion.*but this is None"):
        none.load_state_dict(grace.state_dict())
    with pytest.raises(ValueError, match=r"belongs to policy None"):
        grace.load_state_dict(none.state_dict())
    old = {key: value for key, value in none.state_dict().items() if key != "policy"}
    none.load_state_dict(old)  # saved before there were policies
    state = grace.state_dict()
    state["policy"]["sums"] = {"w": np.zeros(3, np.float32)}
    with pytest.raises(ValueError, match="sum of gradients of 'w' has shape"):
        grace.load_state_dict(state)


# -- disagreement -----------------------------------------------------------------------------------------------------
def test_workers_that_disagree_all_raise():
    graces = workers(TOPK, 2)
    for grace in graces:
        grace.build({"w": np.zeros(2000, np.float32)})
    end_epoch(graces)
    graces[1].schedule.decision.levels["w"] = HIGH
    flights = [grace.ending() for grace in graces]
    for flight in flights:
        with pytest.raises(RuntimeError, match=r"did not agree before this epoch ended.*their states differ"):
            flight.advance()
    graces[1].schedule.epoch = 5
    for flight in [grace.ending() for grace in graces]:
        with pytest.raises(RuntimeError, match="epochs 1 to 5 are under way"):
            flight.advance()


def test_worker_0_decides_for_all():
    graces = workers({**TOPK, "window": 1}, 2)
    for grace in graces:
        grace.build({"w": np.zeros(2000, np.float32)})
    for scale in (1, 1, 1):  # only worker 1's gradients change
        lockstep(
            graces,
            [{"w": normal(2000)}, {"w": normal(2000) * np.float32(scale * np.random.default_rng().integers(1, 99))}],
        )
        end_epoch(graces)
    assert [grace.decision.levels for grace in graces] == [{"w": HIGH}] * 2


@pytest.mark.parametrize("source, level", [("rank0", HIGH), ("mean", LOW), ("aggregated", LOW)])
def test_nan_on_a_worker_that_is_looked_at_means_low(xp, source, level):
    graces = workers({**TOPK, "window": 1, "norm_source": source}, 2)
    for grace in graces:
        grace.build({"w": xp.zeros(2000)})
    for epoch in range(4):
        given = [normal(2000), normal(2000, seed=1)]
        if epoch == 3:
            given[1][7] = NAN
        lockstep(graces, [{"w": xp.asarray(g, "float32")} for g in given])
        end_epoch(graces)
        assert [grace.decision.levels["w"] for grace in graces] == [
            LOW if epoch == 0 else level if epoch == 3 else HIGH
        ] * 2


def test_an_epoch_does_not_end_in_the_middle_of_a_step():
    (grace,) = workers(TOPK, 1)
    grace.build({"v": np.zeros(2000, np.float32), "w": np.zeros(2000, np.float32)})
    grace.start("w", normal(2000))
    with pytest.raises(RuntimeError, match="a step is under way"):
        grace.end_epoch()


# -- names, levels and what is refused --------------------------------------------------------------------------------
REFUSED = [
    ({"compressor": "topk", "policy": "acordion"}, r"unknown policy 'acordion' \(did you mean 'accordion'\?\)"),
    ({"compressor": "topk", "policy": "accordion"}, "policy 'accordion' needs k_low"),
    ({"compressor": "topk", "k_low": 0.1}, "key 'k_low' belongs to policy 'accordion', not to 'topk'"),
    ({**TOPK, "windw": 3}, r"unknown key 'windw' \(did you mean 'window'\?\)"),
    ({**TOPK, "k_low": {"compress_rank": 2}}, "compressor 'topk' has no field 'compress_rank'; it has compress_ratio"),
    ({**TOPK, "k_low": {"compress_ratio": "0.1"}}, "compress_ratio='0.1' must be of type float"),
    ({**TOPK, "k_low": 2.0}, r"compress_ratio=2.0 must lie in \(0, 1\]"),
    ({**RANK, "k_low": 2.5}, "compress_rank=2.5 must be of type int"),
    ({"compressor": "terngrad", "policy": "accordion", "k_low": 3}, "none of the fields .* it has block_size, clip"),
    ({"compressor": "fp16", "policy": "accordion", "k_low": {"bits": 3}}, "'fp16' has no field 'bits'; it has none"),
    ({**TOPK, "eta": 0.0}, "eta=0.0 must be positive"),
    ({**TOPK, "window": 0}, "window=0 must be at least 1"),
    ({**TOPK, "granularity": "tensor"}, "granularity='tensor': choose 'layer' or 'model'"),
    ({**TOPK, "norm_source": "all"}, "norm_source='all': choose"),
    ({"compressor": "qsgd", "policy": "warmup"}, "lowers compress_ratio, which 'qsgd' has not"),
    ({"compressor": "topk", "policy": "warmup", "warmup_factor": 1.0}, "warmup_factor=1.0 must lie"),
    ({"compressor": "topk", "policy": "accordion_batch", "batch_growth": 1}, "batch_growth=1 must be at least 2"),
    ({"compressor": "qsgd", "policy": "accordion", "k_low": 1, "memory": "residual"}, "diverges with 'qsgd'"),
]  # fmt: skip


@pytest.mark.parametrize("params, message", REFUSED, ids=lambda value: str(value)[:60])
def test_refusals_name_the_remedy(params, message):
    with pytest.raises(ValueError, match=message):
        build(**params)


def test_levels_that_would_change_the_memory_are_refused():
    params = {"compressor": "qsgd", "communicator": "twostage", "policy": "accordion", "memory": "residual"}
    graces = workers({**params, "k_low": {"bucket_size": 4096}}, 3)
    with pytest.raises(ValueError, match=r"'server/memory/residual' of 'w' outlasts a change of level"):
        graces[0].build({"w": np.zeros(5000, np.float32)})


def test_a_tensor_is_compressed_where_every_level_applies():
    grc = build(**{**RANK, "k_low": 8}, min_numel=0)
    grc.build({"w": np.zeros((10, 128), np.float32), "v": np.zeros((40, 40), np.float32)})
    assert {tensor.name: tensor.method for tensor in grc.report().tensors} == {"w": "dense", "v": "powersgd"}
    assert grc.decision.levels == {"v": LOW}


def test_registered():
    assert list(policies) == ["accordion", "accordion_batch", "auto", "warmup"]
    chain = at_level(compressors["chain"](), {"compress_ratio": 0.3, "quantum_num": 100})
    assert (chain.sparsifier.compress_ratio, chain.quantizer.quantum_num) == (0.3, 100)
    own = build(compressor="topk", policy=Warmup(warmup_ratio=0.5))
    assert own.schedule.policy == Warmup(warmup_ratio=0.5)
    assert build(**TOPK).schedule.levels == ({"compress_ratio": 0.1}, {"compress_ratio": 0.01})


def test_a_policy_of_ones_own():
    class Halves(Policy):
        def levels(self, compressor):
            return tuple({"compress_ratio": 0.5**n} for n in range(1, 4))

        def on_epoch_end(self, decision, epoch, lr, next_lr, norms):
            assert norms == {}
            return Decision(dict.fromkeys(decision.levels, epoch + 1))

    found = simulate({"compressor": "topk", "policy": Halves()}, [{"w": normal(2048)}], steps=5, steps_per_epoch=1)
    assert found.report.bytes_sent == 8 * (1024 + 512 + 256 + 256 + 256)


def test_without_a_policy_an_epochs_end_changes_nothing(xp):
    (grace,) = workers({"compressor": "topk"}, 1)
    grace.build({"w": xp.zeros(2000)})
    assert grace.end_epoch(lr=0.1, next_lr=0.01) == Decision({})
    assert grace.state_dict()["policy"] is None
    assert "level" not in str(grace.report())


def test_tensors_that_come_later():
    (grace,) = workers({**TOPK, "granularity": "model", "window": 1}, 1)
    grace.build({"w": np.zeros(2000, np.float32)})
    for _ in range(2):
        grace.step({"w": normal(2000)})
        grace.end_epoch()
    grace.build({"v": np.zeros(2000, np.float32)})
    assert grace.decision.levels == {"w": HIGH, "v": HIGH}
    grace.step({"w": normal(2000), "v": normal(2000)})
    grace.end_epoch()
    assert grace.report().tensors[0].levels[-1][0] == 2


@pytest.mark.parametrize("fuse", ["bucket", "model"])
def test_fused_tensors_have_one_level(xp, fuse):
    found = simulate({**TOPK, "fuse": fuse}, sequence(2), xp.name, steps_per_epoch=STEPS)
    (past,) = levels_of(found.report).values()
    assert len(past) > 1


# -- the report -------------------------------------------------------------------------------------------------------
def test_the_report_shows_levels_over_time(tmp_path):
    found = simulate(TOPK, sequence(2), steps_per_epoch=STEPS).report
    (row,) = [tensor for tensor in found.tensors if tensor.name == "jumps"]
    assert row.levels == [
        (0, {"compress_ratio": 0.1}),
        (3, {"compress_ratio": 0.01}),
        (5, {"compress_ratio": 0.1}),
        (7, {"compress_ratio": 0.01}),
    ]
    assert row.level == "compress_ratio=0.01"
    assert "compress_ratio=0.01" in str(found)
    assert found.to_dict()["tensors"][0]["levels"]
    pytest.importorskip("matplotlib")
    from grace.bench.show import plot_levels

    plot_levels(found, EPOCHS, str(tmp_path / "levels.png"))
    assert (tmp_path / "levels.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("name", BACKENDS)
def test_zeros_are_critical(name):
    found = simulate({**TOPK, "window": 1}, [{"w": np.zeros(2000, np.float32)}], name, steps=3, steps_per_epoch=1)
    assert levels_of(found.report) == {"w": [(0, LOW)]}


# -- doors ------------------------------------------------------------------------------------------------------------
def trained(policy, scale_lr=False, lr_scheduler=None):
    """A tiny network in PyTorch: its Grace, optimizer and policy scheduler."""
    torch = pytest.importorskip("torch")
    import grace

    torch.manual_seed(0)
    net = torch.nn.Linear(20, 30)
    grc = build(min_numel=0, compressor="topk", compress_ratio=0.1, **policy)
    optimizer = torch.optim.SGD([{"params": [net.weight], "lr": 0.1}, {"params": [net.bias], "lr": 0.2}])
    grace.torch.DistributedOptimizer(optimizer, grc, net.named_parameters())
    rates = lr_scheduler(optimizer) if lr_scheduler else None
    return net, grc, optimizer, rates, grace.torch.PolicyScheduler(optimizer, scale_lr=scale_lr, lr_scheduler=rates)


def test_batches_grow_in_pytorch_and_updates_are_counted():
    torch = pytest.importorskip("torch")
    policy = {"policy": "accordion_batch", "batch_growth": 4, "window": 2}
    net, grc, optimizer, _, scheduler = trained(policy, scale_lr=True)
    x, steps, updates = torch.randn(8, 20), [], 0
    for _ in range(6):
        micro = grc.decision.micro_steps
        steps.append(micro)
        for _ in range(8 // micro):
            optimizer.zero_grad()
            for part in range(micro):
                assert grc.started == set(), f"pass {part} was exchanged too early"
                (net(x).sum() / micro).backward()
            optimizer.step()
            updates += 1
        scheduler.step()
    assert steps == [1, 1, 1, 4, 4, 4]  # equal gradients in every epoch, so the norm is steady
    assert grc.report().steps == updates == sum(8 // micro for micro in steps)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.4), pytest.approx(0.8)]


def test_the_rates_scheduler_goes_on_from_the_larger_rate():
    torch = pytest.importorskip("torch")

    def made(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 ** (epoch >= 6))

    policy = {"policy": "accordion_batch", "batch_growth": 4, "window": 1}
    net, grc, optimizer, rates, scheduler = trained(policy, scale_lr=True, lr_scheduler=made)
    seen = []
    for _ in range(7):
        optimizer.zero_grad()
        for _ in range(grc.decision.micro_steps):
            net(torch.ones(8, 20)).sum().backward()
        optimizer.step()
        rates.step()
        scheduler.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == [pytest.approx(x) for x in (0.1, 0.4, 0.4, 0.4, 0.4, 0.2, 0.2)]


def test_the_scheduler_reads_rates_and_is_saved():
    torch = pytest.importorskip("torch")
    import grace

    net, grc, optimizer, _, scheduler = trained({"policy": "accordion", "k_low": 0.5, "window": 2})
    levels = []
    for epoch in range(7):
        optimizer.zero_grad()
        net(torch.ones(8, 20)).sum().backward()
        optimizer.step()
        if epoch == 3:
            optimizer.param_groups[1]["lr"] *= 0.5  # for one group only
            saved = copy.deepcopy(scheduler.state_dict())
            scheduler = grace.torch.PolicyScheduler(optimizer, grc)
            scheduler.load_state_dict(saved)
        scheduler.step()
        levels.append(grc.decision.levels["weight"])
    assert levels == [LOW, LOW, HIGH, LOW, HIGH, HIGH, HIGH]
    del optimizer.param_groups[1]  # a removed group has no learning rate
    scheduler.step()
    assert scheduler.state_dict() == {"rates": [0.1]}
    with pytest.raises(ValueError, match="not distributed: name the Grace"):
        grace.torch.PolicyScheduler(torch.optim.SGD(net.parameters(), 0.1))


def test_keras_refuses_batches_that_it_cannot_add_up():
    keras = pytest.importorskip("keras")
    backend("tensorflow")
    import grace

    grc = build(policy="accordion_batch")
    with pytest.raises(ValueError, match=r"'accordion_batch' adds up gradients .* loop of your own"):
        grace.tensorflow.DistributedOptimizer(keras.optimizers.SGD(0.1), grace=grc)


@pytest.mark.slow
# -- Accordion's benefit in a short training; `python -m benchmarks.accordion` runs the full experiment ---------------
def test_accordion_recovers_what_much_compression_loses():
    from benchmarks import accordion

    found = accordion.run("powersgd", False, seed=0, epochs=10, arms=("low", "accordion", "high"))
    result = accordion.summary("powersgd", False, [found])
    assert found["low"]["loss"] < found["accordion"]["loss"] < found["high"]["loss"]
    assert result["recovered"] >= 0.7, result
    assert result["floats"] <= 0.8, result  # the first three of 10 epochs are always low
    # By formula, an epoch of 46 steps sends r (a + b) floats and the biases of every layer.
    floats = 0
    for layer, sizes in enumerate(itertools.pairwise(accordion.SIZES)):
        for level in found["accordion"]["levels"][f"w{layer}"]:
            floats += 46 * (level["compress_rank"] * sum(sizes) + sizes[1])
    assert found["accordion"]["floats"] == floats


def test_a_placebo_has_as_many_low_epochs_elsewhere():
    from benchmarks import accordion

    low, high = {"compress_rank": 8}, {"compress_rank": 1}
    levels = {"w": [low] * 5 + [high] * 35, "v": [low] * 3 + [high] * 37}
    plan = dict(accordion.placebo(levels, low, 40, seed=0))
    assert {name: len(set(epochs)) for name, epochs in plan.items()} == {"w": 5, "v": 3}
    assert not {0, 1, 2, 24, 25, 32, 33} & {epoch for epochs in plan.values() for epoch in epochs}
    assert accordion.better([3, 2, 4, 5, 6], [1, 1, 1, 1, 1]) == 1 / 32
    assert accordion.better([1, 1], [1, 1]) == 1


def test_larger_batches_need_fewer_updates_for_the_same_loss():
    from benchmarks import accordion

    epochs, per_epoch, growth = 8, accordion.CHUNK // (accordion.WORKERS * accordion.BATCH), 4
    policy = {"policy": "accordion_batch", "window": accordion.WINDOW, "batch_growth": growth}
    small = accordion.train({"compressor": "none"}, 1, epochs)
    large = accordion.train({"compressor": "none", **policy}, 1, epochs, scale_lr=True)
    assert large["loss"] <= 1.02 * small["loss"]
    assert small["updates"] == per_epoch * epochs
    grown = [
        sum(per_epoch // m for m in [1] * e + [growth] * (epochs - e)) for e in range(1, epochs)
    ]  # if batches grow from epoch e on
    assert large["updates"] in grown


@pytest.mark.slow
def test_the_placebo_does_as_well():
    """Contrary to the paper: the same number of low epochs at random times helps as much, here and over five seeds."""
    from benchmarks import accordion

    found = accordion.run("powersgd", False, seed=0, epochs=40, arms=("accordion", "placebo"))
    assert found["placebo"]["floats"] == pytest.approx(found["accordion"]["floats"], rel=0.02)
    assert found["placebo"]["levels"] != found["accordion"]["levels"]
    assert abs(found["placebo"]["accuracy"] - found["accordion"]["accuracy"]) < 0.02
