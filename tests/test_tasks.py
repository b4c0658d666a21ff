"""`grace bench tasks`: data, models and metrics are correct, and no measurement is lost."""

import csv
import dataclasses
import itertools
import json
import os
import pickle
import subprocess
import sys
import time
from io import BytesIO, StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("typer", reason="the grace command needs the extra [cli]")
from rich.console import Console
from support.schemas import problems, schema
from typer.testing import CliRunner

from grace import local
from grace.cli.app import app
from grace.compressors.studies.chunktopk import ChunkTopK
from grace_bench.lab import Loopback
from grace_bench.lab.launch import Outcome
from grace_bench.tasks import cluster, data, figures, plan, results, run, show, worker
from grace_bench.tasks.plan import Job
from grace_bench.tasks.tasks import TASKS, batch, rate, tasks
from grace_bench.tasks.worker import Worker

ROOT = Path(__file__).parents[1]
PARAMETERS = {"image": 620_714, "lstm": 1_065_680, "transformer": 914_896, "ncf": 602_945, "segmentation": 482_754}


@pytest.fixture(scope="module")
def made():
    """The synthetic data of every task."""
    return {name: task.data() for name, task in TASKS.items()}


# -- data --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", TASKS)
def test_batches_depend_on_worker_and_step_alone(made, name):
    again = TASKS[name].data()
    inputs, targets = batch(made[name], 12, rank=1, step=5)
    same_inputs, same_targets = batch(again, 12, rank=1, step=5)
    assert all(np.array_equal(a, b) for a, b in zip(inputs, same_inputs, strict=True))
    assert np.array_equal(targets, same_targets)
    for other in ({"rank": 0, "step": 5}, {"rank": 1, "step": 6}, {"rank": 1, "step": 5, "seed": 1}):
        assert not np.array_equal(inputs[0], batch(made[name], 12, **other)[0][0])
    assert targets.dtype == np.int64
    assert len(targets) == len(inputs[0]) == 12


def test_quality_of_whoever_knows_the_answer_and_of_whoever_guesses(made):
    """Each metric for perfect answers, and for guesses."""
    images, masks, text, pairs = made["image"], made["segmentation"], made["lstm"], made["ncf"]

    def oracle(found):
        known = {image.tobytes(): answer for image, answer in zip(*found.test, strict=True)}
        return lambda inputs: np.stack([np.eye(found.classes)[known[image.tobytes()]] for image in inputs[0]])

    assert images.quality(oracle(images)) == 1.0
    assert masks.quality(oracle(masks)) == 1.0
    assert images.quality(lambda inputs: np.eye(10)[np.zeros(len(inputs[0]), int)]) == pytest.approx(0.1, abs=0.04)
    everywhere = np.mean(masks.test[1])  # "shape" everywhere is right on this share of pixels
    assert masks.quality(lambda inputs: np.eye(2)[np.ones(inputs[0].shape[:3], int)]) == pytest.approx(everywhere)
    uniform = text.quality(lambda inputs: np.zeros((*inputs[0].shape, text.words), np.float32))
    assert uniform == pytest.approx(text.words, rel=1e-4)
    assert pairs.quality(lambda inputs: np.zeros(len(inputs[0]))) == 0.0, "ties count against the model"
    drawn = np.random.default_rng(0)
    assert pairs.quality(lambda inputs: drawn.random(len(inputs[0]))) == pytest.approx(0.1, abs=0.03)
    assert 0.1 < pairs.popularity < TASKS["ncf"].target, "the target takes more than popularity"


def test_examples_go_to_the_model_in_pieces_of_one_size():
    values = np.arange(613, dtype=np.float32)
    seen = []

    def predict(inputs):
        seen.append(len(inputs[0]))
        return inputs[0] * 2

    assert np.array_equal(data.in_pieces(predict, (values,)), values * 2)
    assert set(seen) == {data.PIECE}


def test_held_out_examples_are_never_drawn(made):
    pairs = made["ncf"]
    asked = {(int(u), int(i)) for u, i in zip(pairs._asked[:: data.RIVALS + 1], pairs._ranked[:, 0], strict=True)}
    assert len(asked) == 1000
    assert not asked & set(zip(pairs.users.tolist(), pairs.items.tolist(), strict=True))
    taken = set(zip(pairs.users.tolist(), pairs.items.tolist(), strict=True))
    rivals = zip(
        np.repeat(pairs._asked[:: data.RIVALS + 1], data.RIVALS), pairs._ranked[:, 1:].reshape(-1), strict=True
    )
    assert not {(int(u), int(i)) for u, i in rivals} & taken, "rivals are items that the user did not take"
    images = made["image"]
    assert not {x.tobytes() for x in images.train[0]} & {x.tobytes() for x in images.test[0]}


def test_one_example_in_five_is_an_interaction(made):
    (users, items), targets = batch(made["ncf"], 500, 0, 0)
    assert targets.sum() == 100
    assert len(np.unique(users.reshape(-1, 5), axis=1)) == 100
    taken = set(zip(made["ncf"].users.tolist(), made["ncf"].items.tolist(), strict=True))
    assert all(pair in taken for pair in zip(users[targets == 1].tolist(), items[targets == 1].tolist(), strict=True))


def test_next_words_are_the_targets(made):
    (pieces,), targets = batch(made["lstm"], 4, 0, 0)
    assert pieces.shape == targets.shape == (4, 32)
    assert np.array_equal(pieces[:, 1:], targets[:, :-1])


def test_words_that_are_rare_or_new_are_unknown():
    train, test, words = data.numbered(["a", "b", "a", "c", "b", "a"], ["b", "c", "d"], words=3)
    assert train.tolist() == [1, 2, 1, 0, 2, 1]
    assert test.tolist() == [2, 0, 0]
    assert words == 3


# -- data on disk ------------------------------------------------------------------------------------------------------
def write_cifar10(folder):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        found = {"data": rng.integers(256, size=(20, 3072), dtype=np.uint8), "labels": [*range(10)] * 2}
        (folder / name).write_bytes(pickle.dumps(found, protocol=2))
    return found


def test_cifar10_is_read_and_only_arrays_of_it(tmp_path):
    last = write_cifar10(tmp_path / "cifar-10-batches-py")
    found = TASKS["image"].data(tmp_path)
    assert found.source == "CIFAR-10"
    assert (found.train[0].shape, found.test[0].shape) == ((100, 32, 32, 3), (20, 32, 32, 3))
    assert found.test[1].tolist() == last["labels"]
    assert found.train[0].mean((0, 1, 2)) == pytest.approx([0, 0, 0], abs=1e-4)
    planes = last["data"][3].reshape(3, 32, 32)  # red, green, blue, row by row
    spread = np.polyfit(planes[1].reshape(-1), found.test[0][3, :, :, 1].reshape(-1), 1, full=True)
    assert spread[1][0] == pytest.approx(0, abs=1e-6), "the second plane is the second channel"
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(os.system))
    with pytest.raises(pickle.UnpicklingError, match="no place in CIFAR-10"):
        TASKS["image"].data(tmp_path)


@pytest.mark.parametrize(
    "train, test, source",
    [
        ("ptb/ptb.train.txt", "ptb/ptb.test.txt", "Penn Treebank"),
        ("wikitext-2/wiki.train.tokens", "wikitext-2/wiki.test.tokens", "WikiText-2"),
        ("wikitext-2/wiki.train.raw", "wikitext-2/wiki.test.raw", "WikiText-2"),
    ],
)
def test_texts_are_read(tmp_path, train, test, source):
    (tmp_path / train).parent.mkdir()
    (tmp_path / train).write_text(" the <unk> sat on the mat \n the end \n" * 20)
    (tmp_path / test).write_text(" the dog sat \n" * 20)
    found = TASKS["lstm"].data(tmp_path)
    assert found.source == source
    assert found.words == 7  # <unk>, <eos>, the, sat, on, mat, end
    assert len(found.train) == 20 * 10
    assert found.test[:4].tolist().count(0) == 1, "the dog is unknown"


@pytest.mark.parametrize("file, line", [("ml-1m/ratings.dat", "{}::{}::5::{}"), ("ml-100k/u.data", "{}\t{}\t5\t{}")])
def test_movielens_is_read(tmp_path, file, line):
    rows = [(user, 100 + item, (7 * item) % 50) for user in (3, 1, 9) for item in range(user % 4, 150, 2 + user % 3)]
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text("\n".join(line.format(*row) for row in rows) + "\n")
    found = TASKS["ncf"].data(tmp_path)
    assert found.source.startswith("MovieLens")
    assert len(found.users) == len(rows) - 3, "one of each user is held out"
    assert found.sizes["users"] == 3
    latest = {user: max(when for who, _, when in rows if who == user) for user in (1, 3, 9)}
    times = {(user, item): when for user, item, when in rows}
    items = sorted({item for _, item, _ in rows})
    held = {u: items[i] for u, i in zip(found._asked[:: data.RIVALS + 1], found._ranked[:, 0], strict=True)}
    assert [times[user, held[i]] for i, user in enumerate((1, 3, 9))] == [latest[user] for user in (1, 3, 9)]


def test_what_is_not_there_is_made(tmp_path):
    assert TASKS["image"].data(tmp_path).source == "made shapes"


# -- models ------------------------------------------------------------------------------------------------------------
def logits_of(toolkit, name, found):
    task = TASKS[name]
    inputs, targets = batch(found, 3, 0, 0)
    if toolkit == "torch":
        torch = pytest.importorskip("torch")
        from grace_bench.tasks.torch_models import MODELS

        model = MODELS[task.model](**found.sizes, **task.quick.model)
        count = sum(p.numel() for p in model.parameters())
        with torch.no_grad():
            return model(*map(torch.from_numpy, inputs)).numpy(), targets, count
    pytest.importorskip("keras")
    from grace_bench.tasks.keras_models import MODELS

    model = MODELS[task.model](**found.sizes, **task.quick.model)
    count = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    return model(list(inputs) if len(inputs) > 1 else inputs[0]).numpy(), targets, count


@pytest.mark.parametrize("toolkit", plan.TOOLKITS)
@pytest.mark.parametrize("name", TASKS)
def test_models_have_the_parameters_and_logits_that_are_said(made, name, toolkit):
    found, targets, count = logits_of(toolkit, name, made[name])
    classes = {"image": (10,), "lstm": (2000,), "transformer": (2000,), "ncf": (), "segmentation": (2,)}[name]
    assert found.shape == (*targets.shape, *classes)
    assert np.isfinite(found).all()
    more = 4 * TASKS["lstm"].quick.model["width"] if (name, toolkit) == ("lstm", "torch") else 0  # a second bias
    assert count == PARAMETERS[name] + more


@pytest.mark.parametrize("toolkit", plan.TOOLKITS)
def test_a_word_is_predicted_from_those_before_it(made, toolkit):
    """Logits of a position depend on earlier words, and not on later ones."""
    found = made["transformer"]
    task = TASKS["transformer"]
    pieces = batch(found, 2, 0, 0)[0][0].copy()
    other = pieces.copy()
    other[:, 20] = (other[:, 20] + 1) % found.words
    if toolkit == "torch":
        torch = pytest.importorskip("torch")
        from grace_bench.tasks.torch_models import MODELS

        model = MODELS["transformer"](**found.sizes, **task.quick.model)
        with torch.no_grad():
            one, two = (model(torch.from_numpy(x)).numpy() for x in (pieces, other))
    else:
        pytest.importorskip("keras")
        from grace_bench.tasks.keras_models import MODELS

        model = MODELS["transformer"](**found.sizes, **task.quick.model)
        one, two = (model(x).numpy() for x in (pieces, other))
    assert np.allclose(one[:, :20], two[:, :20], atol=1e-5)
    assert abs(one[:, 21:] - two[:, 21:]).max() > 1e-4


# -- plans -------------------------------------------------------------------------------------------------------------
def test_the_direction_of_targets():
    for task in TASKS.values():
        better = task.target * (1.1 if task.higher else 0.9)
        assert task.reached(better, task.target)
        assert task.reached(task.target, task.target)
        assert not task.reached(2 * task.target - better, task.target)
        assert task.reached(0.98 if task.higher else 1.02, task.near(1.0))
        assert not task.reached(0.9 if task.higher else 1.1, task.near(1.0))
    assert {name for name, task in TASKS.items() if not task.higher} == {"lstm", "transformer"}


def test_the_learning_rate_rises_and_falls():
    scale = TASKS["image"].quick
    rates = [rate(scale, step) for step in range(scale.steps)]
    peak = rates.index(max(rates))
    assert 0 < peak < scale.steps // 10
    assert rates[0] < 0.1 * scale.lr
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(0.1 * scale.lr, rel=0.01)


def quick_jobs(**changed):
    common = {"bandwidths": ("100mbit", "1gbit"), **changed}
    return plan.jobs([*TASKS], plan.QUICK, plan.TOOLKITS, [2], **common)


def test_quick_fits_into_half_an_hour_and_keeps_a_tasks_methods_together():
    found = quick_jobs()
    assert 10 * 60 < plan.estimate(found) < 28 * 60
    assert all(job.train == (job.method != plan.LIMIT) for job in found)
    groups = [
        (key, [job.method for job in jobs]) for key, jobs in itertools.groupby(found, lambda j: (j.toolkit, j.task))
    ]
    assert [key for key, _ in groups] == [(toolkit, task) for toolkit in plan.TOOLKITS for task in TASKS]
    for (toolkit, _), methods in groups:
        assert methods[:3] == ["limit", "dense", "fp16"]
        assert set(methods) == set(plan.QUICK[toolkit])
    assert all(isinstance(job.params, dict) for job in found if job.method not in (plan.LIMIT, *plan.BASELINES))
    assert all(plan.known(method) for method in plan.FULL)


def test_auto_is_a_method_with_settings_of_its_own():
    assert plan.known("auto:effort=fast") == "auto:effort=fast"
    job = dataclasses.replace(JOB, method="auto:effort=fast,trial_steps=1")
    assert job.params == {"compressor": "auto", "effort": "fast", "trial_steps": 1}
    with pytest.raises(ValueError, match="choose 'safe', 'balanced', 'fast'"):
        plan.known("auto:effort=slow")
    first, second = told(job, 0), told(job, 1)
    first[1]["chosen"] = "topk: why not"
    assert run.rows_of(job, [first, second])[0]["chosen"] == "topk: why not"
    assert "chosen" not in run.rows_of(JOB, [told(JOB, 0), second])[0]


def test_auto_is_trained_at_each_bandwidth():
    methods = {"torch": ("dense", "auto:effort=fast")}
    found = plan.jobs(["image"], methods, ["torch"], [2], ("100mbit", "1gbit"))
    assert [(job.method, job.bandwidths, job.trained_at) for job in found] == [
        ("dense", (), None),
        ("auto:effort=fast", ("100mbit",), "100mbit"),
        ("auto:effort=fast", ("1gbit",), "1gbit"),
    ]
    assert len({tuple(job.head.values()) for job in found}) == 3
    assert str(found[1]) == "image torch x2 auto:effort=fast at 100mbit"


def test_steps_of_other_methods_are_timed_in_turn_with_autos(tmp_path):
    methods = {"torch": ("limit", "dense", "fp16", "localsgd:sync_every=2", "auto")}
    found = plan.jobs(["image"], methods, ["torch"], [2], ("100mbit", "1gbit"))
    assert [(job.method, job.bandwidths, job.rivals) for job in found] == [
        ("dense", (), ()),  # only trained; the limit is not even that
        ("fp16", (), ()),
        ("localsgd:sync_every=2", ("100mbit", "1gbit"), ()),  # its steps are not alike
        ("auto", ("100mbit",), ("limit", "dense", "fp16")),
        ("auto", ("1gbit",), ("limit", "dense", "fp16")),
    ]
    auto = found[3]
    auto.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == auto
    rows = run.rows_of(auto, [told(auto, 0), told(auto, 1)])
    assert [(row["kind"], row["method"], row["trained_at"]) for row in rows] == [
        ("trained", "auto", "100mbit"),
        ("timed", "auto", "100mbit"),
        *(("timed", rival, None) for rival in auto.rivals),
    ]
    assert [row["seconds"] for row in rows[1:]] == [0.2, *[pytest.approx(0.3)] * 3]  # a median, and means
    texts = {text.partition(":")[0] for text in figures.notes(rows, figures.lines(rows))}
    assert "In turn" in texts
    assert "In turn" not in {text.partition(":")[0] for text in figures.notes(rows[:2], figures.lines(rows[:2]))}
    assert run.remaining(found[3:4], rows) == []
    for number in range(len(rows)):  # only a training chooses, so a missing time requires a new training
        assert run.remaining(found[3:4], rows[:number] + rows[number + 1 :]) == found[3:4]


def test_a_worker_steps_rivals_after_each_evaluation(tmp_path, monkeypatch):
    made, order = [], []

    class Ordered(Recorder):
        def step(self, inputs, targets, lr):
            order.append(made.index(self))
            super().step(inputs, targets, lr)

    def trainer(*_):
        made.append(Ordered())
        return made[-1]

    monkeypatch.setitem(sys.modules, "grace_bench.tasks.train_torch", SimpleNamespace(Trainer=trainer))
    rate = plan.LOOPBACK
    job = Job("ncf", "torch", 1, "auto", (rate,), steps=8, trained_at=rate, seconds=0.0, rivals=("limit", "fp16"))
    Worker(job, tmp_path).run()
    turn = [1] * (1 + worker.TURN) + [2] * (1 + worker.TURN)
    warm_up, last = [1] * worker.WARM_UP + [2] * worker.WARM_UP, [0] * (worker.WARM_AT_RATE + worker.LEAST)
    assert order == [*warm_up, *([0, 0, *turn] * 4), *last]
    timed = {e["method"]: e for e in run.events(tmp_path / "0.jsonl") if e["event"] == "timed"}
    assert {name: len(e["seconds"]) for name, e in timed.items()} == {
        "auto": worker.LEAST,
        **dict.fromkeys(job.rivals, 4 * worker.TURN),
    }
    assert min(made[0].calls[:2]) > 0
    assert {call for rival in made[1:] for call in rival.calls} == {0.0}, "only time is measured"


def test_local_training_is_a_method_with_settings_of_its_own():
    job = dataclasses.replace(JOB, method="diloco:sync_every=20,compressor=topk,compress_ratio=0.1")
    assert (plan.known(job.method), job.sync_every) == (job.method, 20)
    assert job.params == {
        "local": {"preset": "diloco", "sync_every": 20},
        "compressor": "topk",
        "compress_ratio": 0.1,
    }
    assert (JOB.sync_every, dataclasses.replace(JOB, method="dense").sync_every) == (None, None)
    made = {}
    sparse = "sparseloco:average=senders,clip=median"
    for method in ("localsgd:sync_every=4", "slowmo:sync_every=4", "streaming:sync_every=4,fragments=2", sparse):
        made[method.partition(":")[0]] = local.from_params(dataclasses.replace(job, method=method).params, "local")
    assert [(m.settings.outer_lr, m.settings.outer_momentum, m.settings.nesterov) for m in made.values()] == [
        (1, 0, True),
        (1, 0.9, False),
        (0.7, 0.9, True),
        (1, 0, True),
    ]
    assert (made["streaming"].settings.slot, made["streaming"].settings.fragment_sync_delay) == (2, 1)
    assert (made["sparseloco"].settings.sync_every, made["sparseloco"].grace.method.memory.beta) == (30, 0.95)
    assert made["sparseloco"].grace.method.compressor == local.PeerMean(ChunkTopK(), "senders", "median")
    for method, remedy in {
        "diloco": "such as diloco:sync_every=20",
        "diloco:sync_every=0": "must be 1 or more",
        "diloco:sync_every=4,fragments=3": "take 3 or 6",
        "diloco:sync_every=4,compressor=topq": "did you mean",
        "localsgd:sync_every=4,rank=2": "rank",
        "diloco:sync_every": "key=value",
    }.items():
        with pytest.raises(ValueError, match=remedy):
            plan.known(method)


def test_a_job_is_read_as_it_was_written(tmp_path):
    job = quick_jobs(seed=3, steps=8)[7]
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    assert (job.sized.steps, job.sized.every) == (8, 2)


class Recorder:
    """A trainer that trains nothing, and sends 30 bytes in every third step."""

    rank, size, tensors, choice = 0, 1, [3], {}

    def __init__(self):
        self.calls = []

    @property
    def sent(self):
        return 30 * (sum(call != "finish" and call != "look" for call in self.calls) // 3)

    def step(self, inputs, targets, lr):
        self.calls.append(lr)

    def finish(self):
        self.calls.append("finish")

    def predict(self, inputs):
        self.calls.append("look")
        return np.zeros(len(inputs[0]), np.float32)

    def agree(self, number):
        return number


def test_a_worker_of_local_training_times_whole_intervals(tmp_path, monkeypatch):
    found = {}
    for method in ("dense", "diloco:sync_every=3"):
        trainer = Recorder()
        monkeypatch.setitem(sys.modules, "grace_bench.tasks.train_torch", SimpleNamespace(Trainer=lambda *_: trainer))
        job = Job("ncf", "torch", 1, method, (plan.LOOPBACK,), steps=4, seconds=0.0)
        (tmp_path / method).mkdir()
        Worker(job, tmp_path / method).run()
        (timed,) = (e for e in run.events(tmp_path / method / "0.jsonl") if e["event"] == "timed")
        found[method] = trainer.calls, timed
    for calls, timed in found.values():
        end = calls.index("finish")
        assert calls.count("finish") == 1
        assert sum(isinstance(call, float) for call in calls[:end]) == 4
        assert "look" in calls[end:], "the last quality is that of the model that all agree on"
        assert len(timed["seconds"]) == 3
    (calls, timed), (few, _) = found["diloco:sync_every=3"], found["dense"]
    assert [call for call in few[few.index("finish") :] if call != "look"] == ["finish", *[0.0] * 5]
    later = [call for call in calls[calls.index("finish") :] if call not in ("look", "finish")]
    assert len(later) == 3 * (2 + 3)
    assert min(later) > 0, "parameters must move, so that there is something to exchange"
    assert timed["sent"] == 10


def test_a_worker_trains_auto_over_links_that_are_limited(tmp_path, monkeypatch):
    trainer = Recorder()
    now, taken = [0.0], iter((30.0, 10.0, 2.0, 3.0))  # the first steps of a process are slow

    def step(*_):
        now[0] += next(taken, 2.0)

    monkeypatch.setattr(trainer, "step", step)
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=time.sleep))
    monkeypatch.setitem(sys.modules, "grace_bench.tasks.train_torch", SimpleNamespace(Trainer=lambda *_: trainer))
    (tmp_path / "is-10mbit").touch()  # the launcher's reply
    monkeypatch.setattr(worker, "traffic", lambda: (0, 0))
    job = Job("ncf", "torch", 1, "auto", ("10mbit",), steps=8, shaped=True, seconds=0.0, trained_at="10mbit")
    Worker(job, tmp_path).run()
    events = run.events(tmp_path / "0.jsonl")
    order = [event["event"] for event in events]
    assert order.index("wants") < order.index("looked")
    (trained,) = (event for event in events if event["event"] == "trained")
    assert [step for step, _ in trained["curve"]] == [2, 4, 6, 8]
    assert trained["clock"] == [2 * 10.0, 4 * 3.0, 4 * 3.0 + 4.0, 4 * 3.0 + 8.0]  # warm-up counts as the step after it


# -- what was measured is kept, and not measured again -----------------------------------------------------------------
JOB = Job("image", "torch", 2, "topk", ("100mbit", "1gbit"))


def told(job, rank, seconds=0.1, bandwidths=None):
    """The events that a worker writes."""
    found = [{"event": "ready", "parameters": 1000, "tensors": 3, "source": "made", "batch": 16, "size": 2}]
    if job.train and rank == 0:
        found.append({"event": "trained", "curve": [[20, 0.5], [40, 0.86], [60, 0.9]]})
        found[-1] |= {"clock": [2.0, 4.0, 6.0]} if job.trained_at else {}
    for method, bandwidth in job.times:
        if bandwidths is None or bandwidth in bandwidths:
            times = [seconds, 2 * seconds, 6 * seconds]
            timed = {"seconds": times, "sent": 100.0 + rank, "wire": [110.0, 120.0 + rank]}
            found.append({"event": "timed", "method": method, "bandwidth": bandwidth, **timed})
    return [*found, {"event": "done"}]


def test_the_slowest_worker_and_the_busiest_link_count():
    trained, slow, fast = run.rows_of(JOB, [told(JOB, 0), told(JOB, 1, seconds=0.2)])
    assert trained["curve"][-1] == [60, 0.9]
    assert (slow["bandwidth"], fast["bandwidth"]) == JOB.bandwidths
    assert (slow["seconds"], slow["sent"], slow["wire"]) == (0.4, 101.0, 121.0)
    assert slow["quartiles"] == [0.2, pytest.approx(1.2)]


def test_what_is_done_is_not_done_again(tmp_path):
    store = run.Store(tmp_path / "rows.jsonl")
    jobs = quick_jobs()
    assert run.remaining(jobs, store.rows) == jobs
    for row in run.rows_of(JOB, [told(JOB, 0), told(JOB, 1)]):
        store.add(row)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"kind": "trained", "ta')  # the machine went down
    again = run.Store(tmp_path / "rows.jsonl")
    assert again.rows == store.rows
    left = run.remaining(jobs, again.rows)
    assert {(job.task, job.toolkit, job.method) for job in jobs} - {(j.task, j.toolkit, j.method) for j in left} == {
        ("image", "torch", "topk")
    }
    third = dataclasses.replace(JOB, bandwidths=("100mbit", "10mbit"))
    assert run.remaining([third], again.rows) == [dataclasses.replace(JOB, bandwidths=("10mbit",), train=False)]
    for other in ({"seed": 1}, {"steps": 8}, {"data": "somewhere"}, {"full": True}, {"workers": 4}):
        changed = dataclasses.replace(JOB, **other)
        assert run.remaining([changed], again.rows) == [changed], "another setting is another measurement"


def test_failures_are_rows_and_can_be_tried_again(tmp_path):
    store = run.Store(tmp_path / "rows.jsonl")
    outcome = Outcome("torchrun", {0: 1, 1: None}, {0: "Trace\nValueError: too bad\nbye", 1: ""}, "", "")
    rows = run.rows_of(JOB, [told(JOB, 0, bandwidths=["100mbit"])[:-1], told(JOB, 1, bandwidths=["100mbit"])], outcome)
    for row in rows:
        store.add(row)
    assert [("error" in row) for row in rows] == [False, False, True], "what was found before it failed is kept"
    assert rows[2]["error"] == "ValueError: too bad"
    assert "bye" in rows[2]["log"]
    assert run.remaining([JOB], store.rows) == []
    assert run.remaining([JOB], store.rows, retry=True) == [
        dataclasses.replace(JOB, train=False, bandwidths=("1gbit",))
    ]
    late = Outcome("torchrun", {0: None}, {0: ""}, "", "nothing happened for 9 seconds")
    assert run.reason(late) == "did not end within 9 seconds"


def test_jobs_that_time_does_not_allow_are_named_and_not_begun(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(run, "launch", lambda network, job, limit, tell: begun.append(job) or [])
    jobs = quick_jobs(bandwidths=(plan.LOOPBACK,))
    left = run.run(jobs, run.Store(tmp_path / "rows.jsonl"), False, 60, plan.seconds_of(jobs[0]) + 0.5, print, list)
    assert left
    assert begun + left == jobs
    assert len(begun) == [plan.seconds_of(job) > plan.seconds_of(jobs[0]) + 0.5 for job in jobs].index(True)


# -- tables, plots and the page ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def rows():
    """A small measurement: dense; top-k, which pays at one bandwidth; a method that misses the target; a failed one."""
    found = [{"kind": "machine", "cpu": "Z80", "cores": 2}]
    found += [{"kind": "probed", "workers": 2, "bandwidth": "100mbit", "reached": 95e6}]
    for toolkit in plan.TOOLKITS:
        for name in ("image", "lstm"):
            head = {"task": name, "toolkit": toolkit, "workers": 2, "seed": 0, "scale": "quick", "real": False}
            head |= {"steps": TASKS[name].quick.steps, "parameters": 1000, "source": "made shapes", "batch": 16}
            good = [[20, 0.5], [40, 0.88], [60, 0.9]] if name == "image" else [[20, 900.0], [40, 45.0], [60, 40.0]]
            slow = [[20, 0.4], [40, 0.5], [60, 0.88]] if name == "image" else [[20, 900.0], [40, 70.0], [60, 44.0]]
            never = [[20, 0.2], [40, 0.3], [60, 0.4]] if name == "image" else [[20, 900.0], [40, None], [60, None]]
            for method, curve, seconds, sent in (
                ("topk", slow, (0.1, 0.09), 40.0),
                ("dense", good, (0.4, 0.05), 4000.0),
                ("randomk", never, (0.1, 0.09), 40.0),
            ):
                found.append({"kind": "trained", **head, "method": method, "curve": curve})
                for bandwidth, each in zip(("100mbit", "1gbit"), seconds, strict=True):
                    timed = {"seconds": each, "sent": sent, "wire": 1.1 * sent, "bandwidth": bandwidth}
                    found.append({"kind": "timed", **head, "method": method, **timed})
            failed = {"method": "qsgd", "error": "ValueError: <no>", "log": "Traceback <no>"}
            found += [{"kind": "trained", **head, **failed}]
            found += [{"kind": "timed", **head, **failed, "bandwidth": "100mbit"}]
    return found


def test_lines_follow_from_the_rows(rows):
    found = show.lines(rows)
    assert [line["method"] for line in found[:4]] == ["dense", "qsgd", "randomk", "topk"]
    dense, failed, never, topk = found[:4]
    assert (dense["quality"], dense["to_target"], dense["target"]) == (0.9, 40, 0.8)
    assert dense["times"]["100mbit"]["time"] == pytest.approx(16.0)
    assert dense["times"]["100mbit"]["throughput"] == pytest.approx(2 * 16 / 0.4)
    assert topk["times"]["100mbit"]["x_throughput"] == pytest.approx(4)
    assert topk["times"]["100mbit"]["x_time"] == pytest.approx(16 / 6)
    assert topk["times"]["1gbit"]["x_time"] == pytest.approx(2 / 5.4)
    assert topk["volume"] == pytest.approx(100)
    assert (never["to_target"], never["times"]["100mbit"]["time"]) == (None, None)
    assert failed["errors"] == [("training", "ValueError: <no>"), ("100mbit", "ValueError: <no>")]
    words = next(line for line in found if line["task"] == "lstm")
    assert words["times"]["100mbit"]["throughput"] == pytest.approx(2 * 16 * 32 / 0.4)
    assert next(line for line in found if (line["task"], line["method"]) == ("lstm", "randomk"))["diverged"]


def test_the_limit_has_denses_steps_and_its_own_time(rows):
    """An exchange that costs nothing: its training is not run."""
    head = {key: value for key, value in rows[2].items() if key not in ("kind", "curve")} | {"method": "limit"}
    timed = [
        {"kind": "timed", **head, "bandwidth": bandwidth, "seconds": 0.02, "sent": 0, "wire": 0}
        for bandwidth in ("100mbit", "1gbit")
    ]
    limit, dense, _, never, topk = show.lines([*rows, *timed])[:5]
    assert (limit["method"], limit["to_target"], limit["curves"], limit["volume"]) == ("limit", 40, [], None)
    assert limit["times"]["100mbit"]["time"] == pytest.approx(40 * 0.02)
    assert limit["times"]["100mbit"]["x_time"] == pytest.approx(0.4 / 0.02)
    shares = [each["times"]["100mbit"]["share"] for each in (limit, dense, never, topk)]
    assert shares == [pytest.approx(1), pytest.approx(0.8 / 16), None, pytest.approx(0.8 / 6)]
    text = show.markdown([*rows, *timed])
    assert "| limit | - | 40 |" in text
    assert "of limit" in text
    assert "of limit" not in show.markdown(rows)
    assert "limit" not in " ".join(show.lost(show.lines([*rows, *timed])))
    assert set(show.plots([*rows, *timed])) == {"throughput", "volume", "time"}


def test_auto_has_a_line_for_each_bandwidth(rows):
    head = {**rows[2], "method": "auto"}
    more = []
    for bandwidth, seconds, clock in (("100mbit", 0.1, [9.0, 12.0, 15.0]), ("1gbit", 0.04, [3.0, 4.0, 5.0])):
        curve = [[20, 0.5], [40, 0.6], [60, 0.9]]
        row = {**head, "trained_at": bandwidth, "curve": curve, "clock": clock, "chosen": f"topk for {bandwidth}"}
        timed = {"kind": "timed", "bandwidth": bandwidth, "seconds": seconds, "sent": 40.0, "wire": 44.0}
        more += [row, {**head, "trained_at": bandwidth, **timed}]
    found = show.lines([*rows, *more])
    autos = [line for line in found if line["method"] == "auto"]
    assert [(line["trained_at"], [*line["times"]]) for line in autos] == [
        ("100mbit", ["100mbit"]),
        ("1gbit", ["1gbit"]),
    ]
    assert [line["times"][line["trained_at"]]["time"] for line in autos] == [15.0, 5.0]  # measured, with trials
    assert autos[0]["times"]["100mbit"]["x_time"] == pytest.approx(16 / 15)
    text = show.markdown([*rows, *more])
    assert "| auto at 1gbit | 0.9 | 60 |" in text
    assert "mage classification, ResNet, PyTorch, 2 workers, auto at 1gbit: topk for 1gbit." in text
    assert "trials included" in text
    assert "trials included" not in show.markdown(rows)
    assert {row["bandwidth"] for row in results.results(found) if row["method"] == "auto"} == {"100mbit", "1gbit"}
    assert set(show.plots([*rows, *more])) == {"throughput", "volume", "time"}


def test_plots_of_one_task_are_not_cut(rows):
    image = pytest.importorskip("matplotlib.image")
    one = [row for row in rows if (row.get("task", "image"), row.get("toolkit", "torch")) == ("image", "torch")]
    for name in ("eden:bits=3,block_size=64", "powersgd:compress_rank=16", "topk:compress_ratio=0.001,memory=none"):
        one += [{**row, "method": name} for row in one if row.get("method") == "topk"]
    for name, file in show.plots(one).items():
        drawn = image.imread(BytesIO(file))[..., :3]
        edges = [drawn[:3], drawn[-3:], drawn[:, :3], drawn[:, -3:]]
        assert all((edge == 1).all() for edge in edges), f"{name}: something is drawn up to the edge"
        assert 0.4 < drawn.shape[0] / drawn.shape[1] < 2.5, f"{name}: {drawn.shape}"


def test_tables_are_not_broken_in_80_columns(rows):
    console = Console(file=StringIO(), width=80)
    show.render(rows, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for group in figures.grouped(show.lines(rows)):
        _, body = show.table(group)
        for cells in body:
            (*parts,) = (line.split() for line in text.splitlines() if line.split()[:1] == cells[:1])
            shown = [word for part in parts for word in part]
            assert all(word in shown for cell in cells for word in cell.split()), cells


def test_predictions_are_compared_with_measurements(rows):
    head = {**rows[2], "method": "auto", "trained_at": "1gbit", "clock": [1.0, 2.0, 3.0]}
    predicted = {"none": 0.06, "topk": 0.2, "randomk": 0.1, "eden, bits=4": 0.1}  # the last has no training of its own
    both = [{**head, "seed": 0, "predicted": predicted}, {**head, "seed": 1, "predicted": {**predicted, "topk": 0.4}}]
    (found,) = figures.predictions(show.lines([*rows, *both]))
    # Dense reached its quality after 40 steps of 0.05 s, topk after 60 of 0.09 s, randomk never.
    assert {method: predicted for method, (predicted, _) in found.items()} == pytest.approx(
        {"dense": 2.4, "topk": 12.0, "randomk": 4.0}
    )
    assert {method: real for method, (_, real) in found.items()} == {
        "dense": pytest.approx(2.0),
        "topk": pytest.approx(5.4),
        "randomk": None,
    }
    assert "rank correlation" not in show.markdown([*rows, *both])  # a single method has no rank correlation
    slow = [{**row, "trained_at": "100mbit"} for row in both]  # there topk takes 6 s instead of 16
    more = [{**row, "toolkit": "keras"} for row in (*both, *slow)]
    text = show.markdown([*rows, *both, *slow, *more])
    assert "rank correlation" in text
    assert "over 8 pairs" in text
    assert "over 4. 4 candidates did not get there" in text


@pytest.mark.parametrize(
    "pairs, wanted",
    [
        ([(1, 10), (2, 20), (4, 500)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        ([(1, 2), (2, 1), (3, 3)], 0.5),
        ([(1, 1), (1, 2), (3, 3)], 3**0.5 / 2),  # two equal values
    ],
)
def test_rank_correlation_is_spearmans(pairs, wanted):
    assert figures.rank_correlation(pairs) == pytest.approx(wanted)


def test_a_target_that_is_not_fixed_follows_dense(rows):
    changed = [{**row, "steps": 60} if "steps" in row else row for row in rows]
    by_task = {line["task"]: line["target"] for line in show.lines(changed)}
    assert by_task == {"image": pytest.approx(0.97 * 0.9), "lstm": pytest.approx(1.03 * 40)}
    without = [row for row in changed if row.get("method") != "dense"]
    assert {line["target"] for line in show.lines(without)} == {None}
    assert "since dense is missing" in show.markdown(without)


def test_seeds_are_means_with_an_interval(rows):
    dense = [row for row in rows if row.get("method") == "dense" and "curve" in row and row["task"] == "image"]
    curves = [[20, 0.6], [40, 0.9], [60, 0.84]], [[20, 0.5], [40, 0.7], [60, 0.96]]
    more = [{**row, "seed": seed, "curve": curve} for row in dense for seed, curve in enumerate(curves, 1)]
    found = show.lines([*rows, *more])[0]
    assert (found["seeds"], found["quality"]) == (3, pytest.approx(0.9))
    assert found["to_target"] == 40  # the mean is 0.83 there
    worse = show.lines([*rows, *more, {**more[0], "seed": 3, "curve": [[20, 0.6], [40, 0.4], [60, 0.9]]}])[0]
    assert worse["to_target"] == 60
    assert show.lines([*rows, {**more[0], "curve": [[20, 0.9], [40, 0.9], [60, None]]}])[0]["to_target"] == 40
    assert found["interval"] == pytest.approx(4.302653 * 0.06 / 3**0.5, rel=1e-6)
    assert "| dense | 0.9 ± 0.15 | 40 |" in show.markdown([*rows, *more])


def test_quantiles_of_students_t():
    known = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 9: 2.262157, 29: 2.045230, 120: 1.979930}
    assert {freedom: results.student(freedom) for freedom in known} == pytest.approx(known, rel=1e-6)
    assert results.student(2, 0.5) == pytest.approx(0.816497, rel=1e-6)
    assert results.interval([3.0]) is None


def test_the_relative_target_is_there_beside_the_fixed_one(rows):
    dense, _, never, topk = show.lines(rows)[:4]
    assert (dense["target"], dense["relative"]) == (0.8, pytest.approx(0.873))
    assert (dense["to_target"], dense["to_relative"], topk["to_relative"]) == (40, 40, 60)
    assert never["to_relative"] is None
    words = [line for line in show.lines(rows) if line["task"] == "lstm"]
    assert {(line["target"], round(line["relative"], 6)) for line in words} == {(52.0, 41.2)}
    assert {line["method"]: line["to_relative"] for line in words if line["toolkit"] == "torch"} == {
        **dict.fromkeys(("qsgd", "randomk", "topk")),
        "dense": 60,
    }
    assert "steps to dense less 3%" in show.markdown(rows)


def test_results_are_written_as_json_lines_and_csv(rows, tmp_path):
    results.write(results.results(show.lines(rows)), tmp_path)
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert results.check(found) == found
    rules = schema("results")
    assert [problems(row, rules) for row in found] == [[]] * len(found)
    assert problems({**found[0], "steps": "many"}, rules)
    assert set(rules["required"]) == set(results.FIELDS)
    with (tmp_path / "results.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [list(row) for row in table] == [list(results.FIELDS)] * len(found)
    assert [row["quality"] for row in table] == ["" if row["quality"] is None else str(row["quality"]) for row in found]
    (dense,) = (
        row
        for row in found
        if (row["task"], row["toolkit"], row["method"], row["bandwidth"]) == ("image", "torch", "dense", "100mbit")
    )
    assert (dense["seconds_to_target"], dense["seconds_to_relative"]) == (pytest.approx(16), pytest.approx(16))
    assert {row["error"] for row in found if row["method"] == "qsgd"} == {
        "training: ValueError: <no>; 100mbit: ValueError: <no>"
    }
    for odd in ({"task": "image"}, {**dense, "more": 1}):
        with pytest.raises(ValueError, match="result 2 lacks"):
            results.check([dense, odd])
    with pytest.raises(ValueError, match="no list"):
        results.check(dense)


def test_methods_that_did_not_pay_are_named(rows):
    text = " ".join(show.lost(show.lines(rows)))
    assert "randomk missed it (0.4)" in text
    assert "randomk missed it (it diverged)" in text
    assert "qsgd failed (ValueError: <no>)" in text
    assert "topk at 1gbit (2.70x the time of dense)" in text
    assert "topk at 100mbit" not in text


def test_tables_have_every_method_and_say_what_the_network_was(rows):
    text = show.markdown(rows)
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1
    assert "| dense | 0.9 | 40 | 40 | 0.004 | 0.0044 | 0.4 | 80 | 16 | 16 | 0.05 | 640 | 2 | 2 |" in text
    assert "| qsgd | - | failed | failed | - | - | failed |" in text
    assert "| topk | 2.67 (4.00) |" in text
    assert "Emulated network" in text
    assert "100mbit: 95 Mbit/s" in text
    assert "Steps to the target were measured once" in text
    loop = [{**row, "bandwidth": plan.LOOPBACK} if row.get("bandwidth") == "100mbit" else row for row in rows]
    assert "Plain loopback, no network" in show.markdown([r for r in loop if r.get("bandwidth") != "1gbit"])


def test_the_page_holds_tables_plots_and_failures(rows, tmp_path):
    show.save(rows, tmp_path, ["ncf torch x2 topk"], "grace bench tasks <x>")
    page = (tmp_path / "report.html").read_text()
    assert '<meta name="viewport"' in page, "a phone shows it at its own width"
    assert page.count("<img") == 3
    assert page.count("<tr>") > 30
    assert "Traceback &lt;no&gt;" in page
    assert "<x>" not in page
    assert "Z80" in page
    assert "ncf torch x2 topk" in page
    for name in ("throughput", "volume", "time"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert (tmp_path / "report.md").read_text() == show.markdown(rows)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) > 8
    assert (tmp_path / "results.csv").exists()


# -- the command -------------------------------------------------------------------------------------------------------
def grace_bench(*words):
    return CliRunner().invoke(app, ["bench", "tasks", *map(str, words)])


def test_the_command_shows_what_is_stored(rows, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = grace_bench("--out", tmp_path, "--show")
    assert done.exit_code == 0, done.output
    assert "Did not pay: image classification, ResNet, PyTorch" in done.output
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "words, remedy",
    [
        (["--task", "chess"], "choose from image"),
        (["--toolkit", "jax"], "choose from torch, keras"),
        (["--method", "topq"], "grace methods"),
        (["--workers", "none"], "whole numbers"),
        (["--data", "/nowhere"], "does not exist"),
        (["--full", "--workers", "2,4"], "one number of workers"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, words, remedy):
    done = grace_bench("--out", tmp_path, *words)
    assert done.exit_code == 2
    assert remedy in " ".join(done.output.replace("│", " ").split())


def test_a_cluster_gets_jobs_and_scripts(tmp_path):
    words = ["--full", "--workers", 4, "--task", "ncf", "--method", "dense", "--method", "topk", "--out", tmp_path]
    assert grace_bench(*words).exit_code == 0
    jobs = [Job.read(file) for file in sorted((tmp_path / "jobs").glob("*.json"))]
    assert sorted((job.toolkit, job.method) for job in jobs) == [
        (toolkit, method) for toolkit in ("keras", "torch") for method in ("dense", "limit", "topk")
    ]
    assert all(job.full and not job.shaped and job.bandwidths == (plan.AS_IS,) for job in jobs)
    assert {job.method for job in jobs if not job.train} == {"limit"}
    for script in ("torchrun.sh", "horovodrun.sh", "tasks.slurm"):
        subprocess.run(["bash", "-n", tmp_path / script], check=True)
    assert grace_bench("--full", "--collect", "--out", tmp_path).exit_code == 1, "nothing ran yet"
    out = tmp_path / "results" / next(file.stem for file in (tmp_path / "jobs").glob("torch-*dense*"))
    out.mkdir(parents=True)
    job = dataclasses.replace(jobs[0], workers=2)
    for rank in range(2):  # fewer workers than planned
        lines = [json.dumps(event) for event in told(job, rank)]
        (out / f"{rank}.jsonl").write_text("\n".join(lines) + "\n")
    rows = cluster.collect(tmp_path)
    assert [(row["kind"], row["workers"]) for row in rows] == [("trained", 2), ("timed", 2)]
    assert grace_bench("--full", "--collect", "--out", tmp_path).exit_code == 0


OWN = """
import numpy, torch
from grace_bench.tasks.data import Data
from grace_bench.tasks.tasks import Scale, Task

class Points(Data):
    source, sizes = "points", {"classes": 2}
    def batch(self, rng, size):
        x = rng.standard_normal((size, 3)).astype("float32")
        return (x,), (x.sum(1) > 0).astype("int64")
    def quality(self, predict):
        (x,), y = self.batch(numpy.random.default_rng(0), 640)
        return float((predict((x,)).argmax(-1) == y).mean())

def line(classes, width):
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.ReLU(), torch.nn.Linear(width, classes))

scale = Scale(40, 20, 16, 0.2, {"width": 4})
TASK = Task(name="points", title="points", model="own_{toolkit}:line", metric="accuracy", higher=True, target=0.9,
            unit="points", unit_size=1, binary=False, optimizer="sgd", quick=scale, full=scale, made=Points)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """An installed package that offers a task and two invalid ones."""
    (tmp_path / "own_torch.py").write_text(OWN)
    (tmp_path / "own-1.dist-info").mkdir()
    entries = "[grace.bench.tasks]\nmine = own_torch:TASK\nodd = own_torch:Points\ngone = nowhere:TASK\n"
    (tmp_path / "own-1.dist-info" / "entry_points.txt").write_text(entries)
    (tmp_path / "own-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks.cache_clear()
    yield tmp_path
    tasks.cache_clear()


def test_a_package_may_offer_tasks_of_its_own(own):
    pytest.importorskip("torch")
    with pytest.warns(UserWarning, match="own offers the task") as told:
        assert [*tasks()] == [*TASKS, "points"]
    assert {str(each.message).partition(", but: ")[2][:9] for each in told} == {"TypeError", "ModuleNot"}
    job = Job("points", "torch", 2, "dense", ())
    assert (job.sized.steps, plan.seconds_of(job) > 0) == (40, True)


def test_rows_of_a_task_that_is_gone_are_named(rows, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "task": "chess"}) + "\n" for row in rows))
    done = grace_bench("--out", tmp_path, "--show")
    assert done.exit_code == 2
    assert "no installed package offers the tasks chess" in " ".join(done.output.replace("│", " ").split())


@pytest.mark.processes
def test_a_task_of_ones_own_is_trained(own):
    pytest.importorskip("torch")
    words = ["--loopback", "--task", "points", "--toolkit", "torch", "--method", "dense", "--workers", "1"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{own}", "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-W", "ignore", "-m", "grace.cli", "bench", "tasks", *words, "--out", str(own)]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    limit, found = (json.loads(line) for line in (own / "results.jsonl").read_text().splitlines())
    assert (limit["method"], limit["steps_to_relative"]) == ("limit", found["steps_to_relative"])
    assert (found["task"], found["error"], found["seeds"]) == ("points", "", 1)
    assert found["quality"] > 0.8


LOCAL = "diloco:sync_every=4,compressor=fp16"


# -- real workers ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One task on both toolkits, a few steps with two workers, by each toolkit's command."""
    out = tmp_path_factory.mktemp("out")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def command(*words):
        line = [sys.executable, "-m", "grace.cli", "bench", "tasks", "--loopback", "--task", "ncf", "--steps", "8"]
        done = subprocess.run([*line, "--out", str(out), *words], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    command("--toolkit", "torch", "--method", "dense", "--method", "topk", "--method", LOCAL)
    return command, out, command("--toolkit", "keras", "--method", "fp16", "--method", LOCAL)


@pytest.mark.processes
def test_real_workers_train_and_are_timed(trained):
    _, out, done = trained
    rows = [row for row in run.read(out / "rows.jsonl") if row["kind"] in ("trained", "timed")]
    assert [row.get("error") for row in rows] == [None] * 11
    sent = {(row["toolkit"], row["method"]): row["sent"] for row in rows if row["kind"] == "timed"}
    assert sent["torch", "limit"] == 0
    assert sent["torch", "dense"] == 4 * PARAMETERS["ncf"]
    assert sent["torch", "topk"] < 0.03 * sent["torch", "dense"]
    assert sent["keras", "fp16"] == pytest.approx(2 * PARAMETERS["ncf"], rel=0.01)  # small tensors stay float32
    for toolkit in plan.TOOLKITS:  # every fourth step sends float16
        assert sent[toolkit, LOCAL] == pytest.approx(2 * PARAMETERS["ncf"] / 4, rel=0.01)
    curves = [row["curve"] for row in rows if row["kind"] == "trained"]
    assert all([step for step, _ in curve] == [2, 4, 6, 8] for curve in curves)
    assert curves[0] != curves[1]
    assert "Plain loopback, no network" in " ".join(done.stdout.split())
    assert "means over the steps between two exchanges" in " ".join(done.stdout.split())
    assert (out / "report.html").stat().st_size > 50_000


@pytest.mark.processes
def test_a_second_call_measures_nothing_again(trained):
    command, out, _ = trained
    before = list(run.read(out / "rows.jsonl"))
    done = command("--toolkit", "keras", "--method", "fp16")
    assert "0 launches, 1 are done already" in done.stderr
    after = list(run.read(out / "rows.jsonl"))
    assert [row for row in after if row["kind"] != "machine"] == [row for row in before if row["kind"] != "machine"]


@pytest.mark.processes
def test_a_job_that_takes_too_long_is_ended_and_recorded():
    with Loopback(2) as network:
        job = Job("lstm", "torch", 2, "dense", (plan.LOOPBACK,))
        rows = run.launch(network, job, 6, print)
        assert network.processes() == set()
    assert {row["error"] for row in rows} == {"did not end within 6 seconds"}
    assert [row["kind"] for row in rows] == ["trained", "timed"]
