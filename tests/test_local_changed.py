"""Local training: weights changed outside its steps, workers that do different things, and renamed states."""

import re

import numpy as np
import pytest
from launch import launch
from methods import backend
from support.local import METHODS, SHAPES, START, Worker, drift, equal, finish, step, team

import grace
from grace.engine.handshake import OutOfStep
from grace.local import DiLoCo, LocalSGD, in_turn
from grace.transports.local import LocalTransport, World

processes = pytest.mark.processes


def made(method="topk", **settings):
    return lambda transport: DiLoCo(grace.grace_from_params(METHODS[method], transport), 4, **settings)


def train(workers, steps, begin=0):
    for t in range(begin, begin + steps):
        step(workers, lambda rank, t=t: drift(t, rank, SHAPES))


def mean(workers, name):
    return np.mean([worker.numpy(name).astype("f8") for worker in workers], 0)


# -- weights that were written since the last step ---------------------------------------------------------------------
@pytest.mark.parametrize("steps", [6, 8])
@pytest.mark.parametrize("who", [(0, 1, 2), (1,)])
def test_written_weights_become_their_plain_mean(xp, steps, who):
    """Weights written by all workers or one, within an interval or after a landing; the oracle is NumPy's mean."""
    workers = team(xp, 3, START, made(fragments=2, weights=2.0))
    train(workers, steps)
    for rank in who:
        for name in SHAPES:
            workers[rank]._put(name, workers[rank].values[name] * (0.5 + rank))
    wanted = {name: mean(workers, name) for name in SHAPES}
    before = workers[0].local.state_dict()
    finish(workers)
    for worker in workers:
        for name in SHAPES:
            np.testing.assert_allclose(worker.numpy(name), wanted[name], rtol=1e-6, atol=1e-6)
            assert np.array_equal(worker.numpy(name), workers[0].numpy(name))
            assert np.array_equal(worker.numpy(name), np.asarray(worker.local.global_state()["base"][name]))
    after = workers[0].local.state_dict()
    assert equal(after["momentum"], before["momentum"])
    assert equal(after["grace"], before["grace"])  # residuals
    assert after["landed"] == before["landed"] + 1
    train(workers, 4, steps)
    assert all(equal(worker.local.global_state(), workers[0].local.global_state()) for worker in workers)


def test_equal_weights_that_all_restore_are_left_to_the_bit():
    workers = team(backend("numpy"), 2, START, made())
    train(workers, 4)
    best = {name: workers[0].numpy(name) for name in SHAPES}  # directly after a landing: equal on all workers
    train(workers, 3, 4)
    for worker in workers:
        for name, value in best.items():
            worker._put(name, value)
    finish(workers)
    assert all(np.array_equal(worker.numpy(name), best[name]) for worker in workers for name in SHAPES)


def test_buffers_that_moved_alone_are_averaged_alone(xp):
    buffers = {"mean": np.ones(5, np.float32)}
    workers = team(xp, 2, START, lambda t: made()(t), buffers=buffers)
    train(workers, 4)
    before = [worker.local.report().bytes_sent for worker in workers]
    for rank, worker in enumerate(workers):
        worker._put("mean", worker.buffers["mean"] + 2.0 * rank)
    values = {name: workers[0].numpy(name) for name in SHAPES}
    finish(workers)
    assert [float(worker.numpy("mean")[0]) for worker in workers] == [2.0, 2.0]
    assert all(np.array_equal(worker.numpy(name), values[name]) for worker in workers for name in SHAPES)
    assert [worker.local.report().bytes_sent - b for worker, b in zip(workers, before, strict=True)] == [36 + 20] * 2


def test_a_state_loaded_after_a_landing_has_nothing_to_finish():
    """Buffers and parameters are the agreed ones, though these objects did not see them change."""
    buffers = {"mean": np.ones(5, np.float32)}
    workers = team(backend("numpy"), 2, START, made(), buffers=buffers)
    train(workers, 4)
    again = team(backend("numpy"), 2, START, made(), buffers=buffers)
    for worker, other in zip(workers, again, strict=True):
        for name in SHAPES:
            other._put(name, worker.numpy(name))
        other._put("mean", worker.numpy("mean") + 1)  # the change is equal on both workers
        other.local.load_state_dict(worker.local.state_dict())
    finish(again)
    assert [worker.local.landed for worker in again] == [1, 1]


def test_finish_before_the_first_step_takes_the_broadcast_weights_as_base():
    workers = team(backend("numpy"), 2, START, made())
    for worker in workers:
        worker._put("d", np.full(7, 3.0, np.float32))
    finish(workers)
    assert all(worker.local.landed == 0 for worker in workers)
    assert all(np.array_equal(worker.local.global_state()["base"]["d"], np.full(7, 3.0)) for worker in workers)


# -- workers that do different things ----------------------------------------------------------------------------------
def test_a_worker_that_finishes_alone_stops_all_and_nothing_changes():
    workers = team(backend("numpy"), 2, START, made())
    train(workers, 6)
    workers[1].move(drift(6, 1, SHAPES))
    in_turn([workers[1].local.stepping()])  # no exchange is due
    workers[1].move(drift(7, 1, SHAPES))
    runs = [workers[0].local.finishing(), workers[1].local.stepping()]
    before = [(worker.local.global_state(), {name: worker.numpy(name) for name in SHAPES}) for worker in workers]
    assert [next(run, "ended") for run in runs] == [None, None]  # both have sent what they are doing
    for rank, run in enumerate(runs):
        doing = [r"in finish\(\) after step 6", "in a regular exchange after step 8"][rank]
        text = rf"some are in finish\(\), others in a regular .* 6 to 8\. Worker {rank} of 2 is {doing}"
        with pytest.raises(OutOfStep, match=text):
            in_turn([run])
    after = [(worker.local.global_state(), {name: worker.numpy(name) for name in SHAPES}) for worker in workers]
    assert equal(before, after)
    assert [worker.local.landed for worker in workers] == [1, 1]


# -- states under other names ------------------------------------------------------------------------------------------
def built(names, transport=None, **settings):
    local = LocalSGD(grace.grace_from_params(METHODS["topk"], transport or LocalTransport()), 2, **settings)
    local.build({new: START[old].copy() for old, new in names.items()})
    return local


def stepped(names, **settings):
    worker = Worker(
        backend("numpy"),
        {new: START[old] for old, new in names.items()},
        lambda t: LocalSGD(grace.grace_from_params(METHODS["topk"], t), 2, **settings),
        LocalTransport(World(1), 0),
    )
    for t in range(3):
        worker.move({names[old]: change for old, change in drift(t, 0, SHAPES).items()})
        worker.local.step()
    return worker.local


PLAIN = {"a": "body.0.weight", "b": "body.0.bias", "c": "head.weight", "d": "head.bias"}
NAMES = {
    "torch.compile": {old: f"_orig_mod.{name}" for old, name in PLAIN.items()},
    "a compiled part": {**PLAIN, "a": "body._orig_mod.0.weight", "b": "body._orig_mod.0.bias"},
    "DistributedDataParallel": {old: f"module.{name}" for old, name in PLAIN.items()},
    "the bare names": {"a": "0.weight", "b": "0.bias", "c": "weight", "d": "bias"},
}
NUMBERED = {"a": "dense_4/kernel", "b": "dense_4/bias", "c": "dense_5/kernel", "d": "out/bias"}
KERAS = {old: "sequential/" + name.replace("_4", "").replace("_5", "_1") for old, name in NUMBERED.items()}
PAIRS = {
    **{f"to {name}": (PLAIN, other) for name, other in NAMES.items()},
    **{f"from {name}": (other, PLAIN) for name, other in NAMES.items()},
    "Keras": (KERAS, NUMBERED),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_state_of_the_same_model_under_other_names_is_taken(pair):
    saved, mine = PAIRS[pair]
    state = stepped(saved).state_dict()
    local = built(mine)
    local.load_state_dict(state)
    found = local.state_dict()
    assert local.steps == 3
    for old in SHAPES:
        for key in ("base", "momentum"):
            if state[key]:
                assert np.array_equal(found[key][mine[old]], state[key][saved[old]])
        theirs, now = (each["grace"]["tensors"] for each in (state, found))
        assert equal(theirs.get(saved[old]), now.get(mine[old]))
    assert theirs  # top-k has residuals
    waiting = LocalSGD(grace.grace_from_params(METHODS["topk"], LocalTransport()), 2)
    waiting.load_state_dict(state)
    waiting.build({new: START[old].copy() for old, new in mine.items()})
    assert equal(waiting.state_dict(), found)


def test_listed_fragments_are_renamed_too():
    listed = lambda names: [[names["a"], names["c"]], [names["b"], names["d"]]]  # noqa: E731
    compiled = NAMES["torch.compile"]
    state = stepped(PLAIN, fragments=listed(PLAIN)).state_dict()
    local = built(compiled, fragments=listed(compiled))
    local.load_state_dict(state)
    assert local.steps == 3
    with pytest.raises(ValueError, match="use the same settings"):
        built(compiled, fragments=listed(compiled)[::-1]).load_state_dict(state)


def test_a_state_whose_names_are_ambiguous_names_the_remedy():
    state = stepped(PLAIN).state_dict()
    layers = {f"layers.{number}.weight": np.ones((3, 3), np.float32) for number in range(2)}
    twins = LocalSGD(grace.grace_from_params(METHODS["topk"], LocalTransport()), 2)
    twins.build(layers)
    other = LocalSGD(grace.grace_from_params(METHODS["topk"], LocalTransport()), 2)
    other.build({f"blocks.{number}.weight": value for number, value in enumerate(layers.values())})
    short = LocalSGD(grace.grace_from_params(METHODS["topk"], LocalTransport()), 2)
    short.build({"1.weight": np.ones((3, 3), np.float32), "weight": np.ones((3, 3), np.float32)})  # both names match
    with pytest.raises(ValueError, match="names do not match by their ends"):
        short.load_state_dict(twins.state_dict())
    for local in (twins, other):
        with pytest.raises(ValueError, match=r"belongs to another model: .* rename the keys of state\['base'\]"):
            local.load_state_dict(state)
    with pytest.raises(ValueError, match="names do not match by their ends"):
        other.load_state_dict(twins.state_dict())
    assert other.steps == 0


# -- real processes ----------------------------------------------------------------------------------------------------
KINDS = {"torch": "torchrun", "horovod": "horovodrun", "tensorflow": "horovodrun"}


@pytest.fixture(scope="module", params=KINDS)
def changed(request, tmp_path_factory):
    """The findings of two workers of a kind."""
    kind = request.param
    return kind, launch(KINDS[kind], 2, "local_changed.py", tmp_path_factory.mktemp("out"), kind)


def means(workers, key):
    """Check that all workers have the float64 mean of their weights; returns each worker's own weights."""
    mine = [worker[key]["mine"] for worker in workers]
    for name in mine[0] if isinstance(mine[0], dict) else range(len(mine[0])):
        wanted = np.mean([np.asarray(each[name], "f8") for each in mine], 0)
        for worker in workers:
            got = worker[key]["all"][name]
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6, err_msg=f"{key} {name}")
            assert np.array_equal(got, workers[0][key]["all"][name]), (key, name)
    return mine


@processes
def test_all_have_the_mean_of_what_was_written(changed):
    kind, found = changed
    written = ["best in a slot", "best after a landing", "one worker", "in flight"]
    for key in [*written, *(["swa", "update_bn"] if kind == "torch" else [])]:
        mine = means(found, key)
        assert not equal(*mine)
        if key in written:
            before, after = found[0][key]["momentum"], found[0][key]["after"]
            assert equal(before, after)  # also of an exchange in flight, which is dropped
    for key in ("goes on in a slot", "goes on after a landing"):
        assert equal(found[0][key], found[1][key])


@processes
def test_what_steps_moved_takes_an_outer_step_and_a_second_finish_sends_a_handshake(changed):
    _, found = changed
    assert equal(found[0]["steps"]["all"], found[1]["steps"]["all"])
    for worker in found:
        assert not equal(worker["steps"]["momentum"], worker["steps"]["after"])
        assert equal(worker["nothing"]["all"], worker["steps"]["all"])
        assert worker["nothing"]["sent"] == 36
        assert worker["nothing"]["landed"] == worker["steps"]["landed"]


ERRORS = {
    "alone": r"some are in finish\(\), others in a regular exchange; .* 6 to [78]",
    "twice": r"some are in finish\(\), others in a regular exchange; .* 6 to 1?[08]",
    "a batch more": "different numbers of steps, 12 to 13",
    "two batches more": "different numbers of steps, 9 to 1[01]",
    "a slot more": "different numbers of steps, 12 to 1[46]",
}


@processes
def test_workers_that_do_different_things_all_raise(changed):
    """With one fragment, and with two of different sizes: there gloo would otherwise end the process."""
    kind, found = changed
    cases = [f"{name} {parts}" for name in ERRORS for parts in ((1, 2) if kind == "torch" else (2,))]
    for case in [*cases, "alone, with a delay"]:
        text = ERRORS[case.rstrip(" 12").removesuffix(", with a delay")]
        for rank, worker in enumerate(found):
            name, message, seconds = worker[case]
            assert name == "OutOfStep", (case, message)
            assert re.search(f"{text}.*Worker {rank} of 2 is in .*finish.. on all of them", message), (case, message)
            assert seconds < 10, case


@processes
def test_a_second_average_and_parameters_without_an_optimizer_are_refused(changed):
    kind, found = changed
    wanted = {"distributed": "Horovod's DistributedOptimizer averages the gradients.*the optimizer that it was made of"}
    if kind == "torch":
        wanted = {
            "distributed": r"^DistributedOptimizer averages the gradients .*grace\.torch\.release\(optimizer\)",
            "ddp": r"DistributedDataParallel averages the gradients .*the plain module, model\.module",
            "ddp later": r"DistributedDataParallel averages the gradients .*the plain module, model\.module",
            "no optimizer": "'head.weight', which is in no optimizer: .*Add it to a parameter group",
            "ddp of a machine": "^$",
            "frozen": "^$",
            "two optimizers": "^$",
        }
    for worker in found:
        for key, text in wanted.items() if kind != "tensorflow" else ():
            name, message, _ = worker[key]
            assert name == ("" if text == "^$" else "ValueError"), message
            assert re.search(text, message), (key, message)


@processes
@pytest.mark.parametrize("launcher, toolkit", [("torchrun", "torch"), ("horovodrun", "tensorflow")])
def test_after_fit_all_have_one_model_in_any_order_of_callbacks(launcher, toolkit, tmp_path):
    """The callbacks restore the best weights, average weights, or prune weights on one worker alone."""
    found = launch(launcher, 2, "local_callbacks.py", tmp_path, toolkit)
    keys = [key for key, value in found[0].items() if isinstance(value, dict)]
    assert len(keys) == (12 if toolkit == "torch" else 4)
    for key in keys:
        mine = means(found, key)
        if not key.startswith("best 8"):  # in "best 8" an epoch ends with a landing, so weights are equal
            assert any(not np.array_equal(one, other) for one, other in zip(*mine, strict=True)), key
    for worker in found:
        for batches in (7, 8) if toolkit == "torch" else (7,):
            first, last = (worker[f"best {batches} {order}"] for order in (True, False))
            assert first["epochs"] == last["epochs"] < 9
            assert all(np.array_equal(one, other) for one, other in zip(first["all"], last["all"], strict=True))
            assert "on_train_end" not in first["history"]
        for key in ("distributed", "scaled"):
            assert re.search(r"ValueError: this SGD is distributed.*grace\.keras\.release", worker[key])
        if toolkit == "torch":
            assert worker["released"] == ""
        else:
            assert "Use a plain optimizer: the one that Horovod's" in worker["horovod"]
