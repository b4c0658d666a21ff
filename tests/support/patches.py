"""Named tensors in two versions, for tests of grace.patch, and damage for its files."""

import importlib.util

import numpy as np
from hypothesis import strategies as st

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64"]
DTYPES += ["complex64", "complex128"]
SMALL = ["bfloat16", "float8_e4m3fn", "float8_e5m2"] if importlib.util.find_spec("ml_dtypes") else []
"""NumPy has them with the package ml_dtypes alone, which JAX and TensorFlow bring along."""


def dtype_of(name):
    if name not in SMALL:
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))


def random_bits(rng, shape, name):
    """Any bits: NaN payloads, -0.0, subnormal numbers and infinities among them."""
    dtype = dtype_of(name)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    found = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()
    flat = found.reshape(-1)
    if name.startswith("float") and flat.size > 4:
        with np.errstate(all="ignore"):
            flat[:4] = np.array([-0.0, 0.0, np.nan, 1e-45]).astype(dtype)
    return found


def changed(rng, base, density):
    """A copy of which a share of the elements has other bits."""
    new = base.copy()
    bits = new.reshape(-1).view(np.uint8).reshape(new.size, new.itemsize)
    where = rng.random(new.size) < density
    bits[where, rng.integers(0, bits.shape[1])] ^= 1
    return new


def laid_out(array, layout):
    """A copy of an array, with equal values, in some layout."""
    if layout == "strided":
        held = np.zeros((*array.shape, 3), array.dtype)
        held[..., 1] = array
        return held[..., 1]
    if layout == "transposed":
        return np.array(array, order="F")
    if layout == "unaligned":
        held = np.zeros(array.nbytes + 1, np.uint8)
        held[1:] = np.frombuffer(array.tobytes(), np.uint8)
        return np.ndarray(array.shape, array.dtype, held.data, 1)
    return array.copy()


SHAPES = st.one_of(
    st.just(()),
    st.sampled_from([(0,), (3, 0), (65536,), (65537,), (131071,), (300, 451)]),
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
)
LAYOUTS = st.sampled_from(["plain", "strided", "transposed", "unaligned"])
TENSOR = st.tuples(st.sampled_from(DTYPES + SMALL), SHAPES, LAYOUTS, st.sampled_from([0.0, 0.01, 0.3, 1.0]))


def versions(seed, kinds, count=2):
    """``count`` versions of named tensors: [dtype, shape, layout, density] each."""
    rng = np.random.default_rng(seed)
    found = [{} for _ in range(count)]
    for number, (dtype, shape, layout, density) in enumerate(kinds):
        array = random_bits(rng, shape, dtype)
        for version in found:
            version[f"layer.{number}"] = laid_out(array, layout)
            array = changed(rng, array, density)
    return found


def copied(tensors):
    """Tensors of equal bits and layouts in other memory."""
    return {name: laid_out(each, layout_of(each)) for name, each in tensors.items()}


def layout_of(array):
    if not array.flags.aligned:
        return "unaligned"
    if array.flags.c_contiguous:
        return "plain"
    return "transposed" if array.flags.f_contiguous else "strided"


def same(one, other):
    """Whether two mappings have equal names and bits."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)
