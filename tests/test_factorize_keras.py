"""Low-rank layers of Keras: equal to dense ones at full rank, in models of every form, saved, loaded and exported."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from methods import normal

import grace
import grace.tensorflow
from grace.factorize import WarmUp, defactorize, factorize, load_dense, plan, recalibrate
from grace.factorize.plan import Matrix

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras itself, when it reads a variable


@pytest.fixture(autouse=True)
def fresh():
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)


def close(found, expected, rel=1e-4):
    found, expected = np.asarray(found), np.asarray(expected)
    assert np.abs(found - expected).max() <= rel * np.abs(expected).max()


def full(model):
    """Replace all supported layers by factors of full rank."""
    from grace.factorize.keras import survey

    ranks = {layer.name: max(min(m.rows, m.cols) for m in layer.matrices) for layer in survey(model) if layer.matrices}
    assert ranks
    return factorize(model, ranks=ranks)


def sequence(*parts, shape=(6, 12)):
    return keras.Sequential([keras.Input(shape), *parts])


LAYERS = {
    "dense": (lambda: layers.Dense(20, activation="relu"), (30,)),
    "dense on a sequence": (lambda: layers.Dense(20, use_bias=False), (6, 12)),
    "einsum": (lambda: layers.EinsumDense("abc,cd->abd", (None, 20), bias_axes="d"), (6, 12)),
    "einsum, heads": (lambda: layers.EinsumDense("abc,cde->abde", (None, 4, 5), bias_axes="de"), (6, 12)),
    "einsum, mixed order": (lambda: layers.EinsumDense("abcd,ecd->abe", (None, 7)), (3, 6, 2)),
    "einsum, ellipsis": (lambda: layers.EinsumDense("...x,xy->...y", 20, activation="tanh"), (6, 12)),
    "conv1d": (lambda: layers.Conv1D(8, 3, strides=2, padding="causal"), (15, 6)),
    "conv2d": (lambda: layers.Conv2D(8, 3, padding="same", activation="relu"), (9, 9, 6)),
    "conv2d stride": (lambda: layers.Conv2D(8, (3, 5), strides=2, use_bias=False), (9, 9, 6)),
    "conv2d dilation": (lambda: layers.Conv2D(80, 3, dilation_rate=2), (9, 9, 6)),
    "conv2d 1x1": (lambda: layers.Conv2D(8, 1, strides=2), (9, 9, 16)),
    "conv3d": (lambda: layers.Conv3D(8, 3), (5, 5, 5, 3)),
    "lstm": (lambda: layers.LSTM(16, return_sequences=True, go_backwards=True), (6, 12)),
    "lstm, no bias": (lambda: layers.LSTM(16, use_bias=False, recurrent_activation="hard_sigmoid"), (6, 12)),
    "bidirectional": (lambda: layers.Bidirectional(layers.LSTM(16)), (6, 12)),
    "time distributed": (lambda: layers.TimeDistributed(layers.Dense(7)), (6, 12)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_full_rank_changes_nothing_and_is_saved_and_restored(name, tmp_path):
    make, shape = LAYERS[name]
    model = sequence(make(), shape=shape)
    for weight in model.weights:
        weight.assign(normal(*weight.shape) / 5)
    x, weights = normal(2, *shape), model.get_weights()
    expected, shape_after = model(x), model.compute_output_shape((2, *shape))
    same, names = full(model)
    assert same is model
    assert names.added == [name for name in names.added if name in {v.path for v in model.trainable_variables}]
    close(model(x), expected)
    assert model.compute_output_shape((2, *shape)) == shape_after
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(loaded(x), model(x))
    for other in (model, loaded):
        defactorize(other)
        close(other(x), expected)
        for found, weight in zip(other.get_weights(), weights, strict=True):
            close(found, weight)
        other.compile("sgd", "mse", jit_compile=False)
        other.fit(x, np.zeros(expected.shape), verbose=0)


@pytest.mark.parametrize("name", ["dense", "einsum, heads", "einsum, mixed order", "conv2d", "lstm"])
def test_what_a_lower_rank_loses_are_the_small_singular_values(name):
    make, shape = LAYERS[name]
    model = sequence(make(), shape=shape)
    kernel = model.layers[0].cell.kernel if name == "lstm" else model.layers[0].kernel
    labels = {"einsum, heads": 1, "einsum, mixed order": 1}.get(name, len(kernel.shape) - 1)
    dense = np.asarray(kernel, np.float64)
    dense = dense[:, :16] if name == "lstm" else dense
    dense = dense.reshape(int(np.prod(dense.shape[:labels])), -1)
    factorize(model, ranks={model.layers[0].name: 3})
    defactorize(model)
    kernel = model.layers[0].cell.kernel if name == "lstm" else model.layers[0].kernel
    low = np.asarray(kernel, np.float64)
    low = (low[:, :16] if name == "lstm" else low).reshape(dense.shape)
    values = np.linalg.svd(dense, compute_uv=False)
    close(np.sum((dense - low) ** 2), np.sum(values[3:] ** 2))


@pytest.mark.parametrize("options", [{}, {"use_bias": False, "value_dim": 6}, {"output_shape": 9}], ids=str)
def test_attention_answers_as_keras(options, tmp_path):
    q, v = keras.Input((6, 12)), keras.Input((5, 10))
    attention = layers.MultiHeadAttention(4, 8, **options)
    out, scores = attention(q, v, return_attention_scores=True)
    model = keras.Model([q, v], [out, scores])
    for weight in model.weights:
        weight.assign(normal(*weight.shape) / 3)
    x = [normal(2, 6, 12), normal(2, 5, 10)]
    mask = np.array([[True, True, False, True, False], [True] * 5])[:, None]
    expected, masked = model(x), attention(*x, attention_mask=mask, use_causal_mask=True)
    full(model)
    assert type(attention).__name__ == "LowRankMultiHeadAttention"
    for found, wanted in zip(model(x), expected, strict=True):
        close(found, wanted)
    close(attention(*x, attention_mask=mask, use_causal_mask=True), masked)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(loaded(x)[0], model(x)[0])
    defactorize(loaded)
    close(loaded(x)[0], expected[0])


def test_dropout_of_an_lstm_is_kept():
    model = sequence(layers.LSTM(16, dropout=0.5, recurrent_dropout=0.5))
    full(model)
    x = normal(2, 6, 12)
    assert np.array_equal(model(x), model(x))
    assert not np.array_equal(model(x, training=True), model(x, training=True))


class Block(layers.Layer):
    """A layer that contains layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention, self.norm = layers.MultiHeadAttention(4, 16), layers.LayerNormalization()
        self.inner, self.outer = layers.Dense(128, activation="relu"), layers.Dense(64)

    def call(self, x):
        x = x + self.attention(x, x)
        return self.norm(x + self.outer(self.inner(x)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = layers.Conv2D(64, 3, padding="same"), layers.BatchNormalization()
        self.blocks, self.flat, self.out = [Block(), Block()], layers.Reshape((16, 64)), layers.Dense(10)

    def call(self, x, training=None):
        x = self.flat(self.norm(self.conv(x), training=training))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


IMAGES = (4, 4, 4, 3)


def functional():
    image = keras.Input(IMAGES[1:])
    x = layers.BatchNormalization()(layers.Conv2D(64, 3, padding="same")(image))
    x = layers.Reshape((16, 64))(x)
    x = Block()(Block()(x))
    return keras.Model(image, layers.Dense(10)(x))


def subclassed():
    model = Subclassed()
    model(np.zeros(IMAGES, np.float32))
    return model


@pytest.mark.parametrize("make", [functional, subclassed])
def test_layers_inside_layers_change_and_nothing_else_does(make):
    model, x = make(), normal(*IMAGES)
    variables = {v.path: (v, np.asarray(v)) for v in model.variables}
    before = model.predict(x, verbose=0)
    made = plan(model, keep_last=False)
    kinds = [layer.kind for layer in made.layers if layer.ranks]
    assert kinds == ["MultiHeadAttention", "Dense", "Dense"] * 2
    _, names = factorize(model, plan=made)
    after = {v.path: v for v in model.variables}
    assert set(after) == set(variables) - set(names.removed) | set(names.added)
    for path in set(after) - set(names.added):
        assert after[path] is variables[path][0]
        assert np.array_equal(after[path], variables[path][1])
    predicted = model.predict(x, verbose=0)
    assert not np.allclose(predicted, before), "a graph of the dense weights is not used any more"
    np.testing.assert_allclose(predicted, model(x), rtol=1e-4, atol=1e-5)
    assert sum(v.value.shape.num_elements() for v in model.trainable_variables) == made.parameters_after
    weights = model.get_weights()
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    model.fit(x, np.zeros((4, 16, 10)), verbose=0)
    moved = [not np.array_equal(a, b) for a, b in zip(model.get_weights(), weights, strict=True)]
    assert sum(moved) >= len(model.trainable_variables) - 2  # attention does not depend on the key's bias


def test_a_model_that_shares_layers_changes_too():
    model = functional()
    half = keras.Model(model.input, model.layers[-2].output)
    x = normal(*IMAGES)
    full(model)
    close(model.layers[-1](half(x)), model(x))


def test_reasons_to_leave_a_layer_alone():
    dense = layers.Dense(64, name="frozen")
    dense.trainable = False
    model = sequence(
        layers.Dense(64, name="first"),
        dense,
        layers.Dense(64, name="bound", kernel_constraint="non_neg"),
        layers.GRU(64, return_sequences=True, name="gru"),
        layers.Conv1D(64, 3, groups=2, padding="same", name="grouped"),
        layers.EinsumDense("abc,bcd->abd", (16, 64), name="per position"),
        layers.SeparableConv1D(64, 3, padding="same", name="separable"),
        layers.LayerNormalization(name="norm"),
        layers.Dense(64, name="good"),
        layers.Dense(64, name="last"),
        shape=(16, 64),
    )
    found = {layer.name: layer.reason for layer in plan(model).layers}
    words = {
        "first": "first layers",
        "frozen": "frozen",
        "bound": "constraint",
        "gru/gru_cell": "GRUCell is of no kind",
        "grouped": "grouped",
        "per position": "not a product with one matrix",
        "separable": "SeparableConv1D is of no kind",
        "norm": "no matrix",
        "last": "last layer",
    }
    for name, word in words.items():
        assert word in found[name], name
    assert found["good"] == ""
    with pytest.raises(ValueError, match="not built"):
        plan(keras.Sequential([layers.Dense(3)]))


def test_embeddings_and_tied_weights_stay():
    class Tied(layers.Layer):
        def __init__(self, source):
            super().__init__()
            self.source = source

        def build(self, shape):
            self.kernel = self.source.kernel

        def call(self, x):
            return x @ self.kernel

    first = layers.Dense(64, name="source")
    model = sequence(layers.Embedding(64, 64), layers.Dense(64), first, Tied(first), layers.Dense(64), shape=(5,))
    reasons = [layer.reason for layer in plan(model).layers]
    assert "looked up" in reasons[0]
    assert reasons[1] == ""
    assert reasons[2] == "its weight is also that of 'tied'"
    assert "Tied is of no kind" in reasons[3]
    assert plan(model).parameters == sum(v.value.shape.num_elements() for v in model.trainable_variables)


def test_multiply_adds_are_those_of_the_weights():
    model = functional()
    example = normal(*IMAGES)
    made = plan(model, example=example, keep_first=0, keep_last=False)
    by_kind = {layer.kind: layer.macs for layer in made.layers if layer.macs}
    assert by_kind["Conv2D"] == 4 * 16 * 27 * 64
    assert by_kind["MultiHeadAttention"] == 4 * 16 * 4 * 64 * 64
    assert made.layers[-1].macs == 4 * 16 * 64 * 10
    lstm = sequence(layers.LSTM(64))
    (layer,) = plan(lstm, example=normal(2, 6, 12)).layers
    assert layer.macs == 2 * 6 * 4 * 64 * (12 + 64)


def test_matrices_of_the_layers():
    from grace.factorize.keras import survey

    (layer,) = survey(sequence(LAYERS["einsum, mixed order"][0](), shape=(3, 6, 2)))
    assert layer.matrices == (Matrix(7, 12),)
    (layer,) = survey(sequence(layers.LSTM(16)))
    assert layer.matrices == (Matrix(16, 12, 4), Matrix(16, 16, 4))


def test_random_factors_have_the_variance_of_the_weights():
    model = sequence(layers.Dense(300), shape=(400,))
    spread = np.std(model.layers[0].kernel)
    factorize(model, init="random", ranks={"dense": 60})
    defactorize(model)
    assert np.std(model.layers[0].kernel) == pytest.approx(spread, rel=0.05)


@pytest.mark.slow
def test_a_dense_checkpoint_and_back(tmp_path):
    trained, x = functional(), normal(*IMAGES)
    trained.save_weights(tmp_path / "dense.weights.h5")
    reference, _ = factorize(trained)
    keras.utils.set_random_seed(1)
    model, _ = factorize(functional(), init="random")
    assert not np.allclose(model(x), reference(x))
    load_dense(model, tmp_path / "dense.weights.h5")
    np.testing.assert_allclose(model(x), reference(x), rtol=1e-5, atol=1e-6)
    expected = model(x)
    defactorize(model)
    model.save_weights(tmp_path / "again.weights.h5")
    plain = functional()
    plain.load_weights(tmp_path / "again.weights.h5")
    close(plain(x), expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", [functional, subclassed])
def test_weights_files_and_saved_models(make, tmp_path):
    model, x = make(), normal(*IMAGES)
    factorize(model)
    model.save_weights(tmp_path / "low.weights.h5")
    other, _ = factorize(make(), init="random")
    other.load_weights(tmp_path / "low.weights.h5")
    assert np.array_equal(other(x), model(x))
    model.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    close(loaded.serve(x), model(x))


def test_batch_norm_is_measured_anew():
    model = sequence(layers.Dense(8), layers.BatchNormalization(), shape=(5,))
    batches = [normal(16, 5, seed=seed) + 3 for seed in range(3)]
    recalibrate(model, batches)
    inside = np.stack([np.asarray(model.layers[0](batch)) for batch in batches])
    close(model.layers[1].moving_mean, inside.mean((0, 1)))
    close(model.layers[1].moving_variance, inside.var(1).mean(0))
    assert model.layers[1].momentum == 0.99


# -- the doors and the switch, on one worker ------------------------------------------------------------------------
def fit(model, optimizer):
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=True)
    model.fit(normal(*IMAGES), np.zeros((4, 16, 10)), verbose=0)


def test_the_switch_on_one_worker():
    model = functional()
    grc = grace.grace_from_params({"compressor": "topk", "min_numel": 0}, transport="local")
    make = lambda m: keras.optimizers.SGD(0.01, momentum=0.9)  # noqa: E731
    optimizer = grace.tensorflow.DistributedOptimizer(make(model), grc)
    fit(model, optimizer)
    kept = grc.state_dict()["tensors"]
    warmup = WarmUp(1)
    model, new = warmup.switch(model, optimizer, make)
    assert type(optimizer) is keras.optimizers.SGD
    assert not hasattr(optimizer, "_grace")
    assert new._grace is grc
    assert grc.names == [v.path for v in model.trainable_variables]
    state = grc.state_dict()["tensors"]
    stayed = set(state) & set(kept)
    assert stayed == set(kept) - set(warmup.names)
    assert all(np.array_equal(state[name][key], kept[name][key]) for name in stayed for key in kept[name])
    assert all(not value.any() for name in set(state) - stayed for value in state[name].values())
    assert grc.report().steps == 0
    fit(model, new)
    assert grc.report().steps == 1
    with pytest.raises(ValueError, match="not distributed"):
        grace.tensorflow.release(optimizer)
