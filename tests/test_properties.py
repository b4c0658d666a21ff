"""Property tests: random dtypes, shapes and values, through every method between three workers."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from methods import BACKENDS, backend, host, lockstep, same, workers
from table import ROWS

DTYPES = {"numpy": ("float16", "float32", "float64"), "torch": ("float16", "bfloat16", "float32", "float64")}
SOME = [(row, name) for name in BACKENDS for row in (ROWS if name == "numpy" else ROWS[::9])]


NUMBERS = st.floats(-1000, 1000, width=32, allow_subnormal=True)
"""Magnitudes that half precision holds."""


@st.composite
def gradients(draw, toolkit):
    """Three workers' gradients of one random shape and dtype; in one case of three an element is NaN or infinite."""
    shape = draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
    dtype = draw(st.sampled_from(DTYPES.get(toolkit, DTYPES["numpy"])))
    arrays = [draw(npst.arrays(np.float32, shape, elements=NUMBERS)) for _ in range(3)]
    size = arrays[0].size
    if size and draw(st.integers(0, 2)) == 0:
        bad = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        arrays[draw(st.integers(0, 2))].reshape(-1)[draw(st.integers(0, size - 1))] = bad
    return dtype, arrays


@pytest.mark.parametrize("row, name", SOME, ids=lambda value: str(value))
def test_any_gradient_comes_back_alike_on_all_workers(row, name):
    xp = backend(name)

    @settings(
        max_examples=25 if name == "numpy" else 8,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(gradients(name))
    def check(drawn):
        dtype, arrays = drawn
        graces = workers(row.params, 3)
        tensors = [{"w": xp.cast(xp.asarray(array, "float32"), dtype)} for array in arrays]
        for grace in graces:
            grace.build(tensors[0])
        for _ in range(2):
            means = lockstep(graces, tensors)
        found = [host(xp, [xp.cast(worker["w"], "float64")]) for worker in means]
        assert all(xp.dtype(worker["w"]) == dtype for worker in means)
        assert found[0][0].shape == arrays[0].shape
        assert all(same(found[0], other) for other in found)
        fine = all(np.isfinite(array).all() for array in arrays)
        assert np.isfinite(found[0][0]).all() == fine
        states = [arrays for grace in graces for arrays in grace.state_dict()["tensors"].values()]
        kept = [np.asarray(array) for arrays in states for array in arrays.values()]
        assert all(np.isfinite(array.astype(np.float64)).all() for array in kept)

    check()
