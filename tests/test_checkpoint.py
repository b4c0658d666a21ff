"""State files: complete, atomic, never executed; and runs that resume with another number of workers."""

import importlib
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import launch

from grace import checkpoint, grace_from_params
from grace.core import Resize
from grace.core.registry import compressors, memories
from grace.engine.reshard import parsed, stage
from grace.testing.cases import lockstep
from grace.transports.local import LocalTransport, World

SHAPES = {"a": (40, 50), "b": (3000,), "c": (7,)}
METHODS = {
    "topk": {"compressor": "topk", "compress_ratio": 0.05},
    "powersgd": {"compressor": "powersgd"},
    "dgc": {"compressor": "topk", "memory": "dgc"},
    "ef21": {"compressor": "topk", "memory": "ef21"},
    "ef21 of momenta": {"compressor": "topk", "memory": "ef21", "momentum": 0.3},
    "econtrol": {"compressor": "topk", "memory": "econtrol"},
    "diana": {"compressor": "qsgd", "memory": "diana"},
    "two-stage": {"compressor": "efsignsgd", "block_size": 64, "communicator": "twostage"},
    "adam": {"compressor": "efsignsgd", "memory": "onebit_adam", "freeze_step": 2},
    "signum": {"compressor": "signum"},
    "adacomp": {"compressor": "adacomp"},
    "lowpass": {"compressor": "cltk"},
    "machines": {"compressor": "topk", "communicator": "hierarchical", "node_size": 2},
}


def made(params, size, tensors=None):
    world = World(size)
    graces = [grace_from_params({"min_numel": 100, **params}, LocalTransport(world, rank)) for rank in range(size)]
    for grace in graces:
        grace.build(tensors or {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    return graces


def gradients(step, size):
    rngs = [np.random.default_rng([step, rank]) for rank in range(size)]
    return [{name: rng.standard_t(3, shape).astype(np.float32) for name, shape in SHAPES.items()} for rng in rngs]


def train(graces, steps, first=0):
    found = []
    for step in range(first, first + steps):
        found += [mean for worker in lockstep(graces, gradients(step, len(graces))) for mean in worker.values()]
    return found


def saved(graces, folder):
    for grace in graces:
        checkpoint.save(grace, folder)
    return folder


def loaded(params, size, folder):
    graces = made(params, size)
    for grace in graces:
        grace.transport.exchange = lambda text: [text]  # a single thread: no other worker would answer
    return graces, [checkpoint.load(grace, folder) for grace in graces]


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_run_goes_on_bit_for_bit(name, tmp_path):
    straight = made(METHODS[name], 2)
    train(straight, 3)
    saved(straight, tmp_path)
    again, steps = loaded(METHODS[name], 2, tmp_path)
    assert steps == [3, 3]
    for one, other in zip(train(straight, 3, 3), train(again, 3, 3), strict=True):
        assert np.array_equal(one, other)


def test_every_backends_state_comes_back(xp, tmp_path):
    grace = grace_from_params({"compressor": "topk", "min_numel": 0}, "local")
    grace.build({"a": xp.zeros((40, 50))})
    grace.step({"a": xp.asarray(np.random.default_rng(0).standard_normal((40, 50)), "float32")})
    checkpoint.save(grace, tmp_path)
    other = grace_from_params({"compressor": "topk", "min_numel": 0}, "local")
    checkpoint.load(other, tmp_path)  # load before the tensors are known
    other.build({"a": xp.zeros((40, 50))})
    assert other.state_dict()["step"] == 1
    assert other.report().steps == 0, "what another object sent is not in its bytes either"
    one, two = (np.asarray(g.state_dict()["tensors"]["a"]["memory/residual"]) for g in (grace, other))
    assert np.array_equal(one, two)
    assert np.abs(one).sum() > 0


def test_a_tensorflow_checkpoint_holds_it_too(tmp_path):
    tf = pytest.importorskip("tensorflow")
    import grace

    graces = [grace_from_params({"compressor": "topk", "min_numel": 0}, "local") for _ in range(2)]
    for each in graces:
        each.build({"a": tf.zeros((40, 50))})
    graces[0].step({"a": tf.random.stateless_normal((40, 50), (1, 2))})
    path = tf.train.Checkpoint(grace=grace.tensorflow.CheckpointState(graces[0])).write(str(tmp_path / "here"))
    tf.train.Checkpoint(grace=grace.tensorflow.CheckpointState(graces[1])).read(path).assert_consumed()
    one, two = (each.state_dict()["tensors"]["a"]["memory/residual"] for each in graces)
    assert np.array_equal(one, two)
    assert np.any(one)


# -- before the tensors are known --------------------------------------------------------------------------------------
def unbuilt(rank, size=2):
    return grace_from_params(
        {"compressor": "topk", "compress_ratio": 0.05, "min_numel": 100}, LocalTransport(World(size), rank)
    )


def build(grace):
    grace.build({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})


def two_checkpoints(folder):
    graces = made(METHODS["topk"], 2)
    for _ in range(2):
        train(graces, 3)
        saved(graces, folder)
    return graces


def test_a_state_that_waits_for_its_tensors_is_counted_and_saved_as_it_is(tmp_path):
    two_checkpoints(tmp_path / "first")
    again = unbuilt(1)
    assert again.steps == 0
    checkpoint.load(again, tmp_path / "first")
    assert again.steps == 6
    assert checkpoint.save(again, tmp_path / "second").parent.name == "step-000000006"
    once_more = unbuilt(1)
    checkpoint.load(once_more, tmp_path / "second")
    for grace in (again, once_more):
        build(grace)
    one, two = (grace.state_dict()["tensors"]["a"]["memory/residual"] for grace in (again, once_more))
    assert np.array_equal(one, two)
    assert np.any(one)
    assert once_more.steps == 6


def test_states_of_other_workers_that_wait_for_their_tensors_are_not_saved(tmp_path):
    two_checkpoints(tmp_path)
    grace = unbuilt(0, 3)
    checkpoint.load(grace, tmp_path)
    assert grace.steps == 6
    with pytest.raises(RuntimeError, match="run a step first"):
        checkpoint.save(grace, tmp_path)


def test_before_the_tensors_are_known_workers_take_the_last_step_that_all_have(tmp_path):
    two_checkpoints(tmp_path)
    (tmp_path / "step-000000006" / "worker-00001-of-00002.grace").unlink()
    assert [checkpoint.load(unbuilt(rank), tmp_path) for rank in range(2)] == [3, 3]


def test_workers_that_loaded_different_steps_all_raise_when_they_are_built(tmp_path):
    two_checkpoints(tmp_path)
    graces = [unbuilt(0), unbuilt(1), unbuilt(1)]
    for grace, step in zip(graces, (6, 3), strict=False):
        checkpoint.load(grace, tmp_path, step)
    texts = []
    for grace in graces:
        grace.transport.exchange = lambda text: texts.append(text) or [text]
        build(grace)
    assert len(texts) == 3
    for mine, theirs in (("of step 6", "of step 3"), ("of step 6", "none")):
        other = next(text for text in texts if theirs in text)
        for rank in range(2):
            grace = unbuilt(rank)
            if rank == 0 or theirs != "none":
                checkpoint.load(grace, tmp_path, 3 if rank else 6)
            grace.transport.exchange = lambda text, rank=rank, other=other: [texts[0], text] if rank else [text, other]
            with pytest.raises(ValueError, match=f"loaded is {mine} on the one and {theirs} on the other"):
                build(grace)


# -- another number of workers -----------------------------------------------------------------------------------------
def sums(graces):
    """The sums over all workers that a change of their number must keep, by each key's rule."""
    totals = {}
    for grace in graces:
        state = grace.state_dict()
        for unit, cells in state["tensors"].items():
            for key, array in cells.items():
                point, part, field = parsed(key)
                rule = grace.method.reshard(part).get(field)
                if rule is not None:
                    start, count = state["points"][unit][point]
                    shape = np.zeros(sum(int(np.prod(s)) for s in SHAPES.values()))
                    place = unit, f"{stage(point)}/{part}/{field}"
                    total, holders = totals.setdefault(place, (shape, shape.copy()))
                    total[start : start + count] += np.asarray(array, np.float64)
                    holders[start : start + count] += 1
    return {
        name: total if name[1].endswith("residual") else total / np.maximum(holders, 1)
        for name, (total, holders) in totals.items()
    }


def check_kept(old, new, before, after):
    """Assert that ``new`` holds all of ``old``, even if one exchanges in one round and the other in two."""
    cut = {unit for unit, _ in set(old) ^ set(new)}
    old, new = in_gradients(old, cut, before), in_gradients(new, cut, after)
    assert set(new) == set(old)
    for key in old:
        np.testing.assert_allclose(new[key], old[key], atol=2e-5 * max(1, np.abs(old[key]).max()), err_msg=str(key))


def in_gradients(totals, cut, workers):
    """For the units in ``cut``: residuals of both compressions in units of the summed gradients, means of the first."""
    found = {}
    for (unit, key), total in totals.items():
        server, field = key.startswith("server/"), key.rpartition("/")[2]
        if unit not in cut:
            found[unit, key] = total
        elif field == "residual":
            found[unit, field] = found.get((unit, field), 0) + total * (workers if server else 1)
        elif not server:
            found[unit, field] = total
    return found


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "sizes", [(4, 2), (2, 4), (4, 3), (3, 4), (1, 4), (4, 1)], ids=lambda sizes: "{}-{}".format(*sizes)
)
def test_nothing_is_lost_when_the_number_of_workers_changes(name, sizes, tmp_path):
    before, after = sizes
    if name == "machines" and (before % 2 or after % 2):
        with pytest.raises(ValueError, match="machines of equal size"):
            made(METHODS[name], before if before % 2 else after)
        return
    graces = made(METHODS[name], before)
    train(graces, 4)
    old = sums(graces)
    assert old
    resized, steps = loaded(METHODS[name], after, saved(graces, tmp_path))
    assert steps == [4] * after
    check_kept(old, sums(resized), before, after)
    for mean in train(resized, 2, 4):
        assert np.isfinite(mean).all()


def reset(name, graces, size, gone):
    """Reset Graces to a world of another size: first the surviving ones, then new ones."""
    left = [grace for grace in graces if grace.rank not in gone]
    states, world = [grace.state_dict() for grace in left], World(size)
    left = [*left[:size], *made(METHODS[name], size)[len(left) :]]
    for rank, grace in enumerate(left):
        grace.reset(LocalTransport(world, rank), states)
    return left


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("gone, size", [((1,), 3), ((0, 3), 4), ((), 4), ((2,), 4)], ids=str)
def test_what_the_workers_have_that_are_left_is_kept(name, gone, size):
    graces = made(METHODS[name], 4)
    if name == "machines" and size % 2:
        with pytest.raises(ValueError, match="machines of equal size"):
            reset(name, graces, size, gone)
        return
    train(graces, 4)
    old = sums([grace for grace in graces if grace.rank not in gone])
    tracked = {key for key in old if Resize.TRACKED is rule_of(graces[0], key[1])}
    after = reset(name, graces, size, gone)
    new = {key: total for key, total in sums(after).items() if key not in tracked}
    check_kept({key: total for key, total in old.items() if key not in tracked}, new, 4, size)
    for mean in train(after, 2, 4):
        assert np.isfinite(mean).all()
    assert {grace.state_dict()["step"] for grace in after} == {6}


def test_a_worker_that_alone_is_left_shares_with_a_new_one():
    graces = made(METHODS["topk"], 2)
    train(graces, 3)
    old = sums(graces[:1])
    new = sums(reset("topk", graces, 2, (1,)))  # worker 0 keeps its rank, and the number of workers is the same
    for key in old:
        np.testing.assert_allclose(new[key], old[key], atol=1e-5)


def test_a_new_worker_takes_the_policy_over_but_not_worker_0s_sums():
    params = {"compressor": "topk", "policy": "accordion", "k_low": 0.1, "k_high": 0.01}
    graces = made(params, 2)
    train(graces, 3)
    states, world = [grace.state_dict() for grace in graces], World(3)
    assert [bool(state["policy"]["sums"]) for state in states] == [True, False]
    graces.append(made(params, 3)[2])
    for rank, grace in enumerate(graces):
        grace.reset(LocalTransport(world, rank), states)
    after = [grace.state_dict()["policy"] for grace in graces]
    assert [bool(policy["sums"]) for policy in after] == [True, False, False]
    assert all(policy["levels"] == states[0]["policy"]["levels"] for policy in after)


def rule_of(grace, key):
    _, part, field = parsed(key)
    return grace.method.reshard(part).get(field)


@pytest.mark.parametrize("name", ["ef21", "diana"])
@pytest.mark.parametrize("gone, size", [((), 2), ((1,), 2), ((0, 2), 4)], ids=str)
def test_trackers_of_the_mean_stay_true(name, gone, size):
    graces = made(METHODS[name], 3)
    train(graces, 4)
    track = {"ef21": "memory/estimate", "diana": "memory/shift"}[name]
    for steps in range(3):  # directly after the reset, and after further steps
        if steps == 0:
            graces = reset(name, graces, size, gone)
        else:
            train(graces, 1, 3 + steps)
        states = [grace.state_dict()["tensors"]["b"] for grace in graces]
        mean = np.mean([state[track] for state in states], 0)
        assert np.abs(mean).max() > 0.01
        np.testing.assert_allclose(mean, states[0]["memory/mean"], atol=1e-5)


def test_a_reset_keeps_a_workers_own_state_and_drops_the_step_under_way():
    straight, again = made(METHODS["topk"], 2), made(METHODS["topk"], 2)
    for graces in (straight, again):
        train(graces, 3)
    world = World(2)
    for rank, grace in enumerate(again):
        grace.start("b", gradients(3, 2)[rank]["b"])
        grace.reset(LocalTransport(world, rank))
        assert grace.report().steps == 0
        assert not grace.started
    for one, other in zip(train(straight, 3, 3), train(again, 3, 3), strict=True):
        assert np.array_equal(one, other)


def test_a_reset_that_cannot_be_changes_nothing():
    graces = made(METHODS["machines"], 4)
    train(graces, 2)
    states = [grace.state_dict() for grace in graces]
    with pytest.raises(ValueError, match="machines of equal size"):
        graces[0].reset(LocalTransport(World(3), 0), states)
    with pytest.raises(ValueError, match=r"give the states of all 4 workers"):
        graces[1].reset(LocalTransport(World(2), 1))
    train(graces, 1, 2)
    assert {grace.state_dict()["step"] for grace in graces} == {3}


class Joining(LocalTransport):
    """A transport that workers may join later; it records what it exchanges."""

    elastic = True

    def __init__(self):
        super().__init__(World(2))
        self.told = []

    def exchange(self, text):
        self.told.append(text)
        return [text, text.replace('"c"', '"d"') if len(self.told) > 1 else text]


def test_where_workers_join_nothing_is_said_before_they_meet():
    transport = Joining()
    grace = grace_from_params({"compressor": "topk"}, transport)
    grace.build({"a": np.zeros(3000, np.float32)})
    grace.build({"b": np.zeros(3000, np.float32)})
    assert not transport.told
    grace.settle()
    assert len(transport.told) == 1
    assert '"a"' in transport.told[0]
    assert '"b"' in transport.told[0]
    grace.settle()
    assert len(transport.told) == 1
    grace.build({"c": np.zeros(3000, np.float32)})
    with pytest.raises(ValueError, match=r"only worker 0 has \['c'\]"):
        grace.start("c", np.zeros(3000, np.float32))


@pytest.mark.filterwarnings("ignore:.*without error feedback")
def test_what_is_not_declared_is_the_same_on_all_workers():
    """A law of memories and compressors: new workers get copies of one worker's state where no rule is declared."""
    tried = set()
    for name in [*compressors, *memories]:
        params = {"compressor": name} if name in compressors else {"compressor": "topk", "memory": name}
        if name in memories:
            partners = {
                "diana": "qsgd",
                "decoupled": "dion",
                **dict.fromkeys(("onebit_adam", "efsignsgd"), "efsignsgd"),
            }
            params["compressor"] = partners.get(name, params["compressor"])
        if name == "efsignsgd":
            params["memory"] = "residual"
        graces = made(params, 2)
        train(graces, 3)
        one, two = (grace.state_dict()["tensors"] for grace in graces)
        for unit, cells in one.items():
            for key, array in cells.items():
                _, part, field = parsed(key)
                rules = graces[0].method.reshard(part)
                if rules.get(field, Resize.SAME) is Resize.SAME or (field, Resize.TRACKED) in (
                    ("mean", rule) for rule in rules.values()
                ):
                    tried.add(key)
                    assert np.array_equal(array, two[unit][key]), f"{name}: {key} of {unit} differs between workers"
    assert {"compressor/q", "memory/mean", "memory/second"} <= tried


def test_states_that_were_not_saved_together_are_refused(tmp_path):
    graces = made(METHODS["topk"], 3)
    train(graces, 2)
    states = [grace.state_dict() for grace in graces]
    (alone,) = made(METHODS["topk"], 1)
    with pytest.raises(ValueError, match=r"workers \[0, 2\], but the run had 3"):
        alone.load_state_dict(states[0], states[2])
    with pytest.raises(ValueError, match=r"worker 1's state has step 7.*were not saved together"):
        alone.load_state_dict(states[0], {**states[1], "step": 7}, states[2])
    alone.load_state_dict(*states)
    assert alone.state_dict()["step"] == 2


WRONG_PARTS = {
    "a world without end": ({"world_size": 2**40}, "give those of all of them"),
    "a place beyond the tensor": ({"points": {"a": {"": [0, 2000]}, "b": {"": [2**40, 3000]}}}, "the places of 'b'"),
    "a place of another size": ({"points": {"a": {"": [0, 2000]}, "b": {"": [0, 1]}}}, r"shape \(3000,\), but is of 1"),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_states_of_another_number_of_workers_are_not_believed(name):
    states = [grace.state_dict() for grace in made(METHODS["topk"], 2)]
    change, message = WRONG_PARTS[name]
    (alone,) = made(METHODS["topk"], 1)
    with pytest.raises(ValueError, match=message):
        alone.load_state_dict({**states[0], **change}, {**states[1], **({} if "points" in change else change)})
    assert alone.report().steps == 0


def test_rows_of_sharded_training_do_not_follow():
    params, tensors = {"compressor": "topk", "communicator": "reducescatter"}, {"w": np.zeros((2, 300), np.float32)}
    states = [grace.state_dict() for grace in made(params, 2, tensors)]
    (alone,) = made(params, 1, {"w": np.zeros((1, 600), np.float32)})
    with pytest.raises(ValueError, match="resume with as many"):
        alone.load_state_dict(*states)


# -- files -------------------------------------------------------------------------------------------------------------
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    (grace,) = made(METHODS["topk"], 1)
    train([grace], 1)
    checkpoint.save(grace, tmp_path)
    train([grace], 1)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(grace, tmp_path)
    monkeypatch.undo()
    assert checkpoint.steps(tmp_path) == [1]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith(".grace")]
    assert loaded(METHODS["topk"], 1, tmp_path)[1] == [1]


def test_older_files_go_but_a_whole_checkpoint_stays(tmp_path):
    graces = made(METHODS["topk"], 2)
    for step in range(5):
        train(graces, 1, step)
        saved(graces, tmp_path)
        assert checkpoint.steps(tmp_path) == [max(1, step), step + 1][-(step + 1) :]
    train(graces, 1, 5)
    checkpoint.save(graces[0], tmp_path)  # as if the other worker had died before saving
    assert checkpoint.steps(tmp_path) == [5]
    checkpoint.save(graces[0], tmp_path, keep=0)
    with pytest.raises(ValueError, match=r"must be 0 .* or at least 2"):
        checkpoint.save(graces[0], tmp_path, keep=1)


def test_workers_may_remove_old_files_at_once(tmp_path, monkeypatch):
    graces = made(METHODS["topk"], 2)
    for step in range(2):
        train(graces, 1, step)
        saved(graces, tmp_path)
    train(graces, 1, 2)
    listed = checkpoint._listed

    def interrupted(folder):  # the other worker saves, and removes old files, while this one reads
        found = listed(folder)
        if folder.name == "step-000000001" and any(each.name.startswith("worker-00001") for each in found):
            monkeypatch.setattr(checkpoint, "_listed", listed)
            checkpoint.save(graces[1], tmp_path)
        return found

    monkeypatch.setattr(checkpoint, "_listed", interrupted)
    checkpoint.save(graces[0], tmp_path)
    assert checkpoint.steps(tmp_path) == [2, 3]
    assert not (tmp_path / "step-000000001").exists()
    assert checkpoint.steps(tmp_path / "nowhere") == []


def test_what_a_killed_worker_had_begun_goes_with_the_rest(tmp_path):
    graces = made(METHODS["topk"], 2)
    for step in range(4):
        train(graces, 1, step)
        if step == 1:  # killed while writing: no worker has a complete file of this step
            here = tmp_path / "step-000000002"
            here.mkdir()
            for rank in range(2):
                (here / f".worker-0000{rank}-of-00002.grace.4711").write_bytes(b"PK")
        else:
            saved(graces, tmp_path)
    assert checkpoint.steps(tmp_path) == [3, 4]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-000000003", "step-000000004"]


def test_several_workers_may_remove_an_old_folder_at_once(tmp_path, monkeypatch):
    (grace,) = made(METHODS["topk"], 1)
    unlink = Path.unlink

    def another_was_quicker(path, missing_ok=False):
        unlink(path, missing_ok)
        if path.suffix == ".grace":
            path.parent.rmdir()

    monkeypatch.setattr(Path, "unlink", another_was_quicker)
    for step in range(4):
        train([grace], 1, step)
        checkpoint.save(grace, tmp_path)
    assert checkpoint.steps(tmp_path) == [3, 4]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_missing_is_named(tmp_path):
    (grace,) = made(METHODS["topk"], 1)
    with pytest.raises(FileNotFoundError, match="has no checkpoint that all 1 workers can read"):
        checkpoint.load(grace, tmp_path / "nowhere")
    checkpoint.save(grace, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 9 \(but of \[0\]\)"):
        checkpoint.load(grace, tmp_path, step=9)


def test_a_damaged_file_is_refused_and_another_one_named(tmp_path):
    (grace,) = made(METHODS["topk"], 1)
    for _ in range(2):
        train([grace], 1)
        path = checkpoint.save(grace, tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    before = grace.state_dict()
    with pytest.raises(ValueError, match=r"is damaged.*Whole checkpoints are there of steps \[1\]"):
        checkpoint.load(grace, tmp_path)
    after = grace.state_dict()
    assert after["step"] == before["step"] == 2
    assert np.array_equal(after["tensors"]["b"]["memory/residual"], before["tensors"]["b"]["memory/residual"])
    assert checkpoint.load(grace, tmp_path, step=1) == 1


OTHERS = [
    ({"a": (40, 50), "b": (3000,)}, None),
    ({"a": (40, 50), "b": (3000,), "d": (200,)}, "name different tensors: .*'d'.* are not in the state"),
    ({"a": (40, 50)}, r"\['b'\] are not in the model"),
    ({"a": (50, 40), "b": (3001,)}, r"of 'b' has shape \(3000,\), but the model needs \(3001,\)"),
]


@pytest.mark.parametrize(("shapes", "message"), OTHERS)
def test_another_models_state_is_refused_and_changes_nothing(shapes, message, tmp_path):
    (grace,) = made(METHODS["topk"], 1)
    train([grace], 2)
    checkpoint.save(grace, tmp_path)
    (other,) = made(METHODS["topk"], 1, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    if message is None:
        assert checkpoint.load(other, tmp_path) == 2
        return
    with pytest.raises(ValueError, match=message):
        checkpoint.load(other, tmp_path)
    assert other.report().steps == 0
    assert not any(np.any(a) for cells in other.state_dict()["tensors"].values() for a in cells.values())


@pytest.fixture(scope="module")
def data():
    (grace,) = made(METHODS["topk"], 1)
    train([grace], 1)
    return checkpoint.to_bytes(grace.state_dict())


def same(one, two):
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, list):
        return isinstance(two, list) and len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and one.dtype == two.dtype and np.array_equal(one, two)
    return one == two


@given(place=st.floats(0, 1), value=st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_a_changed_byte_is_refused_or_changes_nothing(data, place, value):
    at = min(int(place * len(data)), len(data) - 1)
    changed = data[:at] + bytes([value]) + data[at + 1 :]
    try:
        found = checkpoint.from_bytes(changed)
    except ValueError:
        return
    assert same(found, checkpoint.from_bytes(data))


@given(length=st.floats(0, 1, exclude_max=True))
@settings(max_examples=100, deadline=None)
def test_a_file_that_ends_early_is_refused(data, length):
    with pytest.raises(ValueError, match=r"whole checkpoint|array"):
        checkpoint.from_bytes(data[: int(length * len(data))])


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match="whole checkpoint"):
        checkpoint.from_bytes(data)


def archive(text, **members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        zipped.writestr("state.json", text)
        for name, content in members.items():
            zipped.writestr(f"{name}.npy", content)
    return file.getvalue()


def header(text):
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


class Run:
    def __reduce__(self):
        return os.system, ("touch /tmp/executed",)


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


BAD = {
    "objects": archive('{"$array": 0}', **{"0": npy(np.array([Run()], dtype=object))}),
    "huge": archive('{"$array": 0}', **{"0": header("{'descr': '<f4', 'fortran_order': False, 'shape': (2**40,), }")}),
    "large": archive(
        '{"$array": 0}', **{"0": header("{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }")}
    ),
    "strings": archive('{"$array": 0}', **{"0": npy(np.array(["text"]))}),
    "absent": archive('{"$array": 3}'),
    "path": archive('{"$array": "../../etc/passwd"}'),
    "a list": archive("[1, 2]"),
    "no JSON": archive("{"),
    "deep": archive("[" * 100_000 + "]" * 100_000),
    "no header": archive('{"$array": 0}', **{"0": header("{'descr': '<f4', ")}),
    "no Python": archive('{"$array": 0}', **{"0": header(", (")}),
}


@pytest.mark.parametrize("name", BAD)
def test_archives_that_want_more_are_refused(name):
    with pytest.raises(ValueError, match=r"."):
        checkpoint.from_bytes(BAD[name])
    assert not os.path.exists("/tmp/executed")


WRONG = {
    "no format": {"format": None},
    "a newer format": {"format": 99},
    "another worker": {"rank": 1, "world_size": 2},
    "no step": {"step": "x"},
    "a step before the first": {"step": -1},
    "no worker": {"rank": True},
    "no method": {"method": None},
    "places elsewhere": {"points": {"a": {"": [0, 2000]}, "b": {"": [1, 3000]}}},
    "places of nothing": {"points": {"a": {"": [0, 2000]}, "b": {"": "x"}}},
    "whole numbers": {
        "tensors": {
            "a": {"memory/residual": np.zeros(2000, np.int32)},
            "b": {"memory/residual": np.zeros(3000, np.int32)},
        }
    },
    "a policy": {"policy": {}},
    "another method": {"method": "Other()"},
    "no tensors": {"tensors": [1, 2]},
    "no arrays": {"tensors": {"a": {"memory/residual": "zeros"}, "b": {"memory/residual": 1}}},
    "other keys": {"tensors": {"a": {"memory/other": np.zeros(2000)}, "b": {"memory/other": np.zeros(3000)}}},
}


@pytest.mark.parametrize("name", WRONG)
def test_states_that_make_no_sense_are_refused(name, data):
    (grace,) = made(METHODS["topk"], 1)
    state = {**checkpoint.from_bytes(data), **WRONG[name]}
    with pytest.raises(ValueError, match=r"."):
        grace.load_state_dict(state)
    with pytest.raises(ValueError, match=r"."):
        grace.load_state_dict({key: value for key, value in checkpoint.from_bytes(data).items() if key != "tensors"})
    assert grace.report().steps == 0


def test_a_state_is_plain_text_and_arrays(data):
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        names = zipped.namelist()
        state = json.loads(zipped.read("state.json"))
    assert names == ["state.json", "0.npy", "1.npy"]
    assert state["tensors"]["b"]["memory/residual"] == {"$array": 0}  # the last tensor's gradient comes first


def test_a_renamed_tensor_is_renamed_in_both_places():
    graces = made(METHODS["topk"], 2)
    train(graces, 2)
    states = [grace.state_dict() for grace in graces]
    for state in states:
        state["tensors"]["new"] = state["tensors"].pop("a")
    (alone,) = made(METHODS["topk"], 1)
    with pytest.raises(ValueError, match=r"where \['new'\] were cut.*state\['points'\] too"):
        alone.load_state_dict(*states)


# -- trainers that save one file for all workers -----------------------------------------------------------------------
@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    folder = tmp_path_factory.mktemp("out")
    return folder, launch("torchrun", 2, "one_file.py", folder)


@pytest.mark.processes
@pytest.mark.parametrize("how", [("accelerate", False), ("accelerate", True), "fabric"])
def test_one_file_for_all_workers_gives_each_its_own_state(one_file, how):
    for worker in one_file[1]:
        whole, resumed, steps = worker[how]
        assert np.array_equal(whole, resumed)
        assert steps == 6


@pytest.mark.processes
def test_one_file_of_two_workers_is_loaded_by_one(one_file):
    import torch

    folder, found = one_file
    alone = grace_from_params({"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0})
    alone.build({"w": torch.zeros(20, 10)})
    gathered = importlib.import_module("grace.torch").GatheredState(alone)
    gathered.load_state_dict(torch.load(folder / "gathered" / "custom_checkpoint_0.pkl"))
    (residual,) = alone.state_dict()["tensors"]["w"].values()
    np.testing.assert_allclose(residual, sum(worker["states"][0] for worker in found), rtol=1e-6)
    assert alone.steps == 3


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "mine", "other"),
    [
        (
            ("plain", False),
            "worker 1 cannot load its state: this is the state of worker 0",
            "trainers that save one file for all workers: grace.torch.Gath",
        ),
        (
            ("plain", True),
            "worker 1 cannot load its state: this is the state of worker 0",
            "trainers that save one file for all workers: grace.torch.Gath",
        ),
        ("swapped", "this is the state of worker 1 of 2, but this is worker 0", "the state of worker 0 of 2, but this"),
        ("spoiled", "worker 1 cannot load its state: this state belongs to another", "this state belongs to another"),
        *((name, "worker 1 cannot load its state: ", "") for name in ("a model", "no step", "no tensors", "a list")),
        ("no gathered state", "no state of a GatheredState", "no state of a GatheredState"),
    ],
)
def test_another_workers_state_is_an_error_on_all(one_file, what, mine, other):
    _, found = one_file
    for worker, text in zip(found, (mine, other), strict=True):
        assert worker[what].startswith("ValueError")
        assert text in worker[what]
        assert worker["unchanged"]
        assert worker["goes on"] == 2
