"""What all tests share: quiet toolkits, and the fixture that runs a test once for each backend."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported

import pytest
from methods import BACKENDS, backend


@pytest.fixture(params=BACKENDS)
def xp(request):
    """Each backend; skips, with the reason, where its toolkit is not installed."""
    return backend(request.param)
