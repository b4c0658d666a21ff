"""Every array function of every backend, compared with plain Python.

TensorFlow's run twice: eagerly, and inside tf.function. tests/test_jax_backend.py runs JAX's inside a trace.
"""

import inspect
import math
import re
import struct
import sys
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import streams
from methods import BACKENDS, backend

from grace import simulate
from grace.backends import Backend, backend_of, get_backend, toolkits
from grace.backends.base import ITEMSIZE, ArrayFunctions
from grace.backends.bits import Bits
from grace.backends.buffers import Buffers, InPlace
from grace.backends.former import FORMER
from grace.backends.linalg import Linalg
from grace.backends.random import Random
from grace.core.rng import RECENT, recent
from grace.ops.validate import placed
from grace.testing import installed

N = 1003
INF, NAN = math.inf, math.nan
GROUPS = {"buffers": Buffers, "inplace": InPlace, "linalg": Linalg, "bits": Bits, "random": Random}


def functions(cls):
    return [name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")]


METHODS, ENGINE = functions(ArrayFunctions), functions(Backend)
OPS = METHODS + ENGINE + [f"{group}.{name}" for group, cls in GROUPS.items() for name in functions(cls)]


class Ops:
    """Calls functions of arrays on one backend: NumPy arrays go in and come out."""

    def __init__(self, name, graph):
        self.xp, self.graph = backend(name), graph

    def __call__(self, function, *arrays):
        xp = self.xp
        inputs = [xp.asarray(array.copy(), array.dtype.name) for array in map(np.asarray, arrays)]
        called = partial(function, xp)
        if self.graph:
            import tensorflow as tf

            called = tf.function(called, autograph=False)
        found = called(*inputs)
        for given, array in zip(inputs, arrays, strict=True):
            assert np.array(xp.to_numpy(given)).tobytes() == np.asarray(array).tobytes(), "an argument was changed"
        return [self.out(x) for x in found] if isinstance(found, (tuple, list)) else self.out(found)

    def out(self, x):
        found = np.array(self.xp.to_numpy(x))
        assert found.dtype.name == self.xp.dtype(x)
        return found


@pytest.fixture(params=["numpy", "torch", "tensorflow", "tf.function", "jax"])
def ops(request):
    name = {"tf.function": "tensorflow"}.get(request.param, request.param)
    found = Ops(name, request.param == "tf.function")
    with found.xp.quiet() if name == "jax" else nullcontext():  # JAX's operators need 64-bit types, too
        yield found


def f32(values):
    return np.array(values, np.float32)


def nearest(value):
    """The float32 nearest to a Python float, halves to even."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(INF, value)


def mixed(n=N, seed=0, special=True):
    """Unsorted float32 numbers with negatives, ties, both zeros and, if ``special``, NaN and infinities."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(np.float32)
    x[rng.integers(0, n, n // 4)] = rng.integers(-3, 4, n // 4)
    x[rng.integers(0, n, 5)] = -0.0
    if special:
        x[rng.integers(0, n, 12)] = [NAN, INF, -INF] * 4
    return x


def equal(found, expected):
    """Whether numbers are equal element by element; NaN equals NaN."""
    found, expected = found.tolist(), list(expected)
    return len(found) == len(expected) and all(a == b or (a != a and b != b) for a, b in zip(found, expected))  # noqa: B905


# -- the same functions everywhere ---------------------------------------------------------------------------------
every = pytest.mark.parametrize("xp", [*BACKENDS, "jax"], indirect=True)


@every
@pytest.mark.parametrize("op", OPS)
def test_signatures_are_the_same(xp, op):
    group, _, name = op.rpartition(".")
    own, base = (type(getattr(xp, group)), GROUPS[group]) if group else (type(xp), Backend)
    assert inspect.signature(getattr(own, name)) == inspect.signature(getattr(base, name))


@every
def test_nothing_is_left_out_and_nothing_is_added(xp):
    cls = type(xp)
    assert not cls.__abstractmethods__
    assert issubclass(cls, Backend)
    assert set(functions(cls)) <= set(OPS)
    for group, base in GROUPS.items():
        own = type(getattr(xp, group))
        assert issubclass(own, base)
        assert set(functions(own)) - set(functions(base)) <= {"noise_parts"}, "PyTorch's, for its compiler"


def test_a_method_author_sees_few_functions():
    assert len(METHODS) <= 58
    assert not set(METHODS) & set(ENGINE)


def test_a_backend_shows_few_names():
    assert len([name for name in dir(Backend) if not name.startswith("_")]) <= 80


FORMER_NAMES = """
buffers: address concat_bytes=joined contiguous copy empty empty_payload=part from_bytes overlap
    payload_arena=side_by_side same_memory streaming_writes=together to_bytes write
inplace: add=add_to add_product divide=divide_in floor=floor_in multiply=multiply_in scatter=put subtract=subtract_from
linalg: eigh left_factor part_product product_into qr right_factor solve subtract_product unit_rows
bits: map_bytes=by_byte pack=pack_bits pack_signs unpack=unpack_bits unpack_signs
random: cached=kept noise sample uniform words
"""


def test_former_names_of_functions(xp):
    told = {}
    for word in FORMER_NAMES.split():
        if word.endswith(":"):
            group = word[:-1]
        else:
            new, _, old = word.partition("=")
            told[old or new] = (group, new)
    assert told == FORMER
    for old, (group, new) in told.items():
        assert getattr(xp, old) == getattr(getattr(xp, group), new)
        assert old not in dir(xp)
    with pytest.raises(AttributeError, match="'emptied'"):
        xp.emptied  # noqa: B018


def test_every_function_is_tested_here():
    source = Path(__file__).read_text()
    assert [op for op in OPS if not re.search(rf"\bxp\.{re.escape(op)}\(", source)] == []


def test_an_unconverted_function_runs_as_it_was_written(xp):
    files = []

    def plain(x):
        files.append(inspect.stack()[0].filename)
        return x

    def outer(x):
        return xp.unconverted(plain)(plain(x))

    if xp.name == "tensorflow":
        import tensorflow as tf

        tf.function(outer)(tf.constant(1))
    else:
        outer(1)
    assert [file == __file__ for file in files] == [xp.name != "tensorflow", True]  # AutoGraph rewrites the first


def test_many_arrays_as_one_vector(xp):
    arrays = [xp.asarray(np.arange(n).reshape(shape) + n, "float32") for n, shape in ((6, (2, 3)), (1, ()), (4, (4,)))]
    expected = np.concatenate([np.asarray(xp.to_numpy(array)).reshape(-1) for array in arrays])
    np.testing.assert_array_equal(xp.to_numpy(xp.buffers.joined(arrays)), expected)
    if not xp.mutable:
        return
    whole, parts = xp.buffers.copies(arrays)
    np.testing.assert_array_equal(xp.to_numpy(whole), expected)
    assert [xp.shape(part) for part in parts] == [(2, 3), (), (4,)]
    xp.buffers.write(whole, 2.0)
    assert all((np.asarray(xp.to_numpy(part)) == 2).all() for part in parts)
    assert not (np.asarray(xp.to_numpy(arrays[0])) == 2).all()
    again = xp.buffers.parts(whole, arrays)
    xp.buffers.write_all(again, arrays)
    np.testing.assert_array_equal(xp.to_numpy(whole), expected)
    places = xp.buffers.addresses(again)
    assert [place - places[0] for place in places] == [0, 24, 28]
    assert places[0] == xp.buffers.address(whole)
    matrix = xp.asarray(np.zeros((3, 4)), "float32")
    assert xp.buffers.addresses([whole, xp.transpose(matrix)]) is None
    assert xp.buffers.addresses([whole, xp.asarray([1, 2], "int32")]) is None


def test_threads_that_ask_at_once_get_one_backend(monkeypatch):
    from grace.backends.torch import TorchBackend

    create = TorchBackend.__init__
    monkeypatch.setattr(TorchBackend, "__init__", lambda self, device: sleep(0.05) or create(self, device))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(get_backend, ["torch"] * 4, ["meta"] * 4))
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("name", [*BACKENDS, "jax"])
def test_backends_are_found_by_name_and_by_array(name):
    xp = backend(name)
    assert xp.name == name
    assert get_backend(name) is xp
    assert backend_of(xp.zeros(3)) is xp


def test_unknown_backends_and_arrays_are_named():
    with pytest.raises(ValueError, match=r"'mxnet'.*numpy, torch, tensorflow, jax"):
        get_backend("mxnet")
    with pytest.raises(TypeError, match="list"):
        backend_of([1.0])


TOY = """
import numpy as np

from grace.backends import Toolkit
from grace.backends.numpy import NumpyBackend


class ToyArray(np.ndarray):
    side = "left"


class ToyBackend(NumpyBackend):
    name = "toy"

    def __init__(self, side):
        self.side = side

    def asarray(self, values, dtype):
        return np.asarray(values, dtype).view(ToyArray)


TOY = Toolkit("toy", ToyBackend, ("toykit",), lambda array: array.side)
"""


@pytest.fixture
def toykit(tmp_path, monkeypatch):
    """A package that offers a toolkit, and one whose toolkit cannot be imported."""
    (tmp_path / "toykit.py").write_text(TOY)
    (tmp_path / "toykit-1.dist-info").mkdir()
    entries = "[grace.backends]\ntoy = toykit:TOY\nabsent = absentkit:TOY\nodd = toykit:ToyBackend\n"
    (tmp_path / "toykit-1.dist-info" / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(tmp_path)
    toolkits.cache_clear()
    yield
    toolkits.cache_clear()
    sys.modules.pop("toykit", None)


def test_a_package_adds_a_toolkit_by_one_entry_point(toykit):
    assert backend_of(np.zeros(3)) is get_backend("numpy")
    assert "toykit" not in sys.modules, "NumPy was asked for, and another toolkit came along"
    with pytest.warns(UserWarning, match="the backend") as warned:
        xp = get_backend("toy", "left")
    assert [re.findall("the backend '(.*?)'", str(each.message)) for each in warned] == [["absent"], ["odd"]]
    assert xp.name == "toy"
    assert backend_of(xp.asarray([1.0], "float32")) is xp
    assert get_backend("toy", "right").side == "right"
    with pytest.raises(ValueError, match=r"'toi'.*numpy, torch, tensorflow, jax, toy"):
        get_backend("toi")
    assert "toy" in installed()
    gradients = [{"w": mixed(2000, seed, False), "b": mixed(10, seed, False)} for seed in range(3)]
    for params in ({"compressor": "topk"}, {"compressor": "blockint", "communicator": "twostage"}):
        own, plain = (simulate(params, gradients, name, steps=2) for name in ("toy", "numpy"))
        assert all(equal(own.means[0][name].reshape(-1), plain.means[0][name].reshape(-1)) for name in ("w", "b"))
        assert own.report.bytes_sent == plain.report.bytes_sent


# -- memory --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_memory_of_arrays_that_can_be_written_to(name):
    xp = backend(name)
    assert xp.mutable
    for dtype in ("float32", "uint8", "int32"):
        assert (xp.shape(xp.buffers.empty((3, 4), dtype)), xp.dtype(xp.buffers.empty(5, dtype))) == ((3, 4), dtype)
    x = xp.asarray(mixed(special=False), "float32")
    own = xp.buffers.copy(x)
    assert np.array_equal(xp.to_numpy(own), xp.to_numpy(x))
    assert [xp.buffers.fetch(xp.finite(value))() for value in (x, x + np.inf)] == [True, False]
    assert xp.buffers.same_memory(x, x[:5])
    assert not xp.buffers.same_memory(x, x[5:])
    assert not xp.buffers.same_memory(x, own)
    assert xp.buffers.overlap(x, x[5:])
    assert not xp.buffers.overlap(x, own)
    assert (xp.buffers.address(x[3:]) - xp.buffers.address(x), xp.buffers.address(None)) == (12, 0)
    strided = xp.buffers.contiguous(x[::2])
    assert np.array_equal(xp.to_numpy(strided), mixed(special=False)[::2])
    xp.buffers.write(own[:7], 2.5)
    xp.buffers.write(own[7:9], x[:2])
    assert xp.to_numpy(own)[:9].tolist() == [2.5] * 7 + mixed(special=False)[:2].tolist()


def test_tensors_of_graphs_have_no_memory_of_their_own():
    xp = backend("tensorflow")
    x = xp.zeros(3)
    assert xp.buffers.copy(x) is x
    assert not xp.mutable
    for call in (lambda: xp.buffers.write(x, 0.0), lambda: xp.buffers.address(x)):
        with pytest.raises(TypeError, match="tensorflow"):
            call()


def test_a_pool_gives_memory_out_again_only_when_nobody_has_it():
    from grace.backends.torch_buffers import Pool

    xp, pool = backend("torch"), Pool()
    import torch

    n = 2**18
    one = pool.empty((n,), torch.float32)
    view = one.view(torch.uint8)[8:]
    place = xp.buffers.address(one)
    del one
    other = pool.empty((n,), torch.float32)
    assert xp.buffers.address(other) != place, "a view still refers to it"
    del view
    again = pool.empty((n - 5,), torch.float32)
    assert xp.buffers.address(again) == place
    sizes = [pool.empty((n + 5000 * i,), torch.float32) for i in range(4)]
    assert len({xp.buffers.address(array) for array in [*sizes, again, other]}) == 6


def test_a_pool_gives_out_the_smallest_that_fits():
    import torch

    from grace.backends.torch_buffers import Pool

    pool, n = Pool(), 2**18
    given = [pool.empty((n * k,), torch.uint8) for k in (5, 1, 3, 2, 4)]
    places = {array.numel() // n: array.data_ptr() for array in given}
    two = given.pop(3)
    del given
    assert pool.empty((n * 2 - 3,), torch.uint8).data_ptr() == places[3], "that of two is in use"
    held = [pool.empty((n * 2 + 1,), torch.uint8) for _ in range(3)]
    assert [array.data_ptr() for array in held[:2]] == [places[3], places[4]]
    assert held[2].data_ptr() not in places.values(), "that of one is too small, that of five too large"
    del two
    assert pool.empty((n,), torch.uint8).data_ptr() == places[1]


def test_a_pool_keeps_large_and_small_that_are_wanted_in_turn_and_drops_what_is_not_wanted_any_more():
    import torch

    from grace.backends.torch_buffers import Pool

    made = []
    pool = Pool(lambda size: made.append(size) or np.empty(size, np.uint8))
    large, small = 24 * 2**18, 8 * 2**18
    for _ in range(5):
        for size in (large, small):
            pool.empty((size,), torch.uint8)
    assert made == [large, small]
    for size in (2**18, 2**19):  # now other sizes: at the second, neither old size was requested since the first
        pool.empty((size,), torch.uint8)
    pool.empty((large,), torch.uint8)
    assert made == [large, small, 2**18, 2**19, large]


def test_spent_arguments(ops):
    x, y = mixed(), mixed(seed=1)
    own = lambda xp, x: x if xp.traced else xp.buffers.copy(x)  # noqa: E731
    with np.errstate(all="ignore"):
        assert equal(ops(lambda xp, x, y: xp.inplace.add(own(xp, x), y), x, y), x + y)
        assert equal(ops(lambda xp, x, y: xp.inplace.subtract(own(xp, x), y), x, y), x - y)
        assert equal(ops(lambda xp, x, y: xp.inplace.multiply(own(xp, x), y), x, y), x * y)
        assert equal(ops(lambda xp, x: xp.inplace.divide(own(xp, x), 4.0), x), x / np.float32(4))
        assert equal(ops(lambda xp, x: xp.inplace.floor(own(xp, x)), x), np.floor(x))
        signs = np.where(y >= 0, np.float32(1), np.float32(-1))  # their products are exact
        assert equal(ops(lambda xp, x, y, z: xp.inplace.add_product(own(xp, x), y, z), x, signs, y), x + signs * y)
        table, scale = x[:1000].reshape(-1, 8), y[: 1000 // 8].reshape(-1, 1)
        found = ops(
            lambda xp, x, y, z: xp.inplace.add_product(own(xp, x), y, z), table, signs[:1000].reshape(-1, 8), scale
        )
        assert equal(found.reshape(-1), (table + signs[:1000].reshape(-1, 8) * scale).reshape(-1))
    places = np.array([4, 0, 77], np.int32)
    expected = x.copy()
    expected[places] = 0
    assert equal(ops(lambda xp, x, i: xp.inplace.scatter(own(xp, x), i, 0.0), x, places), expected)
    expected[places] = [1, 2, 3]
    assert equal(ops(lambda xp, x, i, v: xp.inplace.scatter(own(xp, x), i, v), x, places, f32([1, 2, 3])), expected)


@pytest.fixture(params=["kernels", "plain", "plain, many threads"])
def products(request, monkeypatch):
    monkeypatch.setenv("GRACE_KERNELS", "on" if request.param == "kernels" else "off")
    if request.param == "plain, many threads":
        monkeypatch.setattr("grace.backends.torch.MANY", 1)


MATRICES = [(10, 7, 3), (700, 401, 4), (3, 140_000, 2), (5, 1, 1)]  # the second and third are computed in several parts


@pytest.mark.parametrize(("a", "b", "r"), MATRICES)
def test_products_of_factors(ops, products, a, b, r):
    p, q = mixed(a * r, special=False).reshape(a, r), mixed(r * b, seed=1, special=False).reshape(r, b)
    x, product = mixed(a * b, seed=2, special=False), (p.astype(float) @ q).reshape(-1)
    own = lambda xp, x: x if xp.traced else xp.buffers.copy(x)  # noqa: E731
    found = ops(lambda xp, x, p, q: xp.linalg.subtract_product(own(xp, x), p, q), x, p, q)
    np.testing.assert_allclose(found, x - product, atol=1e-5)
    if ops.xp.mutable:
        found = ops(lambda xp, p, q: xp.linalg.product_into(xp.buffers.empty(a * b), p, q), p, q)
        np.testing.assert_allclose(found, product, atol=1e-5)
        given, rest = ops.xp.asarray(x.copy(), "float32"), ops.xp.zeros(a * b)
        factors = [ops.xp.asarray(each, "float32") for each in (p, q)]
        ops.xp.linalg.part_product(given, *factors, rest)
        np.testing.assert_allclose(ops.xp.to_numpy(given), product, atol=1e-5)
        np.testing.assert_allclose(ops.xp.to_numpy(rest), x - product, atol=1e-5)


@pytest.mark.parametrize(("a", "b", "r"), MATRICES)
def test_factors_of_matrices(ops, products, a, b, r):
    rng = np.random.default_rng(0)
    m, p, q = (rng.standard_normal(shape).astype(np.float32) for shape in ((a, b), (a, r), (r, b)))
    left, right = (
        ops(lambda xp, m, q: xp.linalg.left_factor(m, q), m, q),
        ops(lambda xp, p, m: xp.linalg.right_factor(p, m), p, m),
    )
    np.testing.assert_allclose(left, m.astype(float) @ q.T, atol=1e-5 * b**0.5 * 4)
    np.testing.assert_allclose(right, p.T.astype(float) @ m, atol=1e-5 * a**0.5 * 4)


def test_mended(ops):
    x, y = f32([[1, 2], [3, 4]]), f32([[5, 6], [7, 8]])
    for ok in ([True, True], [True, False]):
        found = ops(lambda xp, ok, x, y: xp.mended(ok, x, lambda: y), np.array(ok).reshape(2, 1), x, y)
        assert np.array_equal(found, np.where(np.array(ok).reshape(2, 1), x, y))


@pytest.mark.parametrize("n", [1, 7, 8, 9, N])
def test_signs_as_bits(ops, n):
    x = mixed()[:n]
    packed = ops(lambda xp, x: xp.bits.pack_signs(x), x)
    assert np.array_equal(packed, np.packbits(x >= 0, bitorder="little"))
    assert np.array_equal(ops(lambda xp, p: xp.bits.unpack_signs(p, n), packed), np.where(x >= 0, 1.0, -1.0))


@pytest.mark.parametrize("m", [0, 1, 511, 512, N])
@pytest.mark.parametrize("each", [1, 3])
def test_values_by_byte(ops, m, each):
    packed = np.random.default_rng(m).integers(0, 256, m).astype(np.uint8)

    def values(xp, part):
        x = xp.reshape(xp.cast(part, "float32"), (-1, 1))
        return xp.reshape(xp.concat([x * 0.5, x - 3.0, x * x][:each], 1), (-1,))

    x = packed.astype(np.float32)
    expected = np.stack([x * np.float32(0.5), x - 3, x * x][:each], 1).ravel()
    assert equal(ops(lambda xp, p: xp.bits.map_bytes(lambda part, m: values(xp, part), p, m), packed), expected)


def test_unit_rows(ops, monkeypatch):
    x = f32([[2, -4, 1], [0, -0.0, 0], [1e-37, 0, 0], [3e38, -1e38, 2e38], [NAN, 1, 2]])
    compiled = ops.xp.name == "jax"
    if compiled:  # XLA multiplies by the reciprocal, which must not be smaller than normal numbers
        x[3] /= 8
    expected = x / f32([4, 1, 1e-37, x[3, 0], NAN])[:, None]
    for on_host in (True, False):
        if ops.xp.name == "torch":  # PyTorch has another form for devices
            monkeypatch.setattr(ops.xp, "on_host", on_host)
        for given in (x, x.T.copy().T):  # also for a transposed matrix
            rows, alive = ops(lambda xp, x: xp.linalg.unit_rows(x), given)
            assert np.allclose(rows, expected, rtol=2e-7 * compiled, atol=0, equal_nan=True)
            assert np.array_equal(alive, [[True], [False], [True], [True], [False]])


def test_what_is_kept_is_made_once(ops, monkeypatch):
    monkeypatch.setattr(ops.xp.random, "_cached", {})
    made = []

    def plus(key):  # a new graph for each call
        return ops(
            lambda xp, x: x + xp.random.cached((key, 1), lambda: made.append(key) or xp.full(3, float(key))),
            f32([1, 2, 3]),
        )

    for _ in range(2):
        assert equal(plus(2), [3, 4, 5])
        assert equal(plus(5), [6, 7, 8])
    assert made == [2, 5]
    for key in range(100, 120):  # only the last ones of many are kept
        plus(key)
    plus(119)
    plus(2)
    assert made == [2, 5, *range(100, 120), 2]


def test_max_abs(ops):
    x = mixed()[:1000].reshape(50, 20)
    assert equal(ops(lambda xp, x: xp.max_abs(x), x), [NAN if np.isnan(row).any() else abs(row).max() for row in x])


@pytest.mark.parametrize("n, k", [(N, 10), (N, 1), (N, N), (200_000, 2000), (200_000, 24_999), (200_000, 150_000)])
@pytest.mark.parametrize("kind", ["mixed", "equal", "one heavy place"])
def test_topk_abs(ops, kind, n, k):
    x = mixed(n)
    if kind == "equal":
        x = np.full(n, -2.0, np.float32)
    if kind == "one heavy place":  # the sample misses the large elements, or sees only these
        x = np.zeros(n, np.float32)
        x[:: max(1, n // 65536)] = 1 + np.arange(len(x[:: max(1, n // 65536)]))
    size = np.where(np.isnan(x), INF, abs(x))
    expected = np.sort(np.argsort(-size, kind="stable")[:k])
    assert ops(lambda xp, x: xp.topk_abs(x, k), x).tolist() == expected.tolist()


@pytest.mark.parametrize("m, n, k", [(1, N, 10), (5, N, N), (300, 700, 1), (3, 300_000, 30), (0, 9, 2)])
@pytest.mark.parametrize("kind", ["mixed", "equal"])
def test_topk_abs_of_rows(ops, kind, m, n, k):
    x = np.resize(mixed(N + 1), (m, n)) if kind == "mixed" else np.full((m, n), -2.0, np.float32)
    size = np.where(np.isnan(x), INF, abs(x))
    expected = np.sort(np.argsort(-size, axis=1, kind="stable")[:, :k], 1)
    assert ops(lambda xp, x: xp.topk_abs(x, k), x).tolist() == expected.tolist()


@pytest.mark.parametrize("n, k", [(1, 1), (N, 10), (N, N), (N, 0), (2**19 + 5, 5000), (2**19 + 5, 2**19)])
def test_sample(ops, n, k):
    words = ops(lambda xp, x: xp.random.words(5, 7, 3, n), f32([])).view(np.uint32)
    expected = np.sort(np.argsort(words, kind="stable")[:k])
    assert ops(lambda xp, x: xp.random.sample(5, 7, 3, n, k), f32([])).tolist() == expected.tolist()


@pytest.mark.parametrize("step, worker", [(0, 0), (1, 3), (2**31 + 7, 1), (2**32 + 1, 2**16)])
def test_keys(ops, step, worker):
    def keys(xp, step, worker):
        return xp.concat([xp.reshape(key, (1,)) for key in xp.random.keys(0xFFFFFFF1, step, worker)])

    expected = [streams.fold(0xFFFFFFF1, step, worker, key) for key in (1, 2)]
    assert ops(keys, np.int64(step), np.int64(worker)).tolist() == expected


# -- making and reading --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [name for name in ITEMSIZE if name != "bfloat16"])
def test_arrays_are_made_and_read(xp, dtype):
    values = [[True, False, True], [False, True, True]] if dtype == "bool" else [[1, 0, 1], [0, 1, 1]]
    for given in (values, np.array(values, dtype)):
        x = xp.asarray(given, dtype)
        assert xp.dtype(x) == dtype
        assert xp.shape(x) == (2, 3)
        assert xp.to_numpy(x).dtype.name == dtype
        assert xp.to_numpy(x).tolist() == np.array(values, dtype).tolist()
    assert xp.shape(xp.asarray(values[0][0], dtype)) == ()


def test_checkpoints_get_a_copy_on_the_host(xp):
    x = xp.asarray(mixed(), "float32")
    found = xp.exported(x)
    assert type(found) is (type(x) if xp.name == "torch" else np.ndarray)
    assert equal(np.asarray(found), mixed().tolist())
    found[0] = 7
    assert equal(xp.to_numpy(x), mixed().tolist())


def test_a_cell_of_a_number_counts(xp):
    cell = xp.cell(0)
    cell.assign(2**40)
    cell.assign(cell.read() + 1)
    assert int(cell.read()) == 2**40 + 1
    assert xp.traced or type(cell.read()) is int


@pytest.mark.parametrize(("name", "device", "readable"), [("numpy", "cpu", True), ("torch", "meta", False)])
def test_values_that_can_be_read_now(name, device, readable):
    backend(name)
    assert get_backend(name, device).can_read_values == readable


@pytest.mark.parametrize("shape", [0, 5, (), (0,), (3, 5), (2, 0, 3)])
def test_zeros_and_full(ops, shape):
    expected = shape if isinstance(shape, tuple) else (shape,)
    for dtype in ("float32", "float64", "uint8", "int8", "int32", "int64", "float16"):
        zeros, full = ops(lambda xp: (xp.zeros(shape, dtype), xp.full(shape, 3, dtype)))
        assert zeros.shape == full.shape == expected
        assert zeros.dtype.name == full.dtype.name == dtype
        assert (zeros == 0).all()
        assert (full == 3).all()
    assert ops(lambda xp: xp.zeros(shape)).dtype == ops(lambda xp: xp.full(shape, 1)).dtype == np.float32
    scalar = ops(lambda xp, value: xp.full(shape, value), f32(2.5))
    assert scalar.shape == expected
    assert (scalar == 2.5).all()


def test_arange(ops):
    for n in (0, 1, N):
        assert ops(lambda xp: xp.arange(n)).tolist() == list(range(n))
    assert ops(lambda xp: xp.arange(3)).dtype == np.int32
    assert ops(lambda xp: xp.arange(3, "int64")).dtype == np.int64


def test_lengths_and_integers(ops):
    def slices(xp, x):
        positions = xp.nonzero(x > 0)  # its length is unknown in a graph
        lengths = xp.lengths([x, positions, xp.zeros((4, 2))])
        _, count, _ = xp.integers(lengths)
        return lengths, positions[:count], x[:count]

    x = mixed(special=False)
    positive = [i for i, v in enumerate(x.tolist()) if v > 0]
    lengths, positions, front = ops(slices, x)
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [N, len(positive), 4]
    assert positions.tolist() == positive
    assert equal(front, x[: len(positive)].tolist())


# -- shape ---------------------------------------------------------------------------------------------------------
def test_reshape_concat_transpose(ops):
    x = np.arange(N * 3, dtype=np.int32)
    assert ops(lambda xp, x: xp.reshape(x, (-1, 3)), x).tolist() == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(N)]
    table = x.reshape(N, 3)
    turned = ops(lambda xp, x: xp.transpose(x), table)
    assert turned.tolist() == [list(range(i, 3 * N, 3)) for i in range(3)]
    assert ops(lambda xp, x: xp.reshape(xp.transpose(x), (-1,)), table).tolist() == [v for r in turned for v in r]
    assert ops(lambda xp, x: xp.concat([x, x[:0], x[:2]]), x).tolist() == [*range(3 * N), 0, 1]
    assert ops(lambda xp, x: xp.concat([x]), x).tolist() == x.tolist()
    wide = ops(lambda xp, x: xp.concat([x, x[:, :1]], 1), table)
    assert wide.tolist() == [[3 * i, 3 * i + 1, 3 * i + 2, 3 * i] for i in range(N)]
    assert ops(lambda xp, x: xp.reshape(x, ()), f32([7])).shape == ()


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int8", "int32", "int64", "bool"])
def test_pad(ops, dtype):
    x = np.arange(N).astype(dtype)
    for n in (N, N + 1, 2 * N):
        padded = ops(lambda xp, x: xp.pad(x, n), x)
        assert padded.dtype.name == dtype
        assert padded.tolist() == x.tolist() + [0] * (n - N)
    assert ops(lambda xp, x: xp.pad(x, 3), x[:0]).tolist() == [0, 0, 0]


# -- dtype ---------------------------------------------------------------------------------------------------------
def test_cast_to_half_rounds_halves_to_even(ops):
    known = {
        2049: 2048,
        2051: 2052,
        1 + 2**-11: 1,
        1 + 3 * 2**-11: 1 + 2**-9,
        -2049: -2048,
        2**-25: 0,
        3 * 2**-25: 2**-23,
    }
    assert ops(lambda xp, x: xp.cast(x, "float16"), f32(list(known))).tolist() == list(known.values())
    x = np.concatenate([mixed(), mixed(seed=1, special=False) * 1e4, mixed(seed=2, special=False) * 1e-6])
    expected = [v if not math.isfinite(v) else struct.unpack("e", struct.pack("e", v))[0] for v in x.tolist()]
    assert equal(ops(lambda xp, x: xp.cast(x, "float16"), x), expected)
    assert ops(lambda xp, x: xp.cast(x, "float16"), f32([1e6, -1e6, 65519, 65520])).tolist() == [INF, -INF, 65504, INF]


def test_cast_to_single_rounds_halves_to_even(ops):
    x = np.random.default_rng(0).standard_normal(N) * 10.0 ** np.arange(-30, 30)[np.arange(N) % 60]
    x = np.concatenate([x, [1 + 2**-24, 1 + 3 * 2**-24, -1 - 2**-24, NAN, INF]])
    assert equal(ops(lambda xp, x: xp.cast(x, "float32"), x), [v if v != v else nearest(v) for v in x.tolist()])
    n = np.array([2**24 + 1, 2**24 + 3, -(2**24) - 1, 2**62 + 1, *range(-500, 500)])
    assert ops(lambda xp, n: xp.cast(n, "float32"), n).tolist() == [nearest(float(v)) for v in n.tolist()]


def test_cast_to_integer_truncates(ops):
    x = mixed(special=False) * 25
    for dtype in ("int8", "int32", "int64"):
        assert ops(lambda xp, x: xp.cast(x, dtype), x).tolist() == [int(v) for v in x.tolist()]
    assert ops(lambda xp, x: xp.cast(x, "uint8"), abs(x)).tolist() == [int(v) for v in abs(x).tolist()]


def test_cast_of_truth_and_of_integers(ops):
    mask = mixed() > 0
    for dtype in ("uint8", "int8", "int32", "int64", "float32"):
        found = ops(lambda xp, mask: xp.cast(mask, dtype), mask)
        assert found.dtype.name == dtype
        assert found.tolist() == [int(v) for v in mask.tolist()]
    n = np.arange(-N, N)
    assert ops(lambda xp, n: xp.cast(n, "bool"), n).tolist() == [v != 0 for v in n.tolist()]
    assert ops(lambda xp, n: xp.cast(xp.cast(n, "int32"), "int64"), n).tolist() == n.tolist()


def test_cast_does_not_warn_outside_the_range(xp):
    x = xp.asarray(f32([NAN, INF, -INF, 1e30, -1e30]), "float32")
    for dtype in ("int32", "int8", "float16"):
        assert xp.dtype(xp.cast(x, dtype)) == dtype


FIXED = [name for name in ITEMSIZE if name not in ("bool", "bfloat16")]


def sample_of(dtype, n):
    return np.frombuffer(np.random.default_rng(3).bytes(n * ITEMSIZE[dtype]), dtype).copy()


@pytest.mark.parametrize("source", FIXED)
@pytest.mark.parametrize("target", FIXED)
def test_bitcast(ops, source, target):
    for n in (0, 8, 1008):
        x = sample_of(source, n)
        found = ops(lambda xp, x: xp.bitcast(x, target), x)
        assert found.dtype.name == target
        assert found.ndim == 1
        assert found.tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", [*FIXED, "bool"])
def test_to_bytes_and_back(ops, dtype):
    x = sample_of(dtype, 24 * 50) if dtype != "bool" else mixed(1200) > 0
    for shape in ((1200,), (24, 50), (2, 3, 200), (1200, 1)):
        octets = ops(lambda xp, x: xp.buffers.to_bytes(x), x.reshape(shape))
        assert octets.dtype == np.uint8
        assert octets.tobytes() == x.tobytes()
        back = ops(lambda xp, octets: xp.buffers.from_bytes(octets, dtype, shape), octets)
        assert back.shape == shape
        assert back.dtype.name == dtype
        assert back.tobytes() == x.tobytes()
    assert ops(lambda xp, x: xp.buffers.to_bytes(x), x[0].reshape(())).tobytes() == x[:1].tobytes()
    assert (
        ops(lambda xp, x: xp.buffers.to_bytes(xp.transpose(x)), x.reshape(24, 50)).tobytes()
        == x.reshape(24, 50).T.tobytes()
    )


def test_a_vector_is_split_and_bytes_are_counted(ops):
    x = f32(range(10))
    for sizes in ([3, 0, 5, 2], [10], [0, 10]):
        found = [ops(lambda xp, x, i=i: xp.split(x, sizes)[i], x) for i in range(len(sizes))]
        assert [len(part) for part in found] == sizes
        assert np.concatenate(found).tolist() == x.tolist()
    assert ops(lambda xp, x: xp.asarray([len(xp.split(x, []))], "int32"), x[:0]).tolist() == [0]
    for dtype in [*FIXED, "bool"]:
        found = ops(lambda xp, x: xp.asarray(xp.nbytes(xp.cast(x, dtype)), "int64"), x.reshape(5, 2))
        assert int(found) == 10 * ITEMSIZE[dtype]


def test_arrays_are_joined_whether_or_not_they_lie_side_by_side(ops):
    x, y = f32(range(6)), np.arange(5, dtype=np.uint8)
    joined = ops(lambda xp, x, y: xp.buffers.concat_bytes([x, y, xp.transpose(xp.reshape(x, (2, 3)))]), x, y)
    assert joined.tobytes() == x.tobytes() + y.tobytes() + x.reshape(2, 3).T.tobytes()
    empty = ops(lambda xp, x, y: xp.buffers.concat_bytes([y[:0], x[2:2]]), x, y)
    assert (empty.dtype, empty.shape) == (np.uint8, (0,))
    parts = ops(lambda xp, x, y: xp.buffers.concat_bytes([x[:0], x[:2], y[:0], x[2:4], y[5:]]), x, y)
    assert parts.tobytes() == x[:4].tobytes()


@pytest.mark.parametrize("toolkit", ["numpy", "torch", "tensorflow"])
def test_what_is_written_together_is_said_for_a_while(toolkit, monkeypatch):
    from grace.kernels import library

    xp, lib = backend(toolkit), library()
    with xp.buffers.streaming_writes(10**9), xp.buffers.streaming_writes(3):
        assert lib is None or toolkit == "tensorflow" or lib.gathered(3) == 3
    assert lib is None or lib.gathered(0) == 0
    monkeypatch.setenv("GRACE_KERNELS", "off")
    with xp.buffers.streaming_writes(10**9):
        assert lib is None or lib.gathered(0) == 0


def test_adjacent_parts_of_an_array_are_joined_without_a_copy():
    import torch

    xp = backend("torch")
    whole = xp.asarray(range(200), "uint8")
    parts = [whole[:50], whole[50:120], whole[120:]]
    joined = xp.buffers.concat_bytes(parts)
    assert xp.buffers.same_memory(joined, whole)
    assert torch.equal(joined, whole)
    with xp.buffers.payload_arena(50):  # without effect
        other = xp.buffers.empty_payload(50, "uint8")
    assert not xp.buffers.overlap(other, whole)
    xp.buffers.write(other, 7)
    for apart in ([parts[0], parts[2]], [parts[0], other]):
        found = xp.buffers.concat_bytes(apart)
        assert not xp.buffers.overlap(found, whole), "there is a gap"
        assert torch.equal(found, torch.cat(apart))
    # Adjacent by accident: two views of one larger array.
    one, two = (torch.frombuffer(memoryview(whole.numpy())[i : i + 100], dtype=torch.uint8) for i in (0, 100))
    assert xp.to_numpy(xp.buffers.concat_bytes([one, two])).tolist() == list(range(200))


@pytest.mark.parametrize("dtype", FIXED)
def test_from_bytes_of_slices_that_are_not_aligned(ops, dtype):
    size = ITEMSIZE[dtype] * 125
    octets = sample_of("uint8", size + 16)
    for start in range(1, 9):
        found = ops(lambda xp, octets: xp.buffers.from_bytes(octets[start : start + size], dtype, (25, 5)), octets)
        assert found.shape == (25, 5)
        assert found.tobytes() == octets[start : start + size].tobytes()


@pytest.mark.parametrize("name", ["torch", "tensorflow"])
def test_bfloat16_where_the_toolkit_has_it(name):
    xp = backend(name)
    x = mixed(special=False)
    half = xp.cast(xp.asarray(x, "float32"), "bfloat16")
    assert xp.dtype(half) == "bfloat16"
    bits = x.view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert xp.to_numpy(xp.buffers.to_bytes(half)).tobytes() == expected.tobytes()
    back = xp.buffers.from_bytes(xp.buffers.to_bytes(half), "bfloat16", (N,))
    assert np.array_equal(xp.to_numpy(xp.cast(back, "float32")).view(np.uint32), expected.astype(np.uint32) << 16)
    assert np.array_equal(np.asarray(xp.to_numpy(half), np.float32).view(np.uint32), expected.astype(np.uint32) << 16)


# -- elementwise ---------------------------------------------------------------------------------------------------
def test_where(ops):
    x, y = mixed(), mixed(seed=1)
    expected = [a if a > 0 else b for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert equal(ops(lambda xp, x, y: xp.where(x > 0, x, y), x, y), expected)
    for value in (0.0, 1.5, NAN):
        first = ops(lambda xp, x: xp.where(x > 0, value, x), x)
        second = ops(lambda xp, x: xp.where(x > 0, x, value), x)
        assert first.dtype == second.dtype == np.float32
        assert equal(first, [value if a > 0 else a for a in x.tolist()])
        assert equal(second, [a if a > 0 else value for a in x.tolist()])

    def scalar(xp, x):
        return xp.where(xp.finite(x), x, NAN)

    assert equal(ops(scalar, x), [NAN] * N)
    assert equal(ops(scalar, x[:0]), [])
    assert equal(ops(scalar, mixed(special=False)), mixed(special=False).tolist())


def test_abs_and_sign(ops):
    x = mixed()
    assert equal(ops(lambda xp, x: xp.abs(x), x), [abs(v) for v in x.tolist()])
    x = mixed(special=False)

    def sign(v):
        return (v > 0) - (v < 0)

    found = ops(lambda xp, x: xp.sign(x), x)
    assert found.dtype == np.float32
    assert equal(found, [sign(v) for v in x.tolist()])
    n = np.arange(-N, N, dtype=np.int32)
    assert ops(lambda xp, n: xp.sign(n), n).tolist() == [sign(v) for v in n.tolist()]
    assert ops(lambda xp, n: xp.abs(n), n).tolist() == [abs(v) for v in n.tolist()]


def test_floor_and_round(ops):
    x = np.concatenate([mixed(special=False) * 30, f32([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 8388607.5, 1e30, -1e30])])
    assert equal(ops(lambda xp, x: xp.floor(x), x), [math.floor(v) for v in x.tolist()])
    assert equal(ops(lambda xp, x: xp.round(x), x), [round(v) for v in x.tolist()])  # Python, too, rounds ties to even
    for op in ("floor", "round"):
        assert equal(ops(lambda xp, x: getattr(xp, op)(x), f32([INF, -INF, NAN])), [INF, -INF, NAN])


def test_sqrt_is_correctly_rounded(ops):
    # Rounding a float64 root to float32 is correct, as 53 >= 2 * 24 + 2.
    x = abs(np.concatenate([mixed(20_000, special=False), mixed(seed=1, special=False) * 1e30, f32([0, 4, 1.2e-38])]))
    assert equal(ops(lambda xp, x: xp.sqrt(x), x), [nearest(math.sqrt(v)) for v in x.tolist()])
    assert equal(ops(lambda xp, x: xp.sqrt(x), f32([INF, NAN])), [INF, NAN])
    x = abs(np.random.default_rng(0).standard_normal(N))
    np.testing.assert_allclose(ops(lambda xp, x: xp.sqrt(x), x), [math.sqrt(v) for v in x.tolist()], rtol=1e-15)


def test_log_and_cos(ops):
    x = abs(mixed(special=False)) + np.float32(1e-7)
    np.testing.assert_allclose(ops(lambda xp, x: xp.log(x), x), [math.log(v) for v in x.tolist()], rtol=1e-6, atol=1e-7)
    x = mixed(special=False) * 2
    np.testing.assert_allclose(ops(lambda xp, x: xp.cos(x), x), [math.cos(v) for v in x.tolist()], rtol=1e-6, atol=1e-6)


def test_minimum_and_maximum(ops):
    x, y = (np.where(np.isnan(v), 0, v) for v in (mixed(), mixed(seed=1)))
    pairs = list(zip(x.tolist(), y.tolist(), strict=True))
    assert equal(ops(lambda xp, x, y: xp.minimum(x, y), x, y), [min(pair) for pair in pairs])
    assert equal(ops(lambda xp, x, y: xp.maximum(x, y), x, y), [max(pair) for pair in pairs])
    assert equal(ops(lambda xp, x: xp.minimum(x, 0.5), x), [min(v, 0.5) for v in x.tolist()])
    assert equal(ops(lambda xp, x: xp.maximum(x, 0.5), x), [max(v, 0.5) for v in x.tolist()])
    n = np.arange(-N, N, dtype=np.int32)
    assert ops(lambda xp, n: xp.minimum(n, 7), n).tolist() == [min(v, 7) for v in n.tolist()]
    assert ops(lambda xp, n: xp.maximum(n, 7), n).dtype == np.int32


def test_invert_and_isfinite(ops):
    x = mixed()
    assert ops(lambda xp, x: xp.invert(x > 0), x).tolist() == [not v > 0 for v in x.tolist()]
    assert ops(lambda xp, x: xp.isfinite(x), x).tolist() == [math.isfinite(v) for v in x.tolist()]


def test_division_and_remainder_round_down(ops):
    n = np.arange(-N, N, dtype=np.int64)
    assert ops(lambda xp, n: n // 16, n).tolist() == [v // 16 for v in n.tolist()]
    assert ops(lambda xp, n: n % 16, n).tolist() == [v % 16 for v in n.tolist()]


# -- reductions ----------------------------------------------------------------------------------------------------
def test_sum_is_accumulated_in_float64(ops):
    # In float32 each of the 1000 ones would be lost.
    x = f32([2.0**24, *[1.0] * 1000, -(2.0**24)])
    assert ops(lambda xp, x: xp.sum(x), x) == 1000
    x = mixed(50_000, special=False)
    found = ops(lambda xp, x: xp.sum(x), x)
    assert found.dtype == np.float32
    assert found.shape == ()
    assert found == nearest(math.fsum(x.tolist()))
    half = np.array([60000, 60000, -60000, 1], np.float16)
    assert ops(lambda xp, x: xp.sum(x), half) == np.float16(60001)
    assert ops(lambda xp, x: xp.sum(x), f32([3e38, 3e38, -3e38])) == f32(3e38)


def test_sum_over_one_axis(ops):
    table = mixed(17 * 59, special=False).reshape(17, 59)
    for axis, rows in ((0, table.T), (1, table)):
        expected = f32([nearest(math.fsum(row.tolist())) for row in rows])
        assert np.array_equal(ops(lambda xp, x: xp.sum(x, axis), table), expected)
        kept = ops(lambda xp, x: xp.sum(x, axis, keepdims=True), table)
        assert kept.shape == ((1, 59), (17, 1))[axis]
        assert np.array_equal(kept.reshape(-1), expected)


def test_sum_of_integers_and_of_what_is_not_finite(ops):
    n = np.arange(N) * 2**50 // N - 2**40
    found = ops(lambda xp, n: xp.sum(n), n)
    assert found.dtype == np.int64
    assert found == sum(n.tolist())
    assert ops(lambda xp, n: xp.sum(n), np.full(3, 7, np.int32)).dtype == np.int32
    assert equal(ops(lambda xp, x: xp.sum(x, 1), f32([[1, NAN], [INF, -INF], [INF, 1]])), [NAN, NAN, INF])
    assert ops(lambda xp, x: xp.sum(x), f32([])) == 0


def test_max_keeps_nan(ops):
    x = mixed(special=False)
    assert ops(lambda xp, x: xp.max(x), x) == max(x.tolist())
    assert ops(lambda xp, x: xp.max(x), -abs(x) - 1) == max((-abs(x) - 1).tolist())
    for position in (0, N // 2, N - 1):
        for other in (1.0, INF, -INF):
            y = x.copy()
            y[position], y[position // 2 + 1] = NAN, other
            assert math.isnan(ops(lambda xp, y: xp.max(y), y))
    assert ops(lambda xp, x: xp.max(x), f32([-INF, -INF])) == -INF
    assert math.isnan(ops(lambda xp, x: xp.max(x), f32([NAN, NAN])))


def test_max_over_one_axis(ops):
    table = mixed(17 * 59).reshape(17, 59)

    def best(row):
        return NAN if any(v != v for v in row) else max(row)

    for axis, rows in ((0, table.T), (1, table)):
        assert equal(ops(lambda xp, x: xp.max(x, axis), table), [best(row.tolist()) for row in rows])
        kept = ops(lambda xp, x: xp.max(x, axis, keepdims=True), table)
        assert kept.shape == ((1, 59), (17, 1))[axis]
    n = np.arange(N * 2, dtype=np.int32).reshape(2, N) % 977 - 2000
    assert ops(lambda xp, n: xp.max(n, 1), n).tolist() == [max(row) for row in n.tolist()]


def test_all_and_finite(ops):
    yes = np.ones(N, bool)
    no = yes.copy()
    no[N - 1] = False
    assert [bool(ops(lambda xp, m: xp.all(m), mask)) for mask in (yes, no, yes[:0])] == [True, False, True]
    for value in (NAN, INF, -INF):
        for position in (0, 500, N - 1):
            x = mixed(special=False)
            x[position] = value
            assert not ops(lambda xp, x: xp.finite(x), x)
    for x in (mixed(special=False), f32([]), f32([3e38, -3e38] * 9)):
        found = ops(lambda xp, x: xp.finite(x), x)
        assert found.dtype == bool
        assert found.shape == ()
        assert found


def test_cumsum(ops):
    n = np.random.default_rng(0).integers(-9, 9, N)
    for dtype in ("int32", "int64", "float32"):
        found = ops(lambda xp, n: xp.cumsum(n), n.astype(dtype))
        assert found.dtype.name == dtype
        assert found.tolist() == [sum(n[: i + 1].tolist()) for i in range(N)]


# -- integers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_bitwise(ops, dtype):
    a, b = (sample_of(dtype, N), sample_of(dtype, N)[::-1].copy())
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    assert ops(lambda xp, a, b: xp.bitwise_and(a, b), a, b).tolist() == [p & q for p, q in pairs]
    assert ops(lambda xp, a, b: xp.bitwise_or(a, b), a, b).tolist() == [p | q for p, q in pairs]
    assert ops(lambda xp, a, b: xp.bitwise_xor(a, b), a, b).tolist() == [p ^ q for p, q in pairs]
    for found, expected in (
        (ops(lambda xp, a: xp.bitwise_and(a, 0x55), a), [p & 0x55 for p in a.tolist()]),
        (ops(lambda xp, a: xp.bitwise_or(a, 0x55), a), [p | 0x55 for p in a.tolist()]),
        (ops(lambda xp, a: xp.bitwise_xor(a, 0x55), a), [p ^ 0x55 for p in a.tolist()]),
    ):
        assert found.dtype.name == dtype
        assert found.tolist() == expected


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_shifts(ops, dtype):
    a = sample_of(dtype, N)
    width = 8 * ITEMSIZE[dtype]
    for bits in (0, 1, 3, width - 1):
        right = ops(lambda xp, a: xp.shift_right(a, bits), a)
        assert right.dtype.name == dtype
        assert right.tolist() == [p >> bits for p in a.tolist()]
        left = ops(lambda xp, a: xp.shift_left(a, bits), a)
        assert [p % 2**width for p in left.tolist()] == [(p << bits) % 2**width for p in a.tolist()]


# -- selection -----------------------------------------------------------------------------------------------------
def largest(x, k):
    """Positions of the k largest: NaN counts as infinite, and of equal ones the first is taken."""
    key = [INF if v != v else v for v in x.tolist()]
    return sorted(sorted(range(len(key)), key=lambda i: (-key[i], i))[:k])


@pytest.mark.parametrize("k", [0, 1, 2, 100, 501, N - 1, N])
def test_topk(ops, k):
    x = mixed()
    ties = np.round(mixed(seed=4, special=False))
    integers = np.random.default_rng(0).integers(-50, 50, N).astype(np.int32)
    for values in (x, mixed(special=False), ties, integers, f32(np.zeros(N)), f32(np.full(N, -2)), -abs(x)):
        found = ops(lambda xp, x: xp.topk(x, k), values)
        assert found.dtype == np.int32
        assert found.tolist() == largest(values, k)


def test_topk_prefers_nan_and_keeps_every_one(ops):
    x = mixed(special=False)
    x[[3, 700, N - 1]] = NAN
    assert ops(lambda xp, x: xp.topk(x, 3), x).tolist() == [3, 700, N - 1]
    assert ops(lambda xp, x: xp.topk(x, 1), x).tolist() == [3]


LARGE = 200_000


def large(kind):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(LARGE).astype(np.float32)
    if kind == "constant":
        x[:] = 1
    elif kind == "ties":
        x = np.round(x)
    elif kind == "two values":
        x = (x > 1).astype(np.float32)
    elif kind == "few large":
        x = np.where(rng.random(LARGE) < 1e-3, x + 9, 0).astype(np.float32)
    elif kind == "sorted":
        x.sort()
    elif kind == "periodic":  # every third element is unlike the others
        x[::3] += 50
    elif kind == "nan":
        x[rng.integers(0, LARGE, 50)] = NAN
    return x


@pytest.mark.parametrize("kind", ["normal", "constant", "ties", "two values", "few large", "sorted", "periodic", "nan"])
def test_topk_of_a_large_vector(ops, kind):
    x = large(kind)
    key = np.where(np.isnan(x), np.inf, x)
    for k in (1, 20, 2000, LARGE // 8, LARGE // 2):
        expected = np.sort(np.argsort(-key, kind="stable")[:k])
        assert np.array_equal(ops(lambda xp, x: xp.topk(x, k), x), expected)


@pytest.mark.parametrize("k", [0, 1, 7, 40])
def test_topk_of_each_row(ops, k):
    x = mixed(30 * 40).reshape(30, 40)
    found = ops(lambda xp, a: xp.topk(a, k), x)
    assert (found.dtype, found.shape) == (np.int32, (30, k))
    for row, positions in zip(x.tolist(), found.tolist(), strict=True):
        order = sorted(range(40), key=lambda i: (-INF if math.isnan(row[i]) else -row[i], i))
        assert positions == sorted(order[:k])
    assert ops(lambda xp, a: xp.topk(a, k), x[:0]).shape == (0, k)


def test_sort(ops):
    x = mixed(special=False)
    assert ops(lambda xp, a: xp.sort(a), x).tolist() == sorted(x.tolist())
    found = ops(lambda xp, a: xp.sort(a), x[:1000].reshape(50, 20))
    assert found.tolist() == [sorted(row) for row in x[:1000].reshape(50, 20).tolist()]


@pytest.mark.parametrize("many", [0, 1, 7, 8, 300])  # a few ranks are searched one by one, many in a sorted array
def test_ranked(ops, many):
    x, ranks = mixed(special=False), np.sort(np.random.default_rng(2).permutation(N)[:many]).astype(np.int32)
    x[:2] = INF, -INF
    found = ops(lambda xp, x, r: xp.ranked(x, r), x, ranks)
    assert (found.dtype, found.tolist()) == (np.float32, [sorted(x.tolist())[rank] for rank in ranks])


def test_segment_sum(ops):
    rng = np.random.default_rng(0)
    values, segments = mixed(special=False), rng.integers(0, 9, N).astype(np.int32)
    found = ops(lambda xp, v, s: xp.segment_sum(v, s, 11), values, segments)
    groups = [[v for v, s in zip(values.tolist(), segments.tolist(), strict=True) if s == i] for i in range(11)]
    assert (found.dtype, found.tolist()) == (np.float32, [nearest(math.fsum(group)) for group in groups])
    # A small number is not lost next to a large one.
    found = ops(lambda xp, v, s: xp.segment_sum(v, s, 1), f32([2**24, *[0.25] * 8]), np.zeros(9, np.int32))
    assert found.tolist() == [2**24 + 2]


def test_nonzero(ops):
    for mask in (mixed() > 0, np.zeros(N, bool), np.ones(N, bool), np.zeros(0, bool)):
        found = ops(lambda xp, mask: xp.nonzero(mask), mask)
        assert found.dtype == np.int32
        assert found.tolist() == [i for i, v in enumerate(mask.tolist()) if v]


def some_positions(k=100):
    return np.sort(np.random.default_rng(5).permutation(N)[:k]).astype(np.int32)


def test_take(ops):
    for x in (mixed(special=False), sample_of("uint8", N), np.arange(2 * N, dtype=np.int32).reshape(N, 2)):
        indices = some_positions()
        assert ops(lambda xp, x, i: xp.take(x, i), x, indices).tolist() == [x.tolist()[i] for i in indices]
    assert ops(lambda xp, x, i: xp.take(x, i), mixed(), some_positions(0)).shape == (0,)


def test_scatter(ops):
    x, indices = mixed(special=False), some_positions()
    values = f32(range(len(indices)))
    expected = x.tolist()
    for i, v in zip(indices.tolist(), values.tolist(), strict=True):
        expected[i] = v
    assert ops(lambda xp, x, i, v: xp.scatter(x, i, v), x, indices, values).tolist() == expected
    chosen = set(indices.tolist())
    cleared = ops(lambda xp, x, i: xp.scatter(x, i, 0.0), x, indices)
    assert cleared.tolist() == [0.0 if i in chosen else v for i, v in enumerate(x.tolist())]
    assert ops(lambda xp, x, i: xp.scatter(x, i, 0.0), x, some_positions(0)).tolist() == x.tolist()
    # Previous contents do not matter, even if not finite.
    bad = x.copy()
    bad[indices] = NAN
    assert ops(lambda xp, x, i: xp.scatter(x, i, 0.0), bad, indices).tolist() == cleared.tolist()


def test_scatter_add(ops):
    x, indices = mixed(special=False), some_positions()
    values = f32(range(len(indices)))
    expected = f32(x)
    for i, v in zip(indices.tolist(), values.tolist(), strict=True):
        expected[i] = nearest(float(expected[i]) + v)
    # x is donated, so nothing else may use it.
    assert ops(lambda xp, x, i, v: xp.scatter_add(x + 0.0, i, v), x, indices, values).tolist() == expected.tolist()
    nothing = ops(lambda xp, x: xp.scatter_add(x + 0.0, xp.zeros(0, "int32"), xp.zeros(0)), x)
    assert nothing.tolist() == x.tolist()


# -- linear algebra ------------------------------------------------------------------------------------------------
def matrices():
    random = mixed(50 * 4, special=False).reshape(50, 4)
    deficient = random.copy()
    deficient[:, 2] = deficient[:, 0] - 2 * deficient[:, 1]
    holes = random.copy()
    holes[:, 1] = 0
    holes[:4] = 0
    return {
        "random": random,
        "tall": mixed(N * 3, special=False).reshape(N, 3),
        "square": random[:4],
        "zero": np.zeros((50, 4), np.float32),
        "rank-deficient": deficient,
        "equal columns": np.ones((50, 4), np.float32),
        "zero columns": holes,
        "one": f32([[3]]),
        "one zero": f32([[0]]),
        "large": random * np.float32(1e30),
        "small": random * np.float32(1e-30),
    }


@pytest.mark.parametrize("kind", matrices())
def test_qr_is_orthonormal_and_spans_the_columns(ops, kind):
    x = matrices()[kind]
    q = ops(lambda xp, x: xp.linalg.qr(x), x).astype(np.float64)
    assert q.shape == x.shape
    np.testing.assert_allclose(q.T @ q, np.eye(x.shape[1]), atol=2e-6)
    scale = max(np.abs(x).max(), np.finfo(np.float32).tiny)
    np.testing.assert_allclose(q @ (q.T @ (x / scale)), x / scale, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 30])
def test_eigh(ops, n):
    x = mixed(n * n, special=False).reshape(n, n)
    x = x + x.T
    values, vectors = ops(lambda xp, a: xp.linalg.eigh(a), x)
    assert (values.shape, vectors.shape) == ((n,), (n, n))
    assert (np.diff(values) <= 0).all()
    np.testing.assert_allclose((vectors * values) @ vectors.T, x, atol=1e-5 * abs(x).max() * n)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(n), atol=1e-5)


def test_solve(ops):
    a = mixed(36, special=False).reshape(6, 6) + 9 * np.eye(6, dtype=np.float32)
    b = mixed(18, seed=1, special=False).reshape(6, 3)
    np.testing.assert_allclose(a @ ops(lambda xp, a, b: xp.linalg.solve(a, b), a, b), b, atol=1e-5)


def test_axes_in_another_order(ops):
    x = mixed(120, special=False).reshape(2, 3, 4, 5)
    found = ops(lambda xp, a: xp.transpose(a, (0, 2, 1, 3)), x)
    assert found.tolist() == [[[x[i, j, k].tolist() for j in range(3)] for k in range(4)] for i in range(2)]


def test_matrix_product(ops):
    a, b = mixed(30 * 20, special=False).reshape(30, 20), mixed(20 * 5, seed=1, special=False).reshape(20, 5)
    expected = [[math.fsum(p * q for p, q in zip(r, c, strict=True)) for c in b.T.tolist()] for r in a.tolist()]
    np.testing.assert_allclose(ops(lambda xp, a, b: a @ b, a, b), expected, rtol=1e-4, atol=1e-5)
    turned = ops(lambda xp, a, b: xp.transpose(b) @ xp.transpose(a), a, b)
    np.testing.assert_allclose(turned.T, expected, rtol=1e-4, atol=1e-5)


# -- random bits (more in test_rng.py) -----------------------------------------------------------------------------
def test_words_and_uniform(ops):
    words = ops(lambda xp: xp.random.words(1, 2, 0, N))
    assert words.dtype == np.int32
    assert words.view(np.uint32)[:3].tolist() == [0x2E7DCC10, 0xC6B37AB1, 0x1677D57F]
    u = ops(lambda xp: xp.random.uniform(1, 2, 0, N))
    assert u.dtype == np.float32
    assert u.tolist() == [(word >> 8) / 2**24 for word in words.view(np.uint32).tolist()]


def test_noise(ops):
    noise = ops(lambda xp: xp.random.noise((1, 2), (3, 4), 65000, 20000))
    assert noise.dtype == np.float32
    table, own = (
        streams.words(*keys, 0, count).astype(np.int64) >> 16 for keys, count in (((1, 2), 2**16), ((3, 4), 2))
    )
    places = np.arange(65000, 85000)
    assert np.array_equal(noise, ((table[places % 2**16] + own[places // 2**16]) % 2**16 + 0.5) / 2**16)


# -- bits ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000, 1003])
def test_pack_bits(ops, n):
    mask = mixed(1003)[:n] > 0
    bits = mask.tolist()
    expected = [sum(bit << j for j, bit in enumerate(bits[i : i + 8])) for i in range(0, n, 8)]
    packed = ops(lambda xp, mask: xp.bits.pack(mask), mask)
    assert packed.dtype == np.uint8
    assert packed.tolist() == expected
    back = ops(lambda xp, packed: xp.bits.unpack(packed, n), packed)
    assert back.dtype == bool
    assert back.tolist() == bits


def test_every_byte_is_packed_and_unpacked(ops):
    octets = np.arange(256, dtype=np.uint8)
    bits = [bool(v >> j & 1) for v in range(256) for j in range(8)]
    assert ops(lambda xp, p: xp.bits.unpack(p, 2048), octets).tolist() == bits
    assert ops(lambda xp, m: xp.bits.pack(m), np.array(bits)).tolist() == octets.tolist()


# -- state ---------------------------------------------------------------------------------------------------------
def test_cells_keep_what_is_assigned(xp):
    for value in (mixed(), np.int64(3), f32([[1, 2]]), f32([])):
        cell = xp.cell(xp.asarray(value, value.dtype.name))
        before = cell.read()
        assert xp.to_numpy(cell.read()).tobytes() == value.tobytes()
        cell.assign(cell.read() + cell.read())
        assert equal(np.array(xp.to_numpy(cell.read())).reshape(-1), (value + value).reshape(-1).tolist())
        assert xp.to_numpy(before).tobytes() == value.tobytes()


def test_cells_live_on_between_runs_of_a_graph():
    xp = backend("tensorflow")
    import tensorflow as tf

    cell = xp.cell(xp.asarray(0, "int64"))

    @tf.function(autograph=False)
    def count():
        cell.assign(cell.read() + 1)
        return cell.read()

    assert [int(count()) for _ in range(3)] == [1, 2, 3]
    assert int(cell.read()) == 3


def test_cells_are_added_to(xp):
    cell = xp.cell(xp.asarray(f32([1, 2, 3]), "float32"))
    for _ in range(2):
        cell.add(xp.asarray(f32([1, 0, -1]), "float32"))
    assert xp.to_numpy(cell.read()).tolist() == [3, 2, 1]


def test_switch(xp):
    def chosen(index):
        return xp.switch(index, [lambda value=value: [xp.full(3, value), xp.zeros(2)] for value in (5.0, 6.0, 7.0)])

    for index in range(3):
        first, second = chosen(xp.asarray(index, "int32"))
        assert (xp.to_numpy(first).tolist(), xp.to_numpy(second).tolist()) == ([5.0 + index] * 3, [0, 0])
    assert not xp.tracing
    if xp.name == "tensorflow":
        import tensorflow as tf

        seen = []
        graph = tf.function(lambda index: (seen.append(xp.tracing), chosen(index))[1], autograph=False)
        assert [float(graph(tf.constant(index))[0][1]) for index in range(3)] == [5, 6, 7]
        assert seen == [True]


def test_choose(ops):
    new, old = mixed(), mixed(seed=1)
    for bound, expected in ((1e9, new), (-1e9, old)):
        found = ops(lambda xp, new, old: xp.choose(xp.all(new[:1] < bound), new, old), np.nan_to_num(new), old)
        assert equal(found, (np.nan_to_num(new) if expected is new else old).tolist())
    assert equal(ops(lambda xp, x: xp.choose(xp.finite(x), x, xp.zeros(3)), f32([1, NAN, 2])), [0, 0, 0])


@pytest.mark.parametrize("n", [N, 2**19 + 5])
@pytest.mark.parametrize("many", [1, 2, 3, 63, 64, 255, 5000])
def test_searchsorted(ops, n, many):
    bounds, x = f32(sorted(mixed(many, special=False))) if many > 1 else f32([0.5]), mixed(n, special=False)
    x[: min(n, many)] = bounds[:n]  # an element that equals a bound is not above it
    x[-2:] = INF, -INF
    found = ops(lambda xp, bounds, x: xp.searchsorted(bounds, x), bounds, x)
    assert found.dtype == np.int32
    some = slice(0, n, n // N)
    assert found[some].tolist() == [bisect_left(bounds.tolist(), v) for v in x[some].tolist()]
    assert found[-2:].tolist() == [many, 0]
    assert ops(lambda xp, bounds, x: xp.searchsorted(bounds, x), bounds, x[:0]).tolist() == []


@pytest.mark.parametrize("n", [5, 5000])
def test_searchsorted_puts_nan_somewhere(ops, n):
    bounds, x = f32([-1, 0, 2]), mixed(n, special=False)
    x[::2] = NAN
    found = ops(lambda xp, bounds, x: xp.searchsorted(bounds, x), bounds, x)
    assert found[1::2].tolist() == [bisect_left([-1, 0, 2], v) for v in x[1::2].tolist()]
    assert set(found.tolist()) <= {0, 1, 2, 3}
    whole = ops(
        lambda xp, bounds, x: xp.searchsorted(bounds, x), np.arange(0, 50, 2, dtype=np.int32), sample_of("int32", 2000)
    )
    assert whole.tolist() == [bisect_left(range(0, 50, 2), v) for v in sample_of("int32", 2000).tolist()]


@pytest.mark.parametrize(
    ("places", "fine"),
    [
        *[([], True), ([0], True), ([9], True), ([0, 1, 9], True), (list(range(10)), True)],
        *[([10], False), ([-1], False), ([-1, 3], False), ([3, 10], False), ([3, 3], False), ([3, 2], False)],
        *[([0, 5, 4, 9], False), ([2**31 - 1], False), ([-(2**31), 2], False), ([2, -(2**31)], False)],
    ],
)
def test_placed(ops, places, fine):
    given = np.array(places, np.int32)
    with nullcontext() if fine else pytest.raises(Exception, match="its positions do not ascend"):
        assert ops(lambda xp, places: placed(xp, places, 10), given).tolist() == places


def test_sound(ops):
    def first(xp, x):
        return xp.sound(x, lambda: xp.all(x[:1] == 1), "not one here")

    assert ops(first, f32([1, 2])).tolist() == [1, 2]
    refused = [ValueError]
    if ops.graph:
        import tensorflow as tf

        refused = [tf.errors.InvalidArgumentError]
    with pytest.raises(tuple(refused), match="not one here"):
        ops(first, f32([2, 1]))


def test_a_device_is_not_waited_for():
    # PyTorch's "meta" device has no values: reading one fails.
    from grace.backends.torch import TorchBackend

    backend("torch")
    xp = TorchBackend("meta")
    x = xp.arange(5)
    assert xp.sound(x, lambda: pytest.fail("asked"), "never") is x


def test_require(xp):
    assert xp.require(xp.finite(xp.zeros(3)), "never") is None
    with pytest.raises(FloatingPointError, match="not finite here"):
        xp.require(xp.finite(xp.full(3, NAN)), "not finite here")


def test_infinities_make_no_warning_where_it_is_quiet(xp):
    with xp.quiet():
        x = xp.asarray([INF, -INF, 0.0], "float32")
        assert np.isnan(xp.to_numpy((x - x) / (x * 0.0))).all()


def test_require_inside_a_graph():
    xp = backend("tensorflow")
    import tensorflow as tf

    @tf.function(autograph=False)
    def check(x):
        xp.require(xp.finite(x), "not finite here")
        return x + 1

    assert check(tf.constant([1.0])).numpy().tolist() == [2]
    with pytest.raises((FloatingPointError, tf.errors.InvalidArgumentError), match="not finite here"):
        check(tf.constant([NAN]))


# -- statistics of tails, and loops --------------------------------------------------------------------------------
def test_exp(ops):
    x = np.linspace(-30, 30, 1003)
    np.testing.assert_allclose(ops(lambda xp, x: xp.exp(x), x), [math.exp(v) for v in x], rtol=1e-14)


def test_lgamma(ops):
    x = np.array([0.01, 0.5, 1, 1.5, 2, 3.25, 10, 100])
    expected = [math.lgamma(v) for v in x]
    np.testing.assert_allclose(ops(lambda xp, x: xp.lgamma(x), x), expected, rtol=1e-12, atol=1e-14)


def test_igammac(ops):
    scipy = pytest.importorskip("scipy.special")
    a, x = (grid.reshape(-1) for grid in np.meshgrid([0.01, 0.3, 1, 2.5, 40], [0, 1e-9, 0.2, 1, 3, 30, 60, 300]))
    found = ops(lambda xp, a, x: xp.igammac(a, x), a.astype(np.float64), x.astype(np.float64))
    np.testing.assert_allclose(found, scipy.gammaincc(a, x), rtol=1e-9, atol=1e-290)


@pytest.mark.parametrize("n", [1, N, 2**19 - 1, 2**19, 2**20 + 7])
def test_excess(ops, n):
    x = mixed(n, special=False)
    for bound in (0.0, 1.0, 2.5, 99.0):
        over = [v - bound for v in abs(x).tolist() if v > bound]
        found = ops(lambda xp, x, b: xp.excess(x, b), x, f32([bound]))
        assert found.dtype == np.float64
        assert found[0] == len(over)
        np.testing.assert_allclose(found[1:], [math.fsum(over), math.fsum(v * v for v in over)], rtol=2e-6)


@pytest.mark.parametrize("size", [1e-33, 1e-30, 1e-12, 1e12, 1e18, 1e30])
def test_excess_at_the_ends_of_the_range(ops, size):
    x = mixed(special=False) * np.float32(size)
    wide = abs(x.astype(np.float64))
    found = ops(lambda xp, x, b: xp.excess(x, b), x, f32([0]))
    np.testing.assert_allclose(found, [(wide > 0).sum(), wide.sum(), (wide**2).sum()], rtol=2e-6)


@pytest.mark.parametrize("n", [0, 1, N, 2**19 + 5])
def test_beyond(ops, n):
    x = mixed(n) if n > 1 else f32([2.0] * n)
    for bound in (0.0, 1.0, 9.0):
        found = ops(lambda xp, x, b: xp.beyond(x, b), x, f32([bound]))
        assert found.dtype == np.int32
        assert found.tolist() == [i for i, v in enumerate(abs(x).tolist()) if not v <= bound]


def test_loop(ops):
    def collatz(xp, start):
        more = lambda n, steps: n != 1  # noqa: E731
        body = lambda n, steps: (xp.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1)  # noqa: E731
        return xp.loop(more, body, (start, xp.zeros(1, "int32")))

    for start, steps in ((1, 0), (6, 8), (27, 111)):
        assert [array.tolist() for array in ops(collatz, np.array([start], np.int32))] == [[1], [steps]]


def test_hosted_works_in_numpy(xp):
    one, two = xp.asarray(mixed(special=False), "float32"), xp.arange(N)
    if xp.host is None:
        with pytest.raises(NotImplementedError, match=xp.name):
            xp.hosted(lambda *arrays: arrays, [one], [("float32", (N,))])
        return
    seen = []
    total, same = xp.hosted(
        lambda x, y: seen.extend((type(x), type(y))) or [x + y, y], [one, two], [("float64", (N,)), ("int32", (N,))]
    )
    assert seen == [np.ndarray] * 2
    assert same is two
    assert equal(xp.to_numpy(total), mixed(special=False) + np.arange(N, dtype=np.int32))


def test_threads_share_what_is_kept():
    known = {}

    def ask(first):
        return [recent(known, (first + i) % 40, lambda i=i: (first + i) % 40) == (first + i) % 40 for i in range(5000)]

    with ThreadPoolExecutor(8) as pool:
        assert all(all(each) for each in pool.map(ask, range(8)))
    assert len(known) <= RECENT + 8
