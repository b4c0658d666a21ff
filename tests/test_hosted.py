"""TensorFlow's kernels, and NumPy's for methods without: bit-identical to NumPy, eagerly and in graphs."""

import warnings
from dataclasses import dataclass

import methods
import numpy as np
import pytest
from methods import backend, built, context, host, spread
from table import ROWS

from grace.backends.base import HOSTED as LEAST
from grace.core import Compressor, name_of, run_local
from grace.core.sharding import template
from grace.engine.codecs import TensorCodec
from grace.memories.none import NoMemory

SHAPE = (130, 160)
N = 130 * 160


@pytest.fixture(autouse=True)
def kernels():
    built()


@pytest.fixture
def tf():
    backend("tensorflow")
    import tensorflow

    return tensorflow


@pytest.fixture
def handed(monkeypatch):
    """The number of arrays in each call of `hosted`."""
    xp, calls = backend("tensorflow"), []
    hosted = xp.hosted
    monkeypatch.setattr(
        xp, "hosted", lambda work, arrays, made: calls.append(len(arrays)) or hosted(work, arrays, made)
    )
    return calls


def method_of(**params):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*without error feedback")
        return methods.method_of(**params)


def alone(row):
    """Whether the compressor makes a payload without communication."""
    try:
        template(method_of(**row.params).compressor, backend("numpy"), SHAPE)
    except ValueError:
        return False
    return True


ALONE = [row for row in ROWS if row.params["compressor"] not in ("none", "fp16") and alone(row)]


def steps(xp, method, encode, mean):
    """Payloads, states and means of three steps, in NumPy."""
    state, found = method.init(context(xp, SHAPE)), []
    for step in range(3):
        x = xp.asarray(spread(N, seed=step), "float32")
        payload, state = encode(x if xp.name == "tensorflow" else x.copy(), state, step)
        assert np.array_equal(xp.to_numpy(x), spread(N, seed=step))
        means = mean([payload] * 3, step)
        found.append([*host(xp, payload), *host(xp, state.values()), xp.to_numpy(means).copy()])
    return found


def forms(xp, method, graph=None):
    """encode(x, state, step) and mean(payloads, step); with ``graph`` = tensorflow as traced functions."""

    def encode(x, state, step):
        payload, state = run_local(method.encode(x, state, context(xp, SHAPE, rank=1, step=step)), method)
        if graph and not method.compressor.traits.variable_length:
            assert all(array.shape.is_fully_defined() for array in payload)
        return payload, state

    def mean(payloads, step):
        return method.mean(payloads, context(xp, SHAPE, rank=1, step=step)).array()

    if not graph:
        return encode, mean
    encode, mean = (graph.function(each, autograph=False) for each in (encode, mean))
    return (
        lambda x, state, step: encode(x, state, graph.constant(step, graph.int64)),
        lambda payloads, step: mean(payloads, graph.constant(step, graph.int64)),
    )


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("row", ALONE, ids=str)
def test_is_what_numpy_makes(row, graph, tf, handed):
    xp, reference, method = backend("tensorflow"), backend("numpy"), method_of(**row.params)
    found = steps(xp, method, *forms(xp, method, tf if graph else None))
    expected = steps(reference, method, *forms(reference, method))
    for one, two in zip(found, expected, strict=True):
        for a, b in zip(one, two, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert bool(handed) != xp.kernels.whole(method.compressor) or name_of(method.compressor) == "topk"


@pytest.mark.parametrize("name", ["efsignsgd", "blockint", "eden"])
def test_a_graph_with_kernels_is_small(name, tf):
    # A graph of `auto` holds the exchange of each candidate: with large graphs, tracing would take minutes.
    xp, method = backend("tensorflow"), method_of(compressor=name)
    encode, mean = forms(xp, method)

    @tf.function(autograph=False)
    def exchange(x, step):
        payload, _ = encode(x, method.init(context(xp, SHAPE)), step)
        return mean([payload] * 8, step)

    graph = exchange.get_concrete_function(xp.zeros(N), tf.constant(0, tf.int64)).graph
    assert len(graph.get_operations()) < 40


def test_tensors_of_a_graph_side_by_side(tf):
    xp, reference, method = backend("tensorflow"), backend("numpy"), method_of(compressor="terngrad")
    given = [spread(N, seed=seed) for seed in range(12)]

    def each(xp, gradients):
        contexts = [context(xp, SHAPE, name=f"w{i}") for i in range(len(gradients))]
        pairs = zip(gradients, contexts, strict=True)
        return [run_local(method.encode(x, method.init(ctx), ctx), method)[0] for x, ctx in pairs]

    expected = [host(reference, payload) for payload in each(reference, [x.copy() for x in given])]
    graph = tf.function(lambda gradients: each(xp, gradients), autograph=False)
    for _ in range(5):
        for one, two in zip(graph([xp.asarray(x, "float32") for x in given]), expected, strict=True):
            for a, b in zip(host(xp, one), two, strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_graph_keeps_nothing_from_step_to_step(tf):
    # Contexts belong to the trace: the random numbers of a step must not accumulate in them.
    xp, method = backend("tensorflow"), method_of(compressor="randomk")
    contexts = []

    @tf.function(autograph=False)
    def encode(x, state, step):
        contexts.append(context(xp, SHAPE, step=step, _draws={}))
        return run_local(method.encode(x, state, contexts[0]), method)

    state = method.init(context(xp, SHAPE))
    for step in range(3):
        _, state = encode(xp.asarray(spread(N), "float32"), state, tf.constant(step, tf.int64))
    (traced,) = contexts
    assert not traced._draws


@pytest.mark.parametrize("k", [0, 1, 200, N])
def test_the_largest_of_a_vector(k, tf, handed):
    xp, x = backend("tensorflow"), spread(N)
    x[::7] = 1.5  # ties
    x[3] = np.nan
    expected = np.sort(np.argsort(-np.where(np.isnan(x), np.inf, abs(x)), kind="stable")[:k])
    assert xp.topk_abs(xp.asarray(x, "float32"), k).numpy().tolist() == expected.tolist()
    found = tf.function(lambda x: xp.topk_abs(x, k), autograph=False)(xp.asarray(x, "float32"))
    assert found.numpy().tolist() == expected.tolist()
    assert len(handed) == 2


def test_small_tensors_and_those_without_kernels_stay(tf, handed, monkeypatch):
    xp, method = backend("tensorflow"), method_of(compressor="natural")
    for n in (LEAST - 1, LEAST):
        run_local(method.encode(xp.zeros(n), method.init(context(xp, n)), context(xp, n)), method)
    assert len(handed) == 1
    monkeypatch.setenv("GRACE_KERNELS", "off")
    assert xp.host is None
    run_local(method.encode(xp.zeros(n), method.init(context(xp, n)), context(xp, n)), method)
    assert len(handed) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_the_mean_without_a_warning(tf, bad):
    xp, method, x = backend("tensorflow"), method_of(compressor="terngrad"), spread(N)
    x[7] = bad
    encode, mean = forms(xp, method)
    payload, _ = encode(xp.asarray(x, "float32"), method.init(context(xp, SHAPE)), 0)
    assert not np.isfinite(xp.to_numpy(mean([payload] * 2, 0))).all()


def test_a_payload_that_does_not_fit_names_its_worker(tf):
    xp, method = backend("tensorflow"), method_of(compressor="natural")
    encode, mean = forms(xp, method)
    good, _ = encode(xp.asarray(spread(N), "float32"), method.init(context(xp, SHAPE)), 0)
    payloads = [good, (good[0][:-1], *good[1:]), good]
    with pytest.raises(ValueError, match=r"worker 1 of 4 sent a payload for 'w' that 'natural' cannot have made"):
        mean(payloads, 0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="worker 1 of 4 sent a payload for 'w' that 'natural'"):
        tf.function(mean, autograph=False)(payloads, 0)


@dataclass(frozen=True)
class OfOneToolkit(Compressor):
    """Somebody else's, which knows of TensorFlow only."""

    def compress(self, x, state, ctx):
        import tensorflow as tf

        assert tf.is_tensor(x)
        return (tf.identity(x),), state

    def decompress(self, payload, ctx):
        assert not isinstance(payload[0], np.ndarray)
        return payload[0]


def test_other_peoples_methods_stay(tf, handed):
    method = TensorCodec(OfOneToolkit(), NoMemory())
    encode, mean = forms(backend("tensorflow"), method)
    payload, _ = encode(backend("tensorflow").zeros(N), {}, 0)
    assert mean([payload] * 2, 0).shape == (N,)
    assert not handed
