"""Helpers to run the methods of the table (tests/table)."""

import platform
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from table import ROWS

from grace import grace_from_params
from grace.backends import get_backend
from grace.core import Context
from grace.engine.codecs import TensorCodec
from grace.engine.codecs import table as kernel_calls
from grace.kernels import build
from grace.testing import cases
from grace.testing.cases import (  # noqa: F401 - the tests take all helpers from here
    MATRICES,
    alone,
    context,
    handed_over,
    host,
    lockstep,
    same,
    spread,
    states,
    together,
    unchanged,
)
from grace.transports.local import LocalTransport, World

BACKENDS = ("numpy", "torch", "tensorflow")
SIZES = (1, 7, 8, 9, 1000, 5000)
PLAIN = "neon" if platform.machine() in ("aarch64", "arm64") else "scalar"


def built() -> None:
    """Builds the kernels' library if missing; skips without a compiler."""
    if build.compiler() is None and build.find("kernels") is None:
        pytest.skip("no C++ compiler on this machine")
    assert build.build()


VOTES = ("signsgd", "signum")
EXCHANGES = [(row, communicator) for row in ROWS for communicator in row.communicators]
BY_SHARDS = len(EXCHANGES)
EXCHANGES += [
    (row, "twostage")
    for row in ROWS
    if {"allgather", "twostage"} & {*row.communicators} == {"allgather"} and row.name != "variance"
]
"""Each method with what carries it; from BY_SHARDS on those that are not blockwise, in two stages.

Not variance: a second compression would wait a second time."""


def rows(chosen: Callable[[Any], Any] = lambda row: True) -> Any:
    """Decorator: run a test for each row for which ``chosen`` is true."""
    return pytest.mark.parametrize("row", [row for row in ROWS if chosen(row)], ids=str)


def rows_everywhere(chosen: Callable[[Any], Any] = lambda row: True) -> Any:
    """Decorator: run a test, which uses the fixture ``xp``, for each row for which ``chosen`` is true.

    On TensorFlow only the first such row of each method: a law compares the payloads of all rows with NumPy's.
    """
    some = [row for row in ROWS if chosen(row)]
    first = {row.name: row for row in reversed(some)}.values()
    of = [(row, name) for name in BACKENDS for row in some if name != "tensorflow" or row in first]
    return pytest.mark.parametrize("row, xp", of, ids=[f"{name}-{row}" for row, name in of], indirect=["xp"])


def exchanges(chosen: Callable[[Any, str], Any] = lambda row, communicator: True, few: bool = False) -> Any:
    """Decorator: run a test, which uses the fixture ``xp``, for each row with each communicator that fits it.

    NumPy runs all combinations. The other toolkits leave broadcasts to the tests of transports, widths of codes to
    test_packing.py, and most shards to test_scale.py. With ``few`` they run some rows only: for tests that use no other
    functions of a toolkit than the rest.
    """
    some = [
        (row, communicator, name)
        for name in BACKENDS
        for index, (row, communicator) in enumerate(EXCHANGES)
        if chosen(row, communicator)
        and (name == "numpy" or (row.everywhere and communicator != "broadcast" and (index % 8 == 0 or not few)))
        and (name == "numpy" or index < BY_SHARDS or index % 8 == 0)
    ]
    ids = [f"{name}-{row}-{communicator}" for row, communicator, name in some]
    return pytest.mark.parametrize("row, communicator, xp", some, ids=ids, indirect=["xp"])


def backend(name: str) -> Any:
    """A backend; skips the test where its toolkit is not installed."""
    if name != "numpy":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # messages of a toolkit during its import
            pytest.importorskip(name)
    return get_backend(name)


def parts(row: Any) -> Any:
    """The `grace.Method` of a row: its compressor and memory."""
    return grace_from_params({**row.params, "communicator": row.communicators[0]}, LocalTransport()).method


def workers(params: dict[str, Any], size: int) -> list[Any]:
    """One Grace for each of ``size`` workers in this process; even small tensors are compressed."""
    world = World(size)
    return [grace_from_params({"min_numel": 0, **params}, LocalTransport(world, rank)) for rank in range(size)]


def normal(*shape: int, seed: int = 0) -> Any:
    """float32 numbers of the normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def send(method: Any, xp: Any, x: Any, ctx: Context, state: Any = None) -> Any:
    """The payload and next state of the method's compressor, without a memory."""
    return cases.send(method.compressor, xp, x, ctx, state)


def receive(method: Any, xp: Any, payload: Any, ctx: Context) -> Any:
    """A decoded payload, in NumPy."""
    return cases.receive(method.compressor, xp, payload, ctx)


def method_of(**params: Any) -> Any:
    """The method that a dictionary of parameters describes, in the form that the engine runs."""
    method = grace_from_params(params, LocalTransport()).method
    return TensorCodec(method.compressor, method.memory)


# -- a compressor as the engine carries it out: by kernels where there are some --------------------------------------
natively, native_mean = kernel_calls.encode, kernel_calls.mean
compressed, left_of = kernel_calls.compress, kernel_calls.residual


# Settings for some hundred parameters; other methods use their defaults.
SETTINGS = {
    **{
        name: {"compress_ratio": 0.1}
        for name in ("topk", "adaptive_random", "randomk", "adaq", "gtopk", "cltk", "chain", "qsparse", "stc", "sidco")
    },
    "oktopk": {"compress_ratio": 0.1},
    "dgc": {"compress_ratio": 0.1, "memory": "residual"},
    "arctopk": {"compress_ratio": 0.2, "row_size": 4},
    "sketch_sgd": {"compress_ratio": 0.05},
    "wangni": {"compress_ratio": 0.3},
    "damped": {"quantum_num": 15, "bucket_size": 64},
    "threshold": {"threshold": 0.02},
    "chunktopk": {"chunk_size": 64, "chunk_k": 8},
    "demo": {"chunk": 10, "chunk_k": 10, "memory": "residual"},
    **{name: {"compress_rank": 2, "min_rate": 0.1} for name in ("powersgd", "acpsgd", "gradzip", "atomo")},
    "inceptionn": {"error_bound": 2.0**-14},
    "dion": {"rank_fraction": 0.25},
    "gradiveq": {"slice_size": 20, "compress_ratio": 0.25, "train_steps": 5, "compressed_steps": 5},
}
