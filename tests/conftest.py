"""Shared test setup: quiet toolkits, and the fixture that runs a test once per backend."""

import ctypes
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported

import pytest
from launch import launch
from methods import BACKENDS, PLAIN, backend, built
from support.cases import ONLY

from grace.kernels import library


@pytest.fixture(params=BACKENDS)
def xp(request):
    """Each backend; skips with the reason if its toolkit is not installed."""
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


@pytest.fixture(scope="session")
def keras_doors(tmp_path_factory):
    """The findings of two workers of Keras on TensorFlow; launched once for two test files."""
    return launch("horovodrun", 2, "keras_doors.py", tmp_path_factory.mktemp("out"))


@pytest.fixture
def streamed(request):
    """Kernels use streaming stores for results of 4097 elements or more, instead of millions."""
    if "lib" not in request.fixturenames:
        yield
        return
    function = ctypes.CDLL(request.getfixturevalue("lib").path).grace_stream_from
    function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
    before = function(4097)
    yield
    function(before)


def pytest_addoption(parser):
    parser.addoption(
        "--case", action="append", default=[], help="of tests that loop, run only cases whose name has this"
    )

    parser.addoption("--quick", action="store_true", help="one item of each test, and none that is slow")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    """With --quick, run each test's first item that runs on every machine; no slow ones, none with processes."""
    if not config.getoption("--quick"):
        return
    chosen = {}
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        slow = item.get_closest_marker("slow") or item.get_closest_marker("processes")
        if not slow and parameters.get("lib", PLAIN) == PLAIN:
            chosen.setdefault(item.nodeid.split("[")[0], item)
    kept = set(chosen.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = list(chosen.values())


def pytest_configure(config):
    ONLY.extend(config.getoption("--case"))
