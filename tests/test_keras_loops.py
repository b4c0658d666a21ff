"""Loops of Keras and TensorFlow that differ from ours: loss scalers, GANs, models built late, copies, resumes."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from launch import launch

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
import grace  # noqa: E402
from grace.engine.reshard import matched, renamed  # noqa: E402

DENSE = {"compressor": "none"}
TOPK = {"compressor": "topk", "compress_ratio": 0.5, "min_numel": 0}
processes = pytest.mark.processes


@keras.saving.register_keras_serializable(package="grace_tests")
class Registered(keras.optimizers.SGD):
    """A user's own optimizer."""


def network(*sizes):
    return keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(size) for size in sizes or (3,))])


def wrapped(optimizer=None, params=TOPK):
    grc = grace.grace_from_params(params)
    return grace.tensorflow.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1), grc), grc


def fit(net, optimizer, *callbacks, **options):
    net.compile(optimizer, keras.losses.MeanSquaredError(), jit_compile=False, **options)
    x = np.arange(64, dtype="float32").reshape(16, 4) / 64
    return net.fit(x, x[:, :3], 2, shuffle=False, verbose=0, callbacks=list(callbacks))


# -- over two workers -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch("horovodrun", 2, "keras_loops.py", tmp_path_factory.mktemp("out"))


def equal(found, key):
    return np.array_equal(found[0][key], found[1][key])


@processes
@pytest.mark.parametrize("case", ["natural compile", "natural by hand", "artificial compile"])
def test_all_workers_skip_the_step_in_which_one_overflows_in_float16(found, case):
    (mine, scales, same, steps), (other, other_scales, _, _) = (worker[f"scaler {case}"] for worker in found)
    assert np.array_equal(mine, other)
    assert np.isfinite(mine).all()
    assert scales == other_scales == [2.0**15] * 3 + [2.0**14] * 3
    assert same == [False, False, False, True, False, False]
    assert steps == 5  # the skipped step does not count


@processes
def test_a_scaler_around_ours_skips_together_in_an_eager_loop(found):
    (mine, scales, steps), (other, other_scales, _) = (worker["scaler eager"] for worker in found)
    assert np.array_equal(mine, other)
    assert np.isfinite(mine).all()
    assert scales == other_scales == [16.0, 16.0, 8.0, 8.0]
    assert steps == 3


@processes
def test_a_model_that_its_first_batch_builds_is_equal_on_all_workers(found):
    assert equal(found, "built by its first batch")
    for worker in found:
        assert "built by its first batch" in worker["nothing to broadcast"]


@processes
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("built on one worker", "only worker 0 has ['sequential/dense/kernel', 'sequential/dense/bias']"),
        ("other shapes", "'v' is float32[4] on the one where the other has 'v', float32[5]"),
        ("other roots", "worker 0 broadcasts from worker 0, and worker 1 from worker 1"),
    ],
)
def test_a_broadcast_of_unequal_variables_names_the_difference_on_all_workers(found, case, message):
    for worker in found:
        assert worker[case].startswith("ValueError")
        assert message in worker[case]


@processes
def test_variables_of_every_dtype_are_broadcast_and_strings_refused_by_name(found):
    assert equal(found, "strings")
    assert found[0]["strings"].startswith("TypeError: 'words' has dtype string")
    for worker in found:
        assert len(worker["kinds"]) == 18
        for dtype, shape, values in worker["kinds"]:
            assert np.array_equal(values, np.ones(shape)), dtype


@processes
def test_callbacks_find_both_optimizers_of_a_gan(found, tmp_path_factory):
    for worker in found:
        _, steps, rates = worker["gan"]
        assert steps == {"critic": 12, "generator": 12}
        assert rates == pytest.approx({"critic": 0.005, "generator": 0.001})
        assert "attribute of the model, in DistributedOptimizer" in worker["gan without grace"]
    assert np.array_equal(found[0]["gan"][0], found[1]["gan"][0])


@processes
def test_metrics_are_averaged_by_name_over_the_workers_that_have_them(found):
    first, other = (worker["metrics"] for worker in found)
    assert set(first) == set(other)
    for name in first:
        assert np.array_equal(first[name], other[name], equal_nan=name == "bad"), name
    assert first["f1"].shape == (5,)
    assert (first["a"], first["b"], first["both"]) == (1.0, 2.0, 0.5)
    assert first["count"] == 2**25 + 2
    assert first["huge"] == 1e39
    assert np.isnan(first["bad"])
    assert [len(worker["metrics told"]) for worker in found] == [1, 0]
    assert "metric 'bad' is not finite on worker 1, so neither is its mean" in found[0]["metrics told"][0]
    assert (first["none"], first["text"]) == (None, "x")
    assert np.isfinite(first["val_loss"])
    for worker in found:
        assert "'f1' has shape [3] on worker 0 and [4] on worker 1" in worker["metrics of other shapes"]
        assert worker["metrics on one worker"] == {"loss": 1.0}


@processes
def test_callbacks_follow_the_process_set_of_the_optimizers_grace(found):
    for worker in found:
        before, after, loss, own = worker["process set"]
        assert np.array_equal(before, after)
        assert loss == pytest.approx(own, rel=1e-5)
        assert "root_rank=1: there are workers 0 to 0" in worker["root outside"]
    assert not np.array_equal(found[0]["process set"][0], found[1]["process set"][0])


@processes
def test_horovods_arguments_are_taken_as_its_defaults_or_refused_with_the_remedy(found):
    remedies = {
        "op": "scale the loss",
        "compression": "'compressor': 'fp16'",
        "process_set": "HorovodTransport(process_set)",
        "backward_passes_per_step": "gradient_accumulation_steps",
    }
    for worker in found:
        for name, remedy in remedies.items():
            assert remedy in worker["horovod"][name]


@processes
def test_a_copy_that_is_not_wrapped_again_is_told_of(found):
    for worker in found:
        assert len(worker["copy plain"]) == 1
        assert worker["copy wrapped"] == []


@processes
def test_gradients_of_watched_constants_are_averaged(found):
    for worker in found:
        assert worker["constants"] == [[4.5, 6.0], [1.5, 3.0]]


@processes
def test_an_eager_worker_waits_no_longer_than_its_timeout(found):
    assert found[0]["late"].startswith("TimeoutError: worker 0 of 2 has waited 4 s")
    assert found[1]["late"] == ""


@processes
def test_a_loaded_sequential_model_takes_its_checkpoint_in_another_process(tmp_path):
    before = launch("horovodrun", 2, "keras_resume.py", tmp_path)
    after = launch("horovodrun", 2, "keras_resume.py", tmp_path)
    for first, second in zip(before, after, strict=True):
        assert second["paths"][0] == "dense/kernel"  # the path does not contain the model's name
        assert second["names"] == first["names"] == second["whole names"]
        assert np.array_equal(second["resumed"], second["whole"])
    assert np.array_equal(after[0]["resumed"], after[1]["resumed"])


# -- names ------------------------------------------------------------------------------------------------------------
def test_a_variable_keeps_its_state_whatever_others_are_called():
    grc = grace.grace_from_params({**TOPK, "compress_ratio": 0.25})
    first, second = tf.Variable(tf.zeros(4), name="w"), tf.Variable(tf.zeros(4), name="w")

    def step(variable, *values):
        return grace.tensorflow.average_gradients(grc, [tf.constant(values)], [variable])[0].numpy().tolist()

    assert step(first, 4.0, 3.0, 0.0, 0.0) == [4.0, 0.0, 0.0, 0.0]
    assert step(second, 0.0, 0.0, 5.0, 1.0) == [0.0, 0.0, 5.0, 0.0]  # without the first variable's residual
    assert step(first, 0.0, 0.0, 0.0, 0.0) == [0.0, 3.0, 0.0, 0.0]
    assert grc.names == ["w", "w#2"]


def test_folds_with_cleared_sessions_share_nothing():
    grc = grace.grace_from_params({**TOPK, "compress_ratio": 0.1})
    norms = []
    for _ in range(2):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        net = network()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(tf.ones((1, 4))) * [1.0, 2.0, 3.0])
        tape = grace.tensorflow.DistributedGradientTape(tape, grc)
        means = tape.gradient(loss, net.trainable_variables)
        norms.append([float(tf.norm(mean)) for mean in means])
    assert norms[0] == norms[1]
    assert grc.names[2:] == [f"{name}#2" for name in grc.names[:2]]


def test_new_variables_take_over_what_was_loaded(tmp_path):
    grc = grace.grace_from_params({**TOPK, "compress_ratio": 0.25})
    grace.tensorflow.average_gradients(grc, [tf.constant([4.0, 3.0, 0.0, 0.0])], [tf.Variable(tf.zeros(4), name="w")])
    grc.load_state_dict(grc.state_dict())
    means = grace.tensorflow.average_gradients(grc, [tf.zeros(4)], [tf.Variable(tf.zeros(4), name="w")])
    assert means[0].numpy().tolist() == [0.0, 3.0, 0.0, 0.0]
    assert grc.names == ["w"]


@pytest.mark.parametrize("built", [False, True])
def test_a_state_is_loaded_under_the_names_that_keras_gives_a_loaded_model(built):
    names = ["sequential_1/dense_2/kernel", "sequential_1/dense_3/kernel"]
    grc = grace.grace_from_params({**TOPK, "compress_ratio": 0.25})
    variables = [tf.Variable(tf.zeros(4), name=name) for name in names]
    grace.tensorflow.average_gradients(grc, [tf.constant([4.0, float(n), 0.0, 0.0]) for n in (1, 2)], variables)
    new = grace.grace_from_params({**TOPK, "compress_ratio": 0.25})
    variables = [tf.Variable(tf.zeros(4), name=name) for name in ("dense/kernel", "dense_1/kernel")]
    if built:
        grace.tensorflow.build(new, variables)
    new.load_state_dict(grc.state_dict())
    means = grace.tensorflow.average_gradients(new, [tf.zeros(4)] * 2, variables)
    assert [mean.numpy().tolist() for mean in means] == [[0.0, 1.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]]


def test_names_that_tell_of_another_model_are_not_matched():
    theirs = {"sequential/dense_2/kernel": 8, "sequential/dense_1/kernel": 8}
    assert matched(theirs, {"dense_4/kernel": 8, "dense_11/kernel": 8, "dense_4/bias": 2}) == {
        "dense_4/kernel": "sequential/dense_1/kernel",
        "dense_11/kernel": "sequential/dense_2/kernel",
    }
    for mine in (
        {"dense/kernel": 8},
        {"dense/kernel": 8, "conv/kernel": 8},
        {"dense/kernel": 8, "dense_1/kernel": 4},
        {"dense/kernel": 8, "dense_1/kernel": 8, "dense_2/kernel": 8},
        {"kernel": 8, "kernel_1": 8},
    ):
        assert matched(theirs, mine) == {}
    state = {"tensors": {name: {} for name in theirs}, "points": {}}
    assert renamed(state, ["dense/kernel", "dense_1/kernel", "dense_2/kernel"]) is state


# -- what is no way to call it ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda o, g: (g, o), TypeError, "the optimizer comes first"),
        (lambda o, g: ("adam", g), TypeError, r"keras.optimizers.get\('adam'\)"),
        (lambda o, g: (type(o), g), TypeError, "not its class"),
        (lambda o, g: (o, TOPK), TypeError, "not a dictionary: make it once"),
        (lambda o, g: (o, "topk"), TypeError, "not 'topk'"),
        (lambda o, g: (o, None), TypeError, "needs a Grace from"),
        (lambda o, g: (tf.compat.v1.train.GradientDescentOptimizer(0.1), g), TypeError, "TensorFlow 1"),
        (lambda o, g: (object(), g), TypeError, "wraps optimizers of Keras 3, not builtins.object"),
    ],
)
def test_what_is_no_optimizer_or_no_grace_is_named(call, error, message):
    optimizer, grc = keras.optimizers.SGD(0.1), grace.grace_from_params(DENSE)
    with pytest.raises(error, match=message):
        grace.tensorflow.DistributedOptimizer(*call(optimizer, grc))
    grace.tensorflow.DistributedOptimizer(optimizer, grc)  # the failed call changed nothing, so this one works


def test_an_optimizer_of_keras_2_is_refused():
    legacy = type("SGD", (), {"__module__": "tf_keras.src.optimizers.sgd"})()
    with pytest.raises(TypeError, match=r"tf_keras.src.optimizers.sgd.SGD \(of Keras 2"):
        grace.tensorflow.DistributedOptimizer(legacy, grace.grace_from_params(DENSE))


def test_keras_on_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match=r"runs on jax: set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch"):
        grace.keras.DistributedOptimizer(keras.optimizers.SGD(0.1), grace.grace_from_params(DENSE))
    with pytest.raises(RuntimeError, match="MetricAverageCallback is for Keras on TensorFlow or PyTorch"):
        grace.tensorflow.MetricAverageCallback()


def test_swapped_and_wrong_arguments_of_tapes_and_callbacks_are_named():
    door, grc = grace.tensorflow, grace.grace_from_params(DENSE)
    for call, message in (
        (lambda: door.DistributedGradientTape(grc, tf.GradientTape()), "tape comes first"),
        (lambda: door.DistributedGradientTape(tf.GradientTape(), TOPK), "needs a Grace"),
        (lambda: door.DistributedGradientTape(network(), grc), r"tf.GradientTape, not Sequential"),
        (lambda: door.BroadcastCallback(grc), "root_rank comes before"),
        (lambda: door.PolicyCallback("topk"), "PolicyCallback needs a Grace"),
        (lambda: door.CheckpointState({}), "CheckpointState needs a Grace"),
        (lambda: door.broadcast_variables([tf.Variable(1.0)], grc), "root_rank comes before"),
        (lambda: door.broadcast_variables(network()), "as model.variables"),
        (lambda: door.broadcast_variables([tf.constant(1.0)]), "EagerTensor is none"),
        (lambda: door.DistributedGradientTape(tf.GradientTape(), grc, ratio=1), "unexpected argument 'ratio'"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    tape = door.DistributedGradientTape(tf.GradientTape(), grc)
    with pytest.raises(ValueError, match="wrap it once"):
        door.DistributedGradientTape(tape, grc)
    with pytest.raises(ValueError, match="root_rank=-1"):
        door.broadcast_variables([tf.Variable(1.0)], -1)
    with pytest.raises(RuntimeError, match="no part of a graph"):
        tf.function(lambda: door.broadcast_variables([]))()


class Replicas:
    num_replicas_in_sync = 2


def test_replicas_of_tf_distribute_are_refused_when_wrapping_and_in_a_step(monkeypatch):
    optimizer, grc = wrapped()
    variable = tf.Variable(tf.ones(4))
    other = keras.optimizers.SGD(0.1)
    object.__setattr__(other, "_distribution_strategy", Replicas())
    with pytest.raises(RuntimeError, match="2 replicas"):
        grace.tensorflow.DistributedOptimizer(other, grace.grace_from_params(DENSE))
    monkeypatch.setattr(tf.distribute, "get_strategy", Replicas)
    with pytest.raises(RuntimeError, match="horovodrun"):
        grace.tensorflow.average_gradients(grace.grace_from_params(DENSE), [tf.ones(4)], [variable])
    with pytest.raises(RuntimeError, match="horovodrun"):
        optimizer.apply([tf.ones(4)], [variable])
    assert grc.names == []


def test_one_replica_is_no_matter():
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        net, (optimizer, grc) = network(), wrapped()
        fit(net, optimizer)
    assert grc.report().steps == 8


# -- ownership and copies ---------------------------------------------------------------------------------------------
def test_a_grace_drives_one_optimizer_until_it_is_released():
    optimizer, grc = wrapped(keras.optimizers.SGD(0.5, name="first"))
    second = keras.optimizers.SGD(0.25)
    with pytest.raises(ValueError, match=r"drives an optimizer already \(SGD 'first'\)"):
        grace.tensorflow.DistributedOptimizer(second, grc)
    assert float(grc.learning_rate("w")) == 0.5
    with tf.GradientTape() as tape:
        loss = tf.Variable(1.0) * 2.0
    with pytest.raises(ValueError, match="release the optimizer"):
        grace.tensorflow.DistributedGradientTape(tape, grc).gradient(loss, tf.Variable(1.0))
    grace.tensorflow.release(optimizer)
    assert not hasattr(optimizer, "_grace")
    assert float(grace.tensorflow.DistributedOptimizer(second, grc).learning_rate) == 0.25
    assert float(grc.learning_rate("w")) == 0.25


def test_a_step_that_keras_refuses_sends_nothing():
    optimizer, grc = wrapped()
    known, unknown = tf.Variable(tf.ones(4)), tf.Variable(tf.ones(4))
    with pytest.raises(ValueError, match="build the optimizer first"):
        optimizer.apply([tf.ones(4)])
    optimizer.apply([tf.ones(4)], [known])
    before = grc.state_dict()["tensors"]
    for gradients, variables in (([tf.ones(4)], [unknown]), ([tf.ones(4)] * 2, [known]), ([tf.ones(3)], [known])):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            optimizer.apply(gradients, variables)
    after = grc.state_dict()["tensors"]
    assert grc.report().steps == 1
    assert all(np.array_equal(after[name][key], before[name][key]) for name in before for key in before[name])


def test_a_released_scaler_trains_by_itself():
    optimizer, grc = wrapped()
    scaler = keras.optimizers.LossScaleOptimizer(optimizer)
    assert scaler._grace is grc
    assert grace.tensorflow.release(scaler) is scaler
    fit(network(), scaler)
    assert grc.names == []
    with pytest.raises(ValueError, match="not distributed"):
        grace.tensorflow.release(scaler)


def test_an_optimizer_goes_with_its_last_user_and_not_with_the_collector():
    gc.disable()
    try:
        optimizer, grc = wrapped()
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    assert isinstance(grc, grace.Grace)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras itself, when it saves
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("make", [keras.optimizers.Adam, Registered])
@pytest.mark.parametrize("scaled", [False, True])
def test_saved_loaded_and_copied_optimizers_are_what_unwrapped_ones_would_be(make, scaled, tmp_path):
    optimizer, net = make(0.125, name="mine"), network()
    whole = keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer
    wrapped(whole)
    copies = {
        "config": type(whole).from_config(whole.get_config()),
        "serialized": keras.optimizers.deserialize(keras.optimizers.serialize(whole)),
        "pickled": pickle.loads(pickle.dumps(whole)),
        "deepcopy": copy.deepcopy(whole),
        "copy": copy.copy(whole),
    }
    fit(net, whole)
    copies |= {"model": pickle.loads(pickle.dumps(net)).optimizer, "copy of the model": copy.deepcopy(net).optimizer}
    for suffix in ("keras", "h5"):
        net.save(tmp_path / f"m.{suffix}")
        copies[suffix] = keras.models.load_model(tmp_path / f"m.{suffix}").optimizer
    for name, each in copies.items():
        inner = each.inner_optimizer if scaled else each
        assert type(each) is type(whole), name
        assert type(inner) is make, name
        assert float(inner.learning_rate) == 0.125, name
        assert not hasattr(each, "_grace"), name
        grace.tensorflow.DistributedOptimizer(each, grace.grace_from_params(DENSE))
    assert hasattr(whole, "_grace")


def test_records_have_their_lines_whatever_the_steps_per_execution(tmp_path):
    lines = []
    for number in (1, 4):
        path = tmp_path / f"{number}.jsonl"
        optimizer, _ = wrapped(params={**TOPK, "record": str(path), "record_every": 4})
        fit(network(), optimizer, grace.tensorflow.RecordCallback(), steps_per_execution=number)
        lines.append(path.read_text().count('"kind": "steps"'))
    assert lines == [2, 2]


def test_keras_accumulation_applies_the_mean_of_the_means():
    variable = tf.Variable([1.0, 1.0])
    optimizer, grc = wrapped(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), DENSE)
    for value in (1.0, 3.0):
        before = variable.numpy().tolist()
        optimizer.apply_gradients([(tf.fill(2, value), variable)])
    assert before == [1.0, 1.0]
    assert variable.numpy().tolist() == [-1.0, -1.0]
    assert grc.report().steps == 2


FIRST = """
import sys
import tensorflow as tf
import grace

how = sys.argv[1]
grc = grace.grace_from_params({"compressor": "qsgd", "min_numel": 0})
v = tf.Variable(tf.ones((4, 4)), name="v")
if how == "step":
    grc.build({"v": v})


@tf.function
def step(x):
    if tf.reduce_sum(x) > 100.0:  # AutoGraph has to rewrite this
        x = x - 1.0
    if how == "step":
        return grc.step({"v": x})["v"]
    if how == "keras":
        return grace.keras.average_gradients(grc, [x], [v])[0]
    with grace.tensorflow.DistributedGradientTape(tf.GradientTape(), grc) as tape:
        loss = tf.reduce_sum(v * x)
    return tape.gradient(loss, v)


print(step(tf.fill((4, 4), 7.0)).numpy().mean())
"""


def test_autograph_leaves_grace_alone_when_it_is_first_met_in_a_function(tmp_path):
    path = tmp_path / "first.py"
    path.write_text(FIRST)
    command, here = [sys.executable, str(path)], {**os.environ, "PYTHONPATH": str(Path(grace.__file__).parents[1])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = {how: subprocess.Popen([*command, how], env=here, **pipes) for how in ("tape", "keras", "step")}
    for how, process in started.items():
        printed, errors = process.communicate(timeout=200)
        assert float(printed) == pytest.approx(6.0, abs=0.5), (how, errors)
        assert "AutoGraph" not in errors, how


def test_a_metric_that_is_never_finite_is_told_once(tmp_path):
    optimizer, grc = wrapped(params={**TOPK, "record": str(tmp_path / "r.jsonl")})
    nan = keras.metrics.MeanMetricWrapper(lambda y, p: y[:, 0] * float("nan"), name="nan")
    callbacks = [grace.tensorflow.MetricAverageCallback(), grace.tensorflow.RecordCallback()]
    net = network()
    net.compile(optimizer, keras.losses.MeanSquaredError(), metrics=[nan], jit_compile=False)
    x = np.arange(64, dtype="float32").reshape(16, 4) / 64
    with pytest.warns(UserWarning, match="not finite") as told:
        history = net.fit(x, x[:, :3], 2, epochs=3, verbose=0, callbacks=callbacks).history
    assert [str(each.message) for each in told] == [
        "metric 'nan' is not finite on any worker, so neither is its mean",
        "not finite at step 8, and null in the record: 'nan'",
    ]
    assert np.isnan(history["nan"]).all()
    assert np.isfinite(history["loss"]).all()
    assert (tmp_path / "r.jsonl").read_text().count('"nan": null') == 3
    assert grc.steps == 24


def test_bfloat16_and_ints_keep_their_dtypes_in_logs():
    average = grace.tensorflow.MetricAverageCallback()
    average.set_model(keras.Sequential())
    logs = {"loss": tf.constant(0.5, tf.bfloat16), "f1": np.ones(2, "float32"), "n": np.int64(3), "on": True}
    average.on_epoch_end(0, logs)
    assert logs.pop("f1").tolist() == [1.0, 1.0]
    assert logs == {"loss": 0.5, "n": 3.0, "on": 1.0}
