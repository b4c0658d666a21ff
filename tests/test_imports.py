"""Imports of `import grace`, and its public names."""

import importlib
import subprocess
import sys

import pytest
from methods import backend

import grace
from grace.aliases import ALIASES

TOOLKITS = ("torch", "tensorflow", "keras", "horovod", "numpy", "triton", "jax")


def loaded(code):
    """Which toolkits a fresh interpreter has imported after some code."""
    script = f"{code}\nimport sys\nprint('loaded', *[name for name in {TOOLKITS} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(run.stdout.split()[1:])


def test_importing_grace_imports_no_toolkit():
    assert loaded("import grace") == set()


def test_nor_does_asking_what_there_is():
    code = "import grace.registry as r\nprint = lambda *a, p=print: p(*a) if a[0] == 'loaded' else None\n"
    assert loaded(code + "[list(names) for names in r.REGISTRIES.values()]; dir(__import__('grace'))") == set()


def test_building_a_triple_imports_no_toolkit():
    assert loaded("import grace; grace.grace_from_params({'compressor': 'topk'})") == set()


def test_simulating_on_numpy_imports_numpy_alone():
    code = "import grace, numpy as np; grace.simulate({'compressor': 'topk'}, [{'w': np.ones(2000, 'float32')}] * 2)"
    assert loaded(code) == {"numpy"}


def test_the_door_of_one_toolkit_leaves_the_others_shut():
    backend("torch")
    assert {"tensorflow", "keras", "horovod"} & loaded("import grace; grace.torch") == set()


def test_elastic_states_import_their_toolkit_when_they_are_made():
    assert loaded("import grace; grace.elastic.run") == set()


@pytest.mark.slow
def test_the_door_of_tensorflow_leaves_torch_shut():
    backend("tensorflow")
    assert {"torch", "horovod"} & loaded("import os, grace; grace.tensorflow") == set()


def test_all_names_are_there_and_no_others():
    assert sorted(grace.__all__) == list(grace.__all__) == sorted(set(grace.__all__))
    assert [name for name in grace.__all__ if not hasattr(grace, name)] == []
    public = {
        name
        for name, value in vars(grace).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("grace.")
    }
    assert public == set(grace.__all__) - {"__version__"}


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'grace' has no attribute 'mxnet'"):
        grace.mxnet  # noqa: B018 - the access is what is tested


@pytest.mark.parametrize(("old", "new"), sorted(ALIASES.items()))
def test_a_module_is_found_under_its_former_name(old, new):
    assert importlib.import_module(old) is importlib.import_module(new)


def test_public_names_are_where_they_were():
    from grace.blocks import rows
    from grace.checks import fitting
    from grace.packing import pack
    from grace.pipeline import Grace, Options
    from grace.planner.options import parse
    from grace.record import read
    from grace.report import Report

    from grace.backends.base import Backend
    from grace.core import Resize

    assert all((Backend, rows, fitting, Resize, pack, Options, parse, read, Report))
    assert Grace is grace.Grace
    assert grace.record.read is read
    for module in ("testing", "factorize", "planner", "checkpoint", "elastic", "gossip", "policies"):
        importlib.import_module(f"grace.{module}")


def test_former_names_of_programs():
    from grace.core import MaybeProgram, Steps, as_program, at_once, run, run_local

    assert Steps[int] == MaybeProgram[int]
    assert (run, at_once) == (as_program, run_local)
