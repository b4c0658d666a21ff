"""What all tests share: quiet toolkits, and the fixture that runs a test once for each backend."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported

import pytest
from methods import BACKENDS, PLAIN, backend, built

from grace.kernels import library


@pytest.fixture(params=BACKENDS)
def xp(request):
    """Each backend; skips, with the reason, where its toolkit is not installed."""
    return backend(request.param)


@pytest.fixture(params=("avx512", "avx2", PLAIN))
def lib(request):
    """The kernels of each instruction set; skips those that this processor lacks."""
    built()
    found = library(request.param)
    if found is None:
        pytest.skip(f"this processor has no {request.param}")
    assert found.isa == request.param
    return found
