"""Keras's kernels, [in, out], are exchanged as [out, in] by blockwise methods, and by no others."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from methods import alone, backend, context, normal, receive, send

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
import grace  # noqa: E402
from grace import grace_from_params  # noqa: E402
from grace.factorize.keras import hand_over  # noqa: E402
from grace.policies.auto import DENSE, FIRST, Auto  # noqa: E402
from grace.transports.local import LocalTransport, World  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.* without error feedback loses")

INT4 = {"compressor": "blockint", "bits": 4, "block_size": 16, "memory": "none", "min_numel": 0}
BLOCKWISE = [
    INT4,
    {"compressor": "efsignsgd", "block_size": 16, "memory": "none", "min_numel": 0},
    {"compressor": "onebit", "block_size": 24, "memory": "none", "min_numel": 0},
    {"compressor": "dettmers8", "block_size": 16, "memory": "none", "min_numel": 0},
]
KEPT = {**INT4, "memory": "residual"}
OTHERS = [
    {"compressor": "topk", "compress_ratio": 0.1},
    {"compressor": "randomk", "compress_ratio": 0.1, "memory": "residual"},
    {"compressor": "efsignsgd"},
    {"compressor": "blockint", "block_size": 0, "memory": "residual"},
]
WORKERS = 3


# -- several workers in this process -----------------------------------------------------------------------------------
TURN = threading.Condition()
"""Held by the worker that runs: the others wait for it, or for their turn."""


class Meeting(World):
    """Workers in threads. One runs at a time, until it waits for the messages of others."""

    def __init__(self, size):
        super().__init__(size)
        self._arrivals = {}

    def post(self, key, rank, value):
        collect = super().post(key, rank, value)
        self._arrivals[key] = self._arrivals.get(key, 0) + 1

        def wait():
            with TURN:
                TURN.notify_all()
                assert TURN.wait_for(lambda: self._arrivals[key] == self.size, timeout=60), key
                return collect()

        return wait


def graces(params, size=WORKERS):
    world = Meeting(size)
    return [grace_from_params(params, LocalTransport(world, rank)) for rank in range(size)]


def everywhere(function, workers, *lists):
    """Call a function for each worker, with its item of each list, in a thread each; returns the results."""

    def run(*given):
        with TURN:
            return function(*given)

    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(run, workers, *lists))


def averaged(grc, gradients, variables):
    means = grace.tensorflow.average_gradients(grc, [tf.constant(each) for each in gradients], variables)
    return [mean.numpy() for mean in means]


def in_graph(grc, gradients, variables):
    def step(*given):
        return grace.tensorflow.average_gradients(grc, list(given), variables)

    return [mean.numpy() for mean in tf.function(step, autograph=False)(*map(tf.constant, gradients))]


# -- what is exchanged, in NumPy ---------------------------------------------------------------------------------------
def decoded(params, x):
    """A tensor in its stored layout, compressed by one worker and decoded."""
    method = grace_from_params(params, LocalTransport()).method
    xp, ctx = backend("numpy"), context(backend("numpy"), x.shape)
    payload, _ = send(method, xp, x, ctx)
    return alone(lambda ctx: receive(method, xp, payload, ctx), ctx).reshape(x.shape)


def stored(params, gradients):
    """The mean of workers that send a tensor as it is stored."""
    return np.mean([decoded(params, gradient) for gradient in gradients], 0)


def turned(params, gradients):
    """The mean of workers that send a matrix transposed."""
    return stored(params, [np.ascontiguousarray(gradient.T) for gradient in gradients]).T


def close(one, two):
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def skewed(*shape, seed=0):
    """Random numbers whose columns differ in scale, as gradients of words of different frequency do."""
    return normal(*shape, seed=seed) * np.exp(2 * normal(shape[-1], seed=100)).astype(np.float32)


def network():
    """A model of every kind of variable; "dense", the LSTM and their kernels have two dimensions."""
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Embedding(13, 10, name="words"),
            keras.layers.LSTM(6, name="lstm"),
            keras.layers.Dense(20, name="dense"),
            keras.layers.Reshape((4, 5, 1)),
            keras.layers.Conv2D(3, 2, name="conv"),
            keras.layers.DepthwiseConv2D(2, name="depthwise"),
            keras.layers.BatchNormalization(name="norm"),
        ]
    )
    return model, [v for v in model.trainable_variables if v.path.endswith("kernel") and len(v.shape) == 2]


def kernel(name="kernel", shape=(10, 28)):
    return keras.Variable(np.zeros(shape, "float32"), name=name)


# -- the law -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("params", BLOCKWISE, ids=lambda params: params["compressor"])
def test_means_of_kernels_are_those_of_transposed_gradients(params):
    model, kernels = network()
    variables = model.trainable_variables
    gradients = [[skewed(*v.shape, seed=10 * rank + i) for i, v in enumerate(variables)] for rank in range(WORKERS)]
    params = {**params, "communicator": "allgather"}
    found = everywhere(averaged, graces(params), gradients, [variables] * WORKERS)
    assert [v.path.split("/", 1)[1] for v in kernels] == [
        "lstm/lstm_cell/kernel",
        "lstm/lstm_cell/recurrent_kernel",
        "dense/kernel",
    ]
    for means in found:
        for variable, mean, *each in zip(variables, means, *gradients, strict=True):
            is_kernel = any(variable is one for one in kernels)
            close(mean, (turned if is_kernel else stored)(params, each))
            assert not is_kernel or not np.allclose(mean, stored(params, each), rtol=1e-3, atol=1e-3)


def test_a_graph_and_an_eager_step_give_the_same():
    model, kernels = network()
    variables = model.trainable_variables
    gradients = [skewed(*v.shape, seed=i) for i, v in enumerate(variables)]
    for step in (averaged, in_graph):
        (grc,) = graces(INT4, 1)
        for variable, mean, gradient in zip(variables, step(grc, gradients, variables), gradients, strict=True):
            is_kernel = any(variable is one for one in kernels)
            close(mean, (turned if is_kernel else stored)(INT4, [gradient]))


def test_what_is_sent_and_what_is_kept_are_the_gradients():
    variable, sent = kernel(), 0
    (grc,) = graces(KEPT, 1)
    gradients = [skewed(10, 28, seed=seed) for seed in range(4)]
    grace.tensorflow.build(grc, [variable])
    for gradient in gradients:
        sent = sent + averaged(grc, [gradient], [variable])[0]
    (residual,) = grc.state_dict()["tensors"]["kernel"].values()
    assert np.abs(residual).max() > 0.01
    np.testing.assert_allclose(sent + residual.reshape(28, 10).T, sum(gradients), rtol=1e-4, atol=1e-4)


def test_optimizers_and_tapes_apply_what_is_averaged():
    gradient, expected = skewed(10, 28), turned(INT4, [skewed(10, 28)])
    variable = kernel()
    (grc,) = graces(INT4, 1)
    optimizer = grace.tensorflow.DistributedOptimizer(keras.optimizers.SGD(1.0), grc)
    optimizer.apply([tf.constant(gradient)], [variable])
    close(variable.numpy(), -expected)
    (grc,) = graces(INT4, 1)
    with grace.tensorflow.DistributedGradientTape(tf.GradientTape(), grc) as tape:
        loss = tf.reduce_sum(variable * gradient)
    close(tape.gradient(loss, [variable])[0].numpy(), expected)


def test_sparse_and_absent_gradients_of_kernels_are_averaged_transposed():
    variables, (one, other) = [kernel("a_kernel", (12, 20)), kernel("b_kernel", (12, 20))], graces(INT4, 2)
    dense, rows = skewed(12, 20), [2, 5]
    picked = np.zeros_like(dense)
    picked[rows] = dense[rows]
    sparse = tf.IndexedSlices(tf.constant(dense[rows]), tf.constant(rows), tf.constant([12, 20]))
    given = [[sparse, None], [tf.constant(dense), None]]
    found = everywhere(grace.tensorflow.average_gradients, [one, other], given, [variables] * 2)
    for mean, absent in found:
        close(mean.numpy(), turned(INT4, [picked, dense]))
        assert absent is None
    found = everywhere(grace.tensorflow.average_gradients, [one, other], [[None, None], given[1]], [variables] * 2)
    for mean, _ in found:
        close(mean.numpy(), turned(INT4, [0 * dense, dense]))


# -- what stays as it is -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "variable",
    [
        lambda value: tf.Variable(value, name="dense/kernel"),
        lambda value: keras.Variable(value, name="embeddings"),
        lambda value: keras.Variable(value, name="kernels"),
        lambda value: keras.Variable(value, name="mykernel"),
        lambda value: tf.constant(value),
    ],
    ids=["of TensorFlow", "embeddings", "kernels", "mykernel", "no variable"],
)
def test_a_matrix_that_is_no_kernel_of_keras_stays_as_it_is(variable):
    gradient = skewed(10, 28)
    (grc,) = graces(INT4, 1)
    close(averaged(grc, [gradient], [variable(np.zeros((10, 28), "float32"))])[0], stored(INT4, [gradient]))


@pytest.mark.parametrize("first", ["Keras", "TensorFlow"])
@pytest.mark.parametrize("shape", [(10, 28), (16, 16)])
def test_a_variable_keeps_its_layout_in_whichever_form_it_comes(shape, first):
    gradient, variable, (grc,) = skewed(*shape), kernel(shape=shape), graces(INT4, 1)
    forms = [variable, variable.value][:: 1 if first == "Keras" else -1]
    expected = (turned if first == "Keras" else stored)(INT4, [gradient])
    for form in (*forms, *forms):
        close(averaged(grc, [gradient], [form])[0], expected)


@pytest.mark.parametrize("shape", [(40,), (3, 4, 5), (2, 2, 3, 4)])
def test_a_kernel_of_other_dimensions_stays_as_it_is(shape):
    gradient = skewed(*shape)
    (grc,) = graces(INT4, 1)
    close(averaged(grc, [gradient], [kernel(shape=shape)])[0], stored(INT4, [gradient]))


@pytest.mark.parametrize("params", OTHERS, ids=lambda params: params["compressor"])
def test_other_methods_keep_their_residuals_as_keras_stores_kernels(params):
    gradient, (grc,) = skewed(10, 28), graces({**params, "min_numel": 0}, 1)
    (mean,) = averaged(grc, [gradient], [kernel()])
    (residual,) = grc.state_dict()["tensors"]["kernel"].values()
    np.testing.assert_allclose(mean + residual.reshape(10, 28), gradient, rtol=1e-4, atol=1e-4)
    assert not grc.setup.transposed
    assert "transposed" not in grc.state_dict()


@pytest.mark.parametrize("name", ["fp16", "bf16", "powersgd", "none", "terngrad"])
def test_methods_without_blocks_of_several_elements_exchange_kernels_as_they_are(name):
    gradient, (grc,) = skewed(10, 28), graces({"compressor": name, "min_numel": 0}, 1)
    (reference,) = graces({"compressor": name, "min_numel": 0}, 1)
    reference.build({"kernel": tf.zeros((10, 28))})
    (mean,) = averaged(grc, [gradient], [kernel()])
    assert np.array_equal(mean, reference.step({"kernel": tf.constant(gradient)})["kernel"].numpy())
    assert not grc.setup.transposed


def test_a_grace_that_keras_does_not_drive_transposes_nothing():
    (grc,) = graces(KEPT, 1)
    grc.build({"kernel": tf.zeros((10, 28))})
    assert not grc.setup.transposed
    assert "transposed" not in grc.state_dict()
    close(averaged(grc, [skewed(10, 28)], [kernel()])[0], stored(INT4, [skewed(10, 28)]))  # the layout stays


# -- policies ----------------------------------------------------------------------------------------------------------
def auto(*candidates):
    return {"compressor": "auto", "candidates": list(candidates), "trial_steps": 2, "effort": "fast", "min_numel": 0}


def test_a_policy_with_a_blockwise_level_transposes_at_all_levels(monkeypatch):
    monkeypatch.setattr(Auto, "predicts", False)  # tries all candidates
    variable, sent = kernel(), 0
    (grc,) = graces(auto("topk", {key: KEPT[key] for key in KEPT if key != "min_numel"}), 1)
    gradients = [skewed(10, 28, seed=seed) for seed in range(12)]
    levels = set()
    for gradient in gradients:
        levels.add(grc.schedule.level("kernel") if grc.names else 0)
        sent = sent + averaged(grc, [gradient], [variable])[0]
    assert levels >= {DENSE, FIRST, FIRST + 1}
    state = grc.state_dict()
    kept = sum(array.reshape(28, 10).T for array in state["tensors"]["kernel"].values())
    np.testing.assert_allclose(sent + kept, sum(gradients), rtol=1e-4, atol=1e-3)
    assert state["transposed"] is True


def test_a_policy_without_blockwise_levels_transposes_nothing():
    (grc,) = graces(auto("topk", "powersgd", "fp16"), 1)
    averaged(grc, [skewed(10, 28)], [kernel()])
    assert not grc.setup.transposed


# -- states ------------------------------------------------------------------------------------------------------------
def old(params, gradient, size=1, rank=0):
    """A state of a Grace that exchanges kernels as they are, as earlier versions did, after one step."""
    world = Meeting(size)
    workers = [grace_from_params(params, LocalTransport(world, each)) for each in range(size)]

    def step(grc):
        grc.build({"kernel": tf.constant(gradient)})
        grc.step({"kernel": tf.constant(gradient)})
        return grc.state_dict()

    return everywhere(step, workers)[rank]


def new(params, gradient, size=1, rank=0):
    """A state of a Grace that Keras drives, after one step."""
    workers, variable = graces(params, size), kernel(shape=gradient.shape)
    everywhere(lambda grc: averaged(grc, [gradient], [variable]), workers)
    return workers[rank].state_dict()


@pytest.mark.parametrize("saved, steps", [(old, averaged), (old, in_graph), (new, averaged), (new, in_graph)])
def test_a_state_that_is_loaded_first_sets_the_layout_for_the_whole_run_and_nothing_is_lost(saved, steps):
    gradients = [skewed(10, 28, seed=seed) for seed in range(3)]
    state, variable, (grc,) = saved(KEPT, gradients[0]), kernel(), graces(KEPT, 1)
    sent = gradients[0] - left(state)
    grc.load_state_dict(state)
    grace.tensorflow.build(grc, [variable])
    for gradient in gradients[1:]:
        sent = sent + steps(grc, [gradient], [variable])[0]
    after = grc.state_dict()
    assert ("transposed" in after) == ("transposed" in state) == grc.setup.transposed == (saved is new)
    assert np.abs(left(after)).max() > 0.01
    np.testing.assert_allclose(sent + left(after), sum(gradients), rtol=1e-4, atol=1e-4)
    grc.load_state_dict(after)  # later states are in the same layout


def left(state):
    """The residual of a state, as Keras stores the kernel."""
    (residual,) = state["tensors"]["kernel"].values()
    return residual.reshape(28, 10).T if state.get("transposed") else residual.reshape(10, 28)


def test_a_state_of_the_other_layout_is_refused_after_the_tensors_were_built():
    gradient, variable = skewed(10, 28), kernel()
    built, kept = graces(KEPT, 2)
    kept.load_state_dict(old(KEPT, gradient, 2, 1))
    for grc in (built, kept):
        grace.tensorflow.build(grc, [variable])
    before = [built.state_dict(), kept.state_dict()]
    for grc, state in ((built, old(KEPT, gradient, 2)), (kept, new(KEPT, gradient, 2, 1))):
        for load in (grc.load_state_dict, grc.check_state):
            with pytest.raises(ValueError, match="load the state before the first step"):
                load(state)
    for grc, state in zip((built, kept), before, strict=True):
        assert str(grc.state_dict()) == str(state)


@pytest.mark.parametrize("saved", [old, new])
def test_a_state_without_arrays_is_loaded_in_either_case_and_sets_no_layout(saved):
    eden = {"compressor": "eden", "bits": 4, "block_size": 16, "min_numel": 0}
    for params in (eden, INT4):
        state = saved(params, skewed(10, 28))
        assert not any(state["tensors"].values())
        for early in (False, True):
            (grc,) = graces(params, 1)
            if early:
                grc.load_state_dict(state)
            grace.tensorflow.build(grc, [kernel()])
            grc.load_state_dict(state)
            assert grc.setup.transposed
            assert grc.steps == 1


def test_sums_of_gradients_in_a_policys_state_set_the_layout_too():
    params = {**INT4, "policy": "accordion", "k_low": {"bits": 8}}
    state = old(params, skewed(10, 28))
    assert not any(state["tensors"].values())
    assert state["policy"]["sums"]
    (grc,) = graces(params, 1)
    grc.load_state_dict(state)
    grace.tensorflow.build(grc, [kernel()])
    assert not grc.setup.transposed


@pytest.mark.parametrize("early", [False, True])
def test_states_of_workers_that_disagree_are_refused(early):
    gradient = skewed(10, 28)
    states = [old(KEPT, gradient, 2, 0), new(KEPT, gradient, 2, 1)]
    (grc,) = graces(KEPT, 1)
    if not early:
        grace.tensorflow.build(grc, [kernel()])
    with pytest.raises(ValueError, match="load states that were saved together"):
        grc.load_state_dict(*states)
    assert grc.steps == 0


class Telling(LocalTransport):
    """A worker that sends its settings to the others for comparison."""

    def __init__(self, world, rank):
        super().__init__(world, rank)
        self.world, self.told = world, 0

    def exchange(self, text):
        self.told += 1
        return self.world.post(("told", self.told), self.rank, text)()


def test_workers_that_loaded_different_layouts_are_told_even_of_a_square_kernel():
    gradient, variable, world = skewed(16, 16), kernel(shape=(16, 16)), Meeting(2)
    workers = [grace_from_params(KEPT, Telling(world, rank)) for rank in range(2)]
    workers[0].load_state_dict(old(KEPT, gradient, 2, 0))
    workers[1].load_state_dict(new(KEPT, gradient, 2, 1))

    def build(grc):
        with pytest.raises(ValueError) as caught:
            grace.tensorflow.build(grc, [variable])
        return str(caught.value)

    for message in everywhere(build, workers):
        assert "the layout of Keras's kernels" in message
        assert "is [in, out] on the one and [out, in] on the other" in message


@pytest.mark.parametrize("value", [1, "yes", None, [True]])
def test_a_layout_that_is_no_bool_is_refused(value):
    (grc,) = graces(KEPT, 1)
    with pytest.raises(ValueError, match="this is no state of grace: its 'transposed'"):
        grc.load_state_dict({**new(KEPT, skewed(10, 28)), "transposed": value})


@pytest.mark.parametrize("saved", [old, new])
def test_a_reset_a_copy_and_a_checkpoint_keep_the_layout(saved, tmp_path):
    gradients, variable = [skewed(10, 28, seed=seed) for seed in range(2)], kernel()
    (grc,) = graces(KEPT, 1)
    grc.load_state_dict(saved(KEPT, gradients[0]))
    (expected,) = averaged(grc, [gradients[1]], [variable])
    (again,) = graces(KEPT, 1)
    again.load_state_dict(saved(KEPT, gradients[0]))
    grace.tensorflow.build(again, [variable])
    copied = copy.deepcopy(again)
    grace.checkpoint.save(again, tmp_path)
    (read,) = graces(KEPT, 1)
    grace.checkpoint.load(read, tmp_path)
    again.reset(LocalTransport())
    for one in (again, copied, read):
        assert np.array_equal(averaged(one, [gradients[1]], [variable])[0], expected)
        assert one.setup.transposed == (saved is new)
    again.reset(LocalTransport(), [again.state_dict()])
    assert again.setup.transposed == (saved is new)


def test_states_of_more_workers_are_resized_in_their_layout():
    gradient, variable, size = skewed(10, 28), kernel(), 2
    for saved in (old, new):
        states = [saved(KEPT, gradient, size, rank) for rank in range(size)]
        (grc,) = graces(KEPT, 1)
        grc.load_state_dict(*states)
        grace.tensorflow.build(grc, [variable])
        assert grc.setup.transposed == (saved is new)
        close(left(grc.state_dict()), np.sum([left(state) for state in states], 0))


# -- a model that changes ----------------------------------------------------------------------------------------------
def test_a_rebuilt_grace_keeps_the_layout_and_the_state():
    model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(28, name="dense", use_bias=False)])
    (variable,), (grc,) = model.trainable_variables, graces(KEPT, 1)
    optimizer = grace.tensorflow.DistributedOptimizer(keras.optimizers.SGD(1.0), grc)
    optimizer.apply([tf.constant(skewed(10, 28))], [variable])
    before = grc.state_dict()
    other = hand_over(grc, model, optimizer, keras.optimizers.SGD(1.0))
    after = grc.state_dict()
    assert grc.setup.transposed
    for key, array in before["tensors"][variable.path].items():
        assert np.array_equal(after["tensors"][variable.path][key], array)
    other.apply([tf.constant(skewed(10, 28, seed=1))], [variable])
