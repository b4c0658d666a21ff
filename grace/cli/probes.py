"""Imports one package and reports its capabilities. `grace.cli.doctor` runs each probe in a separate process.

A broken toolkit may print, hang or crash, but only in this process. The answer is the last line of the standard output,
as JSON.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _numpy() -> dict[str, Any]:
    import numpy

    numpy.ones(2) @ numpy.ones(2)
    return {"version": numpy.__version__}


def _torch() -> dict[str, Any]:
    import torch

    torch.ones(2).sum()
    distributed = torch.distributed
    carriers = [name for name in ("gloo", "nccl", "mpi") if getattr(distributed, f"is_{name}_available", bool)()]
    return {
        "version": torch.__version__,
        "detail": "torch.distributed: " + (", ".join(carriers) or "none"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _tensorflow() -> dict[str, Any]:
    import tensorflow

    gpus = tensorflow.config.list_physical_devices("GPU")
    return {"version": tensorflow.__version__, "gpus": [device.name for device in gpus]}


def _keras() -> dict[str, Any]:
    import keras

    return {"version": keras.__version__, "detail": f"backend: {keras.backend.backend()}"}


def _horovod() -> dict[str, Any]:
    import horovod

    root = Path(horovod.__file__).parent
    built = [name for name in ("torch", "tensorflow") if any((root / name).glob("mpi_lib*.so"))]
    carriers = set()
    for name in built:
        if importlib.util.find_spec(name):
            module = importlib.import_module(f"horovod.{name}")
            carriers |= {carrier for carrier in ("gloo", "mpi", "nccl") if getattr(module, f"{carrier}_built")()}
    if not built:
        raise ImportError("built for neither torch nor tensorflow")
    detail = f"built for {', '.join(built)}; over {', '.join(sorted(carriers)) or 'nothing that is installed'}"
    return {"version": horovod.__version__, "detail": detail, "built_for": built}


def _triton() -> dict[str, Any]:
    import triton

    return {"version": triton.__version__, "detail": "for CUDA devices"}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "numpy": _numpy,
    "torch": _torch,
    "tensorflow": _tensorflow,
    "keras": _keras,
    "horovod": _horovod,
    "triton": _triton,
}


def main() -> None:
    """Probe the package named by the last argument."""
    name = sys.argv[-1]
    if importlib.util.find_spec(name) is None:
        answer: dict[str, Any] = {"missing": True}
    else:
        try:
            answer = PROBES[name]()
        except BaseException as error:  # an import may raise anything, even SystemExit
            answer = {"error": f"{type(error).__name__}: {error}"}
    print(f"\n{json.dumps(answer)}", flush=True)
